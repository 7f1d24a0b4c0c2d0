"""Budgets for the number and memory of graphs, and the order of eviction.

A budget in bytes holds at all times: a rehearsal on the device measures how much memory a graph
will take, and a capture that does not fit is not begun. Graphs of one pool share their memory. So
to free memory the whole pool is released, as a group, and graphs that are still needed are captured
again.

There may be two budgets in bytes: the runner's own, for the lane's pool and outputs, and that of a
``GraphMemory``, for all memory that runners share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from dispatchkit.backends.optional import features_of
from dispatchkit.errors import CaptureError
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.live_graphs import FOR_BUDGET, LiveGraphs
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import PoolMember
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.once import Once, warn_at_call
from dispatchkit.options import MemoryOptions

# Evictions per graph within the limit after which churn is warned about.
_CHURN = 4


class ChurnWarning(RuntimeWarning):
    """Graphs are captured and evicted again and again."""


def _least_recent(step: CapturedKey) -> float:
    return step.last_used


def _least_useful(step: CapturedKey) -> float:
    """Tokens served since the capture, per token of the graph's size."""
    return step.hits / step.key.num_tokens


_SCORES: dict[str, Callable[[CapturedKey], float]] = {
    "lru": _least_recent,
    "benefit": _least_useful,
}


@attrs.frozen
class _ExceededBudget:
    """A budget that would be exceeded.

    Attributes:
        need: Bytes that would be needed.
        limit: Bytes that are allowed.
        elsewhere: Needed bytes that evicting the pool would not free.
        is_shared: The budget is shared by several runners.
    """

    need: int
    limit: int
    elsewhere: int
    is_shared: bool


def _exceeded_budget(lane: Lane, limit: int | None, num_bytes: int) -> _ExceededBudget | None:
    """Return the budget that more bytes for a lane would exceed, or None.

    Args:
        lane: The lane.
        limit: Its runner's own limit.
        num_bytes: Additional bytes; 0 to check the current state.
    """
    if limit is not None and (need := lane.num_bytes() + num_bytes) > limit:
        return _ExceededBudget(need, limit, 0, is_shared=False)
    memory = lane.group.memory
    if memory is not None and memory.max_bytes is not None:
        used = memory.num_bytes(lane.backend.torch_device)
        if used + num_bytes > memory.max_bytes:
            group = lane.group.pool_bytes() + lane.group.shared_bytes()
            return _ExceededBudget(used + num_bytes, memory.max_bytes, used - group, is_shared=True)
    return None


class OverBudgetError(CaptureError):
    """A capture would exceed a memory budget; no memory was taken.

    Attributes:
        fits_alone: As far as known, it would fit if its pool had no other graphs.
    """

    def __init__(self, key: GraphKey, passed: _ExceededBudget, *, fits_alone: bool) -> None:
        whose = " of the shared GraphMemory" if passed.is_shared else ""
        super().__init__(
            f"{key} would increase the graphs' memory to {passed.need} bytes, above "
            f"max_bytes{whose} ({passed.limit}).",
            key=str(key),
            reason="over_budget",
        )
        self.fits_alone = fits_alone


class Admission:
    """Admits memory for the capture of one key, before it is taken.

    Args:
        key: The key being captured.
        limit: Most bytes of the lane's graphs in its runner's own budget.
        lane: The lane.
        forecast: Bytes the key's graph is expected to need, or None; for backends that cannot
            rehearse.
        evict_others: Function that evicts graphs outside the pool to free memory for a budget, and
            returns whether it evicted any.
    """

    def __init__(
        self,
        key: GraphKey,
        limit: int | None,
        lane: Lane,
        forecast: Callable[[GraphKey], int | None],
        evict_others: Callable[[_ExceededBudget], bool],
    ) -> None:
        self._key, self._limit, self._lane = key, limit, lane
        self._forecast, self._evict_others = forecast, evict_others

    def ask(self, num_bytes: int) -> None:
        """Return if this many more bytes may be taken.

        Raises:
            OverBudgetError: They exceed a budget.
        """
        while num_bytes and (passed := _exceeded_budget(self._lane, self._limit, num_bytes)):
            if not (passed.is_shared and self._evict_others(passed)):
                fits = passed.elsewhere + num_bytes <= passed.limit
                raise OverBudgetError(self._key, passed, fits_alone=fits)

    def ask_for_graph(
        self, trial: Callable[[], Any], generators: Iterable[Any], more: int = 0
    ) -> None:
        """Return if a graph may take memory in the pool and this many bytes elsewhere.

        Args:
            trial: Runs the operations of the graph.
            generators: Random generators it draws from.
            more: Bytes outside the pool.

        Raises:
            OverBudgetError: It exceeds a budget.
            CaptureError: It cannot be captured.
        """
        lane, memory = self._lane, self._lane.group.memory
        if memory is not None:
            more += memory.expected_bytes(lane.group)
        while True:
            growth = self._growth(trial, generators, lane.pool) + more
            passed = _exceeded_budget(lane, self._limit, growth)
            if passed is None:
                return
            if not self._evict_others(passed):
                alone = self._growth(trial, generators, lane.backend.new_pool()) + more
                fits = passed.elsewhere + alone <= passed.limit
                raise OverBudgetError(self._key, passed, fits_alone=fits)

    def _growth(self, trial: Callable[[], Any], generators: Iterable[Any], pool: Any) -> int:
        """Return an upper bound of the pool's growth, in bytes."""
        backend = self._lane.backend
        rehearsals = features_of(backend).rehearsals
        if rehearsals is not None:
            return rehearsals.rehearse(
                trial, stream=self._lane.stream, pool=pool, generators=generators
            )
        # Only an estimate; a graph that turns out larger is evicted after the capture.
        return max(0, (self._forecast(self._key) or 0) - backend.pool_bytes(pool))


