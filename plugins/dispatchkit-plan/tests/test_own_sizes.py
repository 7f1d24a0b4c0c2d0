"""Sizes that deserve their own graph: the optimum, and their use by the dispatcher."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from dispatchkit.errors import ConfigError, TraceError  # noqa: E402 - after numpy's check
from dispatchkit.observe.trace import StepTrace  # noqa: E402

from dispatchkit_plan import CostModel, Scenario, plan_own_sizes, simulate  # noqa: E402

TOP = 9
shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])
traces = st.lists(st.integers(1, TOP), min_size=1, max_size=14)
ladders = st.sets(st.integers(1, TOP), max_size=3)


@st.composite
def models(draw, flat=False):
    times = st.lists(st.integers(1, 50).map(float), min_size=TOP, max_size=TOP)
    weights = st.lists(st.sampled_from([1, 2, 3, 8]), min_size=TOP, max_size=TOP)
    kinds = {"eager_us": draw(times), "graph_us": draw(times)}
    kinds["graph_bytes"] = [1.0] * TOP if flat else draw(weights)
    curves = {name: list(enumerate(values, start=1)) for name, values in kinds.items()}
    return CostModel(name="drawn", **curves)


def time_of(graphs, steps, model, max_waste):
    """Return the time if each step uses the smallest graph that covers it."""
    total = 0.0
    for size in steps:
        graph = min((one for one in graphs if one >= size), default=None)
        replays = graph is not None and graph - size <= max_waste * graph
        total += model.graph_us(graph) if replays else model.eager_us(size)
    return total


def best_of(steps, beside, model, max_waste, allowed):
    """Return the least time of any set of sizes that occur."""
    open_sizes = sorted(set(steps) - beside)
    sets = [
        {*beside, *own}
        for number in range(len(open_sizes) + 1)
        for own in combinations(open_sizes, number)
        if allowed(own)
    ]
    return min(time_of(one, steps, model, max_waste) for one in sets)


def planned(steps, **options):
    return plan_own_sizes(StepTrace({"num_tokens": list(steps)}), max_size=TOP, **options)


@given(traces, ladders, models(flat=True), shares, st.integers(1, 4))
def test_no_other_sizes_save_more_with_as_many_graphs(steps, beside, model, max_waste, graphs):
    plan = planned(
        steps, cost_model=model, beside=sorted(beside), max_waste=max_waste, graphs=graphs
    )
    assert len(plan.own) <= graphs
    assert plan.after_us == pytest.approx(time_of(plan.sizes, steps, model, max_waste))
    assert plan.before_us == pytest.approx(time_of(beside, steps, model, max_waste))
    best = best_of(steps, beside, model, max_waste, lambda own: len(own) <= graphs)
    assert plan.after_us == pytest.approx(best)
    for one in plan.own:
        without = time_of(set(plan.sizes) - {one.size}, steps, model, max_waste)
        assert one.saved_us == pytest.approx(without - plan.after_us)
        assert one.saved_us > 0
        assert one.num_steps == steps.count(one.size)


@given(traces, ladders, models(), shares, st.sampled_from([8, 16, 32]))
def test_no_other_sizes_save_more_within_as_much_memory(steps, beside, model, max_waste, budget):
    """Graphs take whole parts of the budgets, so nothing is rounded."""

    def price(own):
        return sum(model.graph_bytes(size) for size in own)

    plan = planned(
        steps, cost_model=model, beside=sorted(beside), max_waste=max_waste, memory_bytes=budget
    )
    assert price(one.size for one in plan.own) == sum(one.num_bytes for one in plan.own) <= budget
    best = best_of(steps, beside, model, max_waste, lambda own: price(own) <= budget)
    assert plan.after_us == pytest.approx(best)


def test_what_rounding_leaves_of_a_budget_is_used():
    """With a budget of 50 in 128 parts, a graph takes 2.56: rounded up to 3, only 42 would fit."""
    model = CostModel(
        name="line",
        eager_us=[(1, 100.0), (60, 200.0)],
        graph_us=[(1, 10.0), (60, 10.0)],
        graph_bytes=[(1, 1.0), (59, 1.0), (60, 1.5)],
    )
    steps = StepTrace({"num_tokens": list(range(1, 61))})
    plan = plan_own_sizes(steps, cost_model=model, max_waste=0, memory_bytes=50)
    assert 0 <= 50 - sum(one.num_bytes for one in plan.own) < 1  # no other graph fits
    assert plan.sizes == tuple(range(12, 61))


def test_a_graph_that_saves_nothing_is_not_added():
    """Rounding errors add none either: the largest serves every step as fast as any other."""
    draw = np.random.default_rng(0)
    steps = StepTrace({"num_tokens": [*draw.integers(1, 300, size=3000).tolist(), 300]})
    model = CostModel(name="flat", eager_us=[(1, 0.3)], graph_us=[(1, 0.1)])
    for beside in ((), (7, 100)):
        plan = plan_own_sizes(steps, cost_model=model, graphs=50, max_size=300, beside=beside)
        assert plan.sizes == (*beside, 300)


@pytest.mark.parametrize(
    ("beside", "max_waste"), [((), 0.0), ((64, 512), 1.0), ((64, 512), 0.25), ((), 1.0)]
)
def test_the_dispatcher_takes_as_long_as_planned(beside, max_waste):
    """Checked under the policy that the plan assumes."""
    pytest.importorskip("dispatchkit_threshold")
    draw = np.random.default_rng(0)
    steps = StepTrace({"num_tokens": draw.geometric(0.01, size=400).clip(1, 700).tolist()})
    model = CostModel(
        name="line",
        eager_us=[(1, 500.0), (700, 900.0)],
        graph_us=[(1, 50.0), (700, 880.0)],
        graph_bytes=[(1, 1e6), (700, 2e6)],
    )
    plan = plan_own_sizes(
        steps, cost_model=model, beside=beside, max_waste=max_waste, memory_bytes=20e6
    )
    ran = simulate(
        steps,
        Scenario(
            policy="threshold",
            policy_options={"max_waste": max_waste},
            sizes=plan.sizes,
            mode="FULL",
            cost_model=model,
        ),
    )
    assert ran.time_s == pytest.approx(plan.after_us / 1e6)
    assert plan.after_us < plan.before_us
    assert plan.saved_pct == pytest.approx(100 * (1 - plan.after_us / plan.before_us))


def test_of_halves_the_second_judges():
    """Sizes that occur only in the first half save nothing later."""
    model = CostModel(name="flat", eager_us=[(1, 10.0)], graph_us=[(1, 1.0), (TOP, 1.0)])
    plan = planned([3] * 5 + [4] * 3 + [4] * 8, cost_model=model, graphs=1, fit_on="first-half")
    assert plan.sizes == (4,)  # serves the smaller sizes too
    assert (plan.before_us, plan.after_us, plan.own[0].num_steps) == (80.0, 8.0, 8)
    exact = planned(
        [3] * 5 + [4] * 3 + [4] * 8, cost_model=model, graphs=1, max_waste=0, fit_on="first-half"
    )
    assert exact.sizes == (3,)
    assert (exact.before_us, exact.after_us, exact.own[0].saved_us) == (80.0, 80.0, 0.0)


def test_where_every_size_has_a_graph_there_is_nothing_to_add():
    model = CostModel(name="flat", eager_us=[(1, 10.0)], graph_us=[(1, 1.0)])
    plan = planned([3, 4], cost_model=model, graphs=2, beside=[3, 4])
    assert (plan.own, plan.sizes, plan.saved_pct) == ((), (3, 4), 0.0)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, ConfigError, "exactly one of graphs and memory_bytes. Pass graphs=24"),
        ({"graphs": 0}, ConfigError, "graphs"),
        ({"graphs": 1, "memory_bytes": 5}, ConfigError, "Pass only the tighter budget"),
        ({"memory_bytes": 5}, ConfigError, "bytes_per_graph"),
        (
            {"memory_bytes": 5, "bytes_per_graph": 6},
            ConfigError,
            "at least 6, the memory of the smallest",
        ),
        ({"graphs": 1, "beside": [0]}, ConfigError, "beside"),
        ({"graphs": 1, "beside": [TOP + 1]}, ConfigError, "max_size .* largest size in beside"),
        ({"graphs": 1, "max_waste": 1.5}, ConfigError, "max_waste"),
        ({"graphs": 1, "max_waste": True}, ConfigError, "max_waste"),
        ({"graphs": 1, "max_waste": "all"}, ConfigError, "max_waste must be a share"),
        ({"graphs": 1, "steps": [10, 11]}, TraceError, "Raise max_size"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, error, says):
    model = CostModel(name="flat", eager_us=[(1, 10.0)], graph_us=[(1, 1.0)])
    with pytest.raises(error, match=says):
        planned(**{"steps": [3, 4], "cost_model": model, **options})
