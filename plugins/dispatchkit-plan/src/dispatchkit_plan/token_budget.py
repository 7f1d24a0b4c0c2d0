"""One graph at the token budget: does it pay?

A busy server fills its steps up to the scheduler's token budget, so among the steps too large
for any graph many have exactly that size. A graph there pads them by nothing. It may still
lose: it takes the place of another graph, a large step gains little from one, and an engine
that pads every step to the next graph would then pad all those in between. Padding alone
cannot weigh that against running eager; a cost model measured up to that size can.
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
    """What is known about a graph at the token budget.

    Attributes:
        size: The size weighed.
        share_pct: Steps of exactly that size, per cent of those above the largest graph.
        pays: The cost model says that a plan with it takes less time.
        saved_pct: Time that it saves, per cent of the whole trace's; None where not known.
        reason: One sentence for people.
    """

    size: int
    share_pct: float
    pays: bool
    saved_pct: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
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
    """Return whether one of the graphs is better spent on the token budget.

    Args:
        work: The steps planned on.
        max_size: Largest other size.
        wanted: The size to weigh, ``auto`` for the most frequent above max_size, None for
            none.
        objective: What the plan minimises.
        curve: The plans without it.
        num_graphs: Graphs in all; with the budget's, one fewer is left for the others. None
            where they are limited by something else.
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
        return verdict(
            False, None, f"The cost model was measured up to {last} tokens; beyond is a guess."
        )
    if num_graphs is None:
        return verdict(
            False, None, "It is weighed against another graph; give a number of graphs for that."
        )
    if num_graphs < 2:
        return verdict(False, None, "There is no second graph to spend on it.")
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
