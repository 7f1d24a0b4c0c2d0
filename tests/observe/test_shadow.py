"""A shadow decides beside the policy in force, changes nothing, and foretells a switch."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest

from dispatchkit import Decision, DispatchConfig, Dispatcher, load_plugins
from dispatchkit.dispatch import Outcome
from dispatchkit.errors import PolicyError
from dispatchkit.keys import CaptureSizeWarning
from dispatchkit.observe import read_trace, trace_config
from dispatchkit.observe.recorder import StepRecorder
from dispatchkit.observe.shadow import Shadow
from dispatchkit.observe.shadow_prices import Prices

from dispatchkit_plan import CostModel, Noise, load_cost_model

TRACES = Path(__file__).parents[1] / "data" / "traces"
TRUE = load_cost_model("lm-decode-h100")


def policy(name="vllm", **options):
    return load_plugins().create_policy(name, **options)


def captured(dispatcher):
    for key in dispatcher.registry:
        dispatcher.registry.captured(key, object())
    return dispatcher


def true_us(decision, num_tokens):
    captured = None if decision.key is None else decision.key.num_tokens
    return TRUE.step_us(num_tokens, captured, piecewise=decision.mode.name == "PIECEWISE")


def configs(trace, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return trace_config(trace), trace_config(trace, sizes=sizes)


def facts_of(trace, config):
    """Yield the arguments of each step's dispatch."""
    names = trace.columns
    for step in trace:
        uniform = 0
        if step.uniform_decode and step.max_query_len in config.query_lens:
            uniform = 1 + config.query_lens.index(step.max_query_len)
        reqs = step.num_reqs or 0 if "num_reqs" in names else 0
        if step.num_tokens:
            yield step.num_tokens, min(reqs, config.max_num_seqs), uniform, 0, 2


def serve(active, shadow, steps, noise, seed=0):
    """Run steps as a runner would, a look of the shadow every 100; return their true time."""
    chance = random.Random(seed)
    recorder = StepRecorder(active.config, capacity=256)
    dispatch = recorder.listening_to(shadow.sampling(every=8))
    total, read = 0.0, 0
    for number, facts in enumerate(steps, start=1):
        decision = dispatch(*facts)
        time_us = true_us(decision, facts[0])
        total += time_us
        if decision.timed:
            measured = noise.measured(time_us, chance)
            shadow.observe(Outcome(active.batch(*facts), decision, measured))
        if number % 100 == 0 or number == len(steps):
            rows, lost = recorder.read_from(read)
            shadow.follow(rows, lost)
            read = recorder.num_steps
    return total


def stale_model():
    """Return a cost model as another machine would have it: other times, the same shape."""
    return CostModel(
        name="stale",
        eager_us=[(n, 0.8 * us) for n, us in TRUE.eager_us.points],
        graph_us=[(n, 0.8 * us) for n, us in TRUE.graph_us.points],
    )


def foretold(name, change, times):
    """Follow the first half of a real trace.

    Returns:
        The report; the candidate's true time as a share of the other's on that half, and on the
        second half after a real switch.
    """
    trace = read_trace(TRACES / f"step_{name}.csv.gz")
    in_force, fewer = configs(trace, (1, 8, 64, 256, 512))
    candidate, config = policy(), fewer
    if change == "policy":
        candidate, config = policy("threshold", max_tokens=128), in_force
    steps = list(facts_of(trace, in_force))
    half = len(steps) // 2
    active = captured(Dispatcher(policy(), in_force))
    shadow = Shadow(active, candidate, config, times=times)
    serve(active, shadow, steps[:half], Noise())
    report = shadow.report()
    assert report.steps == half
    switched = captured(Dispatcher(candidate, config))

    def ratio(part):
        there = sum(true_us(switched.dispatch(*facts), facts[0]) for facts in part)
        return there / sum(true_us(active.dispatch(*facts), facts[0]) for facts in part)

    return report, ratio(steps[:half]), ratio(steps[half:])


@pytest.mark.parametrize("name", ["azure_conv_high", "azure_code_low"])
@pytest.mark.parametrize("change", ["sizes", pytest.param("policy", marks=pytest.mark.slow)])
def test_a_switch_then_gives_what_the_shadow_foretold(name, change):
    """Times with noise and outliers, a cost model of another level: within 3 of 100."""
    report, _, real = foretold(name, change, stale_model())
    assert report.ratio == pytest.approx(real, rel=0.03)
    assert report.unpriced_steps == 0


