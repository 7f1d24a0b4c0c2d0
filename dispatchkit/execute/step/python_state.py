"""Record, compare and restore the Python state that a step reaches.

A graph replays kernels but no Python. A step that assigns an attribute, increments a counter,
appends to a list or rebinds a global therefore computes different results in a replay. A warmup on
dummy rows would also change this state. Before a run, ``PythonState`` records every container that
the step reaches. ``changes`` lists the entries that the run changed, and ``restore`` restores them.

The walk starts at the modules of the step, the object that a method is bound to, closure cells,
globals that the code names, defaults, and arguments bound by ``partial``. From each object it
follows attributes, slots, items of builtin containers, attributes of script modules, and names in
the methods of user-defined classes. It does not enter code of the standard library, torch or numpy.
State inside opaque C++ objects, files and other processes is not recorded.
"""

from __future__ import annotations

import array
import dis
import functools
import gc
import itertools
import operator
import pathlib
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Final, TypeVar

import attrs
import torch

from dispatchkit.execute.step.modules import codes_of, functions_of

#: Maximum number of recorded containers. The walk is breadth-first and visits objects before
#: classes, so containers near the step are recorded first.
MAX_CONTAINERS: Final = 50_000

_Class = TypeVar("_Class")

MISSING: Final = object()
"""Marker for a missing entry."""

