"""Compare values and tensors built into graphs with what Python would read now.

A graph keeps the address of each weight and the result of each branch of its capture. Replacing a
weight, switching an adapter or changing a field of a configuration has no effect on it. So every
sixteenth step of a lane compares sixteen such values, in turn; and if torch reports that a
parameter, buffer or submodule was assigned, the next replay compares all of them.

Values of classes, and globals named in their code, take separate turns from those of objects,
modules and functions, since libraries have many tables that hardly ever change.

How soon a change is detected:

- a parameter, buffer or submodule that is assigned (also by ``load_state_dict(assign=True)``), and
  a value that the step itself has changed: before the next result;
- anything else (``.data = ...``, ``swap_tensors``, ``_parameters[...] = ...``, a number, a flag):
  within ``num_values + VALUES_AT_ONCE`` replays of any graphs of the lane;
- a value reached only through a class: within ``num_class_values + VALUES_AT_ONCE`` replays;
- a new item, key or attribute: within ``num_containers / 4 + VALUES_AT_ONCE`` replays, since
  lengths are compared, of 64 containers at once.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.nn.modules import module as torch_module

from dispatchkit.execute.step.python_state import (
    MISSING,
    Container,
    Entry,
    PythonState,
    is_same,
)

_T = TypeVar("_T")

#: Number of values per comparison, and of a lane's steps between comparisons.
VALUES_AT_ONCE: Final = 16

#: Number of containers per comparison, of which only lengths are compared.
CONTAINERS_AT_ONCE: Final = 64

_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class ValueWatch:
    """Watches the values that the graphs of one lane have built in.

    Args:
        state: The state that the step reaches, recorded when the graphs are captured; None to watch
            nothing.
        always: Entries to compare at every replay, which the step is known to change.

    Attributes:
        due: The lane's tick from which on the next replay must call ``is_unchanged``.
        num_values: Number of values in objects, modules, closures and functions.
        num_class_values: Number of further values in classes and in globals named in their code.
        num_containers: Number of dictionaries, lists and objects that may get further entries.
    """

    due: int

    def __init__(self, state: PythonState | None = None, always: Iterable[Entry] = ()) -> None:
        read = () if state is None else state.values_read()
        of_classes = [one for one in read if one.record.is_of_class]
        held = [one for one in read if not one.record.is_of_class]
        self.num_values: int = len(held)
        self.num_class_values: int = len(of_classes)
        containers = () if state is None else state.containers_read()
        self.num_containers: int = len(containers)
        turns = (
            [_Group(chunk) for chunk in _chunks(held, VALUES_AT_ONCE)],
            [_Group(chunk) for chunk in _chunks(of_classes, VALUES_AT_ONCE)],
            [_Lengths(chunk) for chunk in _chunks(containers, CONTAINERS_AT_ONCE)],
        )
        self._groups: list[Sequence[_Group | _Lengths]] = [groups for groups in turns if groups]
        always = tuple(always)
        self._always = _Group(always) if always else None
        self._interval = 1 if always else VALUES_AT_ONCE
        self._next = 0
        self._rewind()
        for module in () if state is None else state.modules:
            _WATCHES.setdefault(module, weakref.WeakSet()).add(self)
        _listen()

    def is_unchanged(self, tick: int) -> bool:
        """Compare the next values in turn; False if something changed, see ``changes``.

        Args:
            tick: The lane's.
        """
        self.due = tick + self._interval  # first, since another thread may mark it meanwhile
        if self._is_marked:
            return False
        if self._always is not None:
            if not self._always.is_unchanged():
                return False
            if tick < self._next:
                return True
            self._next = tick + VALUES_AT_ONCE
        for turn in self._turns:  # noqa: SIM110 - a generator takes longer than what it asks
            if not next(turn).is_unchanged():
                return False
        return True

    def changes(self) -> tuple[Entry, ...]:
        """Compare everything and return the differences; restart the turns."""
        self._rewind()
        always = [] if self._always is None else [self._always]
        groups: Iterable[_Group | _Lengths] = itertools.chain(always, *self._groups)
        return tuple(entry for group in groups for entry in group.changes())

    def differences(self) -> tuple[Entry, ...]:
        """Compare everything and return the differences, without an effect on later replays."""
        always = [] if self._always is None else [self._always]
        groups: Iterable[_Group | _Lengths] = itertools.chain(always, *self._groups)
        return tuple(entry for group in groups for entry in group.differences())

    def mark(self) -> None:
        """Compare everything before the next replay."""
        self._is_marked, self.due = True, 0

    def _rewind(self) -> None:
        self._turns = [itertools.cycle(groups) for groups in self._groups]
        self._next, self._is_marked = 0, False
        self.due = 0 if self._groups else sys.maxsize


class _Group:
    """Compares some entries: the same objects, at the same addresses if they are tensors.

    Nearly all of them are items of dictionaries, which are cheap enough to read in a step.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._values = [entry.before for entry in entries]
        self._addresses = [_address_of(value) for value in self._values]
        self._prepare()

    def is_unchanged(self) -> bool:
        """Return whether Python would read the same now."""
        try:
            for holder, key, value in self._items:
                if holder[key] is not value:
                    return not self.changes()
            for entry, value in self._others:
                now = entry.now()
                if now is not value and not is_same(value, now):
                    return False
            return [*map(_data_ptr, self._tensors)] == self._places
        except (LookupError, RuntimeError):  # an item was removed, or a tensor's memory was freed
            return False

    def differences(self) -> list[Entry]:
        """Return the entries that read differently now."""
        return [
            entry
            for number, entry in enumerate(self._entries)
            if not self._is_same(number, entry.now())
        ]

    def changes(self) -> list[Entry]:
        """Return the entries that read differently now; note equal objects."""
        found = []
        for number, entry in enumerate(self._entries):
            now = entry.now()
            if self._is_same(number, now):
                self._values[number] = now  # an equal number: store the new object
            else:
                found.append(entry)
        self._prepare()
        return found

    def _is_same(self, number: int, now: Any) -> bool:
        is_there = _address_of(now) == self._addresses[number]
        return is_there and is_same(self._values[number], now)

    def _prepare(self) -> None:
        """Group the entries by how they are read."""
        self._items: list[tuple[Any, Any, Any]] = []
        self._others: list[tuple[Entry, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._places: list[int] = []
        for entry, value, address in zip(self._entries, self._values, self._addresses, strict=True):
            if entry.holder is None or value is MISSING:
                self._others.append((entry, value))
            else:
                self._items.append((entry.holder, entry.key, value))
            if address is not None:
                self._tensors.append(value)
                self._places.append(address)


class _Lengths:
    """Compares the lengths of containers; longer ones may have new entries that are read."""

    def __init__(self, containers: Sequence[Container]) -> None:
        self._containers = containers
        self._targets = [one.record.target for one in containers]
        self._lengths: list[int] = []  # the first comparison reads all, since some are filtered

    def is_unchanged(self) -> bool:
        """Return whether nothing that Python would read was added."""
        return [*map(len, self._targets)] == self._lengths or not self.changes()

    def differences(self) -> list[Entry]:
        """Return the new entries."""
        return [entry for container in self._containers for entry in container.added()]

    def changes(self) -> list[Entry]:
        """Return the new entries, and compare with the lengths of now from here on."""
        found = self.differences()
        self._lengths = [*map(len, self._targets)]
        return found


def _chunks(items: Sequence[_T], at_once: int) -> list[Sequence[_T]]:
    """Return batches of entries, one per comparison."""
    return [items[at : at + at_once] for at in range(0, len(items), at_once)]


def _address_of(value: Any) -> int | None:
    """Return the address of a tensor's data; None if it has no single address."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.data_ptr()
    except RuntimeError:  # a wrapper without its own memory
        return None


# -- assignments that torch reports ---------------------------------------------------------------

_WATCHES: weakref.WeakKeyDictionary[Any, weakref.WeakSet[ValueWatch]] = weakref.WeakKeyDictionary()


@functools.cache
def _listen() -> None:
    """Make torch report assignments to modules, once per process."""
    torch_module.register_module_parameter_registration_hook(_assigned)
    torch_module.register_module_buffer_registration_hook(_assigned)
    torch_module.register_module_module_registration_hook(_assigned)


def _assigned(module: torch.nn.Module, _name: str, _value: Any) -> None:
    """Mark the watches of a module; called before the assignment."""
    if torch.compiler.is_compiling():  # anything else here would break a compiled graph
        return
    for watch in _WATCHES.get(module, ()):
        watch.mark()
