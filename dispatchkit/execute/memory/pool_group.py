"""PoolGroup: lanes whose graphs lie in one pool, and run one after another.

Graphs of one pool share their memory: a replay overwrites what others work in, and what graphs
that were captured after it have returned. So lanes may share a pool only if their steps never
overlap, and if nothing that a step returns is read from the pool after the next one has begun:

- The host gives their steps out under one lock, and a step on another stream than the last waits
  for that one (``order``).
- Results are copied out at once, or lie in memory of the lane (``io.outputs``).

Whoever joins lanes to a group sees to the second; see ``lanes.build``. Memory that torch has freed
in a pool is used again on the same stream alone, so that a group also shares the stream that
graphs are captured on.
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
    """What a group counts in; see ``GraphMemory``, which says what its methods do."""

    max_bytes: int | None

    def num_bytes(self, device: str | None = None) -> int:
        """Return the bytes that count in the budget."""
        ...

    def expected_bytes(self, group: PoolGroup) -> int:
        """Return what a capture in a group may take beside its pool and outputs."""
        ...

    def make_room(self, group: PoolGroup, num_bytes: int, what: str) -> None:
        """Evict idle pools until so many bytes may be taken outside of any pool."""
        ...

    def evict_idle_group(self, keep: PoolGroup) -> bool:
        """Evict all graphs of the pool that has been idle for longest."""
        ...

    def measuring(self, backend: GraphBackend, part: str) -> AbstractContextManager[None]:
        """Note what the driver takes in a block, or gives back."""
        ...


def new_stream(backend: GraphBackend, priority: int = 0) -> Stream:
    """Return a stream of a priority.

    Raises:
        ConfigError: The device gives no more streams, or its backend knows no priorities.
    """
    if not priority:
        return backend.new_stream()
    priorities = features_of(backend).priorities
    if priorities is None:
        raise ConfigError("priority", priority, f"0: backend {backend.name!r} has no priorities")
    return priorities.new_stream(priority=priority)


class OrderedLane(Protocol):
    """A lane, as far as others of its group must know it.

    Attributes:
        handle: Raw handle of the stream of its last step; None makes the next step ask.
    """

    handle: int | None

    def refill(self) -> None:
        """Fill its static inputs, whose memory has lost what it held."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Bytes of the outputs that its graphs share, outside the pool."""
        ...

    @property
    def static_bytes(self) -> int:
        """Bytes of its static inputs on the device."""
        ...


class PoolMember(Protocol):
    """The graphs that one lane has in the pool of its group."""

    def num_graphs_in_pool(self) -> int:
        """Return how many keys have one."""
        ...

    def num_steps(self) -> int:
        """Return how many steps the lane has run."""
        ...

    def evict_all(self) -> list[GraphKey]:
        """Evict them, for others to have the memory; returns the keys that lost their graph."""
        ...

    def capture_again(self, keys: Iterable[GraphKey]) -> None:
        """Capture those of some keys that are wanted, as far as there is room."""
        ...


