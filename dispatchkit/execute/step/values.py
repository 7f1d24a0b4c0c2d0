"""Values and tensors that graphs have built in, compared with what Python would read now.

A graph keeps the address of each weight and the result of each branch of its capture. Replacing a
weight, switching an adapter or changing a field of a configuration has no effect on it. So every
eighth replay of a graph compares eight such values, in turn; and where torch reports that a
parameter, buffer or submodule was assigned, the next replay compares all of them.

How soon a change is seen:

- a parameter, buffer or submodule that is assigned (also by ``load_state_dict(assign=True)``), and
  a value that the step itself was seen to change: before the next result;
- anything else (``.data = ...``, ``swap_tensors``, ``_parameters[...] = ...``, a number, a flag):
  within ``num_values + 2 * VALUES_AT_ONCE`` replays of one graph.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.nn.modules import module as torch_module

from dispatchkit.execute.step.python_state import Entry, PythonState, is_same

#: How many values one comparison takes; a graph's replays make one in each so many.
VALUES_AT_ONCE: Final = 8


class ValueWatch:
    """Watches the values that the graphs of one runner have built in.

    Args:
        state: What the step reaches, recorded when the graphs are made; None to watch nothing.
        always: Entries to compare at every replay: those that the step is known to change.

    Attributes:
        is_due: The next replay of any graph must call ``is_unchanged``; otherwise each graph's
            replays do so now and then.
        num_values: How many values there are.
    """

    is_due: bool

    def __init__(self, state: PythonState | None = None, always: Iterable[Entry] = ()) -> None:
        self._checks = [] if state is None else [_Check(one) for one in state.values_read()]
        self._always = [_Check(entry) for entry in always]
        self.num_values: int = len(self._checks)
        self._rewind()
        for module in () if state is None else state.modules:
            _WATCHES.setdefault(module, weakref.WeakSet()).add(self)
        _listen()

    def is_unchanged(self) -> bool:
        """Compare the next values in turn; False: something changed, ask ``changes``."""
        if self._is_marked:
            return False
        # By map: what a generator expression adds is half of a comparison.
        for always in self._always:
            if not always.is_unchanged():
                return False
        return all(map(_Check.is_unchanged, itertools.islice(self._turn, VALUES_AT_ONCE)))

    def changes(self) -> tuple[Entry, ...]:
        """Compare everything, and return what is different; the turn begins anew."""
        self._rewind()
        return tuple(
            check.entry for check in (*self._always, *self._checks) if not check.is_unchanged()
        )

    def mark(self) -> None:
        """Compare everything before the next replay."""
        self._is_marked = self.is_due = True

    def _rewind(self) -> None:
        self._turn = itertools.cycle(self._checks)
        self._is_marked, self.is_due = False, bool(self._always)


class _Check:
    """Compares one entry: the same object, at the same address if it is a tensor."""

    __slots__ = ("_address", "_get", "_key", "_target", "_value", "entry")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._get, self._target, self._key = entry.reader()
        self._value = entry.before
        self._address = _address_of(self._value)

    def is_unchanged(self) -> bool:
        """Return whether Python would read the same now."""
        now = self._get(self._target, self._key)
        if now is not self._value:
            if not is_same(self._value, now):
                return False
            self._value = now  # an equal number: the next comparison is one of identity again
        return self._address is None or now.data_ptr() == self._address


def _address_of(value: Any) -> int | None:
    """Return where a tensor's data is; None where it has no one place."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.data_ptr()
    except RuntimeError:  # a wrapper without memory of its own
        return None


# -- assignments that torch reports ---------------------------------------------------------------

_WATCHES: weakref.WeakKeyDictionary[Any, weakref.WeakSet[ValueWatch]] = weakref.WeakKeyDictionary()


@functools.cache
def _listen() -> None:
    """Ask torch, once in a process, to report assignments to modules."""
    torch_module.register_module_parameter_registration_hook(_assigned)
    torch_module.register_module_buffer_registration_hook(_assigned)
    torch_module.register_module_module_registration_hook(_assigned)


def _assigned(module: torch.nn.Module, _name: str, _value: Any) -> None:
    """Mark the watches of a module; called before the assignment takes place."""
    if torch.compiler.is_compiling():  # anything else here would break a compiled graph
        return
    for watch in _WATCHES.get(module, ()):
        watch.mark()
