"""Record, compare and restore the Python state that a step reaches.

A graph replays kernels but no Python. A step that assigns an attribute, increments a counter,
appends to a list or rebinds a global therefore computes different results in a replay. A warmup on
dummy rows would also change this state. Before a run, ``PythonState`` records every container that
the step reaches. ``changes`` lists the entries that the run changed, and ``restore`` restores them.

The walk starts at the modules of the step, the object that a method is bound to, closure cells,
globals and attributes of modules that the code names, defaults, and arguments bound by ``partial``.
From each object it follows attributes, slots, items of containers, attributes of script modules,
and names in the methods of user-defined classes. It does not enter code of the standard library,
torch or numpy; of their objects, it records containers, buffers, random generators, and public
attributes with plain values or tensors. State inside other opaque objects, such as
``queue.SimpleQueue`` and locks, in files and in other processes is not recorded.
"""

from __future__ import annotations

import argparse
import dis
import functools
import gc
import itertools
import operator
import pathlib
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import attrs
import torch

from dispatchkit.execute.step.container_kinds import (
    ATTRIBUTES,
    CELL,
    CLASS,
    DATA,
    ENVIRONMENT,
    GLOBALS,
    GRADIENT,
    ITERATOR,
    LIBRARIES,
    LIBRARY_ATTRIBUTES,
    MAPPING,
    MEMBER,
    METHODS,
    MISSING,
    MODULE,
    NUMPY_BITS,
    NUMPY_GENERATOR,
    NUMPY_RANDOM,
    RANDOM,
    SCRIPT,
    SEQUENCE,
    SLOTS,
    TORCH_GENERATOR,
    TUPLE,
    Globals,
    Kind,
    dotted,
    is_plain,
    is_same,
    kind_of,
    mapping,
    place_of,
    read_slots,
)
from dispatchkit.execute.step.modules import codes_of, functions_of

#: Maximum number of recorded containers. The walk is breadth-first and visits objects before
#: classes, so containers near the step are recorded first.
MAX_CONTAINERS: Final = 50_000

_Class = TypeVar("_Class")

#: Marks the end of a view, so that an item that moves from one container to the next is detected.
_END: Final = (object(),)
_BOOKKEEPING_CLASSES: set[type] = set()
_CONTAINERS = (dict, list, set, deque, bytearray)
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
)
_MEMBERS = ("_parameters", "_buffers", "_modules")
_VIEWS: Any = tuple(type(view({})) for view in (dict.keys, dict.values, dict.items))
_CACHED = functools._lru_cache_wrapper
#: Classes of libraries whose objects users fill with attributes of their own.
_ENTERED = (torch.nn.Module, types.SimpleNamespace, argparse.Namespace, threading.local)
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_WRITES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"})


def declare_bookkeeping(cls: type[_Class]) -> type[_Class]:
    """Declare, as a class decorator, that attributes of instances are not state of a step.

    Attributes of instances of the class and its subclasses are neither compared nor restored. Use
    the decorator for callables that are pieces of a runner and keep records of their calls. The
    ``__wrapped__`` attribute of an instance is still part of the step.
    """
    _BOOKKEEPING_CLASSES.add(cls)
    return cls


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
        where = _line_that_writes(self.record.site, self.key)
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


