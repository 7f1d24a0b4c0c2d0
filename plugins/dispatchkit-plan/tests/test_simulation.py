"""A simulation of a trace equals running every step by hand."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from dispatchkit.dispatch import CellUpdate, Decision, Dispatcher, greedy_parts  # noqa: E402 - numpy
from dispatchkit.errors import ConfigError, TraceError, UnknownNameError  # noqa: E402
from dispatchkit.keys import (  # noqa: E402
    BatchDescriptor,
    CaptureSizeWarning,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
)
from dispatchkit.observe import trace_config  # noqa: E402
from dispatchkit.observe.trace import StepTrace, TraceStep, read_trace  # noqa: E402
from dispatchkit.options import RunnerOptions, with_settings  # noqa: E402
from dispatchkit.plugins import load_plugins  # noqa: E402
from dispatchkit.testing import SmallestPolicy  # noqa: E402

from dispatchkit_plan.costs import BUILTIN_COST_MODELS, CostModel, load_cost_model  # noqa: E402
from dispatchkit_plan.report import account_for  # noqa: E402
from dispatchkit_plan.scenario import Noise, Scenario  # noqa: E402
from dispatchkit_plan.simulation import simulate, simulate_all  # noqa: E402

TRACES = Path(__file__).parents[3] / "tests" / "data" / "traces"
MODEL = CostModel(
    name="test",
    eager_us=[(1, 100.0), (64, 200.0)],
    graph_us=[(1, 20.0), (64, 150.0)],
    graph_bytes=[(1, 1000.0), (64, 64000.0)],
    capture_us=[(1, 1e5)],
)


class Smallest(SmallestPolicy):
    """Declares mixed graphs for few requests, so that others must serve the rest."""

    def declare(self, config):
        return [
            GraphKey(
                RuntimeMode.FULL,
                BatchDescriptor(num_tokens=size, num_reqs=max(1, size // 2)),
            )
            for size in config.sizes
        ]


class Learner(Smallest):
    """Requests every time, and tries eager once for each outcome."""

    name = "learner"

    def __init__(self):
        self.told = []

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        return Decision.replay(answer.key, timed=True) if answer.key else answer

    def observe(self, outcome):
        self.told.append(outcome)
        if not outcome.decision.one_shot:
            yield CellUpdate(outcome.batch, Decision.eager("probe", timed=True), one_shot=True)


@st.composite
def traces(draw):
    """Draw short traces, with steps above the largest size too."""
    rows = []
    for _ in range(draw(st.integers(1, 80))):
        reqs = draw(st.integers(1, 20))
        uniform = draw(st.booleans())
        tokens = reqs if uniform else reqs + draw(st.integers(0, 60))
        longest = 1 if uniform else tokens - reqs + 1
        rows.append(TraceStep(tokens, reqs, longest, uniform, draw(st.integers(0, 2))))
    return StepTrace.from_steps(rows)


sizes = st.sets(st.integers(1, 64), min_size=1, max_size=6).map(sorted)


def by_hand(policy, trace, sizes, max_graphs=None, capture_after=1):
    """Run every step through its own dispatcher, with the live graphs in a list."""
    config = trace_config(trace, sizes=sizes)
    lazy = max_graphs is not None or capture_after > 1
    dispatcher = Dispatcher(policy, config, lazy=lazy)
    if not lazy:
        for key in dispatcher.registry:
            dispatcher.registry.captured(key, object())
    modes, misses, padding, time_us = Counter(), Counter(), 0, 0.0
    live, captures, evictions, asked = OrderedDict(), 0, 0, Counter()
    for step in trace:
        uniform = int(step.uniform_decode and step.max_query_len in config.query_lens)
        decision = dispatcher.dispatch(
            step.num_tokens, step.num_reqs, uniform, step.num_active_loras
        )
        if lazy and decision.key is not None and decision.key not in live:
            asked[decision.key] += 1
            if asked[decision.key] < capture_after:
                decision = Decision.eager("capture_pending")
        modes[decision.mode.name] += 1
        if decision.key is None:
            misses[decision.reason] += 1
        else:
            padding += decision.key.num_tokens - step.num_tokens
            if lazy and decision.key not in live:
                if len(live) == max_graphs:
                    live.popitem(last=False)
                    evictions += 1
                captures += 1
            live[decision.key] = None
            live.move_to_end(decision.key)
        captured = None if decision.key is None else decision.key.num_tokens
        time_us += MODEL.step_us(step.num_tokens, captured)
    return modes, misses, padding, pytest.approx(time_us / 1e6), captures, evictions


@given(trace=traces(), sizes=sizes)
@settings(max_examples=10)
def test_counting_each_batch_once_equals_every_step_by_hand(trace, sizes):
    """Includes decisions that hold for few requests only."""
    result = simulate(trace, Scenario(policy=Smallest(), sizes=sizes, cost_model=MODEL))
    modes, misses, padding, time_s, *_ = by_hand(Smallest(), trace, sizes)
    assert {mode: count for mode, count in result.modes.items() if count} == modes
    assert result.misses == misses
    assert result.padding_tokens == padding
    assert result.time_s == time_s
    assert result.num_steps == len(trace)
    assert (result.captures, result.evictions) == (len(sizes), 0)
    assert result.memory_bytes == round(sum(map(MODEL.graph_bytes, sizes)))
    assert result.capture_time_s == pytest.approx(0.1 * len(sizes))


@given(trace=traces(), sizes=sizes, max_graphs=st.integers(1, 4))
@settings(max_examples=10)
def test_a_budget_of_graphs_equals_every_step_by_hand(trace, sizes, max_graphs):
    """The least recently used graph is evicted, and the number never exceeds the budget."""
    scenario = Scenario(policy=Smallest(), sizes=sizes, cost_model=MODEL, max_graphs=max_graphs)
    result = simulate(trace, scenario)
    modes, misses, padding, time_s, captures, evictions = by_hand(
        Smallest(), trace, sizes, max_graphs
    )
    assert {mode: count for mode, count in result.modes.items() if count} == modes
    assert result.misses == misses
    assert (result.padding_tokens, result.time_s) == (padding, time_s)
    assert (result.captures, result.evictions) == (captures, evictions)
    assert result.captures - result.evictions <= max_graphs


@given(
    trace=traces(),
    sizes=sizes,
    max_graphs=st.none() | st.integers(1, 4),
    capture_after=st.integers(2, 4),
)
@settings(max_examples=10)
def test_captures_that_wait_for_several_asks_equal_every_step_by_hand(
    trace, sizes, max_graphs, capture_after
):
    """Until then steps run eager with their own reason."""
    limits = {"max_graphs": max_graphs, "capture_after": capture_after}
    scenario = Scenario(policy=Smallest(), sizes=sizes, cost_model=MODEL, **limits)
    result = simulate(trace, scenario)
    modes, misses, padding, time_s, captures, evictions = by_hand(
        Smallest(), trace, sizes, **limits
    )
    assert {mode: count for mode, count in result.modes.items() if count} == modes
    assert result.misses == misses
    assert (result.padding_tokens, result.time_s) == (padding, time_s)
    assert (result.captures, result.evictions) == (captures, evictions)


@pytest.mark.parametrize("capture_after", [1, 3])
def test_a_runner_does_what_was_simulated(capture_after):
    """The tape has the same steps, captures and evictions."""
    torch = pytest.importorskip("torch")
    from dispatchkit import GraphRunner, StaticInput
    from dispatchkit.execute import ChurnWarning, EagerStepWarning

    trace = read_trace(TRACES / "step_azure_conv_low.csv.gz")[:150]
    limits = {"max_graphs": 2, "capture_after": capture_after}
    config = trace_config(trace, sizes=(17, 19, 21, 22, 24), mode="FULL")
    result = simulate(trace, Scenario(config=config, cost_model=MODEL, **limits))
    runner = GraphRunner(
        lambda rows: rows * 2,
        {"rows": StaticInput((None,), "float32")},
        backend="tape",
        lazy=True,
        options=with_settings(RunnerOptions(config=config), limits),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        warnings.simplefilter("ignore", ChurnWarning)
        for step in trace:
            if step.num_tokens:
                runner(
                    torch.zeros(step.num_tokens),
                    num_reqs=step.num_reqs,
                    uniform=step.uniform_decode,
                )
    stats = runner.stats()
    assert {str(mode): n for mode, n in stats.steps_by_mode.items()} == dict(result.modes)
    assert stats.eager_by_reason == dict(result.misses)
    assert (stats.captures, stats.evictions) == (result.captures, result.evictions)
    assert result.evictions > 0


@given(trace=traces(), sizes=sizes, limit=st.integers(64_000, 200_000))
@settings(max_examples=10)
def test_a_budget_of_bytes_is_never_exceeded(trace, sizes, limit):
    scenario = Scenario(policy=Smallest(), sizes=sizes, cost_model=MODEL, max_bytes=limit)
    assert simulate(trace, scenario).memory_bytes <= limit


class Splits(SmallestPolicy):
    """Splits batches that no graph covers."""

    def decide(self, batch, graphs):
        parts = greedy_parts(batch, graphs, RuntimeMode.FULL)
        answer = super().decide(batch, graphs)
        return Decision.split(parts) if parts and answer.key is None else answer


@pytest.mark.parametrize("max_graphs", [None, 1, 2])
def test_a_split_step_is_one_step_that_takes_what_its_parts_take(max_graphs):
    """Above the largest size; if its graphs do not fit together, the step runs eager."""
    trace = StepTrace({"num_tokens": [16, 40, 40, 8]})
    with pytest.warns(CaptureSizeWarning):
        config = DispatchConfig(mode="FULL", sizes=(8, 16), max_num_tokens=64)
    found = {}
    for rows_independent in (False, True):
        scenario = Scenario(
            policy=Splits(),
            config=config,
            cost_model=MODEL,
            max_graphs=max_graphs,
            rows_independent=rows_independent,
        )
        found[rows_independent] = simulate(trace, scenario)
    graph, eager = MODEL.graph_us, MODEL.eager_us
    split_us = 2 * graph(16) + graph(8)
    alone = graph(16) + graph(8)
    assert found[False].modes["NONE"] == 2
    assert found[False].time_s == pytest.approx((alone + 2 * eager(40)) / 1e6)
    if max_graphs == 1:
        assert found[True].misses == {"capture_pending": 2}
        assert found[True].time_s == pytest.approx((alone + 2 * eager(40)) / 1e6)
        return
    assert found[True].modes == {"NONE": 0, "PIECEWISE": 0, "FULL": 4}
    assert found[True].time_s == pytest.approx((alone + 2 * split_us) / 1e6)
    assert (found[True].real_tokens, found[True].padding_tokens) == (104, 0)


def test_the_least_useful_graph_goes_first_where_asked_for():
    """Two replays of 8 tokens serve less per byte than one of 1."""
    steps = [8, 8, 8, 1, 2, 1, 1]
    trace = StepTrace({"num_tokens": steps})
    kinds = {"policy": Smallest(), "sizes": [1, 2, 8], "cost_model": MODEL, "max_graphs": 2}
    assert simulate(trace, Scenario(**kinds)).evictions == 1  # 8 is evicted, 1 stays
    benefit = simulate(trace, Scenario(**kinds, eviction="benefit"))
    assert benefit.evictions == 1  # 8: 3/8, 1: 1/1


def test_a_learning_policy_is_told_noisy_times_and_probes_are_counted():
    """Some steps are measured, one-shot steps always."""
    policy = Learner()
    trace = StepTrace({"num_tokens": [4] * 100})
    scenario = Scenario(policy=policy, sizes=[4], cost_model=MODEL, sample_every=10, seed=3)
    result = simulate(trace, scenario)
    assert result.measured == len(policy.told)
    assert result.probes == sum(told.decision.one_shot for told in policy.told) >= 8
    assert result.misses == {"probe": result.probes}
    assert result.modes["FULL"] == 100 - result.probes
    true = MODEL.step_us(4, 4)
    assert len({told.elapsed_us for told in policy.told}) > 5
    assert result.time_s == pytest.approx(
        (result.modes["FULL"] * true + result.probes * MODEL.eager_us(4)) / 1e6
    )


@pytest.mark.slow_except("adaptive")
@pytest.mark.parametrize("policy", ["adaptive", "vllm"])
def test_the_same_seed_gives_the_same_result(policy):
    trace = read_trace(TRACES / "step_azure_conv_high.csv.gz")[:400]
    results = [simulate(trace, Scenario(policy=policy, seed=7)) for _ in range(2)]
    assert results[0] == results[1]


def test_lanes_have_graphs_of_their_own():
    """Each lane captures; the largest lane is a lower bound of the time."""
    trace = read_trace(TRACES / "step_azure_conv_high.csv.gz")
    one, four = simulate_all(trace, [Scenario(), Scenario(lanes=4)])
    assert four.captures == 4 * one.captures
    assert four.time_s == pytest.approx(one.time_s)
    assert one.busiest_lane_s == one.time_s
    assert four.time_s / 4 <= four.busiest_lane_s < four.time_s / 3
    assert any("lanes" in note.lower() for note in four.notes)
    with pytest.raises(ConfigError, match="by name"):
        simulate(trace, Scenario(policy=Smallest(), lanes=2))


def test_a_known_trace_has_the_known_numbers():
    """vLLM's rule and list on the chat trace, with the decoder's measured times."""
    trace = read_trace(TRACES / "step_azure_conv_high.csv.gz")
    vllm, powers = simulate_all(
        trace, [Scenario(), Scenario(sizes=[1 << bit for bit in range(10)], label="powers")]
    )
    assert vllm.modes == {"NONE": 1090, "PIECEWISE": 261, "FULL": 3649}
    assert vllm.misses == {"above_largest_size": 1090}
    assert vllm.num_graphs == 86
    assert round(vllm.waste_pct, 1) == 4.0
    assert (round(vllm.time_s, 2), round(vllm.eager_time_s, 1)) == (32.40, 48.4)
    assert vllm.hit_rate == pytest.approx(0.782)
    assert powers.label == "powers"
    assert round(powers.time_s, 2) == 34.03
    data = json.loads(json.dumps(vllm.to_json(), allow_nan=False))
    assert data["hit_rate"] == 0.782
    assert data["memory_bytes"] is None
    assert any("the largest size measured" in note for note in data["notes"])


def test_the_configuration_fits_the_trace():
    drafts = trace_config(read_trace(TRACES / "step_azure_conv_spec3.csv.gz"))
    assert drafts.query_lens == (4,)
    loras = trace_config(read_trace(TRACES / "step_azure_conv_lora.csv.gz"))
    assert loras.max_loras == 8
    assert trace_config(StepTrace({"num_tokens": [3]})).max_num_tokens == 512
    assert trace_config(StepTrace({"num_tokens": [3]}), sizes=[8]).max_num_tokens == 8


def test_what_cannot_be_simulated_is_refused():
    trace = StepTrace({"num_tokens": [3, 700]})
    with pytest.raises(UnknownNameError, match="Did you mean 'vllm'"):
        simulate(trace, Scenario(policy="vlm"))
    with pytest.raises(UnknownNameError, match="cost model"):
        simulate(trace, Scenario(cost_model="h100"))
    with pytest.raises(ConfigError, match="graph_bytes"):
        simulate(trace, Scenario(max_bytes=5, cost_model=BUILTIN_COST_MODELS["mlp-h100"]))
    with pytest.raises(ConfigError, match="max_bytes"):
        simulate(trace, Scenario(policy=Smallest(), sizes=[64], max_bytes=5, cost_model=MODEL))
    with pytest.raises(ConfigError, match="at least 700"):
        simulate(trace, Scenario(config=DispatchConfig(max_num_tokens=64)))
    with pytest.raises(TraceError, match="no step with tokens"):
        simulate(StepTrace({"num_tokens": [0]}))
    bad = {"lanes": 0, "max_graphs": 0, "eviction": "fifo", "sample_every": 0, "sizes": 8}
    bad |= {"mode": "FUL", "seed": "x", "noise": 0.1, "config": {}, "policy_options": 3}
    for setting, value in bad.items():
        with pytest.raises(ConfigError, match=setting):
            Scenario(**{setting: value})
    with pytest.raises(ConfigError, match=r"a StepTrace, got 'a.csv'. .*read_steps\(path\)"):
        simulate("a.csv")
    for wrong in ({"relative": -1}, {"outliers": 2}, {"factor": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Noise(**wrong)
    with pytest.raises(ConfigError, match="plugins must be a PluginSet, got 3"):
        simulate(trace, plugins=3)
    with pytest.raises(ConfigError, match=r"a Scenario, got 'vllm'"):
        simulate(trace, "vllm")
    with pytest.raises(ConfigError, match="sizes"):
        Scenario(sizes=[8], config=DispatchConfig())


def test_noise_is_around_the_truth():
    import random

    chance = random.Random(0)
    seen = sorted(Noise().measured(100.0, chance) for _ in range(2000))
    assert 95 < seen[1000] < 105
    assert seen[0] >= 20
    assert seen[-1] > 500


def test_counts_of_a_scenario_may_be_text():
    """Settings and command lines accept the same; the checked value is the used value."""
    scenario = Scenario(lanes="2", max_graphs="3", sample_every="4", capture_after="1")
    assert (scenario.lanes, scenario.max_graphs, scenario.sample_every) == (2, 3, 4)


def test_an_empty_list_of_sizes_is_a_list():
    trace = StepTrace({"num_tokens": [1, 2, 3]})
    found = simulate(trace, Scenario(sizes=()))
    assert (found.num_graphs, found.modes["NONE"]) == (0, 3)


def test_short_requests_run_in_decode_graphs_that_take_varying_lengths():
    trace = StepTrace({"num_tokens": [6, 9], "num_reqs": [2, 2], "max_query_len": [4, 8]})
    config = DispatchConfig(sizes=(8, 16), max_num_tokens=16, query_lens=4, varlen_decode=True)
    scenario = Scenario(policy="vllm@0.33-manager", config=config)
    assert simulate(trace, scenario).modes == {"NONE": 0, "PIECEWISE": 1, "FULL": 1}
    rule = load_plugins().create_policy("vllm@0.33-manager")
    account = account_for(trace, Dispatcher(rule, config, lazy=True), load_cost_model("mlp-h100"))
    assert account.modes() == {"NONE": 0, "PIECEWISE": 1, "FULL": 1}
