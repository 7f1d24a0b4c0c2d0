"""Choose sizes that deserve their own graph, in addition to existing graphs.

A batch without a graph of its size is padded to a larger size, or runs eager. The time that a graph
of its exact size saves depends on the traffic (the frequency of the size) and on the device (the
cost of padding or of running eager). The other chosen graphs matter too, because a graph also
serves smaller batches. All sizes are therefore chosen together, by the dynamic program in
``optimal``. Existing graphs are always part of the result, and do not count toward the budget.
A batch runs eager if no graph is large enough, or if its padding would exceed the share
``max_waste`` of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.keys import check_count, check_counts
from dispatchkit.observe import StepTrace

from dispatchkit_plan.budgets import make_budget
from dispatchkit_plan.costs import CostModel, check_cost_model
from dispatchkit_plan.grid import ignored_axes
from dispatchkit_plan.optimal import (
    FloatArray,
    IntArray,
    best_sizes_within,
    require_sizes,
    served_costs,
    size_curve,
)
from dispatchkit_plan.traffic import SizeHistogram
from dispatchkit_plan.workload import FitOn, Workload, as_workload

__all__ = ["OwnSize", "OwnSizesPlan", "plan_own_sizes"]

_MAX_CANDIDATES = 512
_ROUNDING = 1e-9
"""Graphs that save at most this share of the time are dropped.

Such a small saving may be a rounding error.
"""


@attrs.frozen
class OwnSize:
    """A size that deserves its own graph.

    The judged steps are the steps that the plan is evaluated on.

    Attributes:
        size: Size to capture, in tokens.
        num_steps: Number of judged steps of exactly this size.
        saved_us: Additional time that the judged steps would take without this graph.
        num_bytes: Memory of the graph; None if the budget is a number of graphs.
    """

    size: int
    num_steps: int
    saved_us: float
    num_bytes: float | None


@attrs.frozen(kw_only=True)
class OwnSizesPlan:
    """Sizes that deserve their own graph, and the time that they save.

    Attributes:
        own: Chosen sizes, ascending.
        beside: Sizes of existing graphs, ascending.
        max_waste: Maximum share of a graph that may be padding.
        before_us: Time of the judged steps with the graphs of ``beside`` only.
        after_us: Time of the judged steps with the graphs of ``beside`` and the chosen graphs.
        num_steps: Number of judged steps of any size.
        num_steps_over: Number of judged steps that are larger than ``max_size`` and therefore not
            considered.
        judged_on: Description of the judged steps, the steps that the plan is evaluated on.
        objective: Description of the minimized time, with the name of the cost model.
        warnings: Caveats about the plan.

    Sizes are in tokens, times in microseconds, memory in bytes.
    """

    own: tuple[OwnSize, ...]
    beside: tuple[int, ...]
    max_waste: float
    before_us: float
    after_us: float
    num_steps: int
    num_steps_over: int
    judged_on: str
    objective: str
    warnings: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes to capture, ascending."""
        return tuple(sorted({*self.beside, *(one.size for one in self.own)}))

    @property
    def saved_pct(self) -> float:
        """Time that the chosen graphs save, as a percentage of the time without them."""
        return 100 * (1 - self.after_us / self.before_us) if self.before_us else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            **attrs.asdict(self),
            "own": [attrs.asdict(one) for one in self.own],
            "sizes": list(self.sizes),
            "saved_pct": round(self.saved_pct, 4),
        }


