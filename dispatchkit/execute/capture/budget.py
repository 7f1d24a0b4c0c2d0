"""Budgets for the number and memory of graphs, and the order of eviction.

If there is a budget in bytes, a rehearsal before each capture runs the step on the device and
measures how much memory its graph needs. A graph that would exceed a budget even after evictions is
not captured. For backends without rehearsals, a forecast is used instead, and a graph that then
exceeds a budget is released after its capture.

Because the graphs of a pool share memory, the whole pool is released to free memory, and graphs
that are still needed are captured again.

Two budgets in bytes may apply. The budget of a runner limits the pool and outputs of each of its
lanes. The budget of a ``GraphMemory`` limits the pools, outputs, static inputs, workspaces and
driver memory of all its runners on one device.
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

# Minimum number of evictions per allowed graph for a ChurnWarning.
_CHURN = 4


class ChurnWarning(RuntimeWarning):
    """Graphs are repeatedly captured and evicted."""


def _least_recent(step: CapturedKey) -> float:
    return step.last_used


def _least_useful(step: CapturedKey) -> float:
    """Return the number of launches since the capture, divided by the graph's size in tokens."""
    return step.hits / step.key.num_tokens


_SCORES: dict[str, Callable[[CapturedKey], float]] = {
    "lru": _least_recent,
    "benefit": _least_useful,
}


@attrs.frozen
class _ExceededBudget:
    """A budget that would be exceeded.

    Attributes:
        need: Required memory in bytes.
        limit: Allowed memory in bytes.
        elsewhere: Bytes in use that releasing the lane's pool would not free.
        is_shared: Whether several runners share the budget.
    """

    need: int
    limit: int
    elsewhere: int
    is_shared: bool


