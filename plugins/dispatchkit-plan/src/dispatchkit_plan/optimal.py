"""Find optimal sets of capture sizes by dynamic programming.

Batches have many sizes, few sizes can be captured, and a batch runs at the smallest captured size
that covers it. Which set of sizes has the lowest total cost? Let ``cost[i, j]`` be the cost of all
batches that candidate i serves if the next smaller captured size is candidate ``j - 1``. If ``j``
is 0, there is no smaller captured size. The best set of k sizes that ends at candidate i consists
of i and a best set of k - 1 smaller sizes. Every end ``j - 1`` of the smaller set is compared, and
the set with the lowest total cost is kept. The last size is always the largest candidate, so that
every set covers the same batches.

With M candidates, one pass computes the whole curve for k = 1 to K in K x M^2 / 2 operations. If
costs grow with the padded size, the best ``j`` never decreases as i or k increases, so most of this
work is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from dispatchkit.errors import ConfigError, counted

__all__ = [
    "BoolArray",
    "FloatArray",
    "IntArray",
    "SizeCurve",
    "best_sizes_within",
    "close_upper",
    "padding_costs",
    "require_sizes",
    "served_costs",
    "size_curve",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_ROWS = 64  # rows per block: larger blocks search wider ranges of j, smaller blocks add overhead


def padding_costs(candidates: IntArray, demand: FloatArray) -> FloatArray:
    """Return the cost matrix in tokens, including padding.

    Args:
        candidates: Sizes that may be captured, ascending. Shape (M,).
        demand: Number of batches of each size, 0 to the largest candidate; entry 0 is ignored.
            Shape (N + 1,).

    Returns:
        Matrix of shape (M, M); entry [i, j] is inf for j > i.
    """
    # Number of batches up to each candidate.
    below = np.concatenate([[0.0], np.cumsum(demand[1:])])[candidates]
    before = np.concatenate([[0.0], below[:-1]])
    cost: FloatArray = candidates[:, None] * (below[:, None] - before[None, :])
    close_upper(cost)
    return cost


def served_costs(candidates: IntArray, demand: FloatArray, cost_at: FloatArray) -> FloatArray:
    """Return the cost matrix from the cost of each batch size at each candidate.

    Args:
        candidates: Sizes that may be captured, ascending. Shape (M,).
        demand: Number of batches of each size, 0 to the largest candidate. Shape (N + 1,).
        cost_at: Cost of one batch of size n at candidate i; entries with n above the candidate are
            ignored. Shape (M, N + 1).

    Returns:
        Matrix of shape (M, M); entry [i, j] is inf for j > i.
    """
    # Total cost of the sizes up to n. Shape (M, N + 1).
    total = np.cumsum(cost_at * demand[None, :], axis=1)
    # before[j]: size of candidate j - 1; candidate i serves only larger batches.
    before = np.concatenate([[0], candidates[:-1]])
    served = total[np.arange(len(candidates)), candidates]
    cost: FloatArray = served[:, None] - total[:, before]
    close_upper(cost)
    return cost


def close_upper(cost: FloatArray) -> None:
    """Set the cost to inf where a candidate's predecessor would not be smaller."""
    order = np.arange(len(cost))
    cost[order[:, None] < order[None, :]] = np.inf


def require_sizes(cost: FloatArray, candidates: IntArray, required: Sequence[int]) -> FloatArray:
    """Return costs for which every optimal set contains the required sizes.

    Sets that skip a required size have infinite cost.

    Raises:
        ConfigError: A required size is not a candidate.
    """
    wanted = np.isin(candidates, np.asarray(required, dtype=np.int64))
    if wanted.sum() != len(set(required)):
        odd = sorted(set(required) - set(candidates.tolist()))
        raise ConfigError("required", odd, f"among the candidate sizes ({candidates.tolist()})")
    # Number of required sizes among the first j candidates.
    passed = np.concatenate([[0], np.cumsum(wanted)])
    # Number of required sizes among candidates j to i - 1.
    skips = passed[:-1, None] - passed[None, :-1]
    return np.where(skips > 0, np.inf, cost)


@attrs.frozen(eq=False)
class SizeCurve:
    """The best set of sizes for each number of sizes.

    Attributes:
        candidates: Sizes that may be captured, ascending.
        costs: At index k - 1, the minimum cost with k sizes; inf if k sizes are not possible.
        back: Best ``j`` (see the module docstring) for each number of sizes and each last
            candidate.
    """

    candidates: IntArray
    costs: FloatArray
    back: tuple[IntArray, ...]

    def __len__(self) -> int:
        return len(self.back)

    def sizes(self, num_sizes: int) -> tuple[int, ...]:
        """Return the best set of exactly ``num_sizes`` sizes, ascending."""
        chosen: list[int] = []
        at = len(self.candidates) - 1
        for level in range(num_sizes - 1, -1, -1):
            chosen.append(int(self.candidates[at]))
            at = int(self.back[level][at]) - 1
        return tuple(reversed(chosen))


