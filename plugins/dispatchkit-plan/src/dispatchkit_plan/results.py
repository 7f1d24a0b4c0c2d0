"""Results of the planner: capture sizes, their quality, and how they were found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit_plan.hedge import HedgeChoice
from dispatchkit_plan.token_budget import TokenBudget
from dispatchkit_plan.workload import FitOn

__all__ = ["Plan", "PlannedFamily", "RivalResult"]


@attrs.frozen
class PlannedFamily:
    """Sizes for one kind of step.

    Attributes:
        uniform: True for uniform decode, False for mixed, None if not distinguished.
        num_active_loras: Number of adapters that the graphs are captured for; None if not
            distinguished.
        sizes: Sizes to capture, ascending.
    """

    uniform: bool | None
    num_active_loras: int | None
    sizes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the family as JSON values."""
        return {
            "uniform": self.uniform,
            "num_active_loras": self.num_active_loras,
            "sizes": list(self.sizes),
        }


@attrs.frozen
class RivalResult:
    """Padding of a well-known list of sizes, on the steps that a plan is evaluated on.

    Attributes:
        num_graphs: Number of graphs that the list requires.
        waste_pct: Padding as a percentage of the real tokens.
        matched_by: Smallest k such that no plan in ``Plan.curve`` with k or more graphs has more
            padding than the list. None if the plan with the most graphs has more padding than the
            list.
    """

    num_graphs: int
    waste_pct: float
    matched_by: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "graphs": self.num_graphs,
            "waste_pct": _shown(self.waste_pct),
            "matched_by": self.matched_by,
        }


@attrs.frozen(kw_only=True)
class Plan:
    """Capture sizes, their quality, and how they were found.

    The judged steps are the steps that the plan is evaluated on.

    Attributes:
        sizes: Sizes to capture for all families, ascending. ``max_size`` is always included.
        families: Sizes for each kind of step; one entry unless planned by kind.
        num_graphs: Number of graphs of all families.
        max_size: Largest size that was considered, apart from the token budget. Larger steps run
            eager, unless the plan has a graph at the token budget.
        waste_pct: Padding on the judged steps up to ``max_size``, as a percentage of the real
            tokens.
        excess_pct: Percentage by which the objective on the judged steps up to ``max_size`` exceeds
            the value that it would have if every step had a graph of its exact size. Equal to
            ``waste_pct`` without a cost model.
        curve: (graphs, waste_pct) pairs of plans with different numbers of graphs. These plans are
            made and judged like this plan, but without a graph at the token budget.
        rivals: Results of well-known lists on the judged steps, by name.
        fit_on: Steps used for planning, ``all`` or ``first-half``.
        judged_on: Description of the judged steps.
        hedge: Mixture of histograms for which the sizes were optimized, and why this mixture was
            chosen.
        future: Hedged plan for traffic similar to the trace. None unless the plan was made with
            ``fit_on="all"`` and ``hedge="auto"``.
        num_steps: Number of judged steps of any size.
        num_steps_over: Number of judged steps above ``max_size``.
        token_budget: Verdict on a graph at the token budget. None if no such graph was considered,
            if no step is above ``max_size``, or if sizes are planned by kind.
        objective: Description of the minimized quantity.
        warnings: Caveats about the plan.
    """

    sizes: tuple[int, ...]
    families: tuple[PlannedFamily, ...]
    num_graphs: int
    max_size: int
    waste_pct: float
    excess_pct: float
    curve: tuple[tuple[int, float], ...]
    rivals: Mapping[str, RivalResult]
    fit_on: FitOn
    judged_on: str
    hedge: HedgeChoice
    future: Plan | None
    num_steps: int
    num_steps_over: int
    token_budget: TokenBudget | None
    objective: str
    warnings: tuple[str, ...]

    @property
    def robust(self) -> Plan:
        """The plan to use for future traffic: ``future`` if present, else this plan."""
        return self.future or self

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        data: dict[str, Any] = {
            "sizes": list(self.sizes),
            "graphs": self.num_graphs,
            "max_size": self.max_size,
            "waste_pct": _shown(self.waste_pct),
            "curve": [[graphs, _shown(waste)] for graphs, waste in self.curve],
            "rivals": {name: rival.to_json() for name, rival in self.rivals.items()},
            "objective": self.objective,
            "excess_pct": _shown(self.excess_pct),
            "fit_on": self.fit_on,
            "judged_on": self.judged_on,
            "steps": self.num_steps,
            "steps_over_max_size": self.num_steps_over,
            "hedge": {
                **self.hedge.hedge.to_json(),
                "validated": self.hedge.validated,
                "reason": self.hedge.reason,
            },
            "warnings": list(self.warnings),
        }
        if len(self.families) > 1 or self.families[0].uniform is not None:
            data["families"] = [family.to_json() for family in self.families]
        if self.token_budget is not None:
            data["token_budget"] = self.token_budget.to_json()
        if self.future is not None:
            data["future"] = {
                "sizes": list(self.future.sizes),
                "waste_pct": _shown(self.future.waste_pct),
                "hedge": self.future.to_json()["hedge"],
            }
            if "families" in data:
                data["future"]["families"] = [f.to_json() for f in self.future.families]
        return data


def _shown(value: float) -> float:
    return round(value, 4)