#: Marks the end of a view, so that an item that moves from one container to the next is detected.
_END: Final = (object(),)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Packages whose globals and class attributes do not count as state of a step.
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "attr", "attrs"}
_BOOKKEEPING_CLASSES: set[type] = set()
_CONTAINERS = (dict, list, set, deque, bytearray)
#: Attributes that every module has besides its members, including hooks.
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - {"training"}
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
)
_MEMBERS = ("_parameters", "_buffers", "_modules")
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
        if self.record.kind is _GLOBALS:
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
        self.tensors: list[torch.Tensor] = []
        self._records: list[Record] = []
        self._callables: list[Any] = []
        self._kept: list[Any] = []
        self._classes: set[type] = set()
        # Classes of objects that the step may call directly, not only through a method.
        self._called: set[type] = set()
        self._names: set[str] | None = None
        self._values_read: tuple[Entry, ...] | None = None
        self._records_of: dict[int, list[Record]] = {}
        # Objects that the step reaches without an attribute: roots, cells, globals, classes.
        self._roots: set[int] = set()
        queue: deque[_Node] = deque(_Node(one, name, "", None) for name, one in roots.items())
        # Classes, and values reached only through their code, come last, because the code of a
        # library names most of the library.
        classes: deque[_Node] = deque()
        while (queue or classes) and len(self._records) < MAX_CONTAINERS:
            is_of_class = not queue
            found = classes.popleft() if is_of_class else queue.popleft()
            if is_plain(found.value):
                continue
            if is_excluded is not None and is_excluded(found.value):
                continue
            if not found.is_entry:
                self._roots.add(id(found.value))
            if id(found.value) in self._records_of:
                continue
            records = self._records_of[id(found.value)] = []
            self._kept.append(found.value)  # so that identities are not reused
            if not isinstance(found.value, type):
                self._classes.add(type(found.value))
                if not found.is_owner:
                    self._called.add(type(found.value))
            if isinstance(found.value, torch.nn.Module):
                self.modules.append(found.value)
            elif isinstance(found.value, torch.Tensor):
                self.tensors.append(found.value)
            elif isinstance(found.value, _FUNCTIONS) and not found.is_method:
                self._callables.append(found.value)
            for part in _parts(found):
                inside: Iterable[_Node] = (part,) if isinstance(part, _Node) else part.inside()
                if isinstance(part, Record):
                    part.holder, part.is_of_class = found.value, is_of_class
                    records.append(part)
                    self._records.append(part)
                for one in inside:
                    of_class = is_of_class or isinstance(one.value, type)
                    (classes if of_class else queue).append(one)
        self._seen = [*itertools.chain.from_iterable(one.seen for one in self._records)]
        self._views = [view for one in self._records for view in one.views]

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
            self._values_read = self._read_by_step(
                Entry(record, key)
                for record in self._records
                if record.kind is not _GRADIENT or reads_gradients
                for key, value in record.saved.items()
                if record.kind is not _TUPLE or not is_plain(value)
            )
        return self._values_read

    def containers_read(self) -> tuple[Container, ...]:
        """Return the containers that can grow and that the step's code may read."""
        names = self._names_read()
        is_any = bool(names & _DYNAMIC)
        reached = self._reached()
        return tuple(
            Container(record, None if is_any or record.kind not in _NAMED else names)
            for record in self._records
            if record.kind in _GROWING
            and type(record.target).__len__ in _LENGTHS
            and (is_any or id(record.holder) in reached)
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

    def _reached(self) -> set[int]:
        """Return the identities of objects that the step reaches through names in its code."""
        names = self._names_read()
        reached = set(self._roots)
        waiting = list(reached)
        while waiting:
            for record in self._records_of.get(waiting.pop(), ()):
                for key, value in record.saved.items():
                    one = id(value)
                    if one in self._records_of and one not in reached:
                        if _is_named(record, key, names):
                            reached.add(one)
                            waiting.append(one)
        return reached

    def _names_read(self) -> set[str]:
        if self._names is None:
            self._names = self._find_names()
        return self._names

    def _find_names(self) -> set[str]:
        methods: dict[str, set[types.CodeType]] = {}
        for cls in self._classes:
            for fn in _methods(cls):
                methods.setdefault(fn.__name__, set()).add(fn.__code__)
        # A callable in a closure, a global or an attribute may be called under any name.
        codes = {fn.__code__ for one in self._callables for fn in functions_of(one)}
        for cls in self._called:
            codes |= {fn.__code__ for fn in _methods(cls) if fn.__name__ in _CALLS}
        found = set(_ALWAYS_READ)
        waiting = list(found)
        while codes or waiting:
            for code in codes or methods.pop(waiting.pop(), set()):
                names = _names_in(code)
                waiting.extend(names - found)
                found |= names
            codes = set()
        return found


def restore(entries: Iterable[Entry]) -> None:
    """Restore entries in reverse order, without replacing containers that other code may hold."""
    for entry in reversed(tuple(entries)):
        entry.restore()


def is_same(before: Any, after: Any) -> bool:
    """Return whether two values are the same object or equal plain values."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, float):
        return bool(before.hex() == after.hex())  # NaN equals NaN, and 0.0 differs from -0.0
    if isinstance(before, (*_PLAIN, _Address, _ByValue, _Contents)):
        return bool(before == after)
    if isinstance(before, types.MethodType):
        return before.__func__ is after.__func__ and before.__self__ is after.__self__
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    return False


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
        is_owner: Whether the object was found because a method is bound to it, so that the step
            need not call the object itself.
    """

    value: Any
    path: str
    owner: str
    site: Any
    is_entry: bool = False
    is_installed: bool = False
    is_method: bool = False
    is_owner: bool = False


@attrs.frozen(eq=False)
class Kind:
    """Functions that read and write containers of one kind.

    Attributes:
        read: Function that returns the entries of a container by key.
        write: Function that sets an entry, or removes it for ``MISSING``; None if entries cannot be
            restored.
        join: Function that returns the path of an entry, given the container's path and the key.
        is_entered: Whether the contents of entries are recorded too.
        get: Function that returns one entry by key, or ``MISSING``; None if reading all entries is
            just as fast.
        views: Function that returns reusable iterables. If they yield the same objects as before,
            the entries are unchanged. If there are no iterables, the entries must be read.
    """

    read: Callable[[Any], Mapping[Any, Any]]
    write: Callable[[Any, Any, Any], None] | None
    join: Callable[[str, Any], str]
    is_entered: bool = True
    get: Callable[[Any, Any], Any] | None = None
    views: Callable[[Any], tuple[Iterable[Any], ...]] = lambda _: ()


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

    def added(self, now: Mapping[Any, Any]) -> Iterator[Entry]:
        """Yield the new entries."""
        if now.keys() != self.saved.keys():
            for key in now:
                if key not in self.saved:
                    yield Entry(self, key)


def _dotted(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _indexed(path: str, key: Any) -> str:
    return f"{path}[{key!r:.40}]"


def _itself(path: str, _key: Any) -> str:
    return path


def _by_name(_path: str, key: Any) -> str:
    return str(key)


def _set_item(target: Any, key: Any, value: Any) -> None:
    if value is not MISSING:
        target[key] = value
    elif dict.__contains__(target, key):
        del target[key]


def _set_in_module(target: Any, key: str, value: Any) -> None:
    """Set or remove an attribute of a module; new hooks are cleared in place."""
    if value is MISSING and key in _BOOKKEEPING:
        target[key].clear()
    else:
        _set_item(target, key, value)


def _set_at(target: Any, index: int, value: Any) -> None:
    """Set or remove an item; entries are restored in reverse order, so indices stay valid."""
    if value is MISSING:
        del target[index]
    elif index < len(target):
        target[index] = value
    else:
        target.extend([None] * (index - len(target)))
        target.append(value)


def _set_attribute(target: Any, name: str, value: Any) -> None:
    # Bypasses the __setattr__ of frozen classes.
    if value is MISSING:
        object.__delattr__(target, name)
    else:
        object.__setattr__(target, name, value)


def _set_on_class(target: type, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(target, name)
    else:
        setattr(target, name, value)


def _read_slots(target: Any) -> dict[str, Any]:
    found = {}
    for base in type(target).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(target, name):
                found[name] = getattr(target, name)
    return found


def _read_class(target: type) -> dict[str, Any]:
    """Return the data attributes of a class, without nested classes, descriptors and dunders."""
    return {
        name: value
        for name, value in vars(target).items()
        if not name.startswith(("__", "_abc_"))
        and not isinstance(value, type)
        and not hasattr(type(value), "__get__")
    }


def _read_cell(target: types.CellType) -> dict[str, Any]:
    try:
        return {"": target.cell_contents}
    except ValueError:  # an empty cell
        return {}


def _get_cell(target: types.CellType, _key: Any) -> Any:
    try:
        return target.cell_contents
    except ValueError:
        return MISSING


def _write_cell(target: types.CellType, _key: Any, value: Any) -> None:
    if value is MISSING:
        del target.cell_contents
    else:
        target.cell_contents = value


@attrs.frozen
class _Globals:
    """The globals that a function names."""

    values: dict[str, Any]
    names: frozenset[str]

    def read(self) -> dict[str, Any]:
        return {
            name: self.values[name]
            for name in self.names & self.values.keys()
            if not isinstance(self.values[name], types.ModuleType) or self.values[name] is random
        }


class _Address:
    """A tensor of a script module, compared by memory because each read returns a new object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._place = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Address) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)


class _ByValue:
    """A container of a script module, compared by value because each read returns a copy."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._content = _content_of(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and is_same(self._content, other._content)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _content_of(value: Any) -> Any:
    """Replace containers with tuples, and tensors with their addresses."""
    if isinstance(value, torch.Tensor):
        return _Address(value)
    if isinstance(value, dict):
        return tuple((_content_of(key), _content_of(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_content_of, value))
    return value


def _readable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Address(value)
    return _ByValue(value) if isinstance(value, (dict, list, tuple)) else value


def _read_script(target: Any) -> dict[str, Any]:
    read = target._c.getattr
    known: Any = getattr(target, "_concrete_type", None)
    if known is None:  # a frozen module
        known = torch._C.ConcreteModuleType.from_jit_type(target._c._type())
    return {name: _readable(read(name)) for name in known.get_attributes()}


def _write_script(target: Any, name: str, value: Any) -> None:
    if isinstance(value, _Address):
        value = value.tensor
    elif isinstance(value, _ByValue):
        value = value.value
    target._c.setattr(name, value)


def _read_module(held: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are not bookkeeping, and its hooks."""
    return {name: one for name, one in held.items() if name not in _BOOKKEEPING or _is_hooks(one)}


def _is_hooks(value: Any) -> bool:
    return isinstance(value, OrderedDict) and bool(value)


def _get_item(target: Any, key: Any) -> Any:
    return dict.get(target, key, MISSING)


def _get_at(target: Any, index: int) -> Any:
    return target[index] if index < len(target) else MISSING


def _get_attribute(target: Any, name: str) -> Any:
    return getattr(target, name, MISSING)


@attrs.frozen
class _LazyMap:
    """An iterable that maps a function over its arguments anew in each iteration."""

    get: Callable[..., Any]
    arguments: tuple[Iterable[Any], ...]

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, *self.arguments)


def _read_dict(target: Any) -> dict[Any, Any]:
    # Bypasses the item access of subclasses, which may create a new object in each read.
    return dict.copy(target) if type(target) is dict else dict(dict.items(target))


def _read_sequence(target: Any) -> dict[int, Any]:
    base: Any = next(one for one in (list, deque, tuple, frozenset) if isinstance(target, one))
    return dict(enumerate(base.__iter__(target)))


def _views_of_dict(target: Any) -> tuple[Iterable[Any], ...]:
    # Bypasses the item access of subclasses.
    return dict.keys(target), dict.values(target)


def _views_of_module(held: dict[str, Any]) -> tuple[Iterable[Any], ...]:
    hooks = [one for name, one in held.items() if name in _BOOKKEEPING and type(one) is OrderedDict]
    return *_views_of_dict(held), *hooks


def _views_of_sequence(target: Any) -> tuple[Iterable[Any], ...]:
    return (target,) if type(target) in (list, deque) else ()


def _views_of_class(target: type) -> tuple[Iterable[Any], ...]:
    return vars(target).keys(), vars(target).values()


def _views_of_globals(target: _Globals) -> tuple[Iterable[Any], ...]:
    return (_LazyMap(target.values.get, (target.names, itertools.repeat(MISSING))),)


_MAPPING = Kind(_read_dict, _set_item, _indexed, get=_get_item, views=_views_of_dict)
_ATTRIBUTES = Kind(lambda one: one, _set_item, _dotted, get=_get_item, views=_views_of_dict)
#: Parameters, buffers or submodules of a module.
_MEMBER = Kind(lambda one: one, _set_item, _dotted, get=_get_item, views=_views_of_dict)
_MODULE = Kind(_read_module, _set_in_module, _dotted, get=_get_item, views=_views_of_module)
_SEQUENCE = Kind(_read_sequence, _set_at, _indexed, get=_get_at, views=_views_of_sequence)
# A tuple is immutable, so its items need no comparison.
_TUPLE = Kind(_read_sequence, None, _indexed, views=lambda _: ((),))
_SLOTS = Kind(_read_slots, _set_attribute, _dotted, get=_get_attribute)
_CLASS = Kind(_read_class, _set_on_class, _dotted, get=_get_attribute, views=_views_of_class)
_CELL = Kind(
    _read_cell,
    _write_cell,
    _itself,
    get=_get_cell,
    views=lambda one: (_LazyMap(_get_cell, ((one,), ("",))),),
)
_GLOBALS = Kind(
    _Globals.read,
    lambda one, key, value: _set_item(one.values, key, value),
    _by_name,
    views=_views_of_globals,
)
_SCRIPT = Kind(_read_script, _write_script, _dotted, is_entered=False)


def _is_named(record: Record, key: Any, names: set[str]) -> bool:
    return record.kind not in _NAMED or key in names


#: Methods that run when an object is called.
_CALLS = frozenset({"forward", "__call__"})
#: Attributes that calling a module reads, although the module's class does not name them.
_ALWAYS_READ = frozenset({"training"}) | {
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, OrderedDict)
}
#: Names that show that code accesses attributes by computed names.
_DYNAMIC = frozenset({"setattr", "__setattr__", "__dict__", "vars"})
#: Kinds whose entries are reached by attribute name.
_NAMED = (_ATTRIBUTES, _MODULE, _SLOTS, _CLASS)
#: Kinds of containers that can grow, so that their length changes.
_GROWING = (_MAPPING, _SEQUENCE, _ATTRIBUTES, _MEMBER, _MODULE)
#: Length functions that do not run code of a subclass.
_LENGTHS = (dict.__len__, OrderedDict.__len__, list.__len__, deque.__len__)


class _Contents:
    """The contents of an object, compared by value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Contents) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]  # the contents may be unhashable


def _whole(read: Callable[[Any], Any], write: Callable[[Any, Any], Any] | None) -> Kind:
    """Return a kind whose objects are compared and restored as a whole."""
    put = None if write is None else (lambda one, _key, saved: write(one, saved.value))
    return Kind(lambda one: {"": _Contents(read(one))}, put, _itself, is_entered=False)


def _put_set(target: set[Any], value: frozenset[Any]) -> None:
    target.clear()
    target.update(value)


def _put_bytes(target: Any, value: bytes) -> None:
    target[:] = value if isinstance(target, bytearray) else array.array(target.typecode, value)


def _iterator(one: Any) -> Any:
    """Return a representation of an iterator's position, without advancing the iterator.

    The ``repr`` of ``count`` and ``repeat`` contains their position. The position of other
    ``itertools`` objects follows from the iterators and values that they refer to. Internal
    counters are not accessible, so the position of a ``cycle`` after its first pass, or of an
    ``islice`` between two items, is not detected.
    """
    if isinstance(one, types.GeneratorType):
        frame = one.gi_frame
        if frame is None:
            return "finished"
        held = tuple(v if is_plain(v) else id(v) for v in frame.f_locals.values())
        return repr((frame.f_lasti, held))
    if type(one).__module__ == "itertools":  # its __reduce__ is deprecated
        return repr((repr(one), _held_by_iterator(gc.get_referents(one))))
    return repr([part if is_plain(part) else id(part) for part in one.__reduce__()[1:]])


def _held_by_iterator(values: Iterable[Any]) -> list[Any]:
    """Describe the referents of an iterator; the result changes when the iterator advances."""
    return [
        value
        if is_plain(value)
        else _iterator(value)
        if _is_iterator(value)
        else _held_by_iterator(value)
        if isinstance(value, tuple)
        else (id(value), len(value))
        if isinstance(value, list)
        else id(value)
        for value in values
    ]


def _is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of the builtins or of itertools."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


_SET = _whole(frozenset, _put_set)
_BYTES = _whole(bytes, _put_bytes)
_ITERATOR = _whole(_iterator, None)
_RANDOM = _whole(random.Random.getstate, random.Random.setstate)
_RANDOM_MODULE = _whole(lambda _: random.getstate(), lambda _, value: random.setstate(value))
_GRADIENT = Kind(
    lambda one: {"grad": one.grad},
    lambda one, _, value: setattr(one, "grad", value),
    _dotted,
    get=_get_attribute,
    views=lambda one: (_LazyMap(getattr, ((one,), ("grad",))),),
)


def _numpy_kind(value: Any) -> Kind | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return _whole(lambda one: repr(one.bit_generator.state), None)
    if isinstance(value, numpy.random.RandomState):
        return _whole(lambda one: repr(one.get_state()), None)
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return _whole(
            lambda one: one.tobytes(),
            lambda one, saved: numpy.copyto(
                one, numpy.frombuffer(saved, one.dtype).reshape(one.shape)
            ),
        )
    return None


_KINDS: tuple[tuple[Any, Kind], ...] = (
    (dict, _MAPPING),
    ((list, deque), _SEQUENCE),
    (set, _SET),
    ((tuple, frozenset), _TUPLE),
    ((bytearray, array.array), _BYTES),
    (random.Random, _RANDOM),
)


# -- the walk ------------------------------------------------------------------------------------


def _parts(found: _Node) -> Iterator[Record | _Node]:
    """Yield the records of an object, and other objects that it refers to."""
    value = found.value
    own = found if found.owner else attrs.evolve(found, owner=type(value).__qualname__)
    if isinstance(value, types.ModuleType):
        if value is random:
            yield Record(_RANDOM_MODULE, own)
        return
    if isinstance(value, type):
        yield from _of_class(value)
        return
    if isinstance(value, types.CellType):
        yield Record(_CELL, own)
        return
    if isinstance(value, _Globals):
        yield Record(_GLOBALS, own)
        return
    if isinstance(value, _FUNCTIONS):
        yield from _of_function(value, found)
    kind = _kind_of(value)
    if kind is not None:
        yield Record(kind, own)
    if not isinstance(value, types.FunctionType):
        yield from _of_attributes(value, found.path)


def _kind_of(value: Any) -> Kind | None:
    """Return the kind of container that an object is; None if it has only attributes."""
    for types_, kind in _KINDS:
        if isinstance(value, types_):
            return kind
    if isinstance(value, torch.Tensor):
        return _GRADIENT if value.is_leaf and value.requires_grad else None
    if _is_iterator(value):
        return _ITERATOR
    return _numpy_kind(value)


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
    if _is_library(cls) and not isinstance(value, (torch.nn.Module, types.SimpleNamespace)):
        return
    if isinstance(value, torch.jit.ScriptModule) and hasattr(value, "_c"):
        for name, module in value.named_modules():
            inner = _dotted(path, name) if name else path
            yield Record(_SCRIPT, _Node(module, inner, type(module).__qualname__, None))
        return
    held = getattr(value, "__dict__", None)
    if isinstance(value, torch.nn.Module):
        yield Record(_MODULE, _Node(held, path, owner, cls))
        for name in _MEMBERS:
            yield Record(_MEMBER, _Node(vars(value)[name], path, owner, cls))
    elif isinstance(held, dict):
        yield Record(_ATTRIBUTES, _Node(held, path, owner, cls))
    if not _is_library(cls):
        if _read_slots(value):
            yield Record(_SLOTS, _Node(value, path, owner, cls))
        yield _Node(cls, owner, "", cls)


def _of_class(cls: type) -> Iterator[Record | _Node]:
    """Yield the data attributes, bases and methods of a user-defined class."""
    if _is_library(cls) or _is_own_module(cls.__module__):
        return
    name, installed = cls.__qualname__, _is_installed(cls)
    yield Record(_CLASS, _Node(cls, name, f"class {name}", cls, is_installed=installed))
    for base in cls.__bases__:
        yield _Node(base, base.__qualname__, "", base)
    for fn in _own_functions(cls):
        yield _Node(fn, fn.__qualname__, "", fn, is_method=True)


def _of_function(fn: Any, found: _Node) -> Iterator[Record | _Node]:
    """Yield the bound objects, cells, globals and defaults of a function."""
    owner = getattr(fn, "__self__", None)
    yield _Node(owner, found.path, "", None, found.is_entry, is_owner=True)
    if isinstance(fn, functools.partial):
        for one in (fn.func, *fn.args, *fn.keywords.values()):
            yield _Node(one, found.path, "", None, found.is_entry)
    for plain in functions_of(fn):
        if _is_library(plain):
            continue
        owner = f"function {plain.__code__.co_qualname}"
        names = frozenset(name for code in codes_of(plain.__code__) for name in code.co_names)
        installed = _is_installed(plain)
        if not _is_own_module(plain.__module__ or ""):  # globals would reach all of dispatchkit
            globals_named = _Globals(plain.__globals__, names)
            yield _Node(globals_named, "", owner, plain, is_installed=installed)
            for default in (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values()):
                yield _Node(default, f"a default of {plain.__code__.co_qualname}", owner, plain)
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            yield _Node(cell, name, owner, plain)


def is_plain(value: Any) -> bool:
    """Return whether a value is deeply immutable."""
    return isinstance(value, _PLAIN)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names in a code object, including strings as in ``setattr(self, "calls", 1)``."""
    found: set[str] = set()
    for part in codes_of(code):
        found.update(part.co_names)
        found.update(one for one in part.co_consts if isinstance(one, str) and one.isidentifier())
    return found


def _own_functions(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions in methods and properties of a class, without those of its bases."""
    for member in vars(cls).values():
        for fn in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
            if isinstance(fn, types.FunctionType):
                yield fn


@functools.lru_cache(maxsize=4096)
def _methods(cls: type) -> tuple[types.FunctionType, ...]:
    """Return the methods of a class and its bases that a step may run; excludes ``__init__``."""
    return tuple(
        fn
        for base in cls.__mro__
        if base is not torch.nn.Module
        for fn in _own_functions(base)
        if fn.__name__ != "__init__"
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
    return name.partition(".")[0] in _LIBRARIES


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
