"""LiveGraphs: stores, evicts and releases the graphs that a lane can launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from dispatchkit.errors import RegistryError, counted
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.retries import Retries
from dispatchkit.execute.lane import Lane
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.observe.events import EvictEvent
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState

#: Reason for evicting a graph to free memory for other graphs.
FOR_BUDGET: Final = "budget"


class LiveGraphs:
    """The captured graphs of a lane.

    A graph is released when no key uses it and it is not in flight.

    Args:
        lane: Lane that the graphs were captured on.
        registry: Registry in which the state of each key is recorded.
        counters: Counters in which evictions are counted.
        notify: Function that is called with each event.

    Attributes:
        retries: Retry schedule of failed keys.
        num_evicted_for_budget: Number of graphs evicted to free memory for other graphs.
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
        self.num_evicted_for_budget: int = 0

    def by_key(self) -> dict[GraphKey, CapturedKey]:
        """Return the ``CapturedKey`` of each key that has a graph."""
        return {
            key: entry.graph
            for key, entry in tuple(self._registry.entries.items())
            if entry.state is KeyState.CAPTURED
        }

    def count(self) -> int:
        """Return the number of graphs; a graph that serves several keys counts once."""
        return len({id(step) for step in self.by_key().values()})

    def entry(self, key: GraphKey) -> GraphEntry:
        """Return the registry entry of a key.

        Raises:
            RegistryError: The key is not declared.
        """
        entry = self._registry.get(key)
        if entry is None:
            raise RegistryError(
                f"{key} is not declared in this runner. Pass a key from list(runner.registry), "
                f"which has {counted(len(self._registry), 'key')}."
            )
        return entry

    def evict(self, key: GraphKey, reason: str = "requested") -> None:
        """Evict the graph of a key.

        Raises:
            RegistryError: The key is not declared or has no graph.
        """
        entry = self.entry(key)
        if entry.state is not KeyState.CAPTURED:
            raise RegistryError(
                f"{key} has no graph to evict; its state is {entry.state}. Evict only captured "
                "keys; print(runner) shows the state of each key."
            )
        self._counters.evictions += 1
        self.num_evicted_for_budget += reason == FOR_BUDGET
        self._evict_graph(key, entry.graph, reason)

    def clear(self) -> None:
        """Release all graphs without counting evictions."""
        for key, step in self.by_key().items():
            self._evict_graph(key, step, "requested")

    def _evict_graph(self, key: GraphKey, step: CapturedKey, reason: str) -> None:
        before = self._lane.num_bytes()
        self._registry.evicted(key, reason)
        self._release(step)
        freed = max(0, before - self._lane.num_bytes())
        self.report(EvictEvent, key, reason=reason, num_bytes=freed)

    def fail(self, key: GraphKey, reason: str) -> None:
        """Mark a key as failed and release its graph."""
        step = self.entry(key).graph
        self._registry.failed(key, reason)
        self.retries.note_failure(key)
        if step is not None:
            self._release(step)

    def fail_step(self, step: CapturedKey, reason: str) -> None:
        """Mark all keys of a captured graph as failed and release the graph."""
        for key, one in self.by_key().items():
            if one is step:
                self.fail(key, reason)

    def invalidate(self, reason: str) -> int:
        """Mark all graphs stale and release them; the keys can be captured again.

        Returns:
            The number of keys that lost their graph.
        """
        live = self.by_key()
        for key in live:
            self._registry.stale(key, reason)
        for key, step in live.items():
            self._release(step)
            self.report(EvictEvent, key, reason="invalidated")
        return len(live)

    def forget(self, keys: Iterable[GraphKey]) -> None:
        """Remove keys, and release graphs that no other key uses."""
        gone = [self.entry(key) for key in keys]
        for entry in gone:
            self._registry.forget(entry.key)
        for entry in gone:
            if entry.state is KeyState.CAPTURED:
                self._release(entry.graph)

    def report(self, kind: Callable[..., Any], key: GraphKey, **facts: Any) -> None:
        """Notify observers of an event that concerns a key."""
        facts |= {"runtime_mode": key.mode.name, "num_tokens": key.num_tokens}
        self._notify(kind(key=str(key), lane=self._lane.index, **facts))

    def _release(self, step: CapturedKey) -> None:
        if any(one is step for one in self.by_key().values()):
            return
        step.lane.synchronize()
        step.lane.forget_plans()  # views cached in plans would keep the outputs alive
        with step.lane.measuring("driver"):
            step.release()
