"""GraphRegistry: the single source of truth about keys and their graphs."""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from dispatchkit.errors import DescriptorError, RegistryError
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.registry.entry import GraphEntry, KeyState

# The properties shared by keys that differ only in size: mode, uniform query length, maximum query
# length, adapters and axes.
_Family = tuple[RuntimeMode, int, int | None, int, tuple[int, ...]]
# Size, serial number of the declaration, key. Sorting never compares keys, because serial numbers
# are unique.
_Member = tuple[int, int, GraphKey]


def _from_size(
    members: list[_Member], num_tokens: int, loras: int, rank: int
) -> Iterator[tuple[int, int, int, int, GraphKey]]:
    for index in range(bisect_left(members, (num_tokens,)), len(members)):
        size, serial, key = members[index]
        yield size, loras, rank, serial, key


def _family(key: GraphKey) -> _Family:
    own = key.descriptor
    return (key.mode, own.query_len, own.max_query_len, own.num_active_loras, own.axes)


@attrs.frozen
class RegistryEvent:
    """A change to a key or its state.

    Attributes:
        key: Key that changed.
        before: Previous state of the key; None if the key is new.
        after: Current state of the key; None if the key was removed. Enabling or disabling a key
            does not change its state.
        reason: The reason in the key's entry; ``enabled`` or ``disabled`` after ``set_enabled``.
        by_mode: Whether the whole mode of the key was enabled or disabled, rather than the key
            alone.
    """

    key: GraphKey
    before: KeyState | None
    after: KeyState | None
    reason: str = ""
    by_mode: bool = False


