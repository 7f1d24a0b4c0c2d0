"""Detect changes to values and tensors that are built into graphs.

A graph contains, as of its capture, the address of each weight and the outcome of each branch.
Replacing a weight, switching an adapter or changing a configuration field therefore has no effect
on the graph. The values are compared in two rounds: every sixteenth step of a lane compares the
next sixteen values of each round. If torch reports that a parameter, buffer or submodule was
assigned, the next replay compares all values.

One round covers the values of objects, modules and functions. The other covers the values of
classes and of globals named in their code. It is separate because libraries have many tables that
rarely change.

Delay until a change is detected:

- assigning a parameter, buffer or submodule (including ``load_state_dict(assign=True)``), or
  changing a value that the step itself has changed: no delay, because the next replay detects it;
- any other change (``.data = ...``, ``swap_tensors``, ``_parameters[...] = ...``, a number, a
  flag): at most ``num_values + VALUES_AT_ONCE`` replays of any graphs of the lane;
- changing a value reached only through a class: at most ``num_class_values + VALUES_AT_ONCE``
  replays;
- adding an item, key or attribute: at most ``num_containers / 4 + VALUES_AT_ONCE`` replays, because
  the lengths of 64 containers are compared at a time;
- adding the first forward hook of a module: at most ``VALUES_AT_ONCE`` replays.
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
from torch.utils.hooks import RemovableHandle

from dispatchkit.execute.step.container_kinds import (
    MISSING,
    MODULE,
    address_of,
    is_same,
)
from dispatchkit.execute.step.python_state import PythonState
from dispatchkit.execute.step.records import Container, Entry

_T = TypeVar("_T")

#: Number of values per comparison, and number of steps of a lane from one comparison to the next.
VALUES_AT_ONCE: Final = 16

#: Number of containers per comparison. Only their lengths are compared.
CONTAINERS_AT_ONCE: Final = 64

#: Hooks that torch calls even if gradients are disabled.
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")

_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class ValueWatch:
    """Watch for changes to the values that are built into the graphs of a lane.

    Args:
        state: State that the step reaches, recorded when the graphs are captured; without it,
            nothing is watched.
        always: Entries to compare at every replay, because the step is known to change them.

    Attributes:
        due: The first replay whose ``tick`` is at least this number must call ``is_unchanged``.
        num_values: Number of values in objects, modules, closures and functions.
        num_class_values: Number of values in classes and in globals named in their code.
        num_containers: Number of dictionaries, lists and objects that may grow.
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
        modules = [one for one in containers if one.record.kind is MODULE]
        turns = (
            [_Group(chunk) for chunk in _chunks(held, VALUES_AT_ONCE)],
            [_Group(chunk) for chunk in _chunks(of_classes, VALUES_AT_ONCE)],
            [_Lengths(chunk) for chunk in _chunks(containers, CONTAINERS_AT_ONCE)],
            [_Hooks(modules)] if modules else [],
        )
        self._groups: list[Sequence[_Group | _Lengths | _Hooks]] = [
            groups for groups in turns if groups
        ]
        always = tuple(always)
        self._always = _Group(always) if always else None
        self._interval = 1 if always else VALUES_AT_ONCE
        self._next = 0
        self._restart()
        for module in () if state is None else state.modules:
            _WATCHES.setdefault(module, weakref.WeakSet()).add(self)
        _register_hooks()

    def is_unchanged(self, tick: int) -> bool:
        """Compare the next values; return False if ``changes`` must be called.

        Args:
            tick: Number of steps of the lane so far.
        """
        self.due = tick + self._interval  # first, because another thread may call mark()
        if self._is_marked:
            return False
        if self._always is not None:
            if not self._always.is_unchanged():
                return False
            if tick < self._next:
                return True
            self._next = tick + VALUES_AT_ONCE
        for turn in self._turns:  # noqa: SIM110 - a generator would cost more than the comparison
            if not next(turn).is_unchanged():
                return False
        return True

    def changes(self) -> tuple[Entry, ...]:
        """Compare all values, return those that changed, and restart the rounds."""
        self._restart()
        always = [] if self._always is None else [self._always]
        groups: Iterable[_Group | _Lengths | _Hooks] = itertools.chain(always, *self._groups)
        return tuple(entry for group in groups for entry in group.changes())

    def differences(self) -> tuple[Entry, ...]:
        """Compare all values and return those that changed, without restarting the rounds."""
        always = [] if self._always is None else [self._always]
        groups: Iterable[_Group | _Lengths | _Hooks] = itertools.chain(always, *self._groups)
        return tuple(entry for group in groups for entry in group.differences())

    def mark(self) -> None:
        """Request a comparison of all values before the next replay."""
        self._is_marked, self.due = True, 0

    def _restart(self) -> None:
        self._turns = [itertools.cycle(groups) for groups in self._groups]
        self._next, self._is_marked = 0, False
        self.due = 0 if self._groups else sys.maxsize