def plan_own_sizes(
    data: StepTrace | SizeHistogram | Workload,
    *,
    cost_model: CostModel,
    beside: Sequence[int] = (),
    max_waste: float = 1.0,
    graphs: int | None = None,
    memory_bytes: float | None = None,
    bytes_per_graph: float | None = None,
    max_size: int | None = None,
    fit_on: FitOn = "all",
) -> OwnSizesPlan:
    """Return the sizes of a trace that deserve their own graph, within one budget.

    If more than 512 sizes occur, only the 512 most frequent sizes are considered. For the
    considered sizes, the result is exact if the budget is a number of graphs or if all graphs take
    the same memory. Otherwise, it may be worse than the optimum, because the memory of each graph
    is rounded to a multiple of 1/128 of the budget (``optimal.best_sizes_within``). The rest of the
    budget is then filled with the graphs that save the most time per byte.

    Args:
        data: Traffic to plan for: a step trace, a histogram or a ``Workload``.
        cost_model: Cost model for eager and replayed steps.
        beside: Sizes of existing graphs, which do not count toward the budget.
        max_waste: Maximum share of a graph that may be padding, as for the policy ``threshold``. At
            0, only batches that exactly fill a graph replay; all other batches run eager.
        graphs: Maximum number of graphs to add. Pass either this or ``memory_bytes``.
        memory_bytes: Memory for the added graphs. Requires ``bytes_per_graph``, or a cost model
            with ``graph_bytes``.
        bytes_per_graph: Memory of each graph, for ``memory_bytes``.
        max_size: Size above which steps are not considered; by default, the larger of the largest
            graph size in the cost model and the largest size in ``beside``.
        fit_on: ``all`` to plan on all steps and judge the plan on the same steps, or ``first-half``
            to plan on the first half of the trace and judge the plan on the second half.

    Raises:
        ConfigError: A setting is out of range, no budget or several budgets are given, the memory
            of a graph is unknown, or the budget is too small for any graph.
        TraceError: No step used for planning has at most ``max_size`` tokens.

    Sizes are in tokens, memory is in bytes.
    """
    check_cost_model(cost_model, "cost_model")
    kept = tuple(sorted(set(check_counts(beside, "beside"))))
    share: Any = max_waste
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= 1:
        raise ConfigError("max_waste", max_waste, "a share from 0 to 1")
    if max_size is None:
        max_size = max(cost_model.graph_us.last, *kept, 1)
    max_size = check_count(max_size, "max_size")
    if kept and max_size < kept[-1]:
        raise ConfigError("max_size", max_size, f"at least {kept[-1]}, the largest size in beside")
    work = as_workload(data)
    fit, judged, judged_on = work.split(fit_on)
    if not (fit.num_tokens <= max_size).any():
        raise TraceError(
            work.source,
            None,
            f"every step used for planning exceeds max_size ({counted(max_size, 'token')}); the "
            f"smallest has {int(fit.num_tokens.min()):,}. Raise max_size.",
        )
    warnings = []
    if fit.axes:
        warnings.append(ignored_axes(fit.axes))
    steps = _Steps.of(fit, max_size, kept, cost_model, max_waste)
    candidates = _candidates(steps, kept, warnings)
    if (graphs is None) == (memory_bytes is None):
        given = None if graphs is None else {"graphs": graphs, "memory_bytes": memory_bytes}
        raise ConfigError(
            "budget",
            given,
            "given as exactly one of graphs and memory_bytes",
            "Pass only the tighter budget."
            if given
            else "Pass graphs=24, for example, or --graphs 24 on the command line.",
        )
    if graphs is not None:
        graphs = min(check_count(graphs, "graphs"), max(1, len(candidates)))
    budget = make_budget(
        graphs,
        memory_bytes,
        None,
        bytes_per_graph,
        None,
        cost_model,
        candidates if len(candidates) else steps.batches[:1],
    )
    prices = np.ones(len(candidates)) if budget.price is None else budget.price
    price = dict(zip(candidates.tolist(), prices.tolist(), strict=False))
    limit = float(budget.graphs or budget.limit)
    if price and min(price.values()) > limit:
        least = min(price.values())
        allowed = f"at least {least:.15g}, the memory of the smallest graph"
        raise ConfigError(budget.setting, limit, allowed, f"Raise {budget.setting}.")
    chosen = _choose(steps, kept, price, limit)
    later = _Steps.of(judged, max_size, kept, cost_model, max_waste)
    after = later.time_us({*kept, *chosen})
    return OwnSizesPlan(
        own=tuple(
            OwnSize(
                size,
                num_steps=later.count(size),
                saved_us=later.time_us({*kept, *chosen} - {size}) - after,
                num_bytes=None if budget.price is None else price[size],
            )
            for size in sorted(chosen)
        ),
        beside=kept,
        max_waste=float(max_waste),
        before_us=later.time_us(set(kept)),
        after_us=after,
        num_steps=judged.num_steps,
        num_steps_over=int(judged.counts[judged.num_tokens > max_size].sum()),
        judged_on=judged_on,
        objective=f"time under {cost_model.name}",
        warnings=tuple(warnings),
    )