class PoolGroup:
    """One pool, the stream that its graphs are captured on, and the lanes that have graphs there.

    Args:
        backend: The device.
        lock: Held by each step of its lanes.
        name: What an account calls it.
        memory: Whose budget it counts in; None where nothing is shared.
        is_open: Further lanes may join.
        turns: Of the lock, where groups have one lock.
        sleeper: The backend, where its memory is to be able to sleep.

    Attributes:
        turns: Lets steps run while a capture in the background is under way.
        pool: The pool; another one after ``start_pool``.
        stream: Where graphs are warmed up and captured.
        last_stream: The stream of the last step of any lane.
        idle_since: At which look its lanes had last run steps (see ``note_use``).
        is_asleep: Its memory is given back for a while, and nothing may use it.
        is_limited: A budget of bytes counts its memory: what nobody uses must be free at once.
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
        # Of static inputs and outputs.
        self._tensors: Any = None if sleeper is None else sleeper.new_sleeping_pool()
        self.last_stream: Stream | None = None
        self.idle_since = 0
        self.is_limited = False
        self._num_steps_seen = 0
        # Memory of before, for as long as somebody holds outputs in it.
        self._earlier: list[Any] = []
        # Weakly: memory must go with its runner, at once.
        self._lanes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_lane(self, lane: OrderedLane) -> None:
        """Let the steps of a lane be ordered with those of the others."""
        self._lanes.add(lane)

    def add_member(self, member: PoolMember) -> None:
        """Count the graphs of a lane as graphs of the pool."""
        self._members.add(member)

    @property
    def members(self) -> tuple[PoolMember, ...]:
        """Those that may have graphs in the pool."""
        return tuple(self._members)

    def order(self, lane: OrderedLane, handle: int) -> Stream:
        """Make the current stream wait for the last step of the group; returns that stream.

        Args:
            lane: Whose step is next.
            handle: Raw handle of the current stream.

        Raises:
            ReplayError: The group's memory sleeps.
        """
        self.refuse_asleep()
        current = self.backend.current_stream()
        if self.last_stream is not None:
            # Also covers what the old stream's user queued there to read views of outputs.
            current.wait_stream(self.last_stream)
        self.last_stream = current
        for other in tuple(self._lanes):
            if other is not lane and other.handle != handle:
                other.handle = None
        return current

    def use_priority(self, priority: int) -> None:
        """Capture on a stream of a priority; before anything is captured.

        Raises:
            ConfigError: The device gives no more streams, or its backend knows no priorities.
        """
        del self.stream  # first, so that there are never more streams than lanes
        self.stream = new_stream(self.backend, priority)

    # -- memory -------------------------------------------------------------------------

    def allocate(self, make: Callable[[], _T]) -> _T:
        """Call what makes static inputs or outputs; their memory sleeps with the pool.

        Raises:
            ConfigError: It sleeps now.
        """
        if self._sleeper is None:
            return make()
        if self.is_asleep:
            raise ConfigError("memory", "asleep", "awake for a new runner", "Call memory.wake().")
        return self._sleeper.allocate(self._tensors, make)

    def sleep(self) -> int:
        """Give its memory back, which no step may use from now on; the caller holds the lock.

        Returns:
            The bytes that were given back.
        """
        if self._sleeper is None or self.is_asleep:
            return 0
        for lane in tuple(self._lanes):
            lane.handle = None  # so that the next step asks
        num_bytes = self._sleeper.sleep(self._sleeping())
        self.is_asleep = True
        return num_bytes

    def wake(self) -> None:
        """Have memory again, with static inputs as they were made; the caller holds the lock.

        Raises:
            ReplayError: There is not enough; all of it sleeps on.
        """
        if self._sleeper is None or not self.is_asleep:
            return
        self._sleeper.wake(self._sleeping())
        self.is_asleep = False
        for lane in tuple(self._lanes):
            lane.refill()
        self.backend.synchronize()  # steps on any stream find it done

    def refuse_asleep(self) -> None:
        """Raise where its memory sleeps.

        Raises:
            ReplayError: It does.
        """
        if self.is_asleep:
            raise ReplayError(
                "The memory of the graphs sleeps, and a step was to use it. Call memory.wake() "
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
        """Capture into a new pool from here on; graphs of the old one keep theirs."""
        self._earlier.append(self.pool)
        self.pool = self._new_pool()
        self._forget_earlier()
        if self.is_limited and (self._earlier or self.shared_bytes()):
            gc.collect()  # something in a ring of references still holds outputs of it

    def clear(self) -> dict[PoolMember, list[GraphKey]]:
        """Evict all graphs and start a new pool; returns the keys that lost theirs, by member.

        Graphs of one pool share memory: evicting some of them frees next to nothing.
        """
        lost = {member: member.evict_all() for member in self.members}
        self.start_pool()
        return lost

    def num_graphs(self) -> int:
        """Return how many graphs lie in the pool."""
        return sum(member.num_graphs_in_pool() for member in self.members)

    def num_lanes(self) -> int:
        """Return how many lanes are alive."""
        return len(self._lanes)

    def note_use(self, look: int) -> None:
        """Note whether its lanes have run steps since the last look; no step notes anything."""
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
        """Return the bytes of outputs that graphs share, of all lanes."""
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
