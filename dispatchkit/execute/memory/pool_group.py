"""PoolGroup: lanes whose graphs are in one pool and run one after the other.

Graphs of one pool share their memory: a replay overwrites the intermediates of others, and the
outputs of graphs captured after it. So lanes may share a pool only if their steps never overlap,
and if no result of a step is read from the pool after the next step has begun:

- The host launches their steps under one lock, and a step on another stream than the last step's
  waits for that stream (``order``).
- Results are copied out immediately, or are in memory of the lane (``io.outputs``).

The code that adds lanes to a group ensures the second; see ``lanes.build``. torch reuses freed
memory of a pool only on the same stream, so a group also shares the stream for captures.
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
    """The budget of a group; see ``GraphMemory`` for its methods."""

    max_bytes: int | None

    def num_bytes(self, device: str | None = None) -> int:
        """Return the bytes that count in the budget."""
        ...

    def expected_bytes(self, group: PoolGroup) -> int:
        """Return the memory that a capture in a group may take besides its pool and outputs."""
        ...

    def make_room(self, group: PoolGroup, num_bytes: int, what: str) -> None:
        """Evict idle pools until this many bytes may be taken outside pools."""
        ...

    def evict_idle_group(self, keep: PoolGroup) -> bool:
        """Evict all graphs of the pool idle longest."""
        ...

    def measuring(self, backend: GraphBackend, part: str) -> AbstractContextManager[None]:
        """Record memory that the driver takes or frees in a block."""
        ...


def new_stream(backend: GraphBackend, priority: int = 0) -> Stream:
    """Return a stream of a priority.

    Raises:
        ConfigError: The device has no more streams, or its backend does not support priorities.
    """
    if not priority:
        return backend.new_stream()
    priorities = features_of(backend).priorities
    if priorities is None:
        raise ConfigError("priority", priority, f"0: backend {backend.name!r} has no priorities")
    return priorities.new_stream(priority=priority)


class OrderedLane(Protocol):
    """The interface of a lane to its group.

    Attributes:
        handle: Raw handle of the stream of its last step; None makes the next step call ``order``.
    """

    handle: int | None

    def refill(self) -> None:
        """Fill its static inputs, whose memory has lost its contents."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Bytes of its graphs' shared outputs, outside the pool."""
        ...

    @property
    def static_bytes(self) -> int:
        """Bytes of its static inputs on the device."""
        ...


class PoolMember(Protocol):
    """The graphs that one lane has in the pool of its group."""

    def num_graphs_in_pool(self) -> int:
        """Return the number of keys with a graph."""
        ...

    def num_steps(self) -> int:
        """Return the number of steps that the lane has run."""
        ...

    def evict_all(self) -> list[GraphKey]:
        """Evict them to free memory for others; return the keys that lost their graph."""
        ...

    def capture_again(self, keys: Iterable[GraphKey]) -> None:
        """Capture the wanted ones of some keys, within the budget."""
        ...


