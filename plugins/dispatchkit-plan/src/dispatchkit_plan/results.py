"""Results of the planner: sizes, how good they are, and their assumptions."""

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
    """The sizes of one kind of step.

    Attributes:
        uniform: Uniform decode (True), mixed (False), not distinguished (None).
        num_active_loras: Adapters that the graphs are captured for; None: not distinguished.
        sizes: Sizes to capture, ascending.
    """

    uniform: bool | None
    num_active_loras: int | None
    sizes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the family as JSON holds it."""
        return {
            "uniform": self.uniform,
            "num_active_loras": self.num_active_loras,
            "sizes": list(self.sizes),
        }


@attrs.frozen
class RivalResult:
    """Result of a known list of sizes on the judged steps.

    Attributes:
        num_graphs: Number of graphs of the list.
        waste_pct: Its padding in percent of the real tokens.
        matched_by: Fewest planned graphs from which every larger plan of the curve is at
            least as good; None if there is no such number.
    """

    num_graphs: int
    waste_pct: float
    matched_by: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON holds it."""
        return {
            "graphs": self.num_graphs,
            "waste_pct": _shown(self.waste_pct),
            "matched_by": self.matched_by,
        }


@attrs.frozen(kw_only=True)
class Plan:
    """Capture sizes, how good they are, and their assumptions.

    Attributes:
        sizes: Sizes to capture, ascending; those of all families together when keyed. The
            largest size is always one of them.
        families: The sizes by kind of step; one entry when not keyed.
        num_graphs: Graphs to capture, over all families.
        max_size: Largest size asked for; larger steps run eager.
        waste_pct: Padding in percent of real tokens, over the judged steps up to max_size.
        excess_pct: The objective above its value with a graph at every exact size, in
            percent, over the same steps; the same as waste_pct unless there is a cost model.
        curve: (graphs, waste_pct) for every number of graphs, planned and judged alike.
        rivals: Known lists on the same steps.
        fit_on: The steps planned on: ``all`` or ``first-half``.
        judged_on: The steps judged on, in words.
        hedge: The mixture planned for, and why.
        future: With ``fit_on="all"``, the hedged sizes: for traffic similar to the trace
            instead of exactly the trace. None if ``sizes`` are hedged.
        num_steps: Steps judged, of any size.
        num_steps_over: Judged steps above max_size.
        token_budget: Whether one more graph at the token budget saves time; None if no step is
            above max_size or the plan is keyed.
        objective: What was minimised, in words.
        warnings: What to know before relying on the plan.
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
        """The plan to capture for future traffic: the hedged one."""
        return self.future or self

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON holds it."""
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
