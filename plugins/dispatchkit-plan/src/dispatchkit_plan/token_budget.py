"""Decide whether one graph at the token budget saves time.

A busy server fills its steps up to the scheduler's token budget. Many steps that are too large for
all graphs therefore have exactly that size, and a graph of that size serves them without padding.
The graph may still cost time: it takes the place of another graph, and a replay of a large step is
hardly faster than running the step eager. An engine that pads every step to the next larger graph
would also pad all steps between the largest other graph and the token budget. Comparing the graph
with eager requires a cost model that covers its size; counting padding is not enough.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import numpy as np

from dispatchkit.errors import counted

from dispatchkit_plan.objective import Objective, TimeObjective
from dispatchkit_plan.optimal import SizeCurve
from dispatchkit_plan.workload import Workload

__all__ = ["TokenBudget", "weigh_token_budget"]


@attrs.frozen
class TokenBudget:
    """Verdict on a graph at the token budget, the scheduler's maximum number of tokens per step.

    Attributes:
        size: Size of the graph, in tokens.
        share_pct: Steps of exactly this size, as a percentage of the steps above the largest other
            graph.
        pays: Whether the graph saves time according to the cost model; False if unknown.
        saved_pct: Time that the graph saves, as a percentage of the time of the trace; negative if
            the graph costs time, None if unknown.
        reason: Sentence that explains the verdict.
    """

    size: int
    share_pct: float
    pays: bool
    saved_pct: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        saved = None if self.saved_pct is None else round(self.saved_pct, 4)
        return {
            "size": self.size,
            "share_pct": round(self.share_pct, 2),
            "pays": self.pays,
            "saved_pct": saved,
            "reason": self.reason,
        }


def weigh_token_budget(
    work: Workload,
    max_size: int,
    wanted: int | Literal["auto"] | None,
    objective: Objective,
    curve: SizeCurve,
    num_graphs: int | None,
) -> TokenBudget | None:
    """Return a verdict on moving one of the graphs to the token budget.

    Args:
        work: Steps used for planning.
        max_size: Largest size of the other graphs.
        wanted: Size to consider; ``auto`` for the most frequent size above ``max_size``; None to
            consider no size.
        objective: Objective of the plan.
        curve: Plans of sizes up to ``max_size``.
        num_graphs: Total number of graphs, including the graph at the token budget. None if memory
            or capture time limits the plan instead.

    Returns:
        The verdict, or None if no size is considered or no step is above ``max_size``.
    """
    over = work.chosen(work.num_tokens > max_size)
    if wanted is None or not len(over.num_tokens):
        return None
    sizes, where = np.unique(over.num_tokens, return_inverse=True)
    counts = np.bincount(where, weights=over.counts)
    size = int(sizes[counts.argmax()]) if wanted == "auto" else wanted
    share = 100.0 * float(counts[sizes == size].sum()) / float(counts.sum())

    def verdict(pays: bool, saved: float | None, reason: str) -> TokenBudget:
        return TokenBudget(size, share, pays, saved, reason)

    if not isinstance(objective, TimeObjective):
        return verdict(
            False,
            None,
            "Whether a graph of this size pays off depends on time, not padding. Run `dispatchkit "
            "calibrate`, then plan with `--cost-model costs.json`.",
        )
    model = objective.model
    if not model.covers(size):
        last = min(model.eager_us.last, model.graph_us.last)
        reason = (
            f"The cost model was measured only up to {counted(last, 'token')}. Calibrate with "
            f"sizes up to {size}."
        )
        return verdict(False, None, reason)
    if num_graphs is None:
        return verdict(
            False,
            None,
            "A graph of this size would replace another graph. To compare plans with and without "
            "it, set the number of graphs instead of a limit on memory or capture time.",
        )
    if num_graphs < 2:
        return verdict(
            False,
            None,
            "A graph of this size would be the only graph. Plan with at least 2 graphs.",
        )
    eager = np.array([model.eager_us(int(n)) for n in sizes])
    graph = np.full(len(sizes), model.graph_us(size))
    if objective.dispatch == "best":
        graph = np.minimum(graph, eager)
    with_it = float(counts @ np.where(sizes <= size, graph, eager))
    without = float(counts @ eager)
    demand = work.demand(max_size)
    small = objective.at_sizes

    def below(graphs: int) -> float:
        return float(small(curve.sizes(graphs), max_size)[1:] @ demand[1:])

    before, after = without + below(num_graphs), with_it + below(num_graphs - 1)
    saved = 100.0 * (before - after) / before
    if after < before:
        return verdict(True, saved, f"A graph of this size saves {saved:.2f}% of the time.")
    return verdict(
        False, saved, f"Moving one graph to this size would increase the time by {abs(saved):.2f}%."
    )
