"""Objectives of a plan: padded tokens, or time according to a cost model.

Both objectives define two costs of a batch of n tokens. The first is its cost with a given set of
captured sizes. The second is its cost with a graph of exactly n tokens, or eager if the cost model
predicts that eager is faster. The excess of the first cost over the second, in percent, measures
the quality of the set. If the objective is padded tokens, this excess is the padding in percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from dispatchkit.errors import ConfigError

from dispatchkit_plan.costs import CostModel
from dispatchkit_plan.optimal import (
    FloatArray,
    IntArray,
    close_upper,
    padding_costs,
    served_costs,
)

__all__ = ["Objective", "PaddingObjective", "TimeObjective", "padded_sizes", "waste_pct"]

#: Allowed values of ``TimeObjective.dispatch``.
DISPATCHES = ("always", "best")


def padded_sizes(sizes: Sequence[int], max_size: int) -> IntArray:
    """Return the captured size that serves each batch of 0 to ``max_size`` tokens.

    Args:
        sizes: Captured sizes, ascending; the last one is at least ``max_size``.
        max_size: Number of tokens of the largest batch.

    Returns:
        Array of shape (max_size + 1,).
    """
    ladder = np.asarray(sizes, dtype=np.int64)
    padded = ladder[np.searchsorted(ladder, np.arange(max_size + 1))]
    padded[0] = 0  # an empty batch needs no graph
    return padded


class PaddingObjective:
    """Objective that minimizes the number of tokens, including padding."""

    monotone = True
    name = "padding"

    def costs(self, candidates: IntArray, demand: FloatArray) -> FloatArray:
        """Return the cost matrix for ``optimal.size_curve``."""
        return padding_costs(candidates, demand)

    def at_sizes(self, sizes: Sequence[int], max_size: int) -> FloatArray:
        """Return the cost of a batch of each size, 0 to ``max_size``, with graphs of ``sizes``."""
        return padded_sizes(sizes, max_size).astype(np.float64)

    def exact(self, max_size: int) -> FloatArray:
        """Return the cost of a batch of each size with a graph of exactly that size."""
        return np.arange(max_size + 1, dtype=np.float64)

    def excess_pct(self, sizes: Sequence[int], demand: FloatArray) -> float:
        """Return the excess cost over exact sizes, in percent; 0 without demand."""
        return _excess(self, sizes, demand)


@attrs.frozen
class TimeObjective:
    """Objective that minimizes the time according to a cost model.

    Attributes:
        model: Cost model that provides the times.
        dispatch: ``always`` to replay whenever a graph is large enough, or ``best`` to run eager if
            that is faster according to the model.
    """

    model: CostModel
    dispatch: Literal["always", "best"] = attrs.field(default="always")

    def __attrs_post_init__(self) -> None:
        if self.dispatch not in DISPATCHES:
            raise ConfigError("dispatch", self.dispatch, "'always' or 'best'")

    @property
    def name(self) -> str:
        """Name of the objective in messages."""
        best = ", eager if faster" if self.dispatch == "best" else ""
        return f"time under {self.model.name}{best}"

    @property
    def monotone(self) -> bool:
        """Whether no graph is faster than a smaller graph, up to the last measured size."""
        values = [value for _, value in self.model.graph_us.points]
        return values == sorted(values)

    def costs(self, candidates: IntArray, demand: FloatArray) -> FloatArray:
        """Return the cost matrix for ``optimal.size_curve``."""
        graph = np.array([self.model.graph_us(int(size)) for size in candidates])
        if self.dispatch == "always":
            return _constant_costs(candidates, demand, graph)
        eager = np.array(self.model.eager_us.table(len(demand) - 1))
        return served_costs(candidates, demand, np.minimum(graph[:, None], eager[None, :]))

    def at_sizes(self, sizes: Sequence[int], max_size: int) -> FloatArray:
        """Return the cost of a batch of each size, 0 to ``max_size``, with graphs of ``sizes``."""
        by_size = {int(size): self.model.graph_us(int(size)) for size in sizes}
        padded = padded_sizes(sizes, max_size)
        cost = np.array([by_size.get(int(size), 0.0) for size in padded])
        return self._choose(cost, max_size)

    def exact(self, max_size: int) -> FloatArray:
        """Return the cost of a batch of each size with a graph of that size, or eager if faster."""
        graph = np.array(self.model.graph_us.table(max_size))
        eager = np.array(self.model.eager_us.table(max_size))
        exact: FloatArray = np.minimum(graph, eager)
        exact[0] = 0.0
        return exact

    def excess_pct(self, sizes: Sequence[int], demand: FloatArray) -> float:
        """Return the excess cost over exact sizes, in percent; 0 without demand."""
        return _excess(self, sizes, demand)

    def _choose(self, graph: FloatArray, max_size: int) -> FloatArray:
        if self.dispatch == "always":
            return graph
        cost: FloatArray = np.minimum(graph, np.array(self.model.eager_us.table(max_size)))
        return cost


Objective = PaddingObjective | TimeObjective


def _constant_costs(candidates: IntArray, demand: FloatArray, price: FloatArray) -> FloatArray:
    """Return the cost matrix if the cost of a batch depends only on the size of its graph."""
    below = np.concatenate([[0.0], np.cumsum(demand[1:])])[candidates]
    before = np.concatenate([[0.0], below[:-1]])
    cost: FloatArray = price[:, None] * (below[:, None] - before[None, :])
    close_upper(cost)
    return cost


def _excess(objective: Objective, sizes: Sequence[int], demand: FloatArray) -> float:
    top = len(demand) - 1
    floor = float(objective.exact(top)[1:] @ demand[1:])
    if floor <= 0:
        return 0.0
    return 100.0 * (float(objective.at_sizes(sizes, top)[1:] @ demand[1:]) - floor) / floor


def waste_pct(sizes: Sequence[int], demand: FloatArray) -> float:
    """Return the padding as a percentage of the real tokens.

    Args:
        sizes: Captured sizes, ascending; the last one is at least N.
        demand: Number of batches of each size, 0 to N. Shape (N + 1,).
    """
    return _excess(PaddingObjective(), sizes, demand)
