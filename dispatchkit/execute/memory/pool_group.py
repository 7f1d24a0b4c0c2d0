"""PoolGroup: lanes whose graphs share a pool and run one after the other.

Graphs of one pool share memory. A replay may overwrite the intermediates of other graphs, and the
outputs of graphs that were captured later. Therefore, lanes may share a pool only under two
conditions:

- Steps never overlap. The host launches them under one lock, and a step on another stream waits for
  the stream of the previous step (``order``).
- No result is read from the pool after the next step has begun. Results are copied out immediately,
  or are in the output memory of the lane (``io.outputs``). The code that adds lanes to a group
  ensures this; see ``lanes.build``.

The lanes of a group also share the stream for captures, because torch reuses freed memory of a pool
only on the same stream.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from dispatchkit.backends.base import GraphBackend, Stream
from dispatchkit.backends.optional import SleepingBackend, features_of
from dispatchkit.errors import ConfigError, ReplayError
from dispatchkit.execute.memory.turns import Turns
from dispatchkit.keys.batch import GraphKey

_T = TypeVar("_T")


class SharedBudget(Protocol):
    """Protocol for a budget shared by groups, implemented by ``GraphMemory``."""

    max_bytes: int | None

    def num_bytes(self, device: str | None = None) -> int:
        """Return the memory that counts toward the budget, in bytes."""
        ...

    def expected_bytes(self, group: PoolGroup) -> int:
        """Return the driver memory in bytes that a capture may need."""
        ...

    def evict_until_fits(self, group: PoolGroup, num_bytes: int, what: str) -> None:
        """Evict idle pools until an allocation outside pools fits into the budget."""
        ...

    def evict_idle_group(self, keep: PoolGroup) -> bool:
        """Evict all graphs of the longest-idle pool; return whether a pool was evicted."""
        ...

    def measuring(self, backend: GraphBackend, part: str) -> AbstractContextManager[None]:
        """Record the memory that the driver allocates or frees inside a ``with`` block."""
        ...


def new_stream(backend: GraphBackend, priority: int = 0) -> Stream:
    """Create a stream with a priority.

    Raises:
        ConfigError: The device has no more streams, or the backend does not support priorities.
    """
    if not priority:
        return backend.new_stream()
    priorities = features_of(backend).priorities
    if priorities is None:
        raise ConfigError(
            "the stream priority of a lane",
            priority,
            "0",
            f"The backend {backend.name!r} does not support priorities. Use a lane policy without "
            "stream_priorities().",
        )
    return priorities.new_stream(priority=priority)


class OrderedLane(Protocol):
    """Protocol for a lane in a group.

    Attributes:
        handle: Raw handle of the stream on which the lane last used its static inputs or state;
            None makes the next step call ``order``.
    """

    handle: int | None

    def refill(self) -> None:
        """Reset the static inputs and restore the row count, after sleep released their memory."""
        ...

    @property
    def shared_bytes(self) -> int:
        """The size in bytes of outputs that the lane's graphs share outside the pool."""
        ...

    @property
    def static_bytes(self) -> int:
        """The size in bytes of the lane's static inputs on the device."""
        ...


class PoolMember(Protocol):
    """Protocol for the graphs of a lane in its group's pool."""

    def num_graphs_in_pool(self) -> int:
        """Return the number of keys with a graph."""
        ...

    def num_steps(self) -> int:
        """Return the number of steps that the lane has run."""
        ...

    def evict_all(self) -> list[GraphKey]:
        """Evict all graphs and return their keys."""
        ...

    def capture_again(self, keys: Iterable[GraphKey]) -> None:
        """Recapture keys that lost their graph, within the budget."""
        ...