class PythonState:
    """The Python values that a step reaches, recorded when this object is created.

    Args:
        roots: Callables and objects where the walk starts, by their names in reports.
        is_excluded: Function that returns whether the walk skips an object; None skips nothing.

    Attributes:
        modules: Modules that the step reaches.
        tensors: Tensors that the step reaches.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, is_excluded: Callable[[Any], bool] | None = None
    ) -> None:
        self.modules: list[torch.nn.Module] = []
        self._tensors_found: list[_Node] = []
        # The memory of the tensors; held only during a run, so that it can be freed later.
        self._data: list[torch.Tensor] = []
        self._records: list[Record] = []
        self._callables: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._classes: set[type] = set()
        # Classes of objects that the step may call directly, not only through a method.
        self._called: set[type] = set()
        # Classes of the user, by the code that refers to them and may create objects.
        self._created: dict[types.CodeType | None, set[type]] = {}
        self._names: set[str] | None = None
        self._codes: set[types.CodeType | None] = {None}
        self._values_read: tuple[Entry, ...] | None = None
        self._records_of: dict[int, list[Record]] = {}
        # Objects that the step reaches without an attribute (roots, cells, globals, classes), with
        # the code that refers to them.
        self._roots: dict[int, set[types.CodeType | None]] = {}
        # Objects reached through a method or ``partial`` that is an entry, by its identity.
        self._bound: dict[int, list[int]] = {}
        queue: deque[_Node] = deque(_Node(one, name, "", None) for name, one in roots.items())
        # Classes, and values reached only through their code, come last, because the code of a
        # library names most of the library.
        classes: deque[_Node] = deque()
        modules = _ModulesNamed()
        while (queue or classes or modules) and len(self._records) < MAX_CONTAINERS:
            if not queue:
                queue.extend(modules.take(of_class=False))
            if not (queue or classes):
                classes.extend(modules.take(of_class=True))
            is_of_class = not queue
            found = classes.popleft() if is_of_class else queue.popleft()
            if is_plain(found.value):
                continue
            if is_excluded is not None and is_excluded(found.value):
                continue
            self._note_use(found)
            if id(found.value) in self._records_of:
                continue
            records = self._records_of[id(found.value)] = []
            self._kept.append(found.value)  # so that identities are not reused
            if not isinstance(found.value, type):
                self._classes.add(type(found.value))
            if isinstance(found.value, torch.nn.Module):
                self.modules.append(found.value)
            elif isinstance(found.value, torch.Tensor):
                self._tensors_found.append(found)
            for part in _parts(found):
                inside: Iterable[_Node] = (part,) if isinstance(part, _Node) else part.inside()
                if isinstance(part, _Node) and part.is_entry:
                    self._bound.setdefault(id(found.value), []).append(id(part.value))
                if isinstance(part, Record):
                    part.holder, part.is_of_class = found.value, is_of_class
                    records.append(part)
                    self._records.append(part)
                for one in inside:
                    of_class = is_of_class or isinstance(one.value, type)
                    if isinstance(one.value, Globals) and one.value.is_imported:
                        modules.add(one, of_class=of_class)
                    else:
                        (classes if of_class else queue).append(one)
        self._seen = [*itertools.chain.from_iterable(one.seen for one in self._records)]
        self._views = [view for one in self._records for view in one.views]
        self.tensors: list[torch.Tensor] = [one.value for one in self._tensors_found]
        self._places = [*map(place_of, self.tensors)]

    def _note_use(self, found: _Node) -> None:
        """Record how the step may use an object, at each place where the walk finds the object."""
        value, code = found.value, getattr(found.site, "__code__", None)
        if isinstance(value, Globals) and value.is_imported:  # any code may have named it
            code = None
        if not found.is_entry:
            self._roots.setdefault(id(value), set()).add(code)
        if isinstance(value, type):
            if not (found.is_owner or _is_library(value)):
                self._classes.update((value, type(value)))
                if not _is_installed(value):
                    self._created.setdefault(code, set()).add(value)
        elif isinstance(value, _FUNCTIONS):
            if not found.is_method:
                self._callables[id(value)] = value
        elif not found.is_owner:
            self._called.add(type(value))

    @contextmanager
    def data_held(self) -> Iterator[None]:
        """Hold the memory of the tensors, so that a tensor can be restored to it."""
        self._data = [one.detach() for one in self.tensors]
        try:
            yield
        finally:
            self._data = []

    def changes(self) -> tuple[Entry, ...]:
        """Return the changed entries that the step names, nearest to the step first.

        Other entries do not count. The owner of the step may hold objects for other purposes, and
        another thread may change these objects.
        """
        found = tuple(self._changed())
        return self._read_by_step(found) if found else ()

    def values_read(self) -> tuple[Entry, ...]:
        """Return the entries that can change and that the step's code may read."""
        if self._values_read is None:
            reads_gradients = not self._names_read().isdisjoint({"grad", "backward", *_DYNAMIC})
            unread = _UNWATCHED if reads_gradients else (*_UNWATCHED, GRADIENT)
            self._values_read = self._read_by_step(
                Entry(record, key)
                for record in self._records
                if record.kind not in unread
                for key, value in record.saved.items()
                if record.kind is not TUPLE or not is_plain(value)
            )
        return self._values_read

    def iterators_read(self) -> tuple[Entry, ...]:
        """Return the iterators that the step's code names."""
        found = [Entry(one, "") for one in self._records if one.kind is ITERATOR]
        iterators = self._read_by_step(found) if found else ()
        if not iterators or self._names_read() & _DYNAMIC:
            return iterators
        # Other methods of the step's owner may advance iterators of their own.
        reached = self._reached({one for one, codes in self._roots.items() if codes & self._codes})
        return tuple(one for one in iterators if id(one.record.holder) in reached)

    def containers_read(self) -> tuple[Container, ...]:
        """Return the containers that can grow and that the step's code may read."""
        names = self._names_read()
        is_any = bool(names & _DYNAMIC)
        reached = self._reached()
        return tuple(
            Container(record, None if is_any or record.kind not in _NAMED else names)
            for record in self._records
            if record.can_grow and (is_any or id(record.holder) in reached)
        )

    def is_current(self) -> bool:
        """Return whether no entry has changed."""
        return not any(True for _ in self._changed())

    def _changed(self) -> Iterator[Entry]:
        """Yield all changed entries, whether or not the step reads them."""
        now = [*itertools.chain.from_iterable(self._views)]
        is_seen = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        for record in self._records:
            if not (is_seen and record.views):
                yield from record.changes()
        for number, (tensor, place) in enumerate(zip(self.tensors, self._places, strict=True)):
            if place_of(tensor) != place:
                record = Record(DATA, self._tensors_found[number])
                record.saved = {"data": self._data[number] if self._data else MISSING}
                yield Entry(record, "data")

    def _read_by_step(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Return the entries that the code of the step names.

        The names in a function's code lead to further functions. Methods that ``forward`` does not
        name, directly or indirectly, are excluded, as is everything that only these methods read.
        For example, the loop of a server is excluded.
        """
        names = self._names_read()
        if names & _DYNAMIC:  # the code may access any attribute by a computed name
            return tuple(entries)
        reached = self._reached()
        return tuple(
            entry
            for entry in entries
            if id(entry.record.holder) in reached and _is_named(entry.record, entry.key, names)
        )

    def _reached(self, roots: Iterable[int] | None = None) -> set[int]:
        """Return the identities of objects that names in the step's code reach from the roots."""
        names = self._names_read()
        reached = set(self._roots if roots is None else roots)
        waiting = list(reached)
        while waiting:
            holder = waiting.pop()
            found = list(self._bound.get(holder, ()))
            for record in self._records_of.get(holder, ()):
                found += (id(v) for key, v in record.saved.items() if _is_named(record, key, names))
            for one in found:
                if one in self._records_of and one not in reached:
                    reached.add(one)
                    waiting.append(one)
        return reached

    def _names_read(self) -> set[str]:
        if self._names is None:
            self._names = self._find_names()
        return self._names

    def _find_names(self) -> set[str]:
        codes: set[types.CodeType] = set()
        methods: dict[str, set[types.CodeType]] = {}
        for cls in self._classes:
            for name, fn in _methods(cls):
                methods.setdefault(name, set()).add(fn.__code__)
                if name in _OPERATORS and not _is_library(fn):
                    codes.add(fn.__code__)
        # A callable in a closure, a global or an attribute may be called under any name.
        codes |= {fn.__code__ for one in self._callables.values() for fn in functions_of(one)}
        for cls in self._called:
            codes |= {fn.__code__ for name, fn in _methods(cls) if name in _CALLS}
        found = set(_ALWAYS_READ)
        waiting = list(found)
        while codes or waiting:
            new = codes or methods.pop(waiting.pop(), set())
            codes = set()
            for code in new - self._codes:
                self._codes.add(code)
                names = _names_in(code)
                waiting.extend(names - found)
                found |= names
                for cls in self._created.get(code, ()):
                    if cls.__name__ in _names_called(code):
                        codes |= _constructors(cls)
        return found | _CALLS


def restore(entries: Iterable[Entry]) -> None:
    """Restore entries in reverse order, without replacing containers that other code may hold."""
    records: dict[int, Record] = {}
    for entry in reversed(tuple(entries)):
        entry.restore()
        records[id(entry.record)] = entry.record
    for record in records.values():
        record.restore_order()


# -- records -------------------------------------------------------------------------------------


@attrs.frozen
class _Node:
    """An object found in the walk.

    Attributes:
        value: The object.
        path: Expression that reaches the object.
        owner: Name of the class or function that refers to the object, for messages.
        site: The class or function itself; messages name the line in its code that writes an entry.
        is_entry: Whether the object is an entry of a container, rather than a root or an object
            that a function names.
        is_installed: Whether the object was found in the code of an installed package. Only builtin
            containers in installed code are followed, because a package names most of its own code.
        is_method: Whether the object is a function defined in a class.
        is_owner: Whether the object was found because a method is bound to it or because it is the
            class of an object, so that the step need not call it.
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
        views: Iterables of objects whose identities show whether the entries are unchanged. Each is
            followed by an end marker, so that views of several containers can be chained.
        seen: Objects that ``views`` yielded when the contents were recorded.
        holder: Object that the container belongs to; may be the container itself.
        is_of_class: Whether the container is reached only through classes and their code.
    """

    def __init__(self, kind: Kind, found: _Node) -> None:
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

    def inside(self) -> Iterator[_Node]:
        """Yield the values of entries that the walk must visit."""
        if not self.kind.is_entered:
            return
        for key, value in self.saved.items():
            if not is_plain(value) and not (self._is_installed and type(value) not in _CONTAINERS):
                path = self.kind.join(self.path, key)
                yield _Node(value, path, self.owner, self.site, True, self._is_installed)

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


def _is_named(record: Record, key: Any, names: set[str]) -> bool:
    return record.kind not in _NAMED or key in names


#: Methods that operators and statements call, so that no code needs to name them.
_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        "getattr getattribute getitem missing contains iter next len bool enter exit get set "
        "index int float hash eq ne lt le gt ge neg pos abs invert add sub mul matmul truediv "
        "floordiv mod pow radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow iadd isub imul "
        "imatmul itruediv and or xor lshift rshift torch_function array class_getitem"
    ).split()
)
#: Methods that run when an object is called.
_CALLS = frozenset({"forward", "__call__"})
#: Methods that run when a class is called.
_CREATES = frozenset({"__new__", "__init__", "__post_init__", "__attrs_post_init__"})
#: Attributes that calling a module reads, although the module's class does not name them.
_ALWAYS_READ = frozenset({"training"}) | {
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, OrderedDict)
}
#: Names that show that code accesses attributes by computed names.
_DYNAMIC = frozenset({"setattr", "__setattr__", "__dict__", "vars"})
#: Kinds whose entries are reached by attribute name.
_NAMED = (ATTRIBUTES, LIBRARY_ATTRIBUTES, MODULE, SLOTS, CLASS, METHODS)
#: Kinds of containers that can grow, so that their length changes.
_GROWING = (MAPPING, SEQUENCE, ATTRIBUTES, LIBRARY_ATTRIBUTES, MEMBER, MODULE)
#: Length functions that do not run code of a subclass.
_LENGTHS = (dict.__len__, OrderedDict.__len__, list.__len__, deque.__len__)
#: Kinds whose entries may change between steps without affecting graphs: a step consumes the state
#: of iterators and generators, and other code changes variables that the step does not read.
_UNWATCHED = (
    ITERATOR,
    RANDOM,
    NUMPY_BITS,
    NUMPY_GENERATOR,
    NUMPY_RANDOM,
    TORCH_GENERATOR,
    ENVIRONMENT,
)
#: The state of modules of libraries.
_STATE_OF_LIBRARIES: Mapping[str, Callable[[Any], Any]] = {
    "random": lambda module: module._inst,
    "os": lambda module: module.environ,
}