def size_curve(
    candidates: IntArray, cost: FloatArray, max_sizes: int, *, monotone: bool = True
) -> SizeCurve:
    """Return the best sets of 1 to ``max_sizes`` sizes.

    Args:
        candidates: Sizes that may be captured, ascending; the last one is in every set. Shape (M,).
        cost: Cost matrix, as returned by ``padding_costs`` or ``served_costs``. Shape (M, M).
        max_sizes: Maximum number of sizes, at most the number of candidates.
        monotone: Whether a batch never costs less at a larger candidate. If True, the best
            ``j`` (see the module docstring) never decreases, and most values of ``j`` are skipped.
            Pass False if ``cost`` comes from ``require_sizes``.

    Raises:
        ConfigError: ``max_sizes`` is out of range.
    """
    count = len(candidates)
    if not 1 <= max_sizes <= count:
        raise ConfigError(
            "max_sizes", max_sizes, f"from 1 to {count}, the number of candidate sizes"
        )
    best = cost[:, 0].copy()
    back = np.zeros(count, dtype=np.int64)
    backs, costs = [back], [best[-1]]
    for _ in range(1, max_sizes):
        # For k sizes, reach[j] is the cost of the best set of k - 1 sizes that ends at candidate
        # j - 1.
        reach = np.concatenate([[np.inf], best[:-1]])
        best = np.empty(count)
        previous, back = back, np.empty(count, dtype=np.int64)
        high = count
        for start in range((count - 1) // _ROWS * _ROWS, -1, -_ROWS):
            end = min(start + _ROWS, count)
            low, high = (int(previous[start:end].min()), min(high, end)) if monotone else (0, end)
            sums = cost[start:end, low:high] + reach[low:high]
            pick = sums.argmin(axis=1)
            back[start:end] = pick + low
            best[start:end] = sums[np.arange(end - start), pick]
            high = int(back[start]) + 1
        backs.append(back)
        costs.append(best[-1])
    return SizeCurve(candidates, np.array(costs), tuple(backs))


def best_sizes_within(
    candidates: IntArray,
    cost: FloatArray,
    price: FloatArray,
    budget: float,
    *,
    setting: str = "budget",
    units: int = 128,
) -> tuple[tuple[int, ...], float]:
    """Return the best sizes whose prices sum to at most a budget, and their cost.

    The budget is never exceeded. If all prices are equal, the result is exact. Otherwise, prices
    are rounded down to multiples of 1/``units`` of the budget. If the best set for the rounded
    prices fits the budget at full prices, the result is exact, too. If not, the result is the best
    set for prices rounded up.

    Args:
        candidates: Sizes that may be captured, ascending; the last one is always included. Shape
            (M,).
        cost: Cost matrix, as for ``size_curve``. Shape (M, M).
        price: Price of capturing each candidate (bytes or seconds), at least 0. Shape (M,).
        budget: Maximum sum of prices, above 0.
        setting: Name of the budget in error messages.
        units: Number of parts that the budget is divided into.

    Raises:
        ConfigError: The budget is below the price of the largest size.
    """
    if not price[-1] <= budget:
        raise ConfigError(
            setting,
            budget,
            f"at least {price[-1]:.15g}, the amount needed by the graph of the largest size "
            f"({counted(int(candidates[-1]), 'token')})",
            f"Raise {setting}, or reduce max_size.",
        )
    count = len(candidates)
    if price.min() == price.max():
        # Round up values just below an integer: 0.3 / 0.1 is 2.9999999999999996.
        affordable = count if not price[0] else int(budget / price[0] + 1e-9)
        curve = size_curve(candidates, cost, min(count, affordable), monotone=False)
        best = int(curve.costs.argmin())
        return curve.sizes(best + 1), float(curve.costs[best])
    scaled = price * (units / budget)
    sizes, least = _knapsack(candidates, cost, np.floor(scaled + 1e-9), units)
    by_size = dict(zip(candidates.tolist(), price.tolist(), strict=True))
    if sum(by_size[size] for size in sizes) <= budget * (1 + 1e-12):
        return sizes, least  # within the budget even at full prices
    return _knapsack(candidates, cost, np.ceil(scaled - 1e-9), units)


def _knapsack(
    candidates: IntArray, cost: FloatArray, weights: FloatArray, units: int
) -> tuple[tuple[int, ...], float]:
    """Return the best sizes whose integer weights sum to at most ``units``, and their cost."""
    weight = np.maximum(weights, 0).astype(np.int64)
    count = len(candidates)
    best = np.full((units + 1, count), np.inf)
    back = np.zeros((units + 1, count), dtype=np.int64)
    free = np.flatnonzero(weight == 0)
    by_weight = [(int(w), np.flatnonzero(weight == w)) for w in np.unique(weight) if w > 0]
    for spent in range(units + 1):
        for w, rows in by_weight:
            if w <= spent:
                _relax(rows, cost, best[spent - w], best, back, spent)
        for row in free:  # in ascending order, because free candidates can extend each other's sets
            _relax(np.array([row]), cost, best[spent], best, back, spent)
        if spent:  # unspent budget is allowed
            cheaper = best[spent - 1] < best[spent]
            best[spent] = np.where(cheaper, best[spent - 1], best[spent])
            back[spent] = np.where(cheaper, -1, back[spent])
    chosen: list[int] = []
    at, spent = count - 1, units
    while at >= 0:
        while back[spent][at] == -1:
            spent -= 1
        chosen.append(int(candidates[at]))
        smaller = int(back[spent][at]) - 1
        spent -= int(weight[at])
        at = smaller
    return tuple(reversed(chosen)), float(best[units][-1])


def _relax(
    rows: IntArray,
    cost: FloatArray,
    smaller: FloatArray,
    best: FloatArray,
    back: IntArray,
    spent: int,
) -> None:
    reach = np.concatenate([[0.0], smaller[:-1]])  # the cost without smaller sizes is 0
    first, last = int(rows[0]), int(rows[-1]) + 1
    block = cost[first:last] if last - first == len(rows) else cost[rows]
    sums = block[:, :last] + reach[:last]  # a candidate has no predecessor above itself
    pick = sums.argmin(axis=1)
    best[spent][rows] = sums[np.arange(len(rows)), pick]
    back[spent][rows] = pick