@pytest.mark.parametrize("name", ["azure_code_low", "mooncake_high"])
def test_without_a_cost_model_the_measured_sizes_tell_those_between(name):
    report, real, _ = foretold(name, "sizes", None)
    assert report.ratio == pytest.approx(real, rel=0.03)
    assert report.error_us < 0.03 * report.active_us
    assert report.unpriced_steps < 0.01 * report.steps


def test_far_from_what_was_measured_the_error_bar_says_so():
    """All graphs measured are of half the size that the candidate asks for."""
    report, real, _ = foretold("azure_conv_high", "sizes", None)
    assert abs(report.ratio - real) * report.active_us < report.error_us
    assert report.error_us > abs(report.gain_us)


# -- details --------------------------------------------------------------------------------

CONFIG = DispatchConfig(sizes=(1, 2, 4, 8), mode="FULL")


@pytest.fixture
def active():
    return captured(Dispatcher(policy(), CONFIG))


def measure(shadow, active, num_tokens, times, **how):
    decision = active.dispatch(num_tokens)
    for time_us in times:
        shadow.observe(Outcome(active.batch(num_tokens), decision, time_us, **how))


def test_where_the_sides_differ_is_counted_and_priced(active):
    shadow = Shadow(active, policy("threshold", max_tokens=2), times=TRUE)
    measure(shadow, active, 3, [100.0, 101.0, 99.0])
    shadow.follow([(1, 0, 0, 0, 2)] * 5 + [(3, 0, 0, 0, 2)] * 2 + [(4, 0, 0, 0, 2), (0,) * 5])
    report = shadow.report()
    assert (report.steps, report.same_steps) == (8, 5)
    assert [(one.steps, one.min_tokens, one.max_tokens) for one in report.differences] == [
        (2, 3, 3),
        (1, 4, 4),
    ]
    assert "FULL tokens=4" in report.differences[0].active
    assert report.differences[0].candidate.startswith("eager")
    assert report.ratio > 1
    assert "costs" in str(report)
    assert report.to_dict()["differences"][0]["steps"] == 2


def test_nothing_of_the_policy_in_force_changes(active):
    active.dispatch(3)
    filled, epoch = active.num_filled_cells, active.epoch
    shadow = Shadow(active, policy("threshold", max_tokens=2))
    shadow.follow([(3, 0, 0, 0, 2), (7, 0, 0, 0, 2)] * 3)
    shadow.report()
    assert (active.num_filled_cells, active.epoch) == (filled, epoch)
    assert set(active.registry) == set(captured(Dispatcher(policy(), CONFIG)).registry)


def test_sampled_steps_are_only_timed(active):
    dispatch = Shadow(active, policy("threshold", max_tokens=2)).sampling(every=3)
    decisions = [dispatch(3) for _ in range(6)]
    assert [one.timed for one in decisions] == [False, False, True] * 2
    assert len({one.key for one in decisions}) == 1
    assert not active.dispatch(3).timed


def test_states_of_graphs_are_mirrored(active):
    shadow = Shadow(active, policy())
    key = active.dispatch(3).key
    for change, reason in (
        (lambda: active.registry.failed(key, "planted"), "capture_failed"),
        (lambda: active.registry.captured(key, object()), "hit"),
        (lambda: active.registry.evicted(key), "evicted"),
        (lambda: active.registry.captured(key, object()), "hit"),
        (lambda: active.registry.stale(key, "weights"), "stale"),
        (lambda: active.registry.captured(key, object()), "hit"),
        (lambda: active.registry.set_enabled(False, key=key), "disabled"),
        (lambda: active.registry.set_enabled(True, key=key), "hit"),
        (lambda: active.registry.set_enabled(False, mode=key.mode), "disabled"),
        (lambda: active.registry.set_enabled(True, mode=key.mode), "hit"),
    ):
        change()
        shadow.follow([(3, 0, 0, 0, 2)])
        assert shadow.candidate.dispatch(3).reason == reason
    report = shadow.report()
    assert report.same_steps == report.steps == 10


