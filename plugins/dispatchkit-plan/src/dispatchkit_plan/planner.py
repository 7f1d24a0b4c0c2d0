"""Plan the capture sizes for a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs
import numpy as np

from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.keys import check_count, check_flag, check_instance, whole_number
from dispatchkit.observe import StepTrace

from dispatchkit_plan.budgets import Budget, make_budget
from dispatchkit_plan.costs import CostModel, check_cost_model
from dispatchkit_plan.families import (
    Family,
    joint_curve,
    served_excess_pct,
    split_families,
)
from dispatchkit_plan.grid import ignored_axes
from dispatchkit_plan.hedge import FALLBACK_HEDGE, NO_HEDGE, Hedge, HedgeChoice, choose_hedge
from dispatchkit_plan.objective import DISPATCHES, Objective, PaddingObjective, TimeObjective
from dispatchkit_plan.optimal import FloatArray, IntArray, best_sizes_within, size_curve
from dispatchkit_plan.results import Plan, PlannedFamily, RivalResult
from dispatchkit_plan.rivals import rival_sizes
from dispatchkit_plan.token_budget import TokenBudget, weigh_token_budget
from dispatchkit_plan.traffic import SizeHistogram
from dispatchkit_plan.workload import FitOn, Workload, as_workload

__all__ = ["Plan", "PlannedFamily", "RivalResult", "plan_sizes"]

MAX_SIZE_LIMIT = 1 << 20
MIN_STEPS = 1000
"""The planner warns if fewer steps than this can be used for planning."""

_SAME_STEPS = (
    "The plan was judged on the steps it was planned on, and `sizes` are optimized only for these "
    "steps. For later traffic, use the hedged sizes, which are in `plan.robust` in Python, under "
    "`For later traffic` in the output of the command, and in `future` in its JSON."
)
_MAX_CANDIDATES = 1024
_DENSE_UP_TO = 256


def plan_sizes(
    data: StepTrace | SizeHistogram | Workload,
    *,
    graphs: int | None = None,
    memory_bytes: float | None = None,
    capture_time_s: float | None = None,
    max_size: int = 512,
    fit_on: FitOn = "all",
    keyed: bool | Literal["uniform", "uniform+loras"] = False,
    hedge: Hedge | Literal["auto", "none"] = "auto",
    cost_model: CostModel | None = None,
    dispatch: Literal["always", "best"] = "always",
    align: int = 1,
    token_budget: int | Literal["auto"] | None = "auto",
    bytes_per_graph: float | None = None,
    capture_s_per_graph: float | None = None,
    lora_overhead: float = 0.0,
    separate_base: bool = True,
    max_uniform_size: int | None = None,
    curve_to: int = 64,
) -> Plan:
    """Return the best capture sizes for a trace within one budget.

    A hedge optimizes the sizes for traffic that resembles the trace, rather than for the trace
    alone. With ``fit_on="all"`` and ``hedge="auto"``, the plan has no hedge, and its attribute
    ``future`` is a second plan, with a hedge. Otherwise, there is one plan, with the hedge that
    ``hedge`` selects. With ``fit_on="first-half"``, the plan is judged on the second half of the
    trace.

    Args:
        data: Traffic to plan for: a step trace, a histogram or a ``Workload``.
        graphs: Number of graphs to plan. Pass exactly one of ``graphs``, ``memory_bytes`` and
            ``capture_time_s``.
        memory_bytes: Maximum total memory of the graphs. Requires ``bytes_per_graph``, or a cost
            model with ``graph_bytes``.
        capture_time_s: Maximum total capture time. Requires ``capture_s_per_graph``, or a cost
            model with ``capture_us``.
        max_size: Largest size, always captured and counted as one of the graphs. Larger steps run
            eager, unless the plan has a graph for ``token_budget``.
        fit_on: Steps to plan on: ``all``, or the ``first-half`` of the trace.
        keyed: Whether to plan uniform decode and mixed steps separately (``True`` or
            ``"uniform"``), or also by LoRA count (``"uniform+loras"``), within one budget.
        hedge: ``auto`` to choose a hedge by validation on the planning steps, ``none`` to plan
            without a hedge, or a ``Hedge`` to use.
        cost_model: Cost model, to minimize the predicted time; None to minimize padding.
        dispatch: With a cost model, ``always`` if steps always replay a graph that fits, ``best``
            if they run eager when that is faster.
        align: Number of tokens that divides every size, including ``max_size``.
        token_budget: Size above ``max_size`` for which one graph is considered; ``auto`` for the
            most frequent of these sizes, None to consider none. The graph replaces another graph if
            ``graphs`` is given and the cost model predicts that this saves time. Ignored if
            ``keyed`` is set.
        bytes_per_graph: Memory of each graph, for ``memory_bytes``.
        capture_s_per_graph: Time of each capture, for ``capture_time_s``.
        lora_overhead: Extra cost of a step per adapter of its graph, as a fraction of the cost of
            the step. At 0.02, a step in a graph for 8 adapters costs 16% more.
        separate_base: Whether steps without adapters run only in graphs captured without adapters.
        max_uniform_size: Largest uniform batch in tokens (vLLM: max_num_seqs x query_len); by
            default, ``max_size``. Used only if ``keyed`` is set, to count the graphs that each
            well-known list of sizes needs.
        curve_to: Largest number of graphs in ``Plan.curve``, unless the plan itself has more.

    Raises:
        ConfigError: A setting is out of range, no budget or several budgets are given, or the
            largest graph alone exceeds the budget.
        TraceError: No step used for planning has at most ``max_size`` tokens.

    Sizes are in tokens, memory in bytes, times in seconds.
    """
    max_size = check_count(max_size, "max_size")
    if max_size > MAX_SIZE_LIMIT:
        raise ConfigError("max_size", max_size, f"at most {MAX_SIZE_LIMIT}")
    if cost_model is not None:
        check_cost_model(cost_model, "cost_model")
    if dispatch not in DISPATCHES:
        raise ConfigError("dispatch", dispatch, "'always' or 'best'")
    if not isinstance(keyed, bool) and keyed not in ("uniform", "uniform+loras"):
        raise ConfigError("keyed", keyed, "True, False, 'uniform' or 'uniform+loras'")
    lora_overhead = _check_overhead(lora_overhead)
    separate_base = check_flag(separate_base, "separate_base")
    if max_uniform_size is not None:
        max_uniform_size = check_count(max_uniform_size, "max_uniform_size")
    work = as_workload(data)
    fit, judged, judged_on = work.split(fit_on)
    objective: Objective = (
        PaddingObjective() if cost_model is None else TimeObjective(cost_model, dispatch)
    )
    demand = fit.demand(max_size)
    if not demand[1:].any():
        raise TraceError(
            work.source,
            None,
            f"every step used for planning exceeds max_size ({counted(max_size, 'token')}); the "
            f"smallest has {int(fit.num_tokens.min()):,}. Raise max_size.",
        )
    warnings = _warnings(fit, demand, max_size)
    candidates = _candidates(max_size, align, fit, warnings)
    if token_budget != "auto" and token_budget is not None:
        token_budget = _check_token_budget(token_budget, max_size)
    planner = _Planner(
        fit=fit,
        judged=judged,
        judged_on=judged_on,
        fit_on=fit_on,
        max_size=max_size,
        objective=objective,
        candidates=candidates,
        budget=make_budget(
            graphs,
            memory_bytes,
            capture_time_s,
            bytes_per_graph,
            capture_s_per_graph,
            cost_model,
            candidates,
        ),
        families=split_families(
            fit, max_size, by_uniform=bool(keyed), by_loras=keyed == "uniform+loras"
        ),
        judged_families=split_families(
            judged, max_size, by_uniform=bool(keyed), by_loras=keyed == "uniform+loras"
        ),
        keyed=bool(keyed),
        token_budget=token_budget,
        lora_overhead=lora_overhead,
        separate_base=separate_base,
        max_uniform_size=max_uniform_size or max_size,
        curve_to=check_count(curve_to, "curve_to"),
    )
    choice = _hedge_choice(hedge, fit, candidates, max_size, objective)
    if not choice.validated and hedge == "auto":
        warnings.append(choice.reason)
    if fit_on == "all" and hedge == "auto":
        exact = HedgeChoice(
            NO_HEDGE,
            validated=False,
            reason="The plan is optimized for the planning steps alone, without a hedge.",
        )
        future = planner.plan(choice, warnings, future=None)
        warnings = [
            *warnings,
            _SAME_STEPS,
        ]
        return planner.plan(exact, warnings, future=future)
    return planner.plan(choice, warnings, future=None)


def _check_overhead(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ConfigError("lora_overhead", value, "a non-negative number, such as 0.05")
    return float(value)


def _check_token_budget(value: Any, max_size: int) -> int:
    number = whole_number(value)
    if number is None or number <= max_size:
        allowed = f"'auto', None, or a whole number greater than max_size ({max_size})"
        raise ConfigError("token_budget", value, allowed)
    return number


def _hedge_choice(
    hedge: Hedge | Literal["auto", "none"],
    fit: Workload,
    candidates: IntArray,
    max_size: int,
    objective: Objective,
) -> HedgeChoice:
    if isinstance(hedge, Hedge):
        return HedgeChoice(hedge, validated=False, reason="The given hedge is used.")
    if hedge == "none":
        return HedgeChoice(NO_HEDGE, validated=False, reason="Hedging is turned off.")
    if hedge != "auto":
        check_instance(hedge, Hedge, "hedge", allowed="'auto', 'none' or a Hedge")
    if not fit.ordered:
        return HedgeChoice(
            FALLBACK_HEDGE,
            validated=False,
            reason=(
                "The default hedge is used. A hedge cannot be validated, because the order of the "
                "steps is unknown."
            ),
        )
    return choose_hedge(fit.num_tokens[fit.num_tokens <= max_size], candidates, objective)


def _warnings(fit: Workload, demand: FloatArray, max_size: int) -> list[str]:
    warnings = []
    usable, total = int(demand[1:].sum()), fit.num_steps
    if fit.axes:
        warnings.append(ignored_axes(fit.axes))
    if usable < MIN_STEPS:
        warnings.append(
            f"Only {counted(usable, 'step')} of at most "
            f"{counted(max_size, 'token')} could be used for planning, fewer than {MIN_STEPS:,}. "
            "Record a longer trace before you rely on the plan."
        )
    largest = int(fit.num_tokens.max())
    if largest * 2 <= max_size:
        warnings.append(
            f"No step has more than {counted(largest, 'token')}, but size {max_size} is always "
            f"captured. Set max_size={largest} (--max-size {largest}) to capture {largest} "
            "instead, the largest size that occurs; larger batches then run eager."
        )
    if usable < total / 2:
        warnings.append(
            f"More than half of the steps used for planning ({total - usable:,} of {total:,}) "
            f"exceed max_size ({counted(max_size, 'token')}). A larger max_size may save more time "
            "than a better choice of sizes."
        )
    return warnings


def _candidates(max_size: int, align: int, fit: Workload, warnings: list[str]) -> IntArray:
    align = check_count(align, "align")
    if max_size % align:
        near = [max_size - max_size % align, max_size - max_size % align + align]
        raise ConfigError(
            "align",
            align,
            f"a divisor of max_size ({max_size}), which is always captured",
            f"With this alignment, set max_size to {' or '.join(str(n) for n in near if n)}.",
        )
    every = np.arange(align, max_size + 1, align, dtype=np.int64)
    if len(every) <= _MAX_CANDIDATES:
        return every
    sizes, counts = np.unique(fit.num_tokens[fit.num_tokens <= max_size], return_counts=True)
    common = sizes[np.argsort(-counts, kind="stable")][: _MAX_CANDIDATES // 4]
    grid = np.linspace(0, len(every) - 1, _MAX_CANDIDATES // 2).astype(np.int64)
    kept = np.unique(
        np.concatenate(
            [grid, np.arange(min(_DENSE_UP_TO, len(every))), np.searchsorted(every, common)]
        )
    )
    warnings.append(
        f"Only {len(kept)} of {len(every)} possible sizes are considered: the smallest, the most "
        "frequent, and evenly spaced sizes."
    )
    considered: IntArray = every[kept]
    return considered


@attrs.frozen(kw_only=True, eq=False)
class _Planner:
    """Data shared by the plans of one ``plan_sizes`` call; the plans differ only in their hedge."""

    fit: Workload
    judged: Workload
    judged_on: str
    fit_on: FitOn
    max_size: int
    objective: Objective
    candidates: IntArray
    budget: Budget
    families: Sequence[Family]
    judged_families: Sequence[Family]
    keyed: bool
    token_budget: int | Literal["auto"] | None
    lora_overhead: float
    separate_base: bool
    max_uniform_size: int
    curve_to: int

    def plan(self, choice: HedgeChoice, warnings: Sequence[str], *, future: Plan | None) -> Plan:
        """Return the plan for one hedge, with its quality on the judged steps."""
        warnings = list(warnings)
        tokens: TokenBudget | None = None
        if self.keyed:
            families, curve = self._keyed(choice.hedge)
        else:
            families, curve, tokens = self._single(choice.hedge)
        num_graphs = sum(len(family.sizes) for family in families)
        distinct = int((self.fit.demand(self.max_size)[1:] > 0).sum())
        if num_graphs > distinct * len(families):
            warnings.append(
                f"The plan has {counted(num_graphs, 'graph')}, but the steps used for planning "
                f"have only {counted(distinct, 'distinct size')}. The additional graphs serve "
                "sizes that have not occurred yet."
            )
        over = self.judged.num_tokens > self.max_size
        padding = PaddingObjective()
        return Plan(
            sizes=tuple(sorted({size for family in families for size in family.sizes})),
            families=tuple(families),
            num_graphs=num_graphs,
            max_size=self.max_size,
            waste_pct=self._judge(families, padding),
            excess_pct=self._judge(families, self.objective),
            curve=tuple(curve),
            rivals=self._rivals(curve),
            fit_on=self.fit_on,
            judged_on=self.judged_on,
            hedge=choice,
            future=future,
            num_steps=self.judged.num_steps,
            num_steps_over=int(self.judged.counts[over].sum()),
            token_budget=tokens,
            objective=self.objective.name,
            warnings=tuple(warnings),
        )

    def _judge(self, families: Sequence[PlannedFamily], objective: Objective) -> float:
        plans = {
            (family.uniform, family.num_active_loras): [
                size for size in family.sizes if size <= self.max_size
            ]
            for family in families
        }
        return served_excess_pct(plans, self.judged_families, objective)

    def _single(
        self, hedge: Hedge
    ) -> tuple[list[PlannedFamily], list[tuple[int, float]], TokenBudget | None]:
        demand = hedge.apply(self.fit.demand(self.max_size))
        cost = self.objective.costs(self.candidates, demand)
        graphs = self.budget.graphs
        levels = min(len(self.candidates), max(self.curve_to, graphs or 1))
        curve = size_curve(self.candidates, cost, levels, monotone=self.objective.monotone)
        if graphs is None and self.budget.price is not None:
            sizes, _ = best_sizes_within(
                self.candidates,
                cost,
                self.budget.price,
                self.budget.limit,
                setting=self.budget.setting,
            )
        else:
            sizes = curve.sizes(graphs or 1)
        tokens = weigh_token_budget(
            self.fit, self.max_size, self.token_budget, self.objective, curve, graphs
        )
        if tokens is not None and tokens.pays:
            sizes = (*curve.sizes(len(sizes) - 1), tokens.size)
        judged = self.judged.demand(self.max_size)
        padding = PaddingObjective()
        wastes = [(k, padding.excess_pct(curve.sizes(k), judged)) for k in range(1, levels + 1)]
        return [PlannedFamily(None, None, sizes)], wastes, tokens

    def _keyed(self, hedge: Hedge) -> tuple[list[PlannedFamily], list[tuple[int, float]]]:
        graphs = self.budget.graphs
        most = max(self.curve_to, graphs or 1, len(self.families))
        joint = joint_curve(
            self.families,
            self.candidates,
            self.objective,
            hedge,
            most,
            lora_overhead=self.lora_overhead,
            separate_base=self.separate_base,
        )
        curve = []
        within = None
        padding = PaddingObjective()
        for k in range(joint.fewest, joint.most + 1):
            families = [PlannedFamily(*group) for group in joint.plan(k)]
            curve.append((k, self._judge(families, padding)))
            if graphs is None and self._price(families) <= self.budget.limit:
                within = families  # keep the largest plan that fits: more graphs are never worse
        if graphs is not None:
            return [PlannedFamily(*group) for group in joint.plan(graphs)], curve
        if within is None:
            least = self._price([PlannedFamily(*group) for group in joint.plan(joint.fewest)])
            raise ConfigError(
                self.budget.setting,
                self.budget.limit,
                f"at least {least:.15g}, the amount needed by {counted(joint.fewest, 'graph')}, "
                "one for each group of steps that is planned separately",
                f"Raise {self.budget.setting}, or omit keyed.",
            )
        return within, curve

    def _price(self, families: Sequence[PlannedFamily]) -> float:
        if self.budget.price is None:
            return 0.0
        price = dict(zip(self.candidates.tolist(), self.budget.price.tolist(), strict=True))
        return float(sum(price[size] for family in families for size in family.sizes))

    def _rivals(self, curve: Sequence[tuple[int, float]]) -> dict[str, RivalResult]:
        demand = self.judged.demand(self.max_size)
        results = {}
        for name, sizes in rival_sizes(self.max_size).items():
            waste = PaddingObjective().excess_pct(sizes, demand)
            count = len(sizes)
            if self.keyed:
                count += sum(size <= self.max_uniform_size for size in sizes)
            results[name] = RivalResult(count, waste, _matched_by(curve, waste))
        return results


def _matched_by(curve: Sequence[tuple[int, float]], waste: float) -> int | None:
    """Return the smallest k such that all plans of k or more graphs have at most this padding.

    The result is None if the largest plan has more padding.
    """
    matched = None
    for graphs, planned in reversed(curve):
        if planned > waste + 1e-9:
            break
        matched = graphs
    return matched
