"""Plan graphs for several kinds of steps within one budget.

A graph for uniform decode does not serve mixed batches, and a graph captured for two adapters does
not serve batches with three. The steps are therefore divided into families by kind and LoRA count.
Each family has its own sizes, and all families share one budget of graphs. For each family,
``optimal`` computes the exact minimum cost for every number of sizes. The joint cost is also exact:
to divide k graphs between two families, every split is compared.

LoRA counts can share graphs: counts 1 to 8 can all use graphs captured for 8, or counts 1 to 3 can
use graphs captured for 3. Every grouping of adjacent counts is compared. Without an extra cost per
adapter, one group for all counts is always best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from dispatchkit.errors import ConfigError

from dispatchkit_plan.hedge import Hedge
from dispatchkit_plan.objective import Objective
from dispatchkit_plan.optimal import FloatArray, IntArray, SizeCurve, size_curve
from dispatchkit_plan.workload import Workload

__all__ = ["Family", "JointCurve", "joint_curve", "served_excess_pct", "split_families"]


@attrs.frozen(eq=False)
class Family:
    """Steps that the same graphs may serve.

    Attributes:
        uniform: True for uniform decode, False for mixed, None if not distinguished.
        loras: Number of active adapters of the steps; None if not distinguished.
        demand: Number of steps of each size, 0 to max_size. Shape (max_size + 1,).
    """

    uniform: bool | None
    loras: int | None
    demand: FloatArray

    def to_json(self) -> dict[str, object]:
        """Return the kind and the LoRA count of the family as JSON values."""
        return {"uniform": self.uniform, "num_active_loras": self.loras}


def split_families(
    work: Workload, max_size: int, *, by_uniform: bool, by_loras: bool
) -> list[Family]:
    """Return the families of a workload: mixed, then uniform, each by ascending LoRA count.

    Both kinds are returned even if one kind has no steps yet, because later traffic may have some.

    Raises:
        ConfigError: Planning by kind of step is requested, but the kinds are not recorded.
    """
    if by_uniform and work.uniform is None:
        raise ConfigError(
            "keyed",
            "uniform",
            "False for a trace without the column uniform_decode",
            "Record this column, or omit keyed.",
            message="Planning by kind of step (keyed) requires a trace with the column "
            "uniform_decode.",
        )
    classes: Sequence[bool | None] = (False, True) if by_uniform else (None,)
    families = []
    for uniform in classes:
        part = work
        if uniform is not None and work.uniform is not None:
            part = work.chosen(work.uniform == int(uniform))
        if not by_loras:
            families.append(Family(uniform, None, part.demand(max_size)))
            continue
        for count in sorted({int(loras) for loras in part.num_active_loras} or {0}):
            one = part.chosen(part.num_active_loras == count)
            families.append(Family(uniform, count, one.demand(max_size)))
    return families


@attrs.frozen(eq=False)
class _Group:
    """Adjacent LoRA counts of one kind that share graphs."""

    uniform: bool | None
    loras: int | None
    curve: SizeCurve
    costs: FloatArray  # at index k - 1, the minimum cost with k sizes


@attrs.frozen(eq=False)
class JointCurve:
    """The best joint plan for each total number of graphs.

    Attributes:
        costs: At index k, the minimum cost with k graphs; inf if no plan has k graphs.
        choices: (group, number of sizes) pairs for each k; None if the cost is infinite.
    """

    costs: FloatArray
    choices: tuple[tuple[tuple[_Group, int], ...] | None, ...]

    @property
    def fewest(self) -> int:
        """Minimum number of graphs needed to cover every family."""
        return int(np.flatnonzero(np.isfinite(self.costs))[0])

    @property
    def most(self) -> int:
        """Maximum number of graphs that a plan can use."""
        return int(np.flatnonzero(np.isfinite(self.costs))[-1])

    def plan(self, num_graphs: int) -> list[tuple[bool | None, int | None, tuple[int, ...]]]:
        """Return (uniform, loras, sizes) for each group of the best plan.

        Raises:
            ConfigError: ``num_graphs`` graphs cannot cover every family.
        """
        chosen = self.choices[num_graphs] if 0 < num_graphs < len(self.choices) else None
        if chosen is None:
            raise ConfigError(
                "graphs",
                num_graphs,
                f"at least {self.fewest}, one for each group of steps that is planned separately",
                "Each group needs a graph for its largest size.",
            )
        return [(g.uniform, g.loras, g.curve.sizes(count)) for g, count in chosen]


def joint_curve(
    families: Sequence[Family],
    candidates: IntArray,
    objective: Objective,
    hedge: Hedge,
    max_graphs: int,
    *,
    lora_overhead: float = 0.0,
    separate_base: bool = True,
) -> JointCurve:
    """Return the best joint plan for each number of graphs up to a maximum.

    Args:
        families: Families to plan graphs for.
        candidates: Sizes that may be captured; the last one is captured for every group.
        objective: Objective to minimize.
        hedge: Hedge applied to the steps of each group.
        max_graphs: Maximum total number of graphs.
        lora_overhead: Extra cost of a step per adapter of its graph, as a fraction of the cost of
            the step. With 0.02, a step in a graph for 8 adapters costs 16% more.
        separate_base: Whether steps without adapters run only in graphs captured without adapters.
    """

    def group(uniform: bool | None, loras: int | None, members: Sequence[Family]) -> _Group:
        demand = hedge.apply(np.sum([member.demand for member in members], axis=0))
        levels = min(max_graphs, len(candidates))
        curve = size_curve(
            candidates, objective.costs(candidates, demand), levels, monotone=objective.monotone
        )
        return _Group(uniform, loras, curve, curve.costs * (1 + lora_overhead * (loras or 0)))

    total = JointCurve(np.full(max_graphs + 1, np.inf), (None,) * (max_graphs + 1))
    total.costs[0] = 0.0
    total = attrs.evolve(total, choices=((), *total.choices[1:]))
    by_class: dict[bool | None, list[Family]] = {}
    for family in families:
        by_class.setdefault(family.uniform, []).append(family)
    for uniform, members in by_class.items():
        members.sort(key=lambda member: member.loras or 0)
        base = [m for m in members if m.loras == 0] if separate_base else []
        rest = [m for m in members if m not in base]
        for alone in base:
            total = _with_group(total, group(uniform, 0, [alone]))
        if not rest:
            continue
        # ends[e]: the best plans for the first e LoRA counts, over all ways to group them.
        ends: list[JointCurve] = [total]
        for end in range(1, len(rest) + 1):
            options = []
            for start in range(end) if lora_overhead else ([0] if end == len(rest) else []):
                one = group(uniform, rest[end - 1].loras, rest[start:end])
                options.append(_with_group(ends[start], one))
            ends.append(_best_of(options) if options else total)
        total = ends[-1]
    return total


def _with_group(curve: JointCurve, group: _Group) -> JointCurve:
    size = len(curve.costs)
    costs = np.full(size, np.inf)
    choices: list[tuple[tuple[_Group, int], ...] | None] = [None] * size
    for used in range(size):
        before = curve.choices[used]
        if before is None:
            continue
        room = min(size - 1 - used, len(group.costs))
        sums = curve.costs[used] + group.costs[:room]
        better = np.flatnonzero(sums < costs[used + 1 : used + 1 + room])
        for extra in better.tolist():
            costs[used + 1 + extra] = sums[extra]
            choices[used + 1 + extra] = (*before, (group, extra + 1))
    return JointCurve(costs, tuple(choices))


def _best_of(options: Sequence[JointCurve]) -> JointCurve:
    stacked = np.stack([option.costs for option in options])
    pick = stacked.argmin(axis=0)
    return JointCurve(
        stacked.min(axis=0),
        tuple(options[int(which)].choices[k] for k, which in enumerate(pick)),
    )


def served_excess_pct(
    plans: Mapping[tuple[bool | None, int | None], Sequence[int]],
    families: Sequence[Family],
    objective: Objective,
) -> float:
    """Return the excess cost of the plans over graphs of exact sizes, in percent."""
    cost = floor = 0.0
    for family in families:
        top = len(family.demand) - 1
        exact = objective.exact(top)[1:]
        sizes = _plan_for(plans, family)
        cost += float(objective.at_sizes(sizes, top)[1:] @ family.demand[1:])
        floor += float(exact @ family.demand[1:])
    return 100.0 * (cost - floor) / floor if floor > 0 else 0.0


def _plan_for(
    plans: Mapping[tuple[bool | None, int | None], Sequence[int]], family: Family
) -> Sequence[int]:
    """Return the sizes for a family, from the plan with the smallest sufficient LoRA count."""
    exact = plans.get((family.uniform, family.loras))
    if exact is not None:
        return exact
    larger = sorted(
        (loras, key)
        for key in plans
        if key[0] == family.uniform and (loras := key[1]) is not None
        if family.loras is not None and loras >= family.loras
    )
    if larger:
        return plans[larger[0][1]]
    # If no plan has a sufficient LoRA count, use the plan with the largest count.
    same = [key for key in plans if key[0] == family.uniform] or list(plans)
    return plans[max(same, key=lambda key: key[1] or 0)]