# -- the walk ------------------------------------------------------------------------------------


def _parts(found: _Node) -> Iterator[Record | _Node]:
    """Yield the records of an object, and other objects that it refers to."""
    value = found.value
    own = found if found.owner else attrs.evolve(found, owner=type(value).__qualname__)
    if isinstance(value, types.ModuleType):
        for path, one in _in_modules((value,), _names_at(found.site)):
            yield _Node(one, path, own.owner, found.site, is_installed=found.is_installed)
        return
    if isinstance(value, type):
        yield from _of_class(value)
        return
    if isinstance(value, types.CellType):
        yield Record(CELL, own)
        return
    if isinstance(value, Globals):
        yield Record(GLOBALS, own)
        return
    if isinstance(value, _FUNCTIONS):
        yield from _of_function(value, found)
    if (inner := _inside(value)) is not None:
        yield _Node(inner, found.path, "", None, found.is_entry)
    kind = kind_of(value)
    if kind is not None:
        yield Record(kind, own)
    if not isinstance(value, types.FunctionType):
        yield from _of_attributes(value, found.path)


def _inside(value: Any) -> Any:
    """Return the object that a view or a cached function of a library refers to."""
    if isinstance(value, _VIEWS):
        value = value.mapping
    if isinstance(value, types.MappingProxyType):
        return gc.get_referents(value)[0]
    return value.__wrapped__ if isinstance(value, _CACHED) else None