class PoolGroup:
    """A pool, the stream for its captures, and the lanes with graphs in it.

    Args:
        backend: Backend that creates the pool and the stream.
        lock: Lock that each step of the lanes holds.
        name: Name of the pool in memory accounts.
        memory: Shared budget that the pool counts toward, or None.
        is_open: Whether more lanes may join.
        turns: The ``Turns`` of ``lock``, if other groups use the same lock; created by default.
        sleeper: Backend support for sleeping memory, or None if the memory need not sleep.

    Attributes:
        turns: Lock that steps share with background captures.
        pool: Current pool; replaced by ``start_pool``.
        stream: Stream for warmups, captures and submitted steps.
        last_stream: Stream on which a lane last used its static inputs or state.
        idle_since: Number of the last check that found new steps (see ``record_use``).
        is_asleep: Whether the memory is temporarily released and must not be used.
        asleep_bytes: Number of bytes that ``sleep`` released; 0 if the memory is not asleep.
        is_limited: Whether a budget in bytes applies. If so, unused memory is freed immediately.
    """

    def __init__(
        self,
        backend: GraphBackend,
        lock: threading.RLock,
        *,
        name: str = "",
        memory: SharedBudget | None = None,
        is_open: bool = False,
        turns: Turns | None = None,
        sleeper: SleepingBackend | None = None,
    ) -> None:
        self.backend, self.lock, self.name = backend, lock, name
        self.turns: Turns = turns or Turns(lock, backend.torch_device)
        self.memory: SharedBudget | None = memory
        self.is_open = is_open
        self._sleeper = sleeper
        self.is_asleep = False
        self.asleep_bytes = 0
        self.stream: Stream = backend.new_stream()
        self.pool: Any = self._new_pool()
        # Pool of static inputs and shared outputs; None if the memory need not sleep.
        self._tensors: Any = None if sleeper is None else sleeper.new_sleeping_pool()
        self.last_stream: Stream | None = None
        self.idle_since = 0
        self.is_limited = False
        self._num_steps_seen = 0
        # Earlier pools that contain outputs still in use.
        self._earlier: list[Any] = []
        # Weak references, so that memory is freed with its runner.
        self._lanes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_lane(self, lane: OrderedLane) -> None:
        """Add a lane whose steps are ordered with those of the other lanes."""
        self._lanes.add(lane)

    def add_member(self, member: PoolMember) -> None:
        """Register the graphs of a lane as graphs of the pool."""
        self._members.add(member)

    @property
    def members(self) -> tuple[PoolMember, ...]:
        """The members that may have graphs in the pool."""
        return tuple(self._members)

    def order(self, lane: OrderedLane, handle: int, *, is_eager: bool = False) -> Stream:
        """Make the current stream wait for the last step of the group, and return the stream.

        Args:
            lane: Lane of the next step.
            handle: Raw handle of the current stream.
            is_eager: Whether the next step does not use the group's memory.

        Raises:
            ReplayError: The group's memory is asleep, and the next step uses it.
        """
        if not is_eager:
            self.check_awake()
        current = self.backend.current_stream()
        if self.last_stream is not None:
            # Wait for all work queued on the old stream, because it may read views of outputs.
            current.wait_stream(self.last_stream)
        self.last_stream = current
        for other in tuple(self._lanes):
            if other is not lane and other.handle != handle:
                other.handle = None
        return current

    def use_priority(self, priority: int) -> None:
        """Replace the group's stream with one that has a priority; call before the first capture.

        Raises:
            ConfigError: The device has no more streams, or the backend does not support priorities.
        """
        del self.stream  # first, so that there are never more streams than lanes
        self.stream = new_stream(self.backend, priority)

    # -- memory -------------------------------------------------------------------------

    def allocate(self, make: Callable[[], _T]) -> _T:
        """Call a function, allocating its new tensors in memory that sleeps with the pool.

        Raises:
            ConfigError: The memory is asleep.
        """
        if self._sleeper is None:
            return make()
        if self.is_asleep:
            raise ConfigError(
                "memory",
                "asleep",
                "awake when a runner is created",
                "Call memory.wake() first.",
                message="No runner can be created while its GraphMemory is asleep.",
            )
        return self._sleeper.allocate(self._tensors, make)

    def sleep(self) -> int:
        """Release the memory, which steps must not use until ``wake``; requires the lock.

        Returns:
            The number of bytes released.
        """
        if self._sleeper is None or self.is_asleep:
            return 0
        for lane in tuple(self._lanes):
            lane.handle = None  # makes the next step call ``order``
        self.backend.synchronize()  # if this raises, nothing sleeps
        self.is_asleep = True  # first, because an exception may leave some of the memory asleep
        self.asleep_bytes = self._sleeper.sleep(self._sleeping())
        return self.asleep_bytes

    def wake(self) -> None:
        """Map the memory again and reset static inputs; requires the lock.

        Raises:
            ReplayError: The device has too little free memory; the whole group stays asleep.
        """
        if self._sleeper is None or not self.is_asleep:
            return
        self._sleeper.wake(self._sleeping())
        for lane in tuple(self._lanes):
            lane.refill()
        self.backend.synchronize()  # because the next step may be on any stream
        self.asleep_bytes = 0
        self.is_asleep = False  # last, so that steps are rejected if a static input was not reset

    def check_awake(self) -> None:
        """Check that the memory is not asleep.

        Raises:
            ReplayError: The memory is asleep.
        """
        if self.is_asleep:
            raise ReplayError(
                "The step cannot run, because its GraphMemory is asleep. Call memory.wake() before "
                "running steps."
            )

    def may_capture(self) -> bool:
        """Return whether a step may capture now."""
        return not self.is_asleep and self.turns.may_capture()

    def _sleeping(self) -> list[Any]:
        return [self._tensors, self.pool, *self._earlier]

    def _new_pool(self) -> Any:
        if self._sleeper is None:
            return self.backend.new_pool()
        return self._sleeper.new_sleeping_pool()

    def start_pool(self) -> None:
        """Use a new pool for later captures; existing graphs keep the old pool alive."""
        self._earlier.append(self.pool)
        self.pool = self._new_pool()
        self._forget_earlier()
        if self.is_limited and (self._earlier or self.shared_bytes()):
            gc.collect()  # reference cycles may keep outputs in the old pool alive

    def clear(self) -> dict[PoolMember, list[GraphKey]]:
        """Evict all graphs and start a new pool; return the evicted keys of each member.

        Evicting only some graphs would free almost no memory, because all graphs of the pool share
        its memory.
        """
        lost = {member: member.evict_all() for member in self.members}
        self.start_pool()
        return lost

    def num_graphs(self) -> int:
        """Return the number of graphs in the pool."""
        return sum(member.num_graphs_in_pool() for member in self.members)

    def num_lanes(self) -> int:
        """Return the number of live lanes."""
        return len(self._lanes)

    def record_use(self, check: int) -> None:
        """Record whether the lanes have run steps since the last check.

        Steps themselves record nothing, so they have no additional cost.

        Args:
            check: Number of this check.
        """
        steps = sum(member.num_steps() for member in self.members)
        if steps != self._num_steps_seen:
            self._num_steps_seen, self.idle_since = steps, check

    def pool_bytes(self) -> int:
        """Return the size in bytes of the pool and earlier pools still in use; 0 while asleep."""
        if self.is_asleep:
            return 0
        self._forget_earlier()
        pools = (self.pool, *self._earlier)
        return sum(self.backend.pool_bytes(pool) for pool in pools)

    def shared_bytes(self) -> int:
        """Return the size in bytes of the shared outputs of all lanes; 0 while asleep."""
        if self.is_asleep:
            return 0
        return sum(lane.shared_bytes for lane in tuple(self._lanes))

    def static_bytes(self) -> int:
        """Return the size in bytes of the static inputs of all lanes; 0 while asleep."""
        if self.is_asleep:
            return 0
        return sum(lane.static_bytes for lane in tuple(self._lanes))

    def _forget_earlier(self) -> None:
        self._earlier = [pool for pool in self._earlier if self.backend.pool_bytes(pool)]
