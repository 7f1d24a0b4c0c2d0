"""Live sets of vLLM descriptors, backed by a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSet
from typing import Any

from dispatchkit import GraphKey, GraphRegistry, KeyState, RuntimeMode
from dispatchkit.errors import DispatchkitError

#: Marks a key whose adapter flag and count contradict each other. vLLM accepts descriptors
#: with this contradiction; dispatchkit's own interface never looks up their keys.
CONTRADICTORY: tuple[int, ...] = (1,)


class KeySet(MutableSet[Any]):
    """The descriptors of one mode, as a set that reads and changes the registry.

    Args:
        registry: Registry that stores the keys.
        mode: Runtime mode of the keys.
        to_key: Function that converts a descriptor to a key, or raises an error for an invalid
            descriptor.
        to_descriptor: Function that converts a key to a descriptor.
    """

    def __init__(
        self,
        registry: GraphRegistry,
        mode: RuntimeMode,
        to_key: Callable[[RuntimeMode, Any], GraphKey],
        to_descriptor: Callable[[GraphKey], Any],
    ) -> None:
        self._registry = registry
        self._mode = mode
        self._to_key = to_key
        self._to_descriptor = to_descriptor

    def __contains__(self, descriptor: object) -> bool:
        try:
            return self._to_key(self._mode, descriptor) in self._registry
        except (DispatchkitError, AttributeError):
            return False  # an invalid descriptor is not in the set

    def __iter__(self) -> Iterator[Any]:
        return (self._to_descriptor(key) for key in self._registry if key.mode is self._mode)

    def __len__(self) -> int:
        return sum(key.mode is self._mode for key in self._registry)

    def add(self, value: Any) -> None:
        """Declare the key of a descriptor."""
        self._registry.declare([self._to_key(self._mode, value)])

    def discard(self, value: Any) -> None:
        """Remove the key of a descriptor, and its graph."""
        if value in self:
            self._registry.forget(self._to_key(self._mode, value))

    def clear(self) -> None:
        """Remove all keys of this mode."""
        for key in self._registry:
            if key.mode is self._mode:
                self._registry.forget(key)

    def copy(self) -> set[Any]:
        """Return the descriptors as a plain set."""
        return set(self)

    def update(self, *others: Iterable[Any]) -> None:
        """Declare the keys of several descriptors."""
        for other in others:
            for value in other:
                self.add(value)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)  # `|`, `&` and `-` return plain sets

    def __repr__(self) -> str:
        return repr(set(self))


class KeySets(dict[Any, MutableSet[Any]]):
    """Sets of descriptors by mode; an assignment replaces the contents of a mode's set."""

    def __setitem__(self, mode: Any, descriptors: Iterable[Any]) -> None:
        live = self[mode]
        if descriptors is not live:
            replacement = list(descriptors)
            live.clear()
            for descriptor in replacement:
                live.add(descriptor)


def is_ready(registry: GraphRegistry, key: GraphKey) -> bool:
    """Return whether a key can be dispatched: declared or captured, and enabled."""
    entry = registry.get(key)
    return (
        entry is not None
        and entry.state in (KeyState.DECLARED, KeyState.CAPTURED)
        and registry.is_enabled(key)
    )
