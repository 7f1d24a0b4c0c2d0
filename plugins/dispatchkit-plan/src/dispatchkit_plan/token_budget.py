"""Decide whether one graph at the token budget saves time.

A busy server fills its steps up to the scheduler's token budget, so many of the steps too large
for any graph have exactly that size. A graph of that size serves them without padding. It may
still cost time: it replaces another graph, a large step gains little, and an engine that pads
every step to the next graph would pad all those in between. Comparing that with eager takes a
cost model measured up to that size; padding alone is not enough.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import numpy as np

from dispatchkit_plan.objective import Objective, TimeObjective
from dispatchkit_plan.optimal import SizeCurve
from dispatchkit_plan.workload import Workload

__all__ = ["TokenBudget", "weigh_token_budget"]


@attrs.frozen
class TokenBudget:
    """Result for a graph at the token budget.

    Attributes:
        size: The size of the graph.
        share_pct: Steps of exactly that size, in percent of those above the largest graph.
        pays: Whether a plan with it takes less time by the cost model.
        saved_pct: Time that it saves, in percent of the whole trace's; None if not known.
        reason: The reason, as a sentence.
    """

    size: int
    share_pct: float
    pays: bool
    saved_pct: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON."""
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
    """Return whether one of the graphs is better used at the token budget.

    Args:
        work: The steps planned on.
        max_size: Largest other size.
        wanted: The size to consider, ``auto`` for the most frequent above max_size, None for
            no size.
        objective: The objective of the plan.
        curve: The plans without it.
        num_graphs: Graphs in total, of which this graph would take one. None if the budget is
            not a number of graphs.
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
            "Only a cost model says whether a graph of it pays. Next: run `dispatchkit "
            "calibrate`, then plan with `--cost-model costs.json`.",
        )
    model = objective.model
    if not model.covers(size):
        last = min(model.eager_us.last, model.graph_us.last)
        return verdict(False, None, f"The cost model was only measured up to {last} tokens.")
    if num_graphs is None:
        return verdict(
            False, None, "It would replace another graph; give a number of graphs to compare."
        )
    if num_graphs < 2:
        return verdict(False, None, "It would be the only graph; plan at least two.")
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
        return verdict(True, saved, f"It saves {saved:.2f}% of the trace's time.")
    return verdict(
        False, saved, f"Without it the trace takes {-saved:.2f}% less time, at equal graphs."
    )