def _of_attributes(value: Any, path: str) -> Iterator[Record | _Node]:
    """Yield the attributes, slots and class of an object.

    Library objects other than torch modules and attribute containers are not entered, because they
    have internal state, such as the cache of a logger. Runners and objects declared as bookkeeping
    are not state of the step.
    """
    cls: Any = type(value)
    owner = cls.__qualname__
    if _is_internal(cls) or not _BOOKKEEPING_CLASSES.isdisjoint(cls.__mro__):
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield _Node(wrapped, path, "", None)
        return
    if _is_library(cls) and not isinstance(value, _ENTERED):
        if isinstance(held := getattr(value, "__dict__", None), dict):
            yield Record(LIBRARY_ATTRIBUTES, _Node(held, path, owner, cls))
        return
    if isinstance(value, torch.jit.ScriptModule) and hasattr(value, "_c"):
        for name, module in value.named_modules():
            inner = dotted(path, name) if name else path
            yield Record(SCRIPT, _Node(module, inner, type(module).__qualname__, None))
        return
    held = getattr(value, "__dict__", None)
    if isinstance(value, torch.nn.Module):
        yield Record(MODULE, _Node(held, path, owner, cls))
        for name in _MEMBERS:
            yield Record(MEMBER, _Node(vars(value)[name], path, owner, cls))
    elif isinstance(held, dict):
        yield Record(ATTRIBUTES, _Node(held, path, owner, cls))
    if not _is_library(cls):
        if read_slots(value):
            yield Record(SLOTS, _Node(value, path, owner, cls))
        yield _Node(cls, owner, "", cls, is_owner=True)


