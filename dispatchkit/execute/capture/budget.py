"""Budgets: how many graphs and bytes there may be, and which graph goes first.

A budget of bytes holds at every moment: before a graph takes memory it is told how much, by
a rehearsal on the device, and what does not fit is not begun. Graphs of one pool share their
memory, so that it is the pool that goes to make room, as a group, and whatever is still
wanted of it is captured anew.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from dispatchkit.backends.optional import features_of
from dispatchkit.errors import CaptureError
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.live_graphs import LiveGraphs
from dispatchkit.execute.lane import Lane
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.once import Once
from dispatchkit.options import MemoryOptions

# Evictions for each graph there is room for, after which churn is warned of.
_CHURN = 4


class ChurnWarning(RuntimeWarning):
    """Graphs are captured and evicted again and again."""


def _least_recent(step: CapturedKey) -> float:
    return step.last_used


def _least_useful(step: CapturedKey) -> float:
    """Tokens served since the capture, per token that the graph has to hold memory for."""
    return step.hits / step.key.num_tokens


_SCORES: dict[str, Callable[[CapturedKey], float]] = {
    "lru": _least_recent,
    "benefit": _least_useful,
}


class OverBudgetError(CaptureError):
    """A capture would take more memory than it may; nothing was taken.

    Attributes:
        fits_alone: As far as can be told it would fit if the lane had no other graphs.
    """

    def __init__(self, key: GraphKey, need: int, limit: int, *, fits_alone: bool) -> None:
        super().__init__(
            f"{key} would bring the graphs to {need} bytes, and max_bytes is {limit}.",
            key=str(key),
            reason="over_budget",
        )
        self.fits_alone = fits_alone


class Admission:
    """Lets the capture of one key take memory, each time before it is taken.

    Args:
        key: What is captured.
        limit: Most bytes of the lane's graphs.
        lane: Whose memory.
        forecast: Bytes the key's graph is expected to need, None if not known; for backends
            that cannot rehearse.
        give_way: Evicts a graph that alone holds memory of the pool; False if there is none.
    """

    def __init__(
        self,
        key: GraphKey,
        limit: int,
        lane: Lane,
        forecast: Callable[[GraphKey], int | None],
        give_way: Callable[[], bool],
    ) -> None:
        self._key, self._limit, self._lane = key, limit, lane
        self._forecast, self._give_way = forecast, give_way

    def ask(self, num_bytes: int) -> None:
        """Return if so many bytes more may be taken.

        Raises:
            OverBudgetError: They may not.
        """
        if num_bytes and (need := self._lane.num_bytes() + num_bytes) > self._limit:
            raise OverBudgetError(self._key, need, self._limit, fits_alone=num_bytes <= self._limit)

    def ask_for_graph(
        self, trial: Callable[[], Any], generators: Iterable[Any], more: int = 0
    ) -> None:
        """Return if a graph may take memory of the pool, and so many bytes more elsewhere.

        Args:
            trial: Does what the graph is to do.
            generators: Random generators it draws from.
            more: Bytes outside the pool.

        Raises:
            OverBudgetError: It may not.
            CaptureError: It could not be captured either.
        """
        lane, limit = self._lane, self._limit
        while True:
            need = lane.num_bytes() + self._growth(trial, generators, lane.pool) + more
            if need <= limit:
                return
            if not self._give_way():
                alone = self._growth(trial, generators, lane.backend.new_pool()) + more
                raise OverBudgetError(self._key, need, limit, fits_alone=alone <= limit)

    def _growth(self, trial: Callable[[], Any], generators: Iterable[Any], pool: Any) -> int:
        """Return by how many bytes a pool grows at most."""
        backend = self._lane.backend
        rehearsals = features_of(backend).rehearsals
        if rehearsals is not None:
            return rehearsals.rehearse(
                trial, stream=self._lane.stream, pool=pool, generators=generators
            )
        # No more than a guess; a graph that turns out larger is evicted after the capture.
        return max(0, (self._forecast(self._key) or 0) - backend.pool_bytes(pool))


class MemoryBudget:
    """Keep the graphs of a lane within their limits.

    Args:
        limits: What holds at every moment.
        lane: Whose memory.
        graphs: The graphs of the lane.
        counters: What evictions and captures are counted in.
        forecast: Returns the bytes a key's graph is expected to need, None if not known.

    Attributes:
        limits: Those in force.
        score: The graph of the lowest score is evicted first; None: the order that the limits
            name.
    """

    def __init__(
        self,
        limits: MemoryOptions,
        lane: Lane,
        graphs: LiveGraphs,
        counters: StepCounters,
        forecast: Callable[[GraphKey], int | None],
    ) -> None:
        self._lane, self._graphs, self._counters = lane, graphs, counters
        self._forecast = forecast
        self._once = Once()
        self.limits: MemoryOptions = limits
        self.score: Callable[[CapturedKey], float] | None = None

    def update(self, limits: MemoryOptions) -> list[GraphKey]:
        """Put other limits in force, and evict graphs until they hold.

        Returns:
            The keys that lost their graph with the whole pool, and may find room in a new one.
        """
        self.limits = limits
        limit = limits.max_graphs
        while limit is not None and self._graphs.count() > limit:
            self._evict_one(self._graphs.by_key().values())
        most = limits.max_bytes
        while most is not None and self._lane.num_bytes() > most:
            if not self._give_way():
                return self.clear_pool()
        return []

    @property
    def refusal(self) -> str:
        """Why a key is skipped that there is no slot for."""
        return f"over_budget: max_graphs is {self.limits.max_graphs}"

    def has_slot(self) -> bool:
        """Return whether one more graph may live."""
        limit = self.limits.max_graphs
        return limit is None or self._graphs.count() < limit

    def evict_until_fits(self) -> None:
        """Evict until one more graph may live.

        Raises:
            CaptureError: None may.
        """
        limit = self.limits.max_graphs
        if limit == 0:
            raise CaptureError("max_graphs is 0: no graph may live.", reason="over_budget")
        while not self.has_slot():
            self._evict_one(self._graphs.by_key().values())

    def admission(self, key: GraphKey, *, evict: bool) -> Admission | None:
        """Return what the capture of a key asks for memory; None where there is no limit."""
        limit = self.limits.max_bytes
        if limit is None:
            return None
        give_way = self._give_way if evict else lambda: False
        return Admission(key, limit, self._lane, self._forecast, give_way)

    def clear_pool(self) -> list[GraphKey]:
        """Evict all graphs of the lane's pool, and start a new pool.

        Graphs of one pool share memory: evicting some of them frees next to nothing.

        Returns:
            The keys that lost their graph.
        """
        lost = [key for key, step in self._graphs.by_key().items() if not step.is_foreign]
        for key in lost:
            self._graphs.evict(key, "budget")
        self.drop_pool()
        return lost

    def drop_pool(self) -> None:
        """Start a new pool once the graphs are gone, and see that the memory they had is."""
        lane, old = self._lane, self._lane.pool
        lane.drop_pool()
        limit = self.limits.max_bytes
        # The new pool has nothing yet: what is counted now is memory of before.
        if limit is not None and (lane.backend.pool_bytes(old) or lane.num_bytes() > limit):
            gc.collect()  # something in a ring of references still holds outputs of it

    def check(self, key: GraphKey, step: CapturedKey) -> None:
        """Release a graph that took more than was forecast, and more than it may.

        Raises:
            OverBudgetError: It did.
        """
        limit = self.limits.max_bytes
        if limit is None or (taken := self._lane.num_bytes()) <= limit:
            return
        self._lane.synchronize()
        step.release()
        if self._lane.num_bytes() > limit:
            self.clear_pool()
        raise OverBudgetError(key, taken, limit, fits_alone=False)

    def warn_of_churn(self) -> None:
        """Warn once when most captured graphs are evicted again."""
        evictions, room = self._counters.evictions, self.limits.max_graphs or 1
        is_churn = evictions >= _CHURN * max(room, 4) and evictions > 0.5 * self._counters.captures
        if is_churn and self._once.first():
            warnings.warn(
                f"{evictions} of {self._counters.captures} captured graphs were evicted again: "
                "the batches need more graphs than the budget holds. Raise max_graphs or "
                "max_bytes, use fewer sizes, or raise capture_after.",
                ChurnWarning,
                stacklevel=2,
            )

    def _give_way(self) -> bool:
        """Evict the graph that goes first of those whose going leaves memory to others."""
        holding = [
            step
            for step in self._graphs.by_key().values()
            if step.own_bytes and not step.is_foreign
        ]
        if holding:
            self._evict_one(holding)
        return bool(holding)

    def _evict_one(self, steps: Iterable[CapturedKey]) -> None:
        score = self.score or _SCORES[self.limits.eviction]
        step = min(steps, key=lambda one: (score(one), one.last_used), default=None)
        for key, one in self._graphs.by_key().items():
            if one is step:
                self._graphs.evict(key, "budget")