def _exceeded_budget(lane: Lane, limit: int | None, num_bytes: int) -> _ExceededBudget | None:
    """Return the budget that an allocation for a lane would exceed, or None.

    Args:
        lane: Lane that needs the memory.
        limit: Limit of the lane's runner in bytes, or None.
        num_bytes: Size of the allocation in bytes; 0 checks the memory in use.
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
    """A graph would exceed a memory budget, and was not kept.

    Attributes:
        fits_alone: Whether the graph would fit if its pool had no other graphs.
    """

    def __init__(self, key: GraphKey, passed: _ExceededBudget, *, fits_alone: bool) -> None:
        whose = " of the shared GraphMemory" if passed.is_shared else ""
        super().__init__(
            f"Capturing {key} would increase the memory of graphs to {passed.need} bytes, but "
            f"max_bytes{whose} is {passed.limit}. Increase max_bytes, or capture fewer sizes.",
            key=str(key),
            reason="over_budget",
        )
        self.fits_alone = fits_alone


class Admission:
    """A check of the memory budgets, made before a capture allocates memory.

    Args:
        key: Key to capture.
        limit: Limit of the lane's runner in bytes, or None.
        lane: Lane of the capture.
        forecast: Function that returns the expected memory of a key's graph in bytes, or None if
            unknown. It is used if the backend has no rehearsals.
        evict_others: Function that evicts an idle pool, or a graph that holds memory of its own. It
            returns whether it evicted anything.
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

    def ensure_fits(self, num_bytes: int) -> None:
        """Check that an allocation fits, evicting other graphs if a shared budget requires it.

        Raises:
            OverBudgetError: The allocation would exceed a budget.
        """
        while num_bytes and (passed := _exceeded_budget(self._lane, self._limit, num_bytes)):
            if not (passed.is_shared and self._evict_others(passed)):
                fits = passed.elsewhere + num_bytes <= passed.limit
                raise OverBudgetError(self._key, passed, fits_alone=fits)

    def ensure_graph_fits(
        self, trial: Callable[[], Any], generators: Iterable[Any], more: int = 0
    ) -> None:
        """Check that a graph fits, evicting other graphs if necessary.

        Args:
            trial: Function that runs the operations of the graph.
            generators: Random generators that the operations draw from.
            more: Bytes that the capture needs outside the pool.

        Raises:
            OverBudgetError: The graph would exceed a budget.
            CaptureError: The operations cannot be captured.
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
        """Return the measured or forecast number of bytes that a capture would add to a pool."""
        backend = self._lane.backend
        rehearsals = features_of(backend).rehearsals
        if rehearsals is not None:
            return rehearsals.rehearse(
                trial, stream=self._lane.stream, pool=pool, generators=generators
            )
        # If the forecast is too low, ``MemoryBudget.check`` releases the graph after its capture.
        return max(0, (self._forecast(self._key) or 0) - backend.pool_bytes(pool))


class MemoryBudget:
    """The limits of a lane's graphs, and the evictions that enforce them.

    Args:
        limits: Limits of the runner.
        lane: Lane that the graphs are captured on.
        graphs: Live graphs of the lane.
        counters: Counters of the lane, which include the number of captures.
        forecast: Function that returns the expected memory of a key's graph in bytes, or None if
            unknown.

    Attributes:
        limits: Current limits of the runner.
        score: Function that returns the score of a graph; the graph with the lowest score is
            evicted first. If None, ``limits.eviction`` determines the score.
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
        """Change the limits, and evict graphs until the remaining graphs fit.

        Returns:
            If the pool was released, the keys that lost their graph, for each member of the pool;
            otherwise empty. Some of the lost graphs may fit into a new pool.
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
        """The reason for skipping a key if ``max_graphs`` is reached."""
        return f"over_budget: max_graphs is {self.limits.max_graphs}; increase it for more graphs"

    def has_slot(self) -> bool:
        """Return whether one more graph is allowed."""
        limit = self.limits.max_graphs
        return limit is None or self._graphs.count() < limit

    def evict_until_fits(self) -> None:
        """Evict graphs until one more graph is allowed.

        Raises:
            CaptureError: ``max_graphs`` is 0.
        """
        limit = self.limits.max_graphs
        if limit == 0:
            raise CaptureError(
                "max_graphs is 0, so no graph can be captured. Increase max_graphs.",
                reason="over_budget",
            )
        while not self.has_slot():
            self._evict_one(self._graphs.by_key().values())

    def admission(self, key: GraphKey, *, evict: bool) -> Admission | None:
        """Return the memory check for the capture of a key; None if there is no limit."""
        limit, memory = self.limits.max_bytes, self._lane.group.memory
        if limit is None and (memory is None or memory.max_bytes is None):
            return None
        evict_others = self._evict_others if evict else lambda _: False
        return Admission(key, limit, self._lane, self._forecast, evict_others)

    def drop_pool(self) -> None:
        """Release the lane's shared outputs. If the pool has no graphs, also start a new pool."""
        self._lane.drop_outputs()
        group = self._lane.group
        if not group.num_graphs():
            group.start_pool()

    def check(self, key: GraphKey, step: CapturedKey, *, evict: bool) -> None:
        """Check a new graph, and release it if a budget is exceeded.

        Args:
            key: Key of the graph.
            step: Captured key with the graph.
            evict: Whether idle pools of other runners may be evicted.

        Raises:
            OverBudgetError: The graph needs more memory than expected and exceeds a budget.
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
        """Warn once if most captured graphs have been evicted."""
        evictions, room = self._graphs.num_evicted_for_budget, self.limits.max_graphs or 1
        is_churn = evictions >= _CHURN * max(room, 4) and evictions > 0.5 * self._counters.captures
        if is_churn and self._once.first():
            warn_at_call(
                f"{evictions} of {self._counters.captures} captured graphs have been evicted, "
                f"because the batches need more graphs than the budget allows{self._limits()}. "
                "Increase the budget or capture_after, or use fewer capture sizes.",
                ChurnWarning,
            )

    def _limits(self) -> str:
        """Return the limits that are set, in parentheses for a message."""
        memory = self._lane.group.memory
        limits = {
            "max_graphs": self.limits.max_graphs,
            "max_bytes": self.limits.max_bytes,
            "GraphMemory.max_bytes": None if memory is None else memory.max_bytes,
        }
        listing = ", ".join(f"{name}={one}" for name, one in limits.items() if one is not None)
        return f" ({listing})" if listing else ""

    def _note_limit(self) -> None:
        memory = self._lane.group.memory
        shared = None if memory is None else memory.max_bytes
        self._lane.group.is_limited = self.limits.max_bytes is not None or shared is not None

    def _evict_others(self, passed: _ExceededBudget) -> bool:
        """Evict an idle pool, or a graph that holds memory of its own.

        Returns:
            Whether anything was evicted.
        """
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
        """Evict an idle pool that shares the budget, and return whether one was evicted."""
        group = self._lane.group
        return group.memory is not None and group.memory.evict_idle_group(group)

    def _evict_one(self, steps: Iterable[CapturedKey]) -> None:
        score = self.score or _SCORES[self.limits.eviction]
        step = min(steps, key=lambda one: (score(one), one.last_used), default=None)
        for key, one in self._graphs.by_key().items():
            if one is step:
                self._graphs.evict(key, FOR_BUDGET)
