"""The policy ``adaptive``: learning, changes of decisions, and limits on both."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from dispatchkit import (
    Batch,
    BatchDescriptor,
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    GraphView,
    Outcome,
    RuntimeMode,
    load_plugins,
)
from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import CaptureSizeWarning
from dispatchkit.testing import PolicyTests

from dispatchkit_adaptive import AdaptivePolicy, StateError

PLUGINS = load_plugins()
CONFIG = DispatchConfig(mode="FULL", sizes=(512, 768))


def key(size: int) -> GraphKey:
    return GraphKey(RuntimeMode.FULL, BatchDescriptor(size, size))


def adaptive(**options: Any) -> AdaptivePolicy:
    return AdaptivePolicy(plugins=PLUGINS, **options)


def serve(policy: Any, config: DispatchConfig = CONFIG) -> Dispatcher:
    dispatcher = Dispatcher(policy, config, strict=True)
    for each in dispatcher.registry:
        dispatcher.registry.captured(each, object())
    return dispatcher


class Device:
    """Simulated device: runs steps at known costs, and reports each outcome immediately."""

    def __init__(self, dispatcher: Dispatcher, eager_per_token: float, graph: float) -> None:
        self.dispatcher, self.chance = dispatcher, random.Random(3)
        self.eager_per_token, self.graph = eager_per_token, graph
        self.steps = 0

    def us(self, num_tokens: int, graph: GraphKey | None) -> float:
        if graph is None:
            return self.eager_per_token * num_tokens
        return self.graph * graph.num_tokens / 512

    def calibrate(self, rounds: list[list[Decision]] | None = None) -> None:
        while runs := self.dispatcher.policy.calibration_runs(self.dispatcher.graphs):  # type: ignore[attr-defined]
            if rounds is not None:
                rounds.append([run.decision for run in runs])
            for run in runs:
                for _ in range(run.runs):
                    us = self.us(run.batch.num_tokens, run.decision.key)
                    outcome = Outcome(run.batch, run.decision, us * self.chance.gauss(1, 0.02))
                    self.dispatcher.observe(outcome)

    def step(self, num_tokens: int, **facts: Any) -> Decision:
        self.steps += 1
        decision = self.dispatcher.dispatch(num_tokens)
        if decision.timed:
            us = self.us(num_tokens, decision.key) * self.chance.gauss(1.0, 0.02)
            batch = self.dispatcher.batch(num_tokens)
            self.dispatcher.observe(Outcome(batch, decision, us, step=self.steps, **facts))
        return decision


def test_calibration_runs_only_close_arms_again() -> None:
    """The graphs of 512 and 768 take almost the same time; eager is far slower and runs once."""
    device = Device(serve(adaptive()), 9.0, 900.0)
    device.us = lambda num_tokens, graph: 9e4 if graph is None else 900.0 + graph.num_tokens / 1e3  # type: ignore[method-assign]
    rounds: list[list[Decision]] = []
    device.calibrate(rounds)
    assert any(how.key is None for how in rounds[0])
    assert len(rounds) > 1
    assert all(how.key is not None for again in rounds[1:] for how in again)


class TestKit(PolicyTests):
    max_examples = 20

    def make_policy(self) -> AdaptivePolicy:
        return adaptive()


@pytest.mark.slow
class TestKitOverAnotherBase(PolicyTests):
    max_examples = 10

    def make_policy(self) -> AdaptivePolicy:
        return adaptive(base="threshold", base_options={"max_waste": 0.5})


# -- learning ----------------------------------------------------------------------------------


def test_without_any_time_it_is_its_base() -> None:
    table, base = serve(adaptive()), serve(PLUGINS.create_policy("vllm"))
    for num_tokens in range(1, 769):
        mine, theirs = table.dispatch(num_tokens), base.dispatch(num_tokens)
        assert (mine.key, mine.reason) == (theirs.key, theirs.reason)


def test_calibration_finds_the_faster_arm_before_the_first_step() -> None:
    """Eager takes 2 µs per token and the graph of 512 takes 900, so eager wins up to about 450."""
    device = Device(serve(adaptive()), 2.0, 900.0)
    device.calibrate()
    table = device.dispatcher
    assert table.dispatch(300).key is None
    assert table.dispatch(300).reason == "eager_is_faster"
    assert table.dispatch(500).key == key(512)


def test_it_learns_while_serving_without_calibration() -> None:
    device = Device(serve(adaptive()), 1.0, 900.0)
    for _ in range(1200):
        device.step(400 + device.chance.randrange(100))
    assert device.dispatcher.dispatch(400).reason == "eager_is_faster"


def test_a_slow_graph_that_mends_is_found_again() -> None:
    """A slow mode is probed again from time to time."""
    device = Device(serve(adaptive()), 1.5, 900.0)
    device.calibrate()
    for _ in range(200):
        device.step(500)
    assert device.dispatcher.dispatch(500).key is None
    device.graph = 600.0
    for _ in range(2000):
        device.step(500)
    assert device.dispatcher.dispatch(500).key == key(512)


def test_a_change_of_eager_in_one_bucket_is_expected_in_the_others() -> None:
    device = Device(serve(adaptive()), 1.2, 900.0)
    device.calibrate()
    for _ in range(50):
        device.step(450)
        device.step(700)
    assert device.dispatcher.dispatch(700).key is None
    device.eager_per_token = 3.0
    for _ in range(12):
        device.step(450)
    assert device.dispatcher.dispatch(700).key == key(768)


def test_a_jump_that_was_only_seen_in_other_arms_is_verified() -> None:
    """A slower host slows eager at small sizes; a probe verifies the estimate for large ones."""
    device = Device(serve(adaptive()), 1.7, 900.0)
    device.calibrate()
    for _ in range(240):
        device.step(450)
        device.step(700)
    assert device.dispatcher.dispatch(700).key is None
    us = device.us
    device.us = lambda n, graph: 1250.0 if graph is None and n < 512 else us(n, graph)  # type: ignore[method-assign]
    for _ in range(12):
        device.step(450)
    assert device.dispatcher.dispatch(700).key == key(768)
    for _ in range(60):
        device.step(700)
    assert device.dispatcher.dispatch(700).key is None
    assert device.dispatcher.dispatch(450).key == key(512)


def test_the_bucket_of_an_outcome_is_chosen_at_once_however_many_others_wait() -> None:
    """The account grows with each step of 1,100 tokens, and with it the limit of eager."""
    config = DispatchConfig(mode="FULL", sizes=(*range(8, 513, 8), 768, 1024, 2048))
    policy = adaptive()
    device = Device(serve(policy, config), 2.6, 2.25)
    device.us = lambda n, graph: 2.6 * n + 800 if graph is None else 2.25 * graph.num_tokens + 870  # type: ignore[method-assign]
    device.calibrate()
    limits = []
    for _ in range(10):
        device.step(1100)
        (report,) = policy.explain(device.dispatcher.batch(1100))
        limits.append(report.eager_up_to)
    assert len(set(limits)) > 8
    assert limits == sorted(limits)


def test_the_winner_follows_the_state_of_the_queue() -> None:
    """On an idle device, eager waits for the host and loses; behind queued work it wins."""
    policy = adaptive()
    device = Device(serve(policy), 1.0, 900.0)
    device.step(500)
    batch, table = device.dispatcher.batch(500), device.dispatcher
    for _ in range(40):
        for queued, eager_us in ((False, 1500.0), (True, 600.0)):
            policy.record(batch, RuntimeMode.NONE, eager_us, queued=queued)
            policy.record(key(512), RuntimeMode.FULL, 900.0, queued=queued)
    chosen = {}
    for queued in (False, True, False):
        for _ in range(40):
            decision = table.dispatch(500)
            us = 900.0 if decision.key else 600.0 if queued else 1500.0
            table.observe(Outcome(batch, decision, us, queued=queued))
        chosen[queued] = table.dispatch(500).key
        assert chosen[queued] == (None if queued else key(512))
    assert len(chosen) == 2


def test_host_times_are_not_compared_with_device_times() -> None:
    """Host times are labeled and stored separately."""
    policy = adaptive()
    table = serve(policy)
    table.dispatch(500)
    batch = table.batch(500)
    for _ in range(20):
        policy.record(batch, RuntimeMode.NONE, 1.0, clock="host")
        policy.record(key(512), RuntimeMode.FULL, 900.0, clock="device")
    assert policy.decide(batch, table.graphs).key == key(512)


@pytest.mark.parametrize(
    "facts",
    [
        {"completed": False, "elapsed_us": 1.0},
        {"elapsed_us": None},
        {"elapsed_us": math.nan},
        {"elapsed_us": 900.0, "is_first": True},
    ],
)
def test_what_did_not_run_to_its_end_or_ran_for_the_first_time_teaches_nothing(
    facts: dict[str, Any],
) -> None:
    """The time of a failed or first run does not predict later runs."""
    policy = adaptive()
    table = serve(policy)
    for _ in range(50):
        eager = attrs.evolve(Decision.eager("probe", timed=True), num_tokens=500)
        table.dispatch(500)
        table.observe(Outcome(table.batch(500), eager, **facts))
    assert all(arm.samples == 0 for report in policy.explain() for arm in report.arms)


def test_larger_graphs_and_other_modes_are_arms_too() -> None:
    """PIECEWISE beats FULL at 64 tokens, and the graph of 128 beats that of 64."""
    config = DispatchConfig(sizes=(64, 128), max_num_tokens=128)
    policy = adaptive()
    table = serve(policy, config)
    uniform, mixed = table.batch(60, uniform=1), table.batch(60)
    keys = {
        (each.mode.name, each.num_tokens, each.descriptor.uniform): each for each in table.graphs
    }
    assert table.dispatch(60, uniform=1).key == keys["FULL", 64, True]
    assert table.dispatch(60).key == keys["PIECEWISE", 64, False]
    times = {("FULL", 64): 900.0, ("FULL", 128): 950.0, ("PIECEWISE", 64): 500.0}
    for (mode, size, _), each in keys.items():
        for _ in range(30):
            policy.record(each, each.mode, times.get((mode, size), 300.0))
    assert policy.decide(uniform, table.graphs).key == keys["PIECEWISE", 128, False]
    assert policy.decide(mixed, table.graphs).key == keys["PIECEWISE", 128, False]


def test_hard_constraints_stand_above_what_was_learnt() -> None:
    """A mode that is not allowed is not used, even if it was measured to be faster."""
    config = DispatchConfig(sizes=(64,), max_num_tokens=64)
    policy = adaptive()
    table = serve(policy, config)
    for each in table.graphs:
        table.dispatch(60, uniform=1)
        policy.record(each, each.mode, 10.0 if each.mode is RuntimeMode.FULL else 900.0)
    assert table.dispatch(60, uniform=1, ceiling=1).mode is RuntimeMode.PIECEWISE
    assert table.dispatch(60, uniform=1, ceiling=0).reason == "ceiling"


# -- the table ----------------------------------------------------------------------------------


def test_a_learned_cell_is_served_from_the_table() -> None:
    """``decide`` runs once more after a decision changes, and then no more."""
    asked: list[int] = []

    class Counting(AdaptivePolicy):
        def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
            asked.append(batch.num_tokens)
            return super().decide(batch, graphs)

    device = Device(serve(Counting(plugins=PLUGINS)), 1.0, 900.0)
    device.calibrate()
    device.step(400)
    asked.clear()
    first = device.dispatcher.dispatch(400)
    assert all(device.dispatcher.dispatch(400) is first for _ in range(100))
    assert asked == []


def test_only_cells_whose_answer_flips_are_changed() -> None:
    policy = adaptive()
    device = Device(serve(policy), 2.0, 900.0)
    device.calibrate()
    for num_tokens in (300, 400, 500):
        device.dispatcher.dispatch(num_tokens)
    kept = {n: device.dispatcher.dispatch(n) for n in (300, 500)}
    batch = device.dispatcher.batch(400)
    updates = []
    for _ in range(30):  # eager becomes slower where it was barely faster
        eager = attrs.evolve(device.dispatcher.dispatch(400), mode=RuntimeMode.NONE, key=None)
        updates += policy.observe(Outcome(batch, eager, 1000.0))
    flipped = [update for update in updates if not update.one_shot]
    assert any(update.is_about(batch) for update in flipped)
    assert not any(update.is_about(device.dispatcher.batch(500)) for update in flipped)
    assert (
        kept[500].key == policy.decide(device.dispatcher.batch(500), device.dispatcher.graphs).key
    )


def test_probes_are_one_shot_and_the_steady_answer_is_back_after_them() -> None:
    device = Device(serve(adaptive()), 2.0, 900.0)
    device.calibrate()
    probes = 0
    for _ in range(2000):
        decision = device.step(440)
        if decision.reason == "probe":
            probes += 1
            assert decision.one_shot
            assert decision.timed
            steady = device.dispatcher.decide(device.dispatcher.batch(440))
            assert steady.reason in ("hit", "eager_is_faster")
    assert 1 <= probes <= 2000 // 16


def test_what_was_never_measured_is_tried_once_the_account_covers_three_times_its_time() -> None:
    """A trial costs 1,800 µs more here; three quarters of 1% of 267 steps cover it."""
    table = serve(adaptive())
    found = []
    for step in range(1, 400):
        found.append(table.dispatch(700))
        us = 900.0 if found[-1].key else 2700.0
        table.observe(Outcome(table.batch(700), found[-1], us, step=step))
    tried = [step for step, decision in enumerate(found) if decision.key is None]
    assert 266 <= tried[0] < 280
    assert len(tried) < 6


def test_far_arms_are_seldom_tried() -> None:
    device = Device(serve(adaptive()), 8.0, 900.0)
    device.calibrate()
    modes = [device.step(500).mode for _ in range(1000)]
    assert modes.count(RuntimeMode.NONE) <= 1


def test_evicted_graphs_are_not_chosen_and_what_was_learnt_of_them_stays() -> None:
    device = Device(serve(adaptive()), 2.0, 900.0)
    device.calibrate()
    table = device.dispatcher
    assert table.dispatch(500).key == key(512)
    table.registry.evicted(key(512))
    assert table.dispatch(500).key != key(512)
    table.registry.captured(key(512), object())
    assert table.dispatch(500).key == key(512)
    assert table.dispatch(300).key is None


@pytest.mark.slow
def test_same_seed_same_run() -> None:
    def run() -> list[tuple[str, str]]:
        device = Device(serve(adaptive(seed=5)), 1.8, 900.0)
        device.calibrate()
        return [
            (str(decision.key), decision.reason)
            for decision in (device.step(n) for n in range(300, 700))
        ]

    assert run() == run()


def test_inside_a_composite_it_learns_from_its_own_steps() -> None:
    composite = PLUGINS.create_policy("composite", members="adaptive:1, vllm", plugins=PLUGINS)
    device = Device(serve(composite), 1.0, 900.0)
    device.calibrate()
    for _ in range(20):
        decision = device.step(400)
    assert (decision.policy, decision.reason) == ("adaptive", "eager_is_faster")


# -- record and explain ------------------------------------------------------------------------


def test_recorded_times_decide() -> None:
    policy = adaptive()
    table = serve(policy)
    table.dispatch(500)
    for _ in range(20):
        policy.record(key(512), RuntimeMode.FULL, 900.0)
        policy.record(table.batch(500), RuntimeMode.NONE, 500.0)
    assert policy.decide(table.batch(500), table.graphs).reason == "eager_is_faster"


@pytest.mark.parametrize(
    ("what", "mode", "us"),
    [
        (key(512), RuntimeMode.PIECEWISE, 5.0),
        (key(512), RuntimeMode.FULL, 0.0),
        (key(512), RuntimeMode.FULL, math.nan),
        (Batch(7), RuntimeMode.NONE, 5.0),
        (Batch(500), RuntimeMode.FULL, 5.0),
    ],
)
def test_times_that_make_no_sense_are_refused(what: Any, mode: RuntimeMode, us: float) -> None:
    with pytest.raises(ConfigError):
        adaptive().record(what, mode, us)


def test_a_batch_without_a_choice_has_another_error_than_an_unknown_batch() -> None:
    policy = adaptive()
    with pytest.warns(CaptureSizeWarning):
        table = serve(policy, DispatchConfig(sizes=(64,), max_num_tokens=128))
    table.dispatch(100)
    with pytest.raises(ConfigError, match=r"was dispatched before, .*Dispatch the batch first"):
        policy.record(Batch(99), RuntimeMode.NONE, 5.0)
    with pytest.raises(ConfigError, match="may run both eager and with a graph"):
        policy.record(table.batch(100), RuntimeMode.NONE, 5.0)


def test_explain_names_arms_samples_and_margins() -> None:
    policy = adaptive()
    device = Device(serve(policy), 2.0, 900.0)
    device.calibrate()
    for _ in range(100):
        device.step(500)
    (report,) = policy.explain(device.dispatcher.batch(500))
    in_use, *others = report.arms
    assert in_use.arm == str(key(512))
    assert in_use.margin == 0.0
    assert in_use.samples >= 100
    assert in_use.median_us == pytest.approx(900.0, rel=0.02)
    eager = next(arm for arm in others if arm.arm == "eager")
    assert eager.margin == pytest.approx(1024 / 900 - 1, abs=0.05)
    assert f"tokens, then {key(512)}; last probe:" in str(report)


def test_explain_says_what_is_done_and_which_batches_it_is_about() -> None:
    policy = adaptive()
    device = Device(serve(policy), 2.0, 900.0)
    untold = device.dispatcher.batch(500)
    device.step(500)
    (report,) = policy.explain(untold)
    assert report.eager_up_to == 0
    assert f"-> {key(512)};" in str(report)  # not eager, which has no estimate
    assert "eager: too few samples" in str(report)
    assert str(report).startswith("500 to 512 tokens, mixed")
    assert str(attrs.evolve(report, sizes=(1, 1))).startswith("1 token, mixed")
    device.calibrate()
    for _ in range(60):
        device.step(450)
    (report,) = policy.explain(device.dispatcher.batch(450))
    low, high = report.sizes
    assert low <= report.eager_up_to < high
    assert f"-> eager up to {report.eager_up_to} tokens, then {key(512)}" in str(report)
    heads = {str(one).splitlines()[0] for one in policy.explain()}
    assert len(heads) == len(policy.explain())
    kinds = {one.kind for one in policy.explain()}
    assert "mixed, NONE/PIECEWISE/FULL allowed" in kinds


@pytest.mark.parametrize(
    "options",
    [
        {"history_size": 4},
        {"margin": 2},
        {"promise": -0.1},
        {"explore": "much"},
        {"max_sizes": 0},
        {"base": 3},
        {"base": AdaptivePolicy},
        {"state": 3},
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        adaptive(**options)


def test_unknown_base_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(UnknownNameError, match="vllm"):
        adaptive(base="vlm")


# -- saved state --------------------------------------------------------------------------------

HERE = {"device": "H100", "driver": "cuda 13", "torch": "2.13", "model": "mlp"}


def learned(path: Path) -> AdaptivePolicy:
    policy = adaptive(state=path, fingerprint=HERE)
    device = Device(serve(policy), 2.0, 900.0)
    device.calibrate()
    for n in range(300, 500):
        device.step(n)
    policy.save()
    return policy


def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    learned(path)
    table = serve(adaptive(state=path, fingerprint=HERE))
    assert table.dispatch(300).reason == "eager_is_faster"
    assert table.dispatch(500).key == key(512)
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "JSON"),
        (lambda text: "", "JSON"),
        (lambda text: "[]", "not a state file"),
        (lambda text: text.replace('"version": 2', '"version": 99'), "version 99"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "version 1; only version 2"),
        (lambda text: text.replace("H100", "A100"), "digest"),
        (lambda text: text.replace("dispatchkit-adaptive", "something"), "not a state file"),
    ],
)
def test_a_torn_or_foreign_file_is_refused_and_learning_starts_anew(
    tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "state.json"
    learned(path)
    path.write_text(damage(path.read_text()))
    with pytest.warns(RuntimeWarning, match=message):
        policy = adaptive(state=path, fingerprint=HERE)
    assert serve(policy).dispatch(300).key == key(512)


def test_state_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    learned(path)
    policy = adaptive(fingerprint={**HERE, "device": "A100"})
    with pytest.raises(StateError, match="A100"):
        policy.load(path)


def test_state_with_an_impossible_arm_is_refused(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "state.json"
    learned(path)
    data = json.loads(path.read_text())
    data["arms"][0]["estimate"]["noise"] = -1.0
    body = {"fingerprint": data["fingerprint"], "arms": data["arms"]}
    data["digest"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(data))
    with pytest.raises(StateError, match="invalid arm"):
        adaptive(fingerprint=HERE).load(path)


def test_save_needs_a_path() -> None:
    with pytest.raises(ConfigError, match="path"):
        adaptive().save()


# -- with an executor ---------------------------------------------------------------------------


def test_a_runner_measures_what_the_policy_asks_for() -> None:
    """Calibration runs and regular steps become samples; results equal eager."""
    torch = pytest.importorskip("torch")
    from dispatchkit import GraphRunner, StaticInput

    weight = torch.randn(8, 8)
    runner = GraphRunner(
        lambda x: x @ weight,
        {"x": StaticInput((None, 8), torch.float32)},
        sizes=(4, 8),
        mode="FULL",
        policy="adaptive",
        backend="tape",
    )
    runner.capture()
    policy: Any = runner.dispatcher.policy
    rows = torch.randn(8, 8)
    # Calibration ran after the capture, so there are no further requests.
    assert policy.calibration_runs(runner.dispatcher.graphs) == []
    for _ in range(20):
        assert torch.allclose(runner(rows[:3]), rows[:3] @ weight)
    runner.drain(wait=True)
    (report,) = policy.explain(runner.dispatcher.batch(3))
    samples = {arm.arm: arm.samples for arm in report.arms}
    assert samples["eager"] >= 8
    assert samples[str(GraphKey(RuntimeMode.FULL, BatchDescriptor(4, 4)))] >= 8
    assert sum(samples.values()) >= 16 + 20


# -- calls of the base ----------------------------------------------------------------------------


class CountingBase:
    """The default policy, with a counter of calls of ``decide``."""

    def __init__(self) -> None:
        self.inner, self.num_decided = PLUGINS.create_policy("vllm"), 0

    def declare(self, config: DispatchConfig) -> Any:
        return self.inner.declare(config)

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        self.num_decided += 1
        return self.inner.decide(batch, graphs)


def test_what_is_learnt_asks_the_base_nothing_again() -> None:
    """The base is called again only after a change of the graphs."""
    base = CountingBase()
    table = serve(adaptive(base=base))
    batch = table.batch(300)
    first = table.decide(batch)
    asked = base.num_decided
    assert table.decide(batch) == first
    assert base.num_decided == asked
    table.registry.evicted(key(512))
    assert table.decide(batch).key != key(512)
    assert base.num_decided > asked


def test_fewer_steps_are_measured_once_nothing_changes_and_more_at_an_odd_one() -> None:
    policy = adaptive()
    device = Device(serve(policy), 1.2, 900.0)
    device.calibrate()
    step = paces = 0

    def tell(us: float) -> None:
        nonlocal step
        step += 16 * policy.pace
        batch = device.dispatcher.batch(500)
        decision = device.dispatcher.dispatch(500)
        device.dispatcher.observe(Outcome(batch, decision, us, step=step))

    for _ in range(400):
        tell(device.us(500, device.dispatcher.dispatch(500).key) * device.chance.gauss(1.0, 0.02))
        paces = max(paces, policy.pace)
    assert paces == 8
    tell(1200.0)
    assert policy.pace == 1


def test_who_measures_every_step_is_asked_for_no_fewer() -> None:
    policy = adaptive()
    device = Device(serve(policy), 1.2, 900.0)
    device.calibrate()
    for _ in range(400):
        device.step(500)
        assert policy.pace == 1