@attrs.frozen(eq=False)
class _Steps:
    """Steps by size, and their times with given capture sizes.

    Attributes:
        batches: Sizes that occur or have an existing graph, ascending. Shape (P,).
        counts: Number of steps of each size. Shape (P,).
        eager_us: Time of one eager step of each size. Shape (P,).
        graph_us: Function that returns the time of a replay at a captured size.
        max_waste: Maximum share of a graph that may be padding.
    """

    batches: IntArray
    counts: FloatArray
    eager_us: FloatArray
    graph_us: Callable[[int], float]
    max_waste: float

    @classmethod
    def of(
        cls,
        work: Workload,
        max_size: int,
        kept: Sequence[int],
        model: CostModel,
        max_waste: float,
    ) -> _Steps:
        """Return the steps of at most ``max_size`` tokens."""
        small = work.num_tokens <= max_size
        batches = np.union1d(work.num_tokens[small], np.asarray(kept, dtype=np.int64))
        counts = np.bincount(
            np.searchsorted(batches, work.num_tokens[small]),
            weights=work.counts[small].astype(np.float64),
            minlength=len(batches),
        ).astype(np.float64)
        eager = np.array([model.eager_us(int(size)) for size in batches], dtype=np.float64)
        return cls(batches, counts, eager, functools.cache(model.graph_us), max_waste)

    def count(self, size: int) -> int:
        """Return the number of steps of exactly one size."""
        return int(self.counts[self.batches == size].sum())

    def served_us(self, size: int) -> FloatArray:
        """Return the time of a step of each size if ``size`` is the smallest graph that fits it."""
        wastes = size - self.batches > self.max_waste * size
        return np.where(wastes, self.eager_us, self.graph_us(size))

    def time_us(self, graphs: set[int]) -> float:
        """Return the total time of all steps.

        Each step replays the smallest graph that fits it. A step runs eager if no graph fits it, or
        if its padding would exceed the share ``max_waste`` of the graph.
        """
        ladder = sorted(graphs)
        place = np.searchsorted(np.array(ladder, dtype=np.int64), self.batches)
        size = np.array([*ladder, 0], dtype=np.int64)[place]
        replay = np.array([*map(self.graph_us, ladder), 0.0])[place]
        wastes = size - self.batches > self.max_waste * size
        is_eager = wastes | (place == len(ladder))
        return float(np.where(is_eager, self.eager_us, replay) @ self.counts)


def _candidates(steps: _Steps, kept: Sequence[int], warnings: list[str]) -> IntArray:
    """Return the most frequent sizes that do not have a graph yet, ascending."""
    is_open = (steps.counts > 0) & ~np.isin(steps.batches, np.asarray(kept, dtype=np.int64))
    candidates = steps.batches[is_open]
    if len(candidates) <= _MAX_CANDIDATES:
        return candidates
    warnings.append(
        f"Only the {_MAX_CANDIDATES} most frequent of {len(candidates)} sizes are considered."
    )
    order = np.argsort(-steps.counts[is_open], kind="stable")
    return np.sort(candidates[order[:_MAX_CANDIDATES]])


def _choose(
    steps: _Steps, kept: Sequence[int], price: Mapping[int, float], limit: float
) -> set[int]:
    """Return the sizes to add: the best set whose total price is at most the limit."""
    if not price:
        return set()
    sizes = sorted({*price, *kept})
    # Sizes are represented by ranks. Rank 0 means no size; the last rank means eager, which covers
    # every batch.
    last = len(steps.batches) + 1
    ranks = np.append(1 + np.searchsorted(steps.batches, sizes), last)
    demand = np.concatenate([[0.0], steps.counts, [0.0]])
    served = np.zeros((len(ranks), last + 1))
    served[:, 1:-1] = [*map(steps.served_us, sizes), steps.eager_us]
    required = [*np.flatnonzero(np.isin(sizes, kept)).tolist(), len(sizes)]
    cost = require_sizes(served_costs(ranks, demand, served), ranks, ranks[required].tolist())
    if len(set(price.values())) == 1:
        # Round up values just below an integer: 0.3 / 0.1 is 2.9999999999999996.
        affordable = int(min(limit / next(iter(price.values())) + 1e-9, len(price)))
        curve = size_curve(ranks, cost, len(required) + affordable, monotone=False)
        found = curve.sizes(int(curve.costs.argmin()) + 1)
    else:
        prices = np.array([price.get(size, 0.0) for size in sizes] + [0.0])
        found, _ = best_sizes_within(ranks, cost, prices, limit)
    chosen = {int(steps.batches[rank - 1]) for rank in found[:-1]} - set(kept)
    _fill(chosen, steps, kept, price, limit)
    least = steps.time_us({*kept, *chosen}) * (1 + _ROUNDING)
    for size in sorted(chosen):
        if steps.time_us({*kept, *chosen} - {size}) <= least:
            chosen.discard(size)
    return chosen


def _fill(
    chosen: set[int],
    steps: _Steps,
    kept: Sequence[int],
    price: Mapping[int, float],
    limit: float,
) -> None:
    """Spend the rest of the budget on the sizes that save the most time per unit of price."""
    while True:
        left = limit - sum(price[size] for size in chosen)
        now = steps.time_us({*kept, *chosen})
        gains = {
            size: (now - steps.time_us({*kept, *chosen, size})) / price[size]
            for size in price
            if size not in chosen and price[size] <= left
        }
        best = max(gains, key=gains.__getitem__, default=0)
        if not best or gains[best] <= 0:
            return
        chosen.add(best)