def _of_class(cls: type) -> Iterator[Record | _Node]:
    """Yield the data attributes, bases and methods of a user-defined class."""
    if _is_library(cls) or _is_own_module(cls.__module__):
        return
    name, installed = cls.__qualname__, _is_installed(cls)
    yield Record(CLASS, _Node(cls, name, f"class {name}", cls, is_installed=installed))
    yield Record(METHODS, _Node(cls, name, f"class {name}", cls, is_installed=installed))
    if not _is_library(type(cls)):
        yield _Node(type(cls), type(cls).__qualname__, "", type(cls), is_owner=True)
    for base in cls.__bases__:
        yield _Node(base, base.__qualname__, "", base, is_owner=True)
    for _, fn in _own_functions(cls):
        yield _Node(fn, fn.__qualname__, "", fn, is_method=True)
    for key, member in vars(cls).items():
        is_bound = isinstance(member, types.MethodType)
        if is_bound or (hasattr(type(member), "__get__") and not _is_library(type(member))):
            yield _Node(member, f"{name}.{key}", f"class {name}", cls, is_installed=installed)


def _of_function(fn: Any, found: _Node) -> Iterator[Record | _Node]:
    """Yield the bound objects, cells, globals and defaults of a function."""
    owner = getattr(fn, "__self__", None)
    yield _Node(owner, found.path, "", None, found.is_entry, is_owner=True)
    if isinstance(fn, functools.partial):
        site = next(functions_of(fn), None)
        for one in (fn.func, *fn.args, *fn.keywords.values()):
            yield _Node(one, found.path, "", site, found.is_entry)
    for plain in functions_of(fn):
        if _is_library(plain):
            continue
        owner = f"function {plain.__code__.co_qualname}"
        names = frozenset(name for code in codes_of(plain.__code__) for name in code.co_names)
        named = _names_in(plain.__code__)
        installed = _is_installed(plain)
        if not installed:
            yield Record(ATTRIBUTES, _Node(vars(plain), plain.__name__, owner, plain))
        if not _is_own_module(plain.__module__ or ""):  # globals would reach all of dispatchkit
            globals_named = Globals(plain.__globals__, names)
            yield _Node(globals_named, "", owner, plain, is_installed=installed)
            held = plain.__globals__
            has_imports = _has_imports(plain.__code__)
            imported = _modules_at(held, names) if has_imports else map(held.get, names)
            for path, one in _in_modules(imported, named):
                yield _Node(one, path, owner, plain, is_installed=installed)
            for default in (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values()):
                yield _Node(default, f"a default of {plain.__code__.co_qualname}", owner, plain)
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            if name == "__class__":  # of super(); the step need not create objects of the class
                yield _Node(_class_in(cell), name, owner, plain, is_owner=True)
            else:
                yield _Node(cell, name, owner, plain)


