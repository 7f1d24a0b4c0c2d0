"""Budgets: how many graphs and bytes there may be, and which graph goes first.

A budget of bytes holds at every moment: before a graph takes memory it is told how much, by
a rehearsal on the device, and what does not fit is not begun. Graphs of one pool share their
memory, so that it is the pool that goes to make room, as a group, and whatever is still
wanted of it is captured anew.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dispatchkit.backends.optional import features_of
from dispatchkit.errors import CaptureError
from dispatchkit.execute.capture.captured import CapturedStep
from dispatchkit.execute.lane import Lane
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.options import MemoryOptions

# Evictions for each graph there is room for, after which churn is warned of.
_CHURN = 4


class ChurnWarning(RuntimeWarning):
    """Graphs are captured and given up again and again."""


def _least_recent(step: CapturedStep) -> float:
    return step.last_used


def _least_useful(step: CapturedStep) -> float:
    """Tokens served since the capture, per token that the graph has to hold memory for."""
    return step.hits / step.key.num_tokens


_SCORES: dict[str, Callable[[CapturedStep], float]] = {
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


class Room:
    """Keeps the graphs of a lane within their budget.

    Args:
        budget: The limits.
        lane: Whose memory.
        counters: What evictions and captures are counted in.
        forecast: Returns the bytes a key's graph is expected to need, None if not known.
        live: Returns the captured steps by key.
        evict: Gives up the graph of a key, with a reason.
    """

    def __init__(
        self,
        budget: MemoryOptions,
        lane: Lane,
        counters: StepCounters,
        forecast: Callable[[GraphKey], int | None],
        live: Callable[[], Mapping[GraphKey, CapturedStep]],
        evict: Callable[[GraphKey, str], None],
    ) -> None:
        self._budget, self._lane, self._counters = budget, lane, counters
        self._forecast, self._live, self._evict = forecast, live, evict
        self._is_churn_told = False
        #: Evicts the lowest first; None: as the limits name it.
        self.score: Callable[[CapturedStep], float] | None = None

    @property
    def budget(self) -> MemoryOptions:
        """The limits in force."""
        return self._budget

    def change(self, budget: MemoryOptions) -> list[GraphKey]:
        """Put other limits in force, and give up graphs until they hold.

        Returns:
            The keys that lost their graph with the whole pool, and may find room in a new one.
        """
        self._budget = budget
        limit = budget.max_graphs
        while limit is not None and len({id(step) for step in self._live().values()}) > limit:
            self._evict_one(self._live().values())
        most = budget.max_bytes
        while most is not None and self._lane.num_bytes() > most:
            if not self._give_way():
                return self.clear_pool()
        return []

    @property
    def refusal(self) -> str:
        """What a key is told that there is no room for."""
        return f"over_budget: max_graphs is {self._budget.max_graphs}"

    def for_one_more(self) -> bool:
        """Return whether one more graph may live; one that serves several keys counts once."""
        limit = self._budget.max_graphs
        return limit is None or len({id(step) for step in self._live().values()}) < limit

    def make(self) -> None:
        """Evict until one more graph may live."""
        limit = self._budget.max_graphs
        if limit == 0:
            raise CaptureError("max_graphs is 0: no graph may live.", reason="over_budget")
        while not self.for_one_more():
            self._evict_one(self._live().values())

    def admission(self, key: GraphKey, *, evict: bool) -> Admission | None:
        """Return what the capture of a key asks for memory; None where there is no limit."""
        limit = self._budget.max_bytes
        if limit is None:
            return None
        give_way = self._give_way if evict else lambda: False
        return Admission(key, limit, self._lane, self._forecast, give_way)

    def clear_pool(self) -> list[GraphKey]:
        """Give up all graphs of the lane's pool, and the pool with them.

        Graphs of one pool share memory: to give up some of them frees next to nothing.

        Returns:
            The keys that lost their graph.
        """
        lost = [key for key, step in self._live().items() if not step.is_foreign]
        for key in lost:
            self._evict(key, "budget")
        self.drop_pool()
        return lost

    def drop_pool(self) -> None:
        """Start anew once the graphs are gone, and see that the memory they had is."""
        lane, old = self._lane, self._lane.pool
        lane.drop_pool()
        limit = self._budget.max_bytes
        # The new pool has nothing yet: what is counted now is memory of before.
        if limit is not None and (lane.backend.pool_bytes(old) or lane.num_bytes() > limit):
            gc.collect()  # something in a ring of references still holds outputs of it

    def check(self, key: GraphKey, step: CapturedStep) -> None:
        """Give up a graph that took more than was told beforehand, and more than it may."""
        limit = self._budget.max_bytes
        if limit is None or (taken := self._lane.num_bytes()) <= limit:
            return
        self._lane.settle()
        step.release()
        if self._lane.num_bytes() > limit:
            self.clear_pool()
        raise OverBudgetError(key, taken, limit, fits_alone=False)

    def warn_of_churn(self) -> None:
        """Warn once when most captured graphs are given up again."""
        evictions, room = self._counters.evictions, self._budget.max_graphs or 1
        if self._is_churn_told or evictions < _CHURN * max(room, 4):
            return
        if evictions > 0.5 * self._counters.captures:
            self._is_churn_told = True
            warnings.warn(
                f"{evictions} of {self._counters.captures} captured graphs were given up again: "
                "the batches need more graphs than the budget holds. Raise max_graphs or "
                "max_bytes, use fewer sizes, or raise capture_after.",
                ChurnWarning,
                stacklevel=2,
            )

    def _give_way(self) -> bool:
        """Evict the graph that goes first of those whose going leaves memory to others."""
        holding = [step for step in self._live().values() if step.own_bytes and not step.is_foreign]
        if holding:
            self._evict_one(holding)
        return bool(holding)

    def _evict_one(self, steps: Iterable[CapturedStep]) -> None:
        score = self.score or _SCORES[self._budget.eviction]
        step = min(steps, key=lambda one: (score(one), one.last_used), default=None)
        for key, one in self._live().items():
            if one is step:
                self._evict(key, "budget")
