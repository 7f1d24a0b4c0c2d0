"""Record the entries of containers, and find and restore those that changed."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Final

import attrs

from dispatchkit.execute.step.code_names import line_that_writes
from dispatchkit.execute.step.container_kinds import (
    ATTRIBUTES,
    CLASS,
    GLOBALS,
    LIBRARY_ATTRIBUTES,
    MAPPING,
    MEMBER,
    METHODS,
    MISSING,
    MODULE,
    SEQUENCE,
    SLOTS,
    Kind,
    is_plain,
    is_same,
    mapping,
)

#: Marks the end of a view, so that an item that moves from one container to the next is detected.
_END: Final = (object(),)
_CONTAINERS = (dict, list, set, deque, bytearray)
#: Kinds whose entries are reached by attribute name.
NAMED = (ATTRIBUTES, LIBRARY_ATTRIBUTES, MODULE, SLOTS, CLASS, METHODS)
#: Kinds whose containers become longer when entries are added.
_GROWING = (MAPPING, SEQUENCE, ATTRIBUTES, LIBRARY_ATTRIBUTES, MEMBER, MODULE)
#: Length functions that do not run code of a subclass.
_LENGTHS = (dict.__len__, OrderedDict.__len__, list.__len__, deque.__len__)


@attrs.frozen
class Node:
    """An object that the walk of ``PythonState`` found.

    Attributes:
        value: The object.
        path: Expression that reaches the object.
        owner: Name of the class or function that refers to the object, for messages.
        site: The class or function itself; its code is searched for the line that writes an entry.
        is_entry: Whether the object is an entry of a container, rather than a root or an object
            that a function names.
        is_installed: Whether the object was found in the code of an installed package. Of the
            objects found there, only builtin containers are followed, because a package names most
            of its own code.
        is_method: Whether the object is a function defined in a class.
        is_owner: Whether the object was found because a method is bound to it or because it is the
            class of an object; the step does not necessarily call it.
    """

    value: Any
    path: str
    owner: str
    site: Any
    is_entry: bool = False
    is_installed: bool = False
    is_method: bool = False
    is_owner: bool = False


class Record:
    """The recorded contents of one container.

    Args:
        kind: Kind of the container.
        found: Container, and where it was found.

    Attributes:
        saved: Entries by key; references, not copies.
        views: Iterables of objects whose identities show whether the entries are unchanged. An end
            marker follows each iterable, so that views of several containers can be chained.
        seen: Objects that ``views`` yielded when the contents were recorded.
        holder: Object that the container belongs to; may be the container itself.
        is_of_class: Whether the container is reached only through classes and their code.
    """

    def __init__(self, kind: Kind, found: Node) -> None:
        self.kind, self.target = kind, found.value
        self.path, self.owner, self.site = found.path, found.owner, found.site
        self.holder: Any = found.value
        self.is_of_class: bool = False
        self._is_installed = found.is_installed
        self.views = [part for view in kind.views(found.value) for part in (view, _END)]
        self.seen = [*itertools.chain.from_iterable(self.views)]
        self.saved: dict[Any, Any] = dict(kind.read(found.value))

    @property
    def can_grow(self) -> bool:
        """Whether the length of the container changes when entries are added."""
        if self.kind in (CLASS, METHODS):
            return not self._is_installed
        return self.kind in _GROWING and type(self.target).__len__ in _LENGTHS

    def inside(self) -> Iterator[Node]:
        """Yield the values of entries that the walk must visit."""
        if not self.kind.is_entered:
            return
        for key, value in self.saved.items():
            if not is_plain(value) and not (self._is_installed and type(value) not in _CONTAINERS):
                path = self.kind.join(self.path, key)
                yield Node(value, path, self.owner, self.site, True, self._is_installed)

    def changes(self) -> Iterator[Entry]:
        """Yield the entries that have changed, including new entries."""
        now = self.kind.read(self.target)
        for key, value in self.saved.items():
            one = now.get(key, MISSING)
            if one is not value and not is_same(value, one):
                yield Entry(self, key)
        yield from self.added(now)
        if self.kind is MAPPING and now.keys() == self.saved.keys():
            # The order of keys is state, too.
            pairs = zip(self.saved, now, strict=True)
            yield from (Entry(self, key) for key, other in pairs if key is not other)

    def restore_order(self) -> None:
        """Restore the order of the keys of a dictionary whose entries have been restored."""
        if self.kind is not MAPPING or [*self.kind.read(self.target)] == [*self.saved]:
            return
        base = mapping(self.target)
        for key in self.saved:
            base.__setitem__(self.target, key, base.pop(self.target, key))

    def added(self, now: Mapping[Any, Any]) -> Iterator[Entry]:
        """Yield the new entries."""
        if now.keys() != self.saved.keys():
            for key in now:
                if key not in self.saved:
                    yield Entry(self, key)


@attrs.frozen
class Entry:
    """One entry of a recorded container.

    Attributes:
        record: Record of the container.
        key: Attribute name, index or dictionary key of the entry.
    """

    record: Record
    key: Any

    @property
    def before(self) -> Any:
        """The recorded value, or ``MISSING``."""
        return self.record.saved.get(self.key, MISSING)

    def now(self) -> Any:
        """Return the current value, or ``MISSING``."""
        if self.record.kind.get is not None:
            return self.record.kind.get(self.record.target, self.key)
        return self.record.kind.read(self.record.target).get(self.key, MISSING)

    @property
    def holder(self) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
        """The builtin container that contains ``key``, or None."""
        target = self.record.target
        if self.record.kind is GLOBALS:
            return target.values  # type: ignore[no-any-return]
        # Only exact types, because reading an item of a subclass may run code and insert the item.
        return target if type(target) in (dict, OrderedDict, list, tuple) else None

    @property
    def can_restore(self) -> bool:
        """Whether the entry can be restored."""
        return self.record.kind.write is not None

    def restore(self) -> None:
        """Set the entry to its recorded value."""
        self.set(self.before)

    def set(self, value: Any) -> None:
        """Set the entry, or remove it if ``value`` is ``MISSING``; skip read-only entries."""
        if self.record.kind.write is not None:
            self.record.kind.write(self.record.target, self.key, value)

    @property
    def path(self) -> str:
        """The expression that reaches the entry, such as ``model.cache['step']``."""
        return self.record.kind.join(self.record.path, self.key)

    def __str__(self) -> str:
        where = line_that_writes(self.record.site, self.key)
        return f"{self.path} ({self.record.owner}{', ' + where if where else ''})"


@attrs.frozen
class Container:
    """A recorded container that may have grown.

    Attributes:
        record: Recorded contents of the container.
        names: Names of new entries that the step would read; None means all.
    """

    record: Record
    names: Set[str] | None

    @property
    def sized(self) -> Any:
        """The object whose length changes when the container grows."""
        target = self.record.target
        return vars(target) if isinstance(target, type) else target

    def added(self) -> tuple[Entry, ...]:
        """Return the new entries that the step would read."""
        record, names = self.record, self.names
        added = record.added(record.kind.read(record.target))
        return tuple(entry for entry in added if names is None or entry.key in names)


def restore(entries: Iterable[Entry]) -> None:
    """Restore entries in reverse order, without replacing containers that other code may hold."""
    records: dict[int, Record] = {}
    for entry in reversed(tuple(entries)):
        entry.restore()
        records[id(entry.record)] = entry.record
    for record in records.values():
        record.restore_order()


def is_named(record: Record, key: Any, names: set[str]) -> bool:
    """Return whether code that contains these names may read an entry of a record."""
    return record.kind not in NAMED or key in names
