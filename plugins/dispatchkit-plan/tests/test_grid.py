"""Plans of sizes and an axis: the optimum, its bound, and the policy that runs it."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from dispatchkit import Axis, DispatchConfig, Dispatcher  # noqa: E402 - after numpy's check
from dispatchkit.errors import ConfigError, TraceError  # noqa: E402
from dispatchkit.observe.trace import StepTrace  # noqa: E402

from dispatchkit_plan import (  # noqa: E402
    CostModel,
    GridPolicy,
    Scenario,
    emit,
    plan_grid,
    simulate,
)
from dispatchkit_plan import grid as grid_module  # noqa: E402
from dispatchkit_plan.emitters import emit_grid  # noqa: E402

CALLS = Path(__file__).parents[3] / "tests" / "data" / "calls"

batches = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=12)


def trace_of(steps):
    sizes, values = zip(*steps, strict=True)
    return StepTrace({"num_tokens": list(sizes), "axis.length": list(values)})


def trace_of_calls(name):
    """Return a trace with the rows of each call and its longest item."""
    calls = defaultdict(list)
    with gzip.open(CALLS / f"{name}.csv.gz", "rt") as stream:
        for row in csv.DictReader(stream):
            calls[row["call"]].append(int(row["length"]))
    return trace_of([(len(items), max(items)) for items in calls.values()])


def cost_of(grid, steps, model=None):
    """Return the cost of the steps, each taken to its bucket and size."""
    total = 0.0
    for size, value in steps:
        bucket = min(bucket for bucket in grid if bucket >= value)
        captured = min(one for one in grid[bucket] if one >= size)
        total += captured * bucket if model is None else model.at(bucket).graph_us(captured)
    return total


def every_grid(graphs, max_size, max_value):
    """Yield every grid of at most ``count`` graphs that covers the limits."""
    rows = [
        (*rest, max_size)
        for count in range(max_size)
        for rest in combinations(range(1, max_size), count)
    ]
    for count in range(max_value):
        for lower in combinations(range(1, max_value), count):
            buckets = (*lower, max_value)
            for chosen in product(rows, repeat=len(buckets)):
                if sum(map(len, chosen)) <= graphs:
                    yield dict(zip(buckets, chosen, strict=True))


@pytest.mark.parametrize("is_timed", [False, True])
@given(steps=batches, graphs=st.integers(1, 4), data=st.data())
@settings(max_examples=15)
def test_plans_equal_brute_force(is_timed, steps, graphs, data):
    """No other grid with as many graphs costs less, in padded work or in time."""
    max_size, max_value = max(n for n, _ in steps), max(v for _, v in steps)
    model = None
    if is_timed:
        times = st.lists(st.integers(1, 50), min_size=max_size * 2, max_size=max_size * 2)
        lows = sorted(data.draw(times))[:max_size]
        models = [
            CostModel.from_measurements(
                "drawn", [(n + 1, 100.0, float(us * factor)) for n, us in enumerate(lows)]
            )
            for factor in (1, 3)
        ]
        model = CostModel(
            name="drawn",
            eager_us=models[1].eager_us,
            graph_us=models[1].graph_us,
            axis="length",
            along=[(1, models[0]), (3, models[1])],
        )
    plan = plan_grid(trace_of(steps), "length", graphs=graphs, cost_model=model)
    best = min(cost_of(grid, steps, model) for grid in every_grid(graphs, max_size, max_value))
    assert cost_of(plan.grid, steps, model) == pytest.approx(best)
    assert plan.gap_pct == pytest.approx(0.0)
    assert plan.num_graphs == sum(map(len, plan.grid.values())) <= graphs


@given(steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60))
@settings(max_examples=15)
def test_with_fewer_candidates_the_gap_holds(steps):
    """The optimum lies between the plan and its bound, and no product beats the plan."""
    with pytest.MonkeyPatch.context() as patch:
        best = plan_grid(trace_of(steps), "length", graphs=6)
        patch.setattr(grid_module, "_MAX_SIZES", 6)
        patch.setattr(grid_module, "_MAX_VALUES", 4)
        plan = plan_grid(trace_of(steps), "length", graphs=6)
    assert best.gap_pct == pytest.approx(0.0, abs=1e-9)
    found, least = cost_of(plan.grid, steps), cost_of(best.grid, steps)
    assert least <= found * (1 + 1e-9)
    assert found <= least * (1 + plan.gap_pct / 100) * (1 + 1e-9)
    assert plan.waste_pct <= plan.product.waste_pct + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verses", "functions", "paragraphs"])
def test_sizes_of_its_own_for_each_bucket_pad_less_than_a_product(name):
    """Real calls, 64 graphs: never worse in sample, at most 2% worse on the later half."""
    trace = trace_of_calls(name)
    plan = plan_grid(trace, "length", graphs=64)
    later = plan_grid(trace, "length", graphs=64, fit_on="first-half")
    assert plan.waste_pct <= (0.9 if name == "verses" else 0.8) * plan.product.waste_pct
    assert 100 + later.waste_pct <= 1.02 * (100 + later.product.waste_pct)
    assert later.product.num_graphs <= 64 >= later.num_graphs


def test_limits_are_captured_and_what_lies_beyond_is_counted():
    plan = plan_grid(
        trace_of([(2, 3), (9, 3), (2, 50)]), "length", graphs=4, max_size=8, max_value=16
    )
    assert {sizes[-1] for sizes in plan.grid.values()} == {8}
    assert max(plan.grid) == 16
    assert plan.num_steps_over == 2
    data = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert data["grid"][-1][0] == 16
    assert data["product"]["graphs"] <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": "width"}, "no column 'axis.width'. Pass an axis of the trace: length"),
        ({"graphs": 0}, "graphs"),
        ({"max_size": 1}, "max_size .1 row. and .*smallest of these steps has 2 rows and length 3"),
        ({"fit_on": "halves"}, "'all' or 'first-half'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message):
    with pytest.raises((ConfigError, TraceError), match=message):
        plan_grid(trace_of([(2, 3), (4, 5)]), **{"axis": "length", "graphs": 3, **options})


def test_a_cost_model_of_another_axis_is_refused():
    one = CostModel(name="one", eager_us=[(1, 2.0)], graph_us=[(1, 1.0)])
    model = CostModel(
        name="m", eager_us=one.eager_us, graph_us=one.graph_us, axis="width", along=[(4, one)]
    )
    with pytest.raises(ConfigError, match="measured along 'width'"):
        plan_grid(trace_of([(2, 3)]), "length", graphs=1, cost_model=model)


def test_settings_are_arguments_of_a_runner():
    plan = plan_grid(trace_of([(1, 4), (3, 9), (2, 9)]), "length", graphs=3)
    made = emit_grid(plan)
    given = eval(f"dict({made.text})", {"Axis": Axis, "GridPolicy": GridPolicy})  # noqa: S307
    assert given["policy"].grid == plan.robust.grid
    assert given["axes"] == [Axis("length", tuple(plan.robust.grid))]
    assert given["sizes"] == made.sizes
    with pytest.raises(ConfigError):
        emit([], "dispatchkit")


# -- the policy -----------------------------------------------------------------------------------

GRID = {16: (1, 4), 64: (2, 3, 8)}


def dispatcher(**settings):
    config = DispatchConfig(axes=[Axis("length", (16, 64))], mode="FULL", sizes=(8,), **settings)
    return Dispatcher(GridPolicy(GRID), config, lazy=True, strict=True)


@given(num_tokens=st.integers(1, 8), length=st.integers(1, 70))
def test_a_batch_gets_the_smallest_graph_of_its_bucket(num_tokens, length):
    table = dispatcher()
    decision = table.dispatch(num_tokens, loras=table.config.variant(length=length))
    bucket = next((bucket for bucket in GRID if bucket >= length), None)
    if bucket is None:
        assert decision.reason == "outside_axis"
    elif num_tokens > GRID[bucket][-1]:
        assert decision.reason == "above_largest_size"
    else:
        assert decision.key.descriptor.axes == (bucket,)
        assert decision.key.num_tokens == min(n for n in GRID[bucket] if n >= num_tokens)


def test_a_ceiling_is_kept_and_told():
    table = dispatcher()
    variant = table.config.variant(length=3)
    assert table.dispatch(2, loras=variant, ceiling=0).reason == "ceiling"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "a dict of capture sizes by bucket"),
        ([1, 2], "a dict of capture sizes by bucket"),
        ({16: ()}, r"grid\[16\] must be a list of at least one capture size"),
        ({16: 4}, r"grid\[16\] must be a list"),
        ({16: [1], "16": [2]}, "grid buckets must be distinct"),
        ({0: (1,)}, "grid bucket"),
        ({16: (0,)}, r"grid\[16\]"),
    ],
)
def test_a_grid_that_is_none_is_refused(grid, message):
    with pytest.raises(ConfigError, match=message):
        GridPolicy(grid)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DispatchConfig(sizes=(8,)), "one axis whose buckets"),
        (DispatchConfig(sizes=(8,), axes=[Axis("length", (16,))]), "one axis whose buckets"),
        (DispatchConfig(sizes=(4,), axes=[Axis("length", (16, 64))]), "at least 8"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config, message):
    with pytest.raises(Exception, match=message):
        Dispatcher(GridPolicy(GRID), config)


# -- costs along the axis -------------------------------------------------------------------------


def model_along():
    def at(factor):
        return CostModel(
            name="m",
            eager_us=[(1, 100.0 * factor), (8, 200.0 * factor)],
            graph_us=[(1, 10.0 * factor), (8, 80.0 * factor)],
        )

    return CostModel(
        name="m",
        eager_us=at(4).eager_us,
        graph_us=at(4).graph_us,
        axis="length",
        along=[(16, at(1)), (64, at(4))],
    )


@pytest.mark.parametrize(
    ("value", "factor"), [(1, 1.0), (16, 1.0), (40, 2.5), (64, 4.0), (112, 7.0)]
)
def test_curves_lie_in_proportion_between_measured_values(value, factor):
    model = model_along().at(value)
    assert model.graph_us(8) == pytest.approx(80.0 * factor)
    assert model.eager_us(1) == pytest.approx(100.0 * factor)


def test_models_along_an_axis_survive_a_file(tmp_path):
    from dispatchkit_plan import load_cost_model, save_cost_model

    save_cost_model(model_along(), tmp_path / "costs.json")
    assert load_cost_model(tmp_path / "costs.json") == model_along()


@pytest.mark.parametrize(
    "change",
    [
        {"axis": ""},
        {"at": [[16, {"graph_us": [[1, 1.0]]}]]},
        {"at": [[16, {"eager_us": [[1, 1.0]], "graph_us": [[1, 1.0]], "more": 1}]]},
        {"at": [16]},
        {"at": {"16": {}}},
        {"at": [[0, {"eager_us": [[1, 1.0]], "graph_us": [[1, 1.0]]}]]},
    ],
)
def test_a_file_with_a_bad_axis_is_refused(change):
    with pytest.raises(ConfigError):
        CostModel.from_json({**model_along().to_json(), **change})


@pytest.mark.parametrize("capture_after", [1, 2])
def test_a_simulation_pays_for_padding_along_the_axis(capture_after):
    """Replays cost as much as their bucket, eager steps as much as their value."""
    steps = [(1, 16), (1, 16), (3, 40), (3, 64), (9, 40)]
    config = DispatchConfig(
        axes=[Axis("length", (16, 64))], mode="FULL", sizes=(1, 9), max_num_tokens=9
    )
    model = model_along()
    found = simulate(
        trace_of(steps),
        Scenario(
            policy=GridPolicy({16: (1, 8), 64: (4, 8)}),
            config=config,
            cost_model=model,
            capture_after=capture_after,
        ),
    )
    replays = {16: model.at(16).graph_us(1), 64: model.at(64).graph_us(4)}
    alone = model.at(40).eager_us(9)
    if capture_after == 1:
        expected = 2 * replays[16] + 2 * replays[64] + alone
    else:
        first = model.at(16).eager_us(1) + model.at(40).eager_us(3)
        expected = first + replays[16] + replays[64] + alone
    assert found.time_s * 1e6 == pytest.approx(expected)
    eager = sum(model.at(value).eager_us(size) for size, value in steps)
    assert found.eager_time_s * 1e6 == pytest.approx(eager)
    assert not any("along" in note for note in found.notes)