class _Group:
    """Entries that are compared together, by identity and by tensor address.

    Nearly all entries are dictionary items, which are cheap enough to read in a step.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._values = [entry.before for entry in entries]
        self._addresses = [address_of(value) for value in self._values]
        self._prepare()

    def is_unchanged(self) -> bool:
        """Return whether Python would read the same values now."""
        try:
            for holder, key, value in self._items:
                if holder[key] is not value:
                    return not self.changes()
            for entry, value in self._others:
                now = entry.now()
                if now is not value and not is_same(value, now):
                    return False
            return [*map(_data_ptr, self._tensors)] == self._places
        except (LookupError, RuntimeError):  # a removed item, or a tensor whose memory was freed
            return False

    def differences(self) -> list[Entry]:
        """Return the entries whose values have changed."""
        return [
            entry
            for number, entry in enumerate(self._entries)
            if not self._is_same(number, entry.now())
        ]

    def changes(self) -> list[Entry]:
        """Return the entries whose values have changed, and record equal new objects."""
        found = []
        for number, entry in enumerate(self._entries):
            now = entry.now()
            if self._is_same(number, now):
                self._values[number] = now  # an equal plain value, possibly a new object
            else:
                found.append(entry)
        self._prepare()
        return found

    def _is_same(self, number: int, now: Any) -> bool:
        is_there = address_of(now) == self._addresses[number]
        return is_there and is_same(self._values[number], now)

    def _prepare(self) -> None:
        """Group the entries by the way they are read."""
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
    """Containers whose lengths are compared together, to detect new entries."""

    def __init__(self, containers: Sequence[Container], targets: Sequence[Any] = ()) -> None:
        self._containers = containers
        self._targets = targets or [one.sized for one in containers]
        self._lengths: list[int] = []  # empty, so that the first comparison reads all entries

    def is_unchanged(self) -> bool:
        """Return whether the containers have no new entries that the step may read."""
        return [*map(len, self._targets)] == self._lengths or not self.changes()

    def differences(self) -> list[Entry]:
        """Return the new entries that the step may read."""
        return [entry for container in self._containers for entry in container.added()]

    def changes(self) -> list[Entry]:
        """Return the new entries that the step may read, and record the current lengths."""
        found = self.differences()
        self._lengths = [*map(len, self._targets)]
        return found


class _Hooks:
    """Modules whose hooks are counted when torch's count of all hooks has changed.

    New hooks are also among the new entries that ``_Lengths`` of the same modules returns.
    """

    def __init__(self, modules: Sequence[Container]) -> None:
        held = [one.record.target for one in modules]
        self._lengths = _Lengths(modules, [one[name] for one in held for name in _HOOKS])
        self._num_hooks = -1

    def is_unchanged(self) -> bool:
        """Return whether no module has a new hook."""
        num_hooks = RemovableHandle.next_id
        if num_hooks == self._num_hooks:
            return True
        if not self._lengths.is_unchanged():
            return False
        self._num_hooks = num_hooks
        return True

    def differences(self) -> list[Entry]:
        """Return no entries, because ``_Lengths`` returns the new hooks."""
        return []

    def changes(self) -> list[Entry]:
        """Record the current numbers of hooks, and return no entries."""
        self._lengths.changes()
        return []


def _chunks(items: Sequence[_T], at_once: int) -> list[Sequence[_T]]:
    """Split items into chunks of at most ``at_once`` items."""
    return [items[at : at + at_once] for at in range(0, len(items), at_once)]


# -- assignments that torch reports ---------------------------------------------------------------

_WATCHES: weakref.WeakKeyDictionary[Any, weakref.WeakSet[ValueWatch]] = weakref.WeakKeyDictionary()


@functools.cache
def _register_hooks() -> None:
    """Register hooks for assignments to modules, once per process."""
    torch_module.register_module_parameter_registration_hook(_mark_watches)
    torch_module.register_module_buffer_registration_hook(_mark_watches)
    torch_module.register_module_module_registration_hook(_mark_watches)


def _mark_watches(module: torch.nn.Module, _name: str, _value: Any) -> None:
    """Mark the watches of a module; torch calls this function before an assignment."""
    if torch.compiler.is_compiling():  # other code here would cause a graph break
        return
    for watch in _WATCHES.get(module, ()):
        watch.mark()
