"""Plans: contents, warnings and refused values."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from dispatchkit.errors import ConfigError, TraceError  # noqa: E402 - after numpy's check
from dispatchkit.observe.trace import StepTrace, read_trace  # noqa: E402

from dispatchkit_plan import Hedge, plan_sizes  # noqa: E402
from dispatchkit_plan.costs import CostModel  # noqa: E402
from dispatchkit_plan.hedge import FALLBACK_HEDGE, HEDGE_CANDIDATES, NO_HEDGE  # noqa: E402
from dispatchkit_plan.objective import waste_pct  # noqa: E402
from dispatchkit_plan.traffic import SizeHistogram, StepKind  # noqa: E402

TRACES = Path(__file__).parents[3] / "tests" / "data" / "traces"


def trace_of(tokens, **columns):
    return StepTrace({"num_tokens": tokens, **columns})


@given(
    tokens=st.lists(st.integers(1, 80), min_size=1, max_size=60),
    max_size=st.integers(8, 64),
    graphs=st.integers(1, 8),
)
def test_a_plan_keeps_its_promises(tokens, max_size, graphs):
    """The largest size is included and counted, and the waste follows from the sizes."""
    trace = trace_of(tokens)
    if min(tokens) > max_size:
        with pytest.raises(TraceError, match=rf"exceeds max_size \({max_size} tokens\)"):
            plan_sizes(trace, graphs=graphs, max_size=max_size)
        return
    plan = plan_sizes(trace, graphs=graphs, max_size=max_size, curve_to=8)
    assert len(plan.sizes) == graphs == plan.num_graphs
    assert plan.sizes[-1] == max_size
    assert list(plan.sizes) == sorted(set(plan.sizes))
    demand = np.bincount([n for n in tokens if n <= max_size], minlength=max_size + 1)
    assert plan.waste_pct == pytest.approx(waste_pct(plan.sizes, demand.astype(float)))
    wastes = [waste for _, waste in plan.curve]
    assert [k for k, _ in plan.curve] == list(range(1, 9))
    assert all(a >= b - 1e-9 for a, b in pairwise(wastes))
    assert plan.num_steps == len(tokens)
    assert plan.num_steps_over == sum(n > max_size for n in tokens)
    assert plan.future is not None
    assert plan.robust.sizes[-1] == max_size


def test_json_holds_what_is_documented():
    """It has the keys that scripts read, and only JSON values."""
    plan = plan_sizes(trace_of([3, 5, 5, 600] * 100), graphs=4, max_size=16)
    data = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert data["sizes"][-1] == 16
    assert data["curve"][3] == [4, data["waste_pct"]]
    assert data["rivals"]["vllm-default"].keys() == {"graphs", "waste_pct", "matched_by"}
    assert data["steps_over_max_size"] == 100
    assert data["future"]["hedge"]["validated"] is True
    assert data["token_budget"]["size"] == 600


def test_the_second_half_is_never_looked_at():
    """A plan from the first half does not depend on the second half."""
    first = [3, 9, 27, 40] * 100
    plans = [
        plan_sizes(trace_of([*first, *later]), graphs=6, max_size=64, fit_on="first-half")
        for later in ([5] * 400, [1, 64] * 200)
    ]
    assert len({plan.sizes for plan in plans}) == 1
    assert len({plan.hedge for plan in plans}) == 1
    assert {plan.judged_on for plan in plans} == {"the second half"}


def test_a_validated_hedge_saves_what_the_optimum_loses():
    """For changing traffic: the optimum of the first half pads the second to the largest size."""
    rng = np.random.default_rng(0)
    walk = np.clip(np.cumsum(rng.integers(-2, 3, 3000)) + 60, 1, 256)
    trace = trace_of([int(n) for n in walk])
    hedged = plan_sizes(trace, graphs=12, max_size=256, fit_on="first-half")
    exact = plan_sizes(trace, graphs=12, max_size=256, fit_on="first-half", hedge="none")
    assert hedged.hedge.validated
    assert hedged.hedge.hedge != NO_HEDGE
    assert hedged.waste_pct < exact.waste_pct


def test_a_largest_size_far_above_all_steps_is_reported():
    unused = "No step has more than 40 tokens, but size 512 is always captured. Set max_size=40"
    trace = trace_of([5, 40] * 600)
    assert any(unused in text for text in plan_sizes(trace, graphs=3).warnings)
    assert not any(
        "always captured" in text for text in plan_sizes(trace, graphs=3, max_size=64).warnings
    )


def test_warnings_say_when_not_to_rely_on_a_plan():
    short = plan_sizes(trace_of([5] * 50), graphs=2, max_size=8)
    assert any("Only 50 steps of at most 8 tokens" in text for text in short.warnings)
    assert any(
        "based on only 50 steps. Validating a hedge requires 300" in text for text in short.warnings
    )
    assert any("judged on the steps it was planned on" in text for text in short.warnings)
    large = plan_sizes(trace_of([5, 90, 90] * 400), graphs=2, max_size=8)
    assert any("(800 of 1,200) exceed max_size (8 tokens)" in text for text in large.warnings)
    many = plan_sizes(trace_of([5] * 2000), graphs=6, max_size=8)
    assert any(
        "has 6 graphs, but the steps used for planning have only 1 distinct size" in text
        for text in many.warnings
    )
    fine = plan_sizes(trace_of([3, 5, 8] * 1000), graphs=2, max_size=8, fit_on="first-half")
    assert fine.warnings == ()


def test_a_histogram_is_planned_with_the_standard_hedge():
    """A plan cannot be validated without an order, which causes a warning."""
    histogram = SizeHistogram({StepKind(5): 3000, StepKind(8): 10})
    plan = plan_sizes(histogram, graphs=2, max_size=16)
    assert plan.sizes == (5, 16) or plan.sizes == (8, 16)
    assert plan.robust.hedge.hedge == FALLBACK_HEDGE
    assert any("the order of the steps is unknown" in text for text in plan.warnings)
    with pytest.raises(ConfigError, match="not record the order"):
        plan_sizes(histogram, graphs=2, max_size=16, fit_on="first-half")


def test_alignment_restricts_every_size():
    plan = plan_sizes(trace_of([3, 5, 17] * 100), graphs=3, max_size=32, align=4)
    assert all(size % 4 == 0 for size in (*plan.sizes, *plan.robust.sizes))
    with pytest.raises(ConfigError, match="30 or 35"):
        plan_sizes(trace_of([3]), graphs=1, max_size=32, align=5)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({}, "exactly one of graphs.*Pass graphs=24"),
        ({"graphs": 2, "memory_bytes": 1e9}, "exactly one of graphs"),
        ({"graphs": 0}, "at least 1"),
        ({"graphs": 2.5}, "whole number"),
        ({"graphs": True}, "not counts"),
        ({"graphs": 17}, "at most 16, the number of candidate sizes"),
        ({"graphs": 9, "align": 2}, "at most 8, the number of candidate sizes"),
        ({"graphs": 2, "max_size": 0}, "max_size"),
        ({"graphs": 2, "max_size": 10**9}, "at most"),
        ({"graphs": 2, "fit_on": "second-half"}, "'all' or 'first-half'"),
        ({"graphs": 2, "hedge": "strong"}, "'auto', 'none'"),
        ({"graphs": 2, "keyed": True}, "uniform_decode"),
        ({"graphs": 2, "token_budget": 9}, r"'auto', None, .* greater than max_size \(16\)"),
        ({"memory_bytes": 1e9, "bytes_per_graph": 1.0, "token_budget": 9}, "greater than max_size"),
        ({"memory_bytes": 1e9}, "bytes_per_graph"),
        ({"memory_bytes": float("nan"), "bytes_per_graph": 1.0}, "greater than 0"),
        (
            {"memory_bytes": 100.0, "bytes_per_graph": 200.0},
            "at least 200, the amount needed by the graph",
        ),
        ({"capture_time_s": 1.0}, "capture_s_per_graph"),
        ({"capture_time_s": 1.0, "capture_s_per_graph": -1}, "greater than 0"),
        ({"graphs": 2, "cost_model": "mlp-h100"}, r"a dispatchkit_plan.CostModel, .* load_cost_"),
        ({"graphs": 2, "hedge": Hedge}, r"Pass an instance: Hedge\(\.\.\.\)"),
        ({"graphs": 2, "dispatch": "sometimes"}, "dispatch must be 'always' or 'best'"),
        ({"graphs": 2, "keyed": "uniforms"}, "keyed must be True, False, 'uniform' or"),
        ({"graphs": 2, "lora_overhead": -1}, "lora_overhead must be a non-negative number"),
        ({"graphs": 2, "lora_overhead": "x"}, "lora_overhead must be a non-"),
        ({"graphs": 2, "separate_base": "x"}, "separate_base must be True or False"),
        ({"graphs": 2, "max_uniform_size": 0}, "max_uniform_size must be a whole number"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings_, message):
    with pytest.raises(ConfigError, match=message):
        plan_sizes(trace_of([3, 5, 600] * 10), **{"max_size": 16, **settings_})


@pytest.mark.parametrize("data", [3, "trace.csv", Path("trace.csv"), [3, 4, 5], None])
def test_only_steps_that_were_read_are_planned_on(data):
    with pytest.raises(ConfigError, match=r"data must be a StepTrace, .*read_workload\(path\)"):
        plan_sizes(data, graphs=2)


def test_a_memory_budget_buys_as_many_graphs_as_fit():
    """With one price per graph, a budget is a number of graphs."""
    trace = read_trace(TRACES / "step_azure_conv_high.csv.gz")
    by_memory = plan_sizes(trace, memory_bytes=160e6, bytes_per_graph=10e6, hedge="none")
    by_count = plan_sizes(trace, graphs=16, hedge="none")
    assert by_memory.num_graphs == 16
    assert by_memory.waste_pct == pytest.approx(by_count.waste_pct)
    by_time = plan_sizes(trace, capture_time_s=8.0, capture_s_per_graph=0.5, hedge="none")
    assert by_time.waste_pct == pytest.approx(by_count.waste_pct)


def test_dear_sizes_are_bought_last():
    """With prices from a cost model, the sum stays within the budget."""
    model = CostModel(
        name="priced",
        eager_us=[(1, 10.0)],
        graph_us=[(1, 1.0), (64, 64.0)],
        graph_bytes=[(1, 1.0), (64, 64.0)],
        capture_us=[(1, 1e6), (64, 1e6)],
    )
    trace = trace_of([1, 2, 3, 30, 60] * 300)
    plan = plan_sizes(trace, memory_bytes=72.0, cost_model=model, max_size=64, hedge="none")
    assert sum(plan.sizes) <= 72
    assert plan.sizes == (1, 2, 3, 64)
    timed = plan_sizes(trace, capture_time_s=3.0, cost_model=model, max_size=64, hedge="none")
    assert timed.num_graphs == 3


def test_the_token_budget_is_captured_only_where_it_pays():
    """A graph at 100 that speeds up a third of the steps beats one more small size."""
    steps = trace_of([10, 11, 100] * 400)
    fast = CostModel(
        name="fast", eager_us=[(1, 50.0), (100, 100.0)], graph_us=[(1, 10.0), (100, 40.0)]
    )
    slow = CostModel(
        name="slow", eager_us=[(1, 50.0), (100, 100.0)], graph_us=[(1, 10.0), (100, 140.0)]
    )
    short = CostModel(name="short", eager_us=[(1, 50.0), (16, 60.0)], graph_us=[(1, 10.0)])
    kinds = {"graphs": 3, "max_size": 16, "hedge": "none"}
    pays = plan_sizes(steps, cost_model=fast, **kinds)
    assert pays.sizes[-2:] == (16, 100)
    assert pays.num_graphs == 3
    assert pays.token_budget.pays
    assert pays.token_budget.share_pct == 100.0
    assert pays.token_budget.saved_pct > 0
    for model, why in [
        (slow, "would increase the time by"),
        (short, "measured only up to 1 token. Calibrate with sizes up to 100"),
        (None, "cost-model"),
    ]:
        plan = plan_sizes(steps, cost_model=model, **kinds)
        assert plan.sizes[-1] == 16
        assert not plan.token_budget.pays
        assert why in plan.token_budget.reason
    by_memory = {"memory_bytes": 300.0, "bytes_per_graph": 100.0, "max_size": 16, "hedge": "none"}
    plan = plan_sizes(steps, cost_model=fast, **by_memory)
    assert plan.sizes[-1] == 16
    assert (plan.token_budget.pays, plan.token_budget.saved_pct) == (False, None)
    assert "set the number of graphs" in plan.token_budget.reason
    assert plan_sizes(steps, token_budget=None, **kinds).token_budget is None
    assert plan_sizes(trace_of([3] * 9), **kinds).token_budget is None


def test_large_sizes_are_thinned_and_it_is_said():
    """A maximum of 8192 is planned in bounded time and memory; frequent sizes stay exact."""
    trace = trace_of([5000, 5000, 77, 4321] * 300)
    plan = plan_sizes(trace, graphs=4, max_size=8192, hedge="none")
    assert plan.sizes == (77, 4321, 5000, 8192)
    assert any("are considered" in text for text in plan.warnings)


def test_lora_counts_share_graphs_unless_adapters_cost():
    """Cheap adapters: one group for all counts. Expensive ones: separate groups."""
    counts = [1, 8] * 300
    trace = trace_of(
        [4, 30] * 300, uniform_decode=[0] * 600, num_reqs=[4, 30] * 300, num_active_loras=counts
    )
    kinds = {"graphs": 6, "max_size": 32, "keyed": "uniform+loras", "hedge": "none"}
    free = plan_sizes(trace, **kinds)
    assert {f.num_active_loras for f in free.families if f.uniform is False} == {8}
    dear = plan_sizes(trace, lora_overhead=0.5, **kinds)
    assert {f.num_active_loras for f in dear.families if f.uniform is False} == {1, 8}
    assert dear.num_graphs == 6
    assert dear.waste_pct >= free.waste_pct


def test_steps_without_adapters_keep_graphs_of_their_own():
    """Base-only steps (every third here) do not carry adapters."""
    trace = trace_of(
        [4, 30, 9] * 300,
        uniform_decode=[1, 0, 1] * 300,
        num_active_loras=[0, 8, 3] * 300,
    )
    kinds = {"graphs": 8, "max_size": 32, "keyed": "uniform+loras", "hedge": "none"}
    plan = plan_sizes(trace, **kinds)
    groups = {(f.uniform, f.num_active_loras) for f in plan.families}
    assert groups == {(True, 0), (True, 3), (False, 8)}
    together = plan_sizes(trace, **kinds, separate_base=False)
    assert {(f.uniform, f.num_active_loras) for f in together.families} == {(True, 3), (False, 8)}
    assert together.waste_pct <= plan.waste_pct
    for options in ({}, {"curve_to": 1}, {"max_size": 1, "keyed": "uniform+loras"}):
        with pytest.raises(ConfigError, match=r"at least ., one for each group of steps"):
            plan_sizes(
                trace_of([1] * 9, uniform_decode=[1] * 9), **{"graphs": 1, "keyed": True, **options}
            )
    with pytest.raises(ConfigError, match="at least 16, the amount needed by 2 graphs, one for"):
        plan_sizes(trace, keyed=True, memory_bytes=15, bytes_per_graph=8)


@pytest.mark.parametrize("own", ["x", None, 0.5, 2, -1])
def test_a_hedge_is_shares_with_a_sum_of_1(own):
    with pytest.raises(ConfigError, match="shares in spread must be non-negative numbers that sum"):
        Hedge(own)


def test_a_hedge_keeps_the_total_and_fills_gaps():
    """It distributes the same demand: nothing is added, and no size is excluded."""
    demand = np.zeros(65)
    demand[[8, 40]] = 100, 50
    for hedge in (FALLBACK_HEDGE, *HEDGE_CANDIDATES):
        mixed = hedge.apply(demand)
        assert mixed[1:].sum() == pytest.approx(150)
        assert (mixed[1:] > 0).all()
    assert np.array_equal(NO_HEDGE.apply(demand), demand)
    spread = Hedge(own=0.0, spread=((0.25, 1.0),)).apply(demand)
    assert np.flatnonzero(spread).tolist() == [6, 7, 8, 9, 10, *range(30, 51)]
    for bad in ({"own": 0.5}, {"own": -0.5, "prior": 1.5}, {"own": 0.5, "spread": ((2.0, 0.5),)}):
        with pytest.raises(ConfigError, match=r"shares in spread|width in spread"):
            Hedge(**bad)