def test_graphs_that_only_the_candidate_has_count_as_there(active):
    shadow = Shadow(active, policy(), DispatchConfig(sizes=(3, 8), mode="FULL"))
    for size, us in ((2, 20.0), (4, 40.0), (8, 80.0)):
        measure(shadow, active, size, [us] * 3)
    shadow.follow([(3, 0, 0, 0, 2)] * 10)
    report = shadow.report()
    # 30 us, between what graphs of 2 and of 4 tokens take.
    assert report.gain_us == pytest.approx(100.0)
    assert report.unpriced_steps == 0


def test_what_has_no_known_time_is_left_out_and_said(active):
    shadow = Shadow(active, policy("threshold", max_tokens=2))
    shadow.follow([(3, 0, 0, 0, 2)] * 4)
    report = shadow.report()
    assert report.unpriced_steps == 4
    assert report.error_us is None
    assert report.differences[0].gain_us is None
    assert any("give a cost model" in note for note in report.notes)
    assert "not known" in str(report)


def test_steps_outside_the_candidates_limits_are_refused(active):
    shadow = Shadow(active, policy(), DispatchConfig(sizes=(4,), mode="FULL"))
    shadow.follow([(7, 0, 0, 0, 2), (3, 0, 0, 0, 2)])
    assert shadow.report().refused_steps == 1


def test_samples_behind_other_work_are_kept_apart(active):
    shadow = Shadow(active, policy("threshold", max_tokens=2), times=TRUE)
    measure(shadow, active, 3, [10.0] * 3)
    measure(shadow, active, 3, [50.0] * 5, queued=True)
    shadow.follow([(3, 0, 0, 0, 2)])
    assert shadow.report().active_us == pytest.approx(50.0)


def test_a_candidate_at_fault_is_counted_and_named(active):
    class Faulty:
        name = "faulty"
        is_on_trial = True

        def declare(self, config):
            return policy().declare(config)

        def decide(self, batch, graphs):
            if not self.is_on_trial:
                raise ValueError("no idea")
            return Decision.eager("none")

    candidate = Faulty()
    shadow = Shadow(active, candidate)
    candidate.is_on_trial = False
    shadow.follow([(3, 0, 0, 0, 2)] * 2)
    report = shadow.report()
    assert report.faults == 2
    assert "no idea" in report.fault


def test_a_candidate_that_is_refused_says_so(active):
    class Wrong:
        def declare(self, config):
            return [3]

        def decide(self, batch, graphs):
            return None

    with pytest.raises(PolicyError, match="only GraphKeys"):
        Shadow(active, Wrong())


def test_a_swap_of_the_policy_in_force_begins_the_count_anew(active):
    shadow = Shadow(active, policy("threshold", max_tokens=2))
    shadow.follow([(3, 0, 0, 0, 2)])
    active.swap(policy())
    shadow.follow([(3, 0, 0, 0, 2)], lost=5)
    report = shadow.report()
    assert (report.steps, report.lost_steps) == (1, 5)
    assert any("poll more often" in note for note in report.notes)


def test_a_learning_candidate_hears_that_it_did_not_run(active):
    heard = []

    class Learner:
        name = "learner"

        def declare(self, config):
            return policy().declare(config)

        def decide(self, batch, graphs):
            return Decision.eager("none")

        def observe(self, outcome):
            heard.append(outcome)

    shadow = Shadow(active, Learner())
    measure(shadow, active, 3, [10.0])
    assert [(one.won, one.elapsed_us) for one in heard] == [(False, 10.0)]
    assert any("learns" in note for note in shadow.report().notes)


def test_no_price_is_negative_however_far_it_lies_from_what_was_measured():
    prices = Prices({8: [100.0] * 3, 16: [300.0] * 3}, None)
    assert prices.value(prices.of(1)) == 100.0
    assert prices.value(prices.of(32)) == 700.0
    noisy = Prices({8: [100.0] * 3, 16: [90.0] * 3}, None)
    assert noisy.value(noisy.of(512)) == 90.0


def test_a_candidate_is_frozen_and_thawed_with_the_dispatcher_in_force():
    """Else it would seem to replay what nobody may capture any more."""
    config = DispatchConfig(sizes=(8,), max_num_tokens=8)
    create = load_plugins().create_policy
    active = Dispatcher(create("vllm"), config, lazy=True)
    shadow = Shadow(active, create("vllm"))
    for lazy in (False, True):
        active.set_lazy(lazy)
        shadow.follow([(4, 4, 0, 0, 2)])
        assert shadow.report().differences == ()