def _class_in(cell: types.CellType) -> type | None:
    try:
        return cell.cell_contents  # type: ignore[no-any-return]
    except ValueError:  # the class is being created
        return None


class _ModulesNamed:
    """Modules that functions name, with all of the names, so that each is recorded only once."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bool], tuple[_Node, set[str]]] = {}
        self._taken: dict[tuple[int, bool], set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, found: _Node, *, of_class: bool) -> None:
        """Add the names that one function uses of a module."""
        key = id(found.value.values), of_class
        if new := found.value.names - self._taken.setdefault(key, set()):
            self._waiting.setdefault(key, (found, set()))[1].update(new)

    def take(self, *, of_class: bool) -> list[_Node]:
        """Return the modules with the names that were not returned before, and remove them."""
        taken = []
        for key in [key for key in self._waiting if key[1] == of_class]:
            found, names = self._waiting.pop(key)
            self._taken[key] |= names
            value = attrs.evolve(found.value, names=frozenset(names))
            taken.append(attrs.evolve(found, value=value))
        return taken


def _in_modules(modules: Iterable[Any], names: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the state of Python modules, as paths and objects.

    Args:
        modules: Modules that a function or an object refers to; other objects are skipped.
        names: Names in the code that reads the modules, including those that it imports.
    """
    waiting = [*modules]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if not isinstance(module, types.ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        path = module.__name__
        if path in _STATE_OF_LIBRARIES:
            yield path, _STATE_OF_LIBRARIES[path](module)
        elif path.partition(".")[0] == "numpy":
            yield "numpy.random", sys.modules["numpy"].random.mtrand._rand
        elif not _is_library_module(path) and not _is_own_module(path):
            values = vars(module)
            yield path, Globals(values, frozenset(names), is_imported=True)
            waiting.extend(values[name] for name in names & values.keys())


def _modules_at(values: Mapping[str, Any], names: Set[str]) -> Iterator[Any]:
    """Yield the modules that names in a function refer to, among other objects.

    Args:
        values: Globals of the function.
        names: Names in the code of the function, including those in its own import statements.
    """
    package = values.get("__package__") or ""
    for name in names:
        yield values.get(name, sys.modules.get(name))
        parent = package
        while parent:  # relative to the package or to one above it
            yield sys.modules.get(f"{parent}.{name}")
            parent = parent.rpartition(".")[0]


@functools.lru_cache(maxsize=4096)
def _has_imports(code: types.CodeType) -> bool:
    """Return whether a code object contains import statements."""
    # Every second byte is an operation. Disassembling all code would take far longer.
    return any(_IMPORT_NAME in part.co_code[::2] for part in codes_of(code))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names in a code object, including strings as in ``setattr(self, "calls", 1)``."""
    found: set[str] = set()
    for part in codes_of(code):
        found.update(part.co_names)
        found.update(one for one in part.co_consts if isinstance(one, str) and one.isidentifier())
    return frozenset(found)


def _names_at(site: Any) -> frozenset[str]:
    """Return the names in the code of a class or function."""
    if isinstance(site, type):
        return frozenset().union(*(_names_in(fn.__code__) for _, fn in _methods(site)))
    return _names_in(site.__code__) if isinstance(site, types.FunctionType) else frozenset()


def _own_functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions in a class by the names of their attributes, without those of bases."""
    for name, member in vars(cls).items():
        for fn in _functions_in(member):
            if isinstance(fn, types.FunctionType):
                yield name, fn


def _constructors(cls: type) -> set[types.CodeType]:
    """Return the code that runs when a class of the user is called."""
    functions = [
        one for base in cls.__mro__ if not _is_library(base) for one in _own_functions(base)
    ]
    return {fn.__code__ for name, fn in functions if name in _CREATES}


@functools.lru_cache(maxsize=4096)
def _names_called(code: types.CodeType) -> frozenset[str]:
    """Return the names whose values a code object calls, as in ``A()`` and ``module.A()``."""
    found = set()
    for part in codes_of(code):
        last = ("", "")
        for one in dis.get_instructions(part):
            # A call is prepared by a null next to the function, or by loading a method.
            if "NULL" in one.argrepr or one.opname == "LOAD_METHOD" or last[0] == "PUSH_NULL":
                found.add(one.argval)
            elif one.opname == "PUSH_NULL":
                found.add(last[1])
            last = (one.opname, one.argval)
    return frozenset(one for one in found if isinstance(one, str))


def _functions_in(member: Any) -> tuple[Any, ...]:
    """Return the functions that an attribute of a class runs."""
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    if isinstance(member, (classmethod, staticmethod)):
        return (member.__func__,)
    if isinstance(member, functools.singledispatchmethod):
        return member.func, member.dispatcher
    if isinstance(member, (functools.partialmethod, functools.cached_property)):
        return (member.func,)
    return (member.__wrapped__,) if isinstance(member, _CACHED) else (member,)


@functools.lru_cache(maxsize=4096)
def _methods(cls: type) -> tuple[tuple[str, types.FunctionType], ...]:
    """Return the methods of a class and its bases that a step may run; excludes ``__init__``."""
    return tuple(
        (name, fn)
        for base in cls.__mro__
        if base is not torch.nn.Module
        for name, fn in _own_functions(base)
        if name != "__init__"
    )


@functools.lru_cache(maxsize=4096)
def _is_internal(cls: Any) -> bool:
    """Return whether a class or one of its bases belongs to dispatchkit or its plugins.

    Runners, backends and decoders contain bookkeeping that steps do not read.
    """
    return any(_is_own_module(base.__module__) for base in cls.__mro__)


@functools.cache
def _is_own_module(name: str) -> bool:
    """Return whether a module belongs to dispatchkit or its plugins.

    The state of these modules is not state of a step. The class that owns a step often names
    dispatchkit to create runners, and the walk would then reach the whole package. The models of
    the demo and the test kits count as user code.
    """
    top, _, rest = name.partition(".")
    if top.startswith("dispatchkit_"):
        return True
    return top == "dispatchkit" and rest.partition(".")[0] not in ("demo", "testing")


@functools.cache
def _is_library_module(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def _is_library(thing: Any) -> bool:
    """Return whether a class or function belongs to the standard library, torch or numpy."""
    return _is_library_module(getattr(thing, "__module__", None) or "")


def _is_installed(thing: Any) -> bool:
    """Return whether a class or function belongs to an installed package."""
    return _is_installed_module(thing.__module__ or "")


@functools.cache
def _is_installed_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & set(pathlib.Path(file).parts))


def _line_that_writes(site: Any, name: Any) -> str:
    """Return ``file:line`` where a class or function writes a name; empty if unknown."""
    if isinstance(site, type):
        members = [
            one for base in site.__mro__ if not _is_library(base) for one in vars(base).values()
        ]
        codes = [one.__code__ for one in members if isinstance(one, types.FunctionType)]
        codes.sort(key=lambda code: code.co_name == "__init__")  # __init__ last: calls skip it
    elif isinstance(site, types.FunctionType):
        codes = list(codes_of(site.__code__))
    else:
        return ""
    for code in codes:
        for one in dis.get_instructions(code):
            if one.opname in _WRITES and one.argval == name and one.positions is not None:
                return f"{code.co_filename}:{one.positions.lineno}"
    return f"{codes[0].co_filename}:{codes[0].co_firstlineno}" if codes else ""
