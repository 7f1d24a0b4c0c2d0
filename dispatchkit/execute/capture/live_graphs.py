"""LiveGraphs: the graphs of one lane that may be launched, and how each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from dispatchkit.errors import RegistryError
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.retries import Retries
from dispatchkit.execute.lane import Lane
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.observe.events import EvictEvent
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState

#: Why a graph is evicted that has to make room for others.
FOR_ROOM: Final = "budget"


class LiveGraphs:
    """The captured graphs of one lane.

    A graph is released once no key names it and nothing of it is in flight.

    Args:
        lane: Where they are.
        registry: Their keys.
        counters: Where evictions are counted.
        notify: Called with events.

    Attributes:
        retries: Says when keys that failed are captured again.
        num_for_room: How many were evicted for others to have room.
    """

    def __init__(
        self,
        lane: Lane,
        registry: GraphRegistry,
        counters: StepCounters,
        notify: Callable[[object], None],
    ) -> None:
        self._lane, self._registry = lane, registry
        self._counters, self._notify = counters, notify
        self.retries: Retries = Retries()
        self.num_for_room: int = 0

    def by_key(self) -> dict[GraphKey, CapturedKey]:
        """Return the captured steps by key."""
        return {
            key: entry.graph
            for key, entry in tuple(self._registry.entries.items())
            if entry.state is KeyState.CAPTURED
        }

    def count(self) -> int:
        """Return how many graphs there are; one that serves several keys counts once."""
        return len({id(step) for step in self.by_key().values()})

    def entry(self, key: GraphKey) -> GraphEntry:
        """Return what the registry has of a key.

        Raises:
            RegistryError: It is not declared.
        """
        entry = self._registry.get(key)
        if entry is None:
            raise RegistryError(f"{key} is not declared; the runner has no such key.")
        return entry

    def evict(self, key: GraphKey, reason: str = "requested") -> None:
        """Take the graph of a key away.

        Raises:
            RegistryError: It has none.
        """
        entry = self.entry(key)
        if entry.state is not KeyState.CAPTURED:
            raise RegistryError(f"{key} is {entry.state}: it has no graph to evict.")
        self._counters.evictions += 1
        self.num_for_room += reason == FOR_ROOM
        self._take(key, entry.graph, reason)

    def clear(self) -> None:
        """Take all graphs away as their owner asked, which is counted as no eviction."""
        for key, step in self.by_key().items():
            self._take(key, step, "requested")

    def _take(self, key: GraphKey, step: CapturedKey, reason: str) -> None:
        before = self._lane.num_bytes()
        self._registry.evicted(key, reason)
        self._release(step)
        freed = max(0, before - self._lane.num_bytes())
        self.report(EvictEvent, key, reason=reason, num_bytes=freed)

    def fail(self, key: GraphKey, reason: str) -> None:
        """Mark that a replay of a key failed, and release its graph."""
        step = self.entry(key).graph
        self._registry.failed(key, reason)
        self.retries.note_failure(key)
        if step is not None:
            self._release(step)

    def fail_step(self, step: CapturedKey, reason: str) -> None:
        """Mark all keys that a captured step serves as failed, and release it."""
        for key, one in self.by_key().items():
            if one is step:
                self.fail(key, reason)

    def invalidate(self, reason: str) -> int:
        """Mark every graph stale and release it; the keys can be captured again.

        Returns:
            How many keys lost their graph.
        """
        live = self.by_key()
        for key in live:
            self._registry.stale(key, reason)
        for key, step in live.items():
            self._release(step)
            self.report(EvictEvent, key, reason="invalidated")
        return len(live)

    def forget(self, keys: Iterable[GraphKey]) -> None:
        """Remove keys altogether, with the graphs that no other key names."""
        gone = [self.entry(key) for key in keys]
        for entry in gone:
            self._registry.forget(entry.key)
        for entry in gone:
            if entry.state is KeyState.CAPTURED:
                self._release(entry.graph)

    def report(self, kind: Callable[..., Any], key: GraphKey, **facts: Any) -> None:
        """Notify observers of an event of a key."""
        facts |= {"runtime_mode": key.mode.name, "num_tokens": key.num_tokens}
        self._notify(kind(key=str(key), lane=self._lane.index, **facts))

    def _release(self, step: CapturedKey) -> None:
        if any(one is step for one in self.by_key().values()):
            return
        step.lane.synchronize()
        step.lane.forget_plans()  # the views in them would keep its outputs
        with step.lane.measuring("driver"):
            step.release()
