"""The dynamic programme compared with brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from dispatchkit.errors import ConfigError  # noqa: E402 - after the check for numpy

from dispatchkit_plan.costs import CostModel  # noqa: E402
from dispatchkit_plan.objective import (  # noqa: E402
    PaddingObjective,
    TimeObjective,
    waste_pct,
)
from dispatchkit_plan.optimal import (  # noqa: E402
    best_sizes_within,
    padding_costs,
    require_sizes,
    served_costs,
    size_curve,
)

TOP = 9
demands = st.lists(st.integers(0, 5), min_size=TOP, max_size=TOP).map(
    lambda counts: np.array([0, *counts], dtype=np.float64)
)


def sets_of(num_sizes, top=TOP):
    """Yield every set of ``count`` sizes that contains the largest."""
    return [(*rest, top) for rest in combinations(range(1, top), num_sizes - 1)]


def total(objective, sizes, demand):
    return float(objective.at_sizes(sizes, TOP)[1:] @ demand[1:])


@st.composite
def models(draw, monotone=True):
    """Draw measured times, growing with size or not."""
    graph = draw(st.lists(st.integers(1, 50), min_size=TOP, max_size=TOP))
    eager = draw(st.lists(st.integers(1, 50), min_size=TOP, max_size=TOP))
    graph = sorted(graph) if monotone else graph
    return CostModel.from_measurements(
        "drawn", [(n + 1, float(eager[n]), float(graph[n])) for n in range(TOP)]
    )


@given(demand=demands, num_sizes=st.integers(1, TOP))
def test_padding_plans_equal_brute_force(demand, num_sizes):
    """No other set with as many sizes pads less."""
    objective = PaddingObjective()
    candidates = np.arange(1, TOP + 1)
    curve = size_curve(candidates, padding_costs(candidates, demand), TOP)
    best = min(total(objective, sizes, demand) for sizes in sets_of(num_sizes))
    chosen = curve.sizes(num_sizes)
    assert len(chosen) == num_sizes
    assert chosen[-1] == TOP
    assert total(objective, chosen, demand) == best == curve.costs[num_sizes - 1]


@pytest.mark.slow_except("True-best", "False-always")
@pytest.mark.parametrize("dispatch", ["always", "best"])
@pytest.mark.parametrize("monotone", [True, False])
@given(data=st.data(), demand=demands, num_sizes=st.integers(1, TOP))
def test_timed_plans_equal_brute_force(data, demand, num_sizes, dispatch, monotone):
    """For any measured times, even if a larger graph is faster."""
    objective = TimeObjective(data.draw(models(monotone)), dispatch)
    candidates = np.arange(1, TOP + 1)
    curve = size_curve(
        candidates, objective.costs(candidates, demand), TOP, monotone=objective.monotone
    )
    best = min(total(objective, sizes, demand) for sizes in sets_of(num_sizes))
    assert total(objective, curve.sizes(num_sizes), demand) == pytest.approx(best)
    assert curve.costs[num_sizes - 1] == pytest.approx(best)


@given(data=st.data(), monotone=st.booleans())
def test_skipping_by_monotonicity_changes_nothing(data, monotone):
    """Tested with many candidates, in several blocks of rows."""
    counts = data.draw(st.lists(st.integers(0, 9), min_size=150, max_size=150))
    demand = np.array([0, *counts], dtype=np.float64)
    candidates = np.arange(1, 151)
    cost = padding_costs(candidates, demand)
    fast = size_curve(candidates, cost, 40, monotone=True)
    slow = size_curve(candidates, cost, 40, monotone=False)
    assert np.array_equal(fast.costs, slow.costs)


@given(demand=demands)
def test_both_cost_matrices_agree_on_padding(demand):
    """Serving at the padded size, expressed as a general cost, is the same problem."""
    candidates = np.array([2, 3, 5, TOP])
    price = np.repeat(candidates[:, None], TOP + 1, axis=1).astype(np.float64)
    assert np.allclose(padding_costs(candidates, demand), served_costs(candidates, demand, price))


@given(demand=demands, required=st.sets(st.integers(1, TOP), max_size=3))
def test_required_sizes_are_in_every_plan(demand, required):
    """The result is the best set that contains them."""
    objective = PaddingObjective()
    candidates = np.arange(1, TOP + 1)
    cost = require_sizes(padding_costs(candidates, demand), candidates, sorted(required))
    curve = size_curve(candidates, cost, 5, monotone=False)
    fitting = [s for s in sets_of(5) if required <= set(s)]
    assert curve.costs[4] == min(total(objective, sizes, demand) for sizes in fitting)
    assert required <= set(curve.sizes(5))


def test_a_required_size_must_be_a_candidate():
    with pytest.raises(ConfigError, match="required must be among the candidate sizes"):
        require_sizes(np.zeros((2, 2)), np.array([4, 8]), [3])


@given(
    demand=demands,
    price=st.lists(st.integers(0, 6), min_size=TOP, max_size=TOP),
    budget=st.integers(1, 24),
)
def test_plans_within_a_budget_equal_brute_force(demand, price, budget):
    """With whole prices and as many units of budget, nothing is rounded."""
    objective = PaddingObjective()
    candidates = np.arange(1, TOP + 1)
    prices = np.array(price, dtype=np.float64)
    cost = padding_costs(candidates, demand)
    if price[-1] > budget:
        with pytest.raises(ConfigError, match="the amount needed by the graph of the largest size"):
            best_sizes_within(candidates, cost, prices, budget, units=budget)
        return
    affordable = [
        sizes
        for count in range(1, TOP + 1)
        for sizes in sets_of(count)
        if sum(price[size - 1] for size in sizes) <= budget
    ]
    best = min(total(objective, sizes, demand) for sizes in affordable)
    chosen, cost_of = best_sizes_within(candidates, cost, prices, budget, units=budget)
    assert chosen in affordable
    assert total(objective, chosen, demand) == best == cost_of


@given(demand=demands, budget=st.floats(0.5, 30))
def test_a_budget_is_never_exceeded(demand, budget):
    """For any prices, rounding is conservative."""
    candidates = np.arange(1, TOP + 1)
    prices = 0.1 + 0.04 * candidates
    chosen, _ = best_sizes_within(
        candidates, padding_costs(candidates, demand), prices, budget, units=50
    )
    assert sum(prices[size - 1] for size in chosen) <= budget + 1e-9


def test_waste_is_padding_per_real_token():
    """Two batches of 3 and one of 4 in graphs of 4 and 8: two padded tokens for ten."""
    demand = np.array([0, 0, 0, 2, 1, 0, 0, 0, 0], dtype=np.float64)
    assert waste_pct((4, 8), demand) == pytest.approx(20.0)
    assert waste_pct((4, 8), np.zeros(9)) == 0.0


def test_a_number_of_sizes_must_be_possible():
    with pytest.raises(ConfigError, match="1 to 2"):
        size_curve(np.array([1, 2]), np.zeros((2, 2)), 3)
