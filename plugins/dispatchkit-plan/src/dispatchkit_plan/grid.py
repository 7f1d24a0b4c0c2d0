"""Plan capture sizes and the buckets of one axis together, from a trace.

Consider a batch of n rows whose longest item has v positions. The batch runs in the smallest bucket
of the axis that is at least v, and at the smallest capture size of this bucket that is at least n.
Sizes and buckets could be planned separately, with a graph for each combination. However, batches
of short items tend to differ in size from batches of long items, so each bucket needs its own
sizes.

``plan_grid`` uses dynamic programming twice. For every range of values and every number of sizes,
it finds the best sizes (see ``optimal``). It then divides the values into ranges, within one budget
of graphs. The result is the exact optimum for the considered values and sizes.

If the trace has more values or sizes than are considered, the planner bounds the distance from the
optimum. It rounds all steps down to considered values and sizes. No plan for the original steps has
a lower cost than the best plan for the rounded steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.keys import check_count
from dispatchkit.observe import StepTrace

from dispatchkit_plan.costs import CostModel, check_cost_model
from dispatchkit_plan.hedge import FALLBACK_HEDGE, NO_HEDGE, Hedge
from dispatchkit_plan.objective import Objective, PaddingObjective, TimeObjective
from dispatchkit_plan.optimal import BoolArray, FloatArray, IntArray, SizeCurve, size_curve
from dispatchkit_plan.workload import FitOn, check_trace

__all__ = ["GridPlan", "GridProduct", "ignored_axes", "plan_grid"]

_MAX_SIZES = 72
_MAX_VALUES = 44

Grid = Mapping[int, tuple[int, ...]]  # capture sizes by bucket; buckets and sizes ascend


@attrs.frozen
class GridProduct:
    """Sizes and buckets planned separately, with a graph for each combination.

    Attributes:
        sizes: Capture sizes of every bucket.
        buckets: Buckets of the axis.
        waste_pct: Padding on the judged steps, as a percentage of the real work.
    """

    sizes: tuple[int, ...]
    buckets: tuple[int, ...]
    waste_pct: float

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return len(self.sizes) * len(self.buckets)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "sizes": list(self.sizes),
            "buckets": list(self.buckets),
            "graphs": self.num_graphs,
            "waste_pct": round(self.waste_pct, 4),
        }


@attrs.frozen(kw_only=True)
class GridPlan:
    """Buckets of an axis with their capture sizes, and the quality of the plan.

    Attributes:
        axis: Name of the bucketed axis.
        grid: Capture sizes of each bucket, ascending.
        num_graphs: Total number of graphs, over all buckets.
        waste_pct: Padding on the judged steps within the limits, as a percentage of the real work.
            Work is rows times positions.
        excess_pct: Excess cost of the plan over graphs with the exact size and axis value of each
            batch, in percent. Equal to ``waste_pct`` without a cost model.
        gap_pct: Upper bound on the excess over the optimum for the planning steps, in percent of
            the optimum; 0 means that the plan is optimal. None if no bound is known, because the
            plan is hedged, or because the cost model has a graph that is faster than a smaller
            graph.
        product: Best combination of separately planned sizes and buckets within the same budget of
            graphs, judged on the same steps.
        future: Hedged plan for traffic similar to the trace, if ``fit_on="all"``. None if the plan
            itself is hedged.
        max_size: Largest size; larger steps run eager.
        max_value: Largest bucket; steps with larger values run eager.
        fit_on: Steps used for planning, ``all`` or ``first-half``.
        judged_on: Description of the judged steps.
        num_steps: Number of judged steps, including those above a limit.
        num_steps_over: Number of judged steps above a limit.
        objective: Minimized quantity, as text.
        warnings: Caveats about the plan.
    """

    axis: str
    grid: Grid
    num_graphs: int
    waste_pct: float
    excess_pct: float
    gap_pct: float | None
    product: GridProduct
    future: GridPlan | None
    max_size: int
    max_value: int
    fit_on: FitOn
    judged_on: str
    num_steps: int
    num_steps_over: int
    objective: str
    warnings: tuple[str, ...]

    @property
    def robust(self) -> GridPlan:
        """The plan to use for future traffic: ``future`` if present, else this plan."""
        return self.future or self

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "axis": self.axis,
            "grid": [[bucket, list(sizes)] for bucket, sizes in self.grid.items()],
            "graphs": self.num_graphs,
            "max_size": self.max_size,
            "max_value": self.max_value,
            "waste_pct": round(self.waste_pct, 4),
            "excess_pct": round(self.excess_pct, 4),
            "gap_pct": None if self.gap_pct is None else round(self.gap_pct, 4),
            "objective": self.objective,
            "product": self.product.to_json(),
            "fit_on": self.fit_on,
            "judged_on": self.judged_on,
            "steps": self.num_steps,
            "steps_over": self.num_steps_over,
            "future": None if self.future is None else self.future.to_json(),
            "warnings": list(self.warnings),
        }


def plan_grid(
    trace: StepTrace,
    axis: str,
    *,
    graphs: int,
    max_size: int | None = None,
    max_value: int | None = None,
    fit_on: FitOn = "all",
    hedge: Hedge = FALLBACK_HEDGE,
    cost_model: CostModel | None = None,
) -> GridPlan:
    """Return the best buckets of an axis and their capture sizes.

    With ``fit_on="all"``, the plan is optimized for the trace itself, and ``future`` is a hedged
    plan. With ``"first-half"``, the plan is hedged and judged on the second half.

    Args:
        trace: Steps with a value of the axis (column ``axis.NAME``).
        axis: Name of the axis to plan buckets for.
        graphs: Maximum number of graphs, over all buckets.
        max_size: Largest size, captured in every bucket; by default, the size of the largest step.
        max_value: Largest bucket; by default, the largest value.
        fit_on: ``all`` or ``first-half``.
        hedge: Mixture of histograms to plan hedged sizes for.
        cost_model: Cost model, to minimize time instead of padding. If it was measured without an
            axis, a step of n rows with value v is assumed to take the time of n * v tokens.

    Raises:
        ConfigError: A setting is out of range, or the cost model was measured along another axis.
        TraceError: The trace does not have the axis, or no step used for planning is within the
            limits.

    Sizes are in rows. Values are in the unit of the axis, such as positions.
    """
    check_trace(trace)
    if cost_model is not None:
        check_cost_model(cost_model, "cost_model")
    graphs = check_count(graphs, "graphs")
    work = _Batches.of(trace, axis)
    max_size = int(work.sizes.max()) if max_size is None else check_count(max_size, "max_size")
    max_value = int(work.values.max()) if max_value is None else check_count(max_value, "max_value")
    fit, judged, judged_on = work.split(fit_on)
    if not len(fit.within(max_size, max_value)):
        least = int((fit.sizes * fit.values).argmin())
        raise TraceError(
            trace.source,
            None,
            f"no step used for planning is within max_size ({counted(max_size, 'row')}) and "
            f"max_value ({axis} {max_value}). Raise these limits; the smallest of these steps has "
            f"{counted(int(fit.sizes[least]), 'row')} and {axis} {int(fit.values[least])}.",
        )
    if cost_model is not None and cost_model.along and cost_model.axis != axis:
        raise ConfigError(
            "cost_model",
            cost_model.name,
            f"measured along {axis!r} or without an axis",
            f"Calibrate a runner whose axis is {axis!r}.",
            message=f"Cost model {cost_model.name!r} was measured along {cost_model.axis!r}, but "
            f"the plan is for {axis!r}.",
        )
    planner = _GridPlanner(
        axis=axis,
        fit=fit.within(max_size, max_value),
        judged=judged,
        judged_on=judged_on,
        fit_on=fit_on,
        graphs=graphs,
        max_size=max_size,
        max_value=max_value,
        costs=_Costs(cost_model),
    )
    if fit_on == "all":
        return planner.plan(NO_HEDGE, planner.plan(hedge, None))
    return planner.plan(hedge, None)


def ignored_axes(axes: Sequence[str]) -> str:
    """Return the warning of a plan that ignores the axes of a trace."""
    if len(axes) == 1:
        return (
            f"The plan ignores the axis {axes[0]}: each size needs a graph for every bucket, but "
            "the budget counts one graph per size. To plan the buckets too, use plan_grid or "
            "--axis."
        )
    return (
        f"The plan ignores the axes {' and '.join(axes)}: each size needs a graph for every "
        "combination of buckets, but the budget counts one graph per size. To plan the buckets of "
        "one axis too, use plan_grid or --axis."
    )


@attrs.frozen(eq=False)
class _Batches:
    """Rows and axis values of steps, as arrays of shape (steps,)."""

    sizes: IntArray
    values: IntArray
    source: str
    has_order: bool

    @classmethod
    def of(cls, trace: StepTrace, axis: str) -> _Batches:
        """Return the steps of a trace, excluding steps without rows."""
        if axis not in trace.axes:
            problem = f"the trace has no column 'axis.{axis}'."
            if trace.axes:
                problem += f" Pass an axis of the trace: {', '.join(trace.axes)}."
            else:
                problem += " Record the values of the axis in this column."
            raise TraceError(trace.source, None, problem)
        sizes = np.array(trace.column("num_tokens"), dtype=np.int64)
        values = np.maximum(np.array(trace.column(f"axis.{axis}"), dtype=np.int64), 1)
        some = sizes > 0
        if not some.any():
            raise TraceError(
                trace.source, None, "the trace has no step with tokens. Use another trace."
            )
        return cls(sizes[some], values[some], trace.source, trace.has_order)

    def __len__(self) -> int:
        return len(self.sizes)

    def chosen(self, which: slice | BoolArray) -> _Batches:
        """Return the selected steps."""
        return attrs.evolve(self, sizes=self.sizes[which], values=self.values[which])

    def within(self, max_size: int, max_value: int) -> _Batches:
        """Return the steps within the limits."""
        return self.chosen((self.sizes <= max_size) & (self.values <= max_value))

    def split(self, fit_on: FitOn) -> tuple[_Batches, _Batches, str]:
        """Return the planning steps, the judged steps, and a description of the judged steps."""
        if fit_on == "all":
            return self, self, "the planning steps"
        if fit_on != "first-half":
            raise ConfigError("fit_on", fit_on, "'all' or 'first-half'")
        middle = len(self) // 2
        if not middle or not self.has_order:
            raise TraceError(
                self.source,
                None,
                "the trace cannot be split into halves: it has only one step. Use fit_on='all'."
                if self.has_order
                else "the trace cannot be split into halves: it does not record the order of its "
                "steps. Use fit_on='all'.",
            )
        return self.chosen(slice(None, middle)), self.chosen(slice(middle, None)), "the second half"


class _Costs:
    """Costs of batches in a bucket, as padded work or as time."""

    def __init__(self, model: CostModel | None) -> None:
        self._model = model
        self.name = "padding" if model is None else f"time under {model.name}"

    def objective(self, value: int) -> tuple[Objective, float]:
        """Return the objective for the sizes of a bucket, and a factor for its costs."""
        model = self._model
        if model is None:
            return PaddingObjective(), float(value)
        if model.along:
            return TimeObjective(model.at(value)), 1.0
        return TimeObjective(model.scaled(value)), 1.0

    def of_grid(self, grid: Grid, work: _Batches) -> float:
        """Return the total cost of steps within the limits, each in its bucket."""
        buckets = np.array(list(grid), dtype=np.int64)
        at = np.searchsorted(buckets, work.values)
        total = 0.0
        for index, (bucket, sizes) in enumerate(grid.items()):
            objective, factor = self.objective(bucket)
            demand = _demand(work.sizes[at == index], sizes[-1])
            total += factor * float(objective.at_sizes(sizes, sizes[-1])[1:] @ demand[1:])
        return total

    def of_exact(self, work: _Batches) -> float:
        """Return the total cost if every step had a graph of its exact size and axis value."""
        total = 0.0
        for value in np.unique(work.values).tolist():
            objective, factor = self.objective(value)
            demand = _demand(work.sizes[work.values == value])
            total += factor * float(objective.exact(len(demand) - 1)[1:] @ demand[1:])
        return total

    def excess_pct(self, grid: Grid, work: _Batches) -> float:
        """Return the excess cost of a grid over exact graphs for all batches, in percent."""
        exact = self.of_exact(work)
        return 100.0 * (self.of_grid(grid, work) / exact - 1.0) if exact > 0 else 0.0


def _demand(sizes: IntArray, top: int = 0) -> FloatArray:
    return np.bincount(sizes, minlength=top + 1).astype(np.float64)


@attrs.frozen(kw_only=True, eq=False)
class _GridPlanner:
    """Data shared by the exact and the hedged plan of one ``plan_grid`` call."""

    axis: str
    fit: _Batches
    judged: _Batches
    judged_on: str
    fit_on: FitOn
    graphs: int
    max_size: int
    max_value: int
    costs: _Costs

    def plan(self, hedge: Hedge, future: GridPlan | None) -> GridPlan:
        """Return the plan for one hedge, with its quality on the judged steps."""
        product = self._product(hedge)
        sizes = _candidates(self.fit.sizes, self.max_size, _MAX_SIZES, product[0])
        values = _candidates(self.fit.values, self.max_value, _MAX_VALUES, product[1])
        grid, cost, is_monotone = self._best(self.fit, sizes, values, hedge)
        judged = self.judged.within(self.max_size, self.max_value)
        of_product = dict.fromkeys(product[1], product[0])
        padding = _Costs(None)
        gap = None
        if hedge is NO_HEDGE and is_monotone:
            gap = self._gap(sizes, values, cost)
        return GridPlan(
            axis=self.axis,
            grid=grid,
            num_graphs=sum(map(len, grid.values())),
            waste_pct=padding.excess_pct(grid, judged),
            excess_pct=self.costs.excess_pct(grid, judged),
            gap_pct=gap,
            product=GridProduct(*product, padding.excess_pct(of_product, judged)),
            future=future,
            max_size=self.max_size,
            max_value=self.max_value,
            fit_on=self.fit_on,
            judged_on=self.judged_on,
            num_steps=len(self.judged),
            num_steps_over=len(self.judged) - len(judged),
            objective=self.costs.name,
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> list[str]:
        if len(self.fit) >= 1000:
            return []
        short = (
            f"The trace is short: only {counted(len(self.fit), 'step')} within the limits could be "
            "used for planning, fewer than 1,000. Record a longer trace before you rely on the "
            "plan."
        )
        return [short]

    def _gap(self, sizes: IntArray, values: IntArray, cost: float) -> float:
        """Return an upper bound on the plan's excess over the optimum, in percent.

        The steps are rounded down to considered values and sizes. Rounding a plan for the original
        steps down in the same way gives a plan that serves the rounded steps at the same or a lower
        cost. The cost of the best plan for the rounded steps is therefore a lower bound.
        """
        rounded = attrs.evolve(
            self.fit,
            sizes=_rounded_down(self.fit.sizes, sizes),
            values=_rounded_down(self.fit.values, values),
        )
        _, bound, _ = self._best(rounded, sizes, values, NO_HEDGE)
        return 100.0 * max(0.0, cost / bound - 1.0)

    def _product(self, hedge: Hedge) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the best separately planned sizes and buckets."""
        apart = PaddingObjective()
        curves = []
        for found, top, most in (
            (self.fit.sizes, self.max_size, _MAX_SIZES),
            (self.fit.values, self.max_value, _MAX_VALUES),
        ):
            considered = _candidates(found, top, 8 * most, ())
            demand = hedge.apply(_demand(found, top))
            levels = min(self.graphs, len(considered))
            curves.append(size_curve(considered, apart.costs(considered, demand), levels))
        by_size, by_value = curves
        costs: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        for num_buckets in range(1, min(self.graphs, len(by_value)) + 1):
            num_sizes = min(self.graphs // num_buckets, len(by_size))
            one = by_size.sizes(num_sizes), by_value.sizes(num_buckets)
            costs[one] = self.costs.of_grid(dict.fromkeys(one[1], one[0]), self.fit)
        return min(costs, key=lambda one: costs[one])

    def _best(
        self, work: _Batches, sizes: IntArray, values: IntArray, hedge: Hedge
    ) -> tuple[Grid, float, bool]:
        """Return the best grid of considered values, its cost, and whether costs are monotone."""
        most = min(self.graphs, len(sizes) * len(values))
        at = np.searchsorted(values, work.values)
        top = int(sizes[-1])
        by_value = [_demand(work.sizes[at == index], top) for index in range(len(values))]
        # Entries [end, k] of three arrays describe the best plan for the first `end` values with k
        # graphs: its cost, the start of its last bucket, and the number of sizes of this bucket.
        least = np.full((len(values) + 1, most + 1), np.inf)
        least[0, 0] = 0.0
        begins, counts = np.zeros((2, len(values) + 1, most + 1), dtype=np.int64)
        curves: dict[tuple[int, int], SizeCurve] = {}
        is_monotone = True
        for end in range(1, len(values) + 1):
            objective, factor = self.costs.objective(int(values[end - 1]))
            is_monotone = is_monotone and objective.monotone
            demand = np.zeros(top + 1)
            for begin in range(end - 1, -1, -1):
                demand = demand + by_value[begin]
                if begin and not by_value[begin].any():
                    continue  # no steps: the bucket can start at the next value instead
                curve = size_curve(
                    sizes,
                    factor * objective.costs(sizes, hedge.apply(demand)),
                    min(most, len(sizes)),
                    monotone=objective.monotone,
                )
                curves[begin, end] = curve
                for count, cost in enumerate(curve.costs.tolist(), start=1):
                    sums = least[begin, : most + 1 - count] + cost
                    better = sums < least[end, count:]
                    least[end, count:][better] = sums[better]
                    begins[end, count:][better] = begin
                    counts[end, count:][better] = count
        left, end = int(least[-1].argmin()), len(values)
        cost = float(least[-1, left])
        grid: dict[int, tuple[int, ...]] = {}
        while end:
            begin, count = int(begins[end, left]), int(counts[end, left])
            grid[int(values[end - 1])] = curves[begin, end].sizes(count)
            end, left = begin, left - count
        return dict(sorted(grid.items())), cost, is_monotone


def _rounded_down(found: IntArray, considered: IntArray) -> IntArray:
    at = np.searchsorted(considered, found, side="right") - 1
    rounded: IntArray = np.where(at < 0, found, considered[np.maximum(at, 0)])
    return rounded


def _candidates(found: IntArray, top: int, most: int, also: Sequence[int]) -> IntArray:
    """Return the values to consider: ``top``, ``also`` and the found values, sorted.

    If more than ``most`` distinct values were found, quantiles replace the found values.
    """
    different = np.unique(found)
    if len(different) > most:
        # Choose half by frequency and half by value, because rare large values are expensive.
        shares = np.quantile(found, np.linspace(0, 1, most // 2), method="higher")
        lying = np.quantile(different, np.linspace(0, 1, most // 2), method="higher")
        different = np.concatenate([shares, lying, different[:1]])
    every: IntArray = np.unique(np.concatenate([different, [top], np.array(also, dtype=np.int64)]))
    return every.astype(np.int64)
