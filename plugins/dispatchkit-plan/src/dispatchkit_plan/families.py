"""Plan graphs of several kinds from one budget: (size, uniform, LoRA count) together.

A graph for uniform decode does not serve a mixed batch, and a graph captured for two adapters
does not serve three. So the steps are divided into families, each with its own sizes, which
share one number of graphs. Each family's curve of least cost over number of sizes is exact
(``optimal``), and so is their sum at each total: the best split of k graphs over two families
is the minimum over all splits.

LoRA counts are covered in the same way: counts 1 to 8 may share graphs captured for 8, or 1
to 3 may have their own. Every grouping of neighbouring counts is compared. Without an extra
cost per adapter, one group for all counts is always best, and is the result.
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
        uniform: Uniform decode (True), mixed (False), or not distinguished (None).
        loras: Adapters that its graphs are captured for; None if not distinguished.
        demand: Steps per size 0..max_size.
    """

    uniform: bool | None
    loras: int | None
    demand: FloatArray

    def to_json(self) -> dict[str, object]:
        """Return the fields that identify the family."""
        return {"uniform": self.uniform, "num_active_loras": self.loras}


def split_families(
    work: Workload, max_size: int, *, by_uniform: bool, by_loras: bool
) -> list[Family]:
    """Return the steps by kind of graph, uniform or mixed, each by ascending LoRA count.

    Both classes are returned even if one has no steps: such steps may still occur.

    Raises:
        ConfigError: Uniform decode is requested but not recorded.
    """
    if by_uniform and work.uniform is None:
        raise ConfigError(
            "keyed",
            "uniform",
            "off for a workload without the column uniform_decode",
            "Record that column.",
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
    """One set of sizes in the joint plan."""

    uniform: bool | None
    loras: int | None
    curve: SizeCurve
    costs: FloatArray  # at index k - 1


@attrs.frozen(eq=False)
class JointCurve:
    """The best joint plan for each total number of graphs.

    Attributes:
        costs: Least cost with k graphs, at index k; inf if k graphs are too few.
        choices: For each k with a finite cost, (group, its number of sizes).
    """

    costs: FloatArray
    choices: tuple[tuple[tuple[_Group, int], ...] | None, ...]

    @property
    def fewest(self) -> int:
        """Smallest number of graphs that covers every family."""
        return int(np.flatnonzero(np.isfinite(self.costs))[0])

    def plan(self, num_graphs: int) -> list[tuple[bool | None, int | None, tuple[int, ...]]]:
        """Return (uniform, loras, sizes) of each group of the best plan with ``num_graphs``.

        Raises:
            ConfigError: ``num_graphs`` cannot cover every family.
        """
        chosen = self.choices[num_graphs] if 0 < num_graphs < len(self.choices) else None
        if chosen is None:
            raise ConfigError(
                "graphs",
                num_graphs,
                f"{self.fewest} to {len(self.choices) - 1} when planned by kind of step",
                "Each kind of step needs at least its largest size.",
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
        families: Steps by kind.
        candidates: Sizes that may be captured; the last is in every group.
        objective: What is minimised.
        hedge: The hedge, applied to each group's steps.
        max_graphs: Maximum number of graphs in total.
        lora_overhead: Extra cost of a graph for each adapter it is captured for, as a share:
            at 0.02 a step in a graph for 8 adapters costs 16% more.
        separate_base: Never run steps without adapters in graphs captured with adapters.
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
        # ends[e]: best plans for the first e counts, each range of counts as one group.
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
    """Return the excess over exact sizes of all families under their plans, in percent."""
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
    """Return the sizes that serve a family: those of the smallest sufficient LoRA count."""
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
    # A kind without steps to plan on falls back to its largest group.
    same = [key for key in plans if key[0] == family.uniform] or list(plans)
    return plans[max(same, key=lambda key: key[1] or 0)]