class GraphRegistry:
    """The keys, their entries and the transitions between states.

    Readers need no lock, because entries are immutable and replaced as a whole. Writers hold one
    lock. Listeners are called under that lock, in the order in which they subscribed. They must not
    write.

    Attributes:
        lock: The lock that writers hold. Tables derived from the registry must use this lock. If a
            table had its own lock, two threads could deadlock: a listener acquires the table's lock
            after the registry's, but a swap declares keys while it holds the table's lock.
        num_changes: Number of changes: keys added, removed, changed, enabled or disabled.
    """

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._entries: dict[GraphKey, GraphEntry] = {}
        self._families: dict[_Family, list[_Member]] = {}
        self._disabled_keys: frozenset[GraphKey] = frozenset()
        self._disabled_modes: frozenset[RuntimeMode] = frozenset()
        self._listeners: tuple[Callable[[RegistryEvent], None], ...] = ()
        self._serial = 0
        self.num_changes: int = 0

    # -- reading ----------------------------------------------------------------------

    @property
    def entries(self) -> Mapping[GraphKey, GraphEntry]:
        """All entries by key, as a read-only view that follows later changes."""
        return MappingProxyType(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[GraphKey]:
        return iter(self._entries.copy())  # copied atomically, because writers may run concurrently

    def get(self, key: GraphKey) -> GraphEntry | None:
        """Return the entry of a key, or None if it is not declared."""
        return self._entries.get(key)

    def is_enabled(self, key: GraphKey) -> bool:
        """Return whether a key and its mode are enabled."""
        return key.mode not in self._disabled_modes and key not in self._disabled_keys

    @property
    def disabled_modes(self) -> frozenset[RuntimeMode]:
        """The runtime modes disabled by ``set_enabled``."""
        return self._disabled_modes

    def covering(self, batch: Batch, mode: RuntimeMode) -> Iterator[GraphKey]:
        """Yield those keys of a mode that can serve a batch, smallest first.

        Keys of the same size are ordered by number of adapters, fewest first, and then by kind:
        uniform keys, mixed keys that have a maximum query length, other mixed keys.
        """
        streams = []
        for family, members in self._families.copy().items():
            if family[0] is mode:
                rank = 0 if family[1] else 1 if family[2] is not None else 2
                streams.append(_from_size(members, batch.num_tokens, family[3], rank))
        for *_, key in heapq.merge(*streams):
            if key.covers(batch):
                yield key

    # -- writing ----------------------------------------------------------------------

    def subscribe(self, listener: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        """Call a listener for each change; return a function that unsubscribes it."""
        with self.lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self.lock:
                self._listeners = tuple(each for each in self._listeners if each != listener)

        return unsubscribe

    def declare(self, keys: Iterable[GraphKey]) -> None:
        """Declare keys; keys that are already declared do not change.

        Raises:
            DescriptorError: ``keys`` is not a list of keys.
        """
        if not isinstance(keys, Iterable):
            raise DescriptorError("keys", keys, "a list of GraphKeys")
        keys = tuple(keys)
        for at, key in enumerate(keys):
            if not isinstance(key, GraphKey):
                raise DescriptorError(f"keys[{at}]", key, "a GraphKey")
        with self.lock:
            grown: dict[_Family, list[_Member]] = {}
            new = [key for key in dict.fromkeys(keys) if key not in self._entries]
            for key in new:
                self._serial += 1
                grown.setdefault(_family(key), []).append((key.num_tokens, self._serial, key))
            # Lists are replaced, not modified, because a reader may be iterating over one.
            for family, members in grown.items():
                self._families[family] = sorted([*self._families.get(family, ()), *members])
            for key in new:
                self._entries[key] = GraphEntry(key)
                self._notify(key, None, KeyState.DECLARED)

    def captured(self, key: GraphKey, graph: Any, *, num_bytes: int = 0) -> GraphEntry:
        """Set the graph of a key, so that the key can be dispatched."""
        entry = self._move(
            key, KeyState.CAPTURED, graph=graph, num_bytes=num_bytes, reason="", attempts=0
        )
        return entry

    def failed(self, key: GraphKey, reason: str) -> GraphEntry:
        """Record that a key's capture or graph failed, and release the graph."""
        with self.lock:
            attempts = self._require(key).attempts + 1
            return self._move(
                key, KeyState.FAILED, graph=None, num_bytes=0, reason=reason, attempts=attempts
            )

    def evicted(self, key: GraphKey, reason: str = "budget") -> GraphEntry:
        """Mark a captured or stale key as evicted, and release its graph."""
        with self.lock:
            self._require(key, KeyState.CAPTURED, KeyState.STALE, change="be evicted")
            return self._move(key, KeyState.EVICTED, graph=None, num_bytes=0, reason=reason)

    def stale(self, key: GraphKey, reason: str) -> GraphEntry:
        """Mark a captured key as stale, for example because a weight was replaced."""
        with self.lock:
            self._require(key, KeyState.CAPTURED, change="become stale")
            return self._move(key, KeyState.STALE, reason=reason)

    def forget(self, key: GraphKey) -> None:
        """Remove a key."""
        with self.lock:
            before = self._require(key)
            del self._entries[key]
            family = _family(key)
            kept = [item for item in self._families[family] if item[2] != key]
            if kept:
                self._families[family] = kept
            else:
                del self._families[family]
            self._disabled_keys -= {key}
            self._notify(key, before.state, None)

    def clear(self) -> None:
        """Remove all keys."""
        with self.lock:
            for key in self._largest_first():
                self.forget(key)

    def set_enabled(
        self, enabled: bool, *, mode: RuntimeMode | None = None, key: GraphKey | None = None
    ) -> None:
        """Enable or disable a mode or a key while serving.

        Raises:
            RegistryError: Neither a mode nor a key is given, the mode is NONE, or the key is not
                declared.
        """
        if (mode is None and key is None) or mode is RuntimeMode.NONE:
            given = "nothing" if mode is None else "mode NONE"
            raise RegistryError(
                f"set_enabled() needs mode PIECEWISE or FULL, or a key; got {given}."
            )
        with self.lock:
            if key is not None:
                self._require(key)
            if mode is not None:
                changed = (
                    self._disabled_modes - {mode} if enabled else self._disabled_modes | {mode}
                )
                self._disabled_modes = changed
            if key is not None:
                self._disabled_keys = (
                    self._disabled_keys - {key} if enabled else self._disabled_keys | {key}
                )
            reason = "enabled" if enabled else "disabled"
            for each in self._largest_first():
                if each == key or each.mode is mode:
                    state = self._entries[each].state
                    self._notify(each, state, state, reason, by_mode=each != key)

    # -- internals --------------------------------------------------------------------

    def _largest_first(self) -> list[GraphKey]:
        # The event of a key empties all table cells that the key could serve. The largest key comes
        # first, because its event empties the most cells, so that later events are cheap.
        return sorted(self._entries, key=lambda key: -key.num_tokens)

    def _require(self, key: GraphKey, *states: KeyState, change: str = "") -> GraphEntry:
        entry = self._entries.get(key)
        if entry is None:
            raise RegistryError(f"{key} is not declared. Declare it before changing its state.")
        if states and entry.state not in states:
            allowed = " or ".join(states)
            raise RegistryError(f"{key} is {entry.state}; only {allowed} keys can {change}.")
        return entry

    def _move(self, key: GraphKey, state: KeyState, **changes: Any) -> GraphEntry:
        with self.lock:
            before = self._require(key)
            entry = attrs.evolve(before, state=state, **changes)
            self._entries[key] = entry
            self._notify(key, before.state, state, entry.reason)
            return entry

    def _notify(
        self,
        key: GraphKey,
        before: KeyState | None,
        after: KeyState | None,
        reason: str = "",
        *,
        by_mode: bool = False,
    ) -> None:
        self.num_changes += 1
        event = RegistryEvent(key, before, after, reason, by_mode)
        for listener in self._listeners:
            listener(event)