class MemoryBudget:
    """Keep the graphs of a lane within their limits.

    Args:
        limits: The limits.
        lane: The lane.
        graphs: The graphs of the lane.
        counters: Counters of evictions and captures.
        forecast: Returns the bytes a key's graph is expected to need, or None.

    Attributes:
        limits: The limits in force.
        score: The graph with the lowest score is evicted first; None: the order named by the
            limits.
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
        self._note_limit()
        self.score: Callable[[CapturedKey], float] | None = None

    def update(self, limits: MemoryOptions) -> Mapping[PoolMember, list[GraphKey]]:
        """Change the limits, and evict graphs until they hold.

        Returns:
            The keys that lost their graph with the whole pool and may fit into a new one.
        """
        self.limits = limits
        self._note_limit()
        limit = limits.max_graphs
        while limit is not None and self._graphs.count() > limit:
            self._evict_one(self._graphs.by_key().values())
        most = limits.max_bytes
        while (passed := _exceeded_budget(self._lane, most, 0)) is not None:
            if not self._evict_others(passed):
                return self._lane.group.clear()
        return {}

    @property
    def refusal(self) -> str:
        """Why a key is skipped if no more graphs are allowed."""
        return f"over_budget: max_graphs is {self.limits.max_graphs}"

    def has_slot(self) -> bool:
        """Return whether one more graph is allowed."""
        limit = self.limits.max_graphs
        return limit is None or self._graphs.count() < limit

    def evict_until_fits(self) -> None:
        """Evict graphs until one more is allowed.

        Raises:
            CaptureError: No graph is allowed.
        """
        limit = self.limits.max_graphs
        if limit == 0:
            raise CaptureError("max_graphs is 0, so no graph may be kept.", reason="over_budget")
        while not self.has_slot():
            self._evict_one(self._graphs.by_key().values())

    def admission(self, key: GraphKey, *, evict: bool) -> Admission | None:
        """Return the memory admission for the capture of a key; None if there is no limit."""
        limit, memory = self.limits.max_bytes, self._lane.group.memory
        if limit is None and (memory is None or memory.max_bytes is None):
            return None
        evict_others = self._evict_others if evict else lambda _: False
        return Admission(key, limit, self._lane, self._forecast, evict_others)

    def drop_pool(self) -> None:
        """Start a new pool once all of its lanes' graphs are gone."""
        self._lane.drop_outputs()
        group = self._lane.group
        if not group.num_graphs():
            group.start_pool()

    def check(self, key: GraphKey, step: CapturedKey, *, evict: bool) -> None:
        """Release a graph that took more memory than forecast and exceeds a budget.

        Args:
            key: The captured key.
            step: The graph.
            evict: Idle pools of other runners may be evicted first.

        Raises:
            OverBudgetError: It exceeds a budget.
        """
        limit = self.limits.max_bytes
        passed = _exceeded_budget(self._lane, limit, 0)
        while evict and passed is not None and passed.is_shared and self._evict_idle():
            passed = _exceeded_budget(self._lane, limit, 0)
        if passed is None:
            return
        self._lane.synchronize()
        step.release()
        if _exceeded_budget(self._lane, limit, 0) is not None:
            self._lane.group.clear()
        raise OverBudgetError(key, passed, fits_alone=False)

    def warn_of_churn(self) -> None:
        """Warn once when most captured graphs are evicted again."""
        evictions, room = self._graphs.num_evicted_for_budget, self.limits.max_graphs or 1
        is_churn = evictions >= _CHURN * max(room, 4) and evictions > 0.5 * self._counters.captures
        if is_churn and self._once.first():
            warn_at_call(
                f"{evictions} of {self._counters.captures} captured graphs were evicted again, "
                "because the batches need more graphs than the budget allows. Raise max_graphs "
                "or max_bytes, use fewer sizes, or raise capture_after.",
                ChurnWarning,
            )

    def _note_limit(self) -> None:
        memory = self._lane.group.memory
        shared = None if memory is None else memory.max_bytes
        self._lane.group.is_limited = self.limits.max_bytes is not None or shared is not None

    def _evict_others(self, passed: _ExceededBudget) -> bool:
        """Evict an idle pool of others, or a graph whose memory is not shared."""
        if passed.is_shared and self._evict_idle():
            return True
        holding = [
            step
            for step in self._graphs.by_key().values()
            if step.own_bytes and not step.is_external
        ]
        if holding:
            self._evict_one(holding)
        return bool(holding)

    def _evict_idle(self) -> bool:
        """Evict the graphs of another pool that shares the budget; False if there is none."""
        group = self._lane.group
        return group.memory is not None and group.memory.evict_idle_group(group)

    def _evict_one(self, steps: Iterable[CapturedKey]) -> None:
        score = self.score or _SCORES[self.limits.eviction]
        step = min(steps, key=lambda one: (score(one), one.last_used), default=None)
        for key, one in self._graphs.by_key().items():
            if one is step:
                self._graphs.evict(key, FOR_BUDGET)