class PoolGroup:
    """One pool, the stream for its captures, and the lanes with graphs in it.

    Args:
        backend: The device.
        lock: Held by each step of its lanes.
        name: Its name in accounts.
        memory: The budget it counts in; None if nothing is shared.
        is_open: Further lanes may join.
        turns: The turns of the lock, if groups share a lock.
        sleeper: The backend, if its memory must be able to sleep.

    Attributes:
        turns: Lets steps run during a background capture.
        pool: The pool; replaced by ``start_pool``.
        stream: The stream for warmup and capture.
        last_stream: The stream of the last step of any lane.
        idle_since: The check at which its lanes had last run steps (see ``note_use``).
        is_asleep: Its memory is temporarily released and must not be used.
        is_limited: A budget in bytes counts its memory, so unused memory must be freed immediately.
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
        self.stream: Stream = backend.new_stream()
        self.pool: Any = self._new_pool()
        # The pools of static inputs and outputs.
        self._tensors: Any = None if sleeper is None else sleeper.new_sleeping_pool()
        self.last_stream: Stream | None = None
        self.idle_since = 0
        self.is_limited = False
        self._num_steps_seen = 0
        # Earlier pools, while outputs in them are referenced.
        self._earlier: list[Any] = []
        # Weak references: memory must be freed with its runner.
        self._lanes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_lane(self, lane: OrderedLane) -> None:
        """Order the steps of a lane with those of the others."""
        self._lanes.add(lane)

    def add_member(self, member: PoolMember) -> None:
        """Count the graphs of a lane as graphs of the pool."""
        self._members.add(member)

    @property
    def members(self) -> tuple[PoolMember, ...]:
        """The members that may have graphs in the pool."""
        return tuple(self._members)

    def order(self, lane: OrderedLane, handle: int) -> Stream:
        """Make the current stream wait for the last step of the group; return that stream.

        Args:
            lane: The lane of the next step.
            handle: Raw handle of the current stream.

        Raises:
            ReplayError: The group's memory is asleep.
        """
        self.refuse_asleep()
        current = self.backend.current_stream()
        if self.last_stream is not None:
            # This also covers work queued on the old stream to read views of outputs.
            current.wait_stream(self.last_stream)
        self.last_stream = current
        for other in tuple(self._lanes):
            if other is not lane and other.handle != handle:
                other.handle = None
        return current

    def use_priority(self, priority: int) -> None:
        """Use a stream of a priority for captures; call it before the first capture.

        Raises:
            ConfigError: The device has no more streams, or its backend does not support priorities.
        """
        del self.stream  # first, so that there are never more streams than lanes
        self.stream = new_stream(self.backend, priority)

    # -- memory -------------------------------------------------------------------------

    def allocate(self, make: Callable[[], _T]) -> _T:
        """Call a function that creates static inputs or outputs, whose memory sleeps with the pool.

        Raises:
            ConfigError: It is asleep.
        """
        if self._sleeper is None:
            return make()
        if self.is_asleep:
            raise ConfigError("memory", "asleep", "awake for a new runner", "Call memory.wake().")
        return self._sleeper.allocate(self._tensors, make)

    def sleep(self) -> int:
        """Release its memory, which no step may then use; the caller holds the lock.

        Returns:
            The bytes that were given back.
        """
        if self._sleeper is None or self.is_asleep:
            return 0
        for lane in tuple(self._lanes):
            lane.handle = None  # so that the next step calls ``order``
        num_bytes = self._sleeper.sleep(self._sleeping())
        self.is_asleep = True
        return num_bytes

    def wake(self) -> None:
        """Map memory again and reset static inputs; the caller holds the lock.

        Raises:
            ReplayError: There is not enough memory; all of it stays asleep.
        """
        if self._sleeper is None or not self.is_asleep:
            return
        self._sleeper.wake(self._sleeping())
        self.is_asleep = False
        for lane in tuple(self._lanes):
            lane.refill()
        self.backend.synchronize()  # steps on any stream find it done

    def refuse_asleep(self) -> None:
        """Raise if its memory is asleep.

        Raises:
            ReplayError: Its memory is asleep.
        """
        if self.is_asleep:
            raise ReplayError(
                "A step needs the memory of the graphs, which is asleep. Call memory.wake() "
                "before the first step."
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
        """Use a new pool for later captures; graphs in the old one keep it."""
        self._earlier.append(self.pool)
        self.pool = self._new_pool()
        self._forget_earlier()
        if self.is_limited and (self._earlier or self.shared_bytes()):
            gc.collect()  # a reference cycle may still hold outputs in it

    def clear(self) -> dict[PoolMember, list[GraphKey]]:
        """Evict all graphs and start a new pool; return the keys that lost theirs, by member.

        Graphs of one pool share memory, so evicting some of them frees almost nothing.
        """
        lost = {member: member.evict_all() for member in self.members}
        self.start_pool()
        return lost

    def num_graphs(self) -> int:
        """Return the number of graphs in the pool."""
        return sum(member.num_graphs_in_pool() for member in self.members)

    def num_lanes(self) -> int:
        """Return the number of lanes alive."""
        return len(self._lanes)

    def note_use(self, look: int) -> None:
        """Record whether its lanes have run steps since the last check, at no cost to steps."""
        steps = sum(member.num_steps() for member in self.members)
        if steps != self._num_steps_seen:
            self._num_steps_seen, self.idle_since = steps, look

    def pool_bytes(self) -> int:
        """Return the bytes of the pool, and of earlier ones whose memory is still in use."""
        if self.is_asleep:
            return 0
        self._forget_earlier()
        pools = (self.pool, *self._earlier)
        return sum(self.backend.pool_bytes(pool) for pool in pools)

    def shared_bytes(self) -> int:
        """Return the bytes of the shared outputs of all lanes."""
        if self.is_asleep:
            return 0
        return sum(lane.shared_bytes for lane in tuple(self._lanes))

    def static_bytes(self) -> int:
        """Return the bytes of the static inputs of all lanes."""
        if self.is_asleep:
            return 0
        return sum(lane.static_bytes for lane in tuple(self._lanes))

    def _forget_earlier(self) -> None:
        self._earlier = [pool for pool in self._earlier if self.backend.pool_bytes(pool)]
