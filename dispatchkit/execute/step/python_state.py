"""Record, compare and restore the Python state that a step reaches.

A graph replays kernels and no Python. A step that assigns an attribute, counts, appends to a list
or rebinds a global computes something different when replayed, and a warmup on dummy rows has
already changed that state. ``PythonState`` records every container that the step reaches before
such a run; ``changes`` lists the entries that the run changed, and ``restore`` restores them.

Reached are the modules a step runs through, the object a method is bound to, closure cells, globals
that the code names, defaults, arguments bound by ``partial``; and from each of them attributes,
slots, items of builtin containers, attributes of script modules, and what the methods of the
caller's own classes name. Code of the standard library, of torch and of numpy is not entered. Not
seen: state inside opaque C++ objects, files, and other processes.
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

#: Most containers recorded. The walk is breadth-first, objects before classes, so those near the
#: step come first.
MAX_CONTAINERS: Final = 50_000

_Class = TypeVar("_Class")

MISSING: Final = object()
"""Represents a missing entry."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Libraries whose globals and class attributes are not state of a step.
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "attr", "attrs"}
_BOOKKEEPING_CLASSES: set[type] = set()
_CONTAINERS = (dict, list, set, deque, bytearray)
#: Attributes of every module other than its members, including hooks.
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
    """Declare that the attributes of a class's objects are not state of a step.

    A class decorator. Attributes of the class's objects, and of subclasses, are neither compared
    nor restored. Use it for callables that are pieces of a runner and keep records of their calls.
    An object's ``__wrapped__`` is still part of the step.
    """
    _BOOKKEEPING_CLASSES.add(cls)
    return cls


@attrs.frozen
class Entry:
    """One entry of a container: its recorded value, and how to reach it.

    Attributes:
        record: The container.
        key: Its name, index or dictionary key there.
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
        """The builtin container that ``key`` is an index into, or None."""
        target = self.record.target
        if self.record.kind is _GLOBALS:
            return target.values  # type: ignore[no-any-return]
        # Exact types: reading an item of a subclass may run code and insert the item.
        return target if type(target) in (dict, OrderedDict, list, tuple) else None

    @property
    def can_restore(self) -> bool:
        """Whether it can be restored."""
        return self.record.kind.write is not None

    def restore(self) -> None:
        """Put it back."""
        self.set(self.before)

    def set(self, value: Any) -> None:
        """Set it, or remove it for ``MISSING``; no effect if it cannot be restored."""
        if self.record.kind.write is not None:
            self.record.kind.write(self.record.target, self.key, value)

    @property
    def path(self) -> str:
        """How the step reaches it, such as ``model.cache['step']``."""
        return self.record.kind.join(self.record.path, self.key)

    def __str__(self) -> str:
        where = _line_that_writes(self.record.site, self.key)
        return f"{self.path} ({self.record.owner}{', ' + where if where else ''})"


@attrs.frozen
class Container:
    """A recorded container, which may have further entries now.

    Attributes:
        record: Its recorded contents.
        names: Names of further entries that would be read; None means all.
    """

    record: Record
    names: Set[str] | None

    def added(self) -> tuple[Entry, ...]:
        """Return the new entries that would be read."""
        record, names = self.record, self.names
        added = record.added(record.kind.read(record.target))
        return tuple(entry for entry in added if names is None or entry.key in names)


class PythonState:
    """The Python values that a step reaches, recorded at creation.

    Args:
        roots: Callables and objects to start from, by the name to report them under.
        is_left_out: Returns whether a function is not part of the step; None: all are part of it.

    Attributes:
        modules: The modules reached.
        tensors: The tensors reached.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, is_left_out: Callable[[Any], bool] | None = None
    ) -> None:
        self.modules: list[torch.nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self._records: list[Record] = []
        self._callables: list[Any] = []
        self._kept: list[Any] = []
        self._classes: set[type] = set()
        # Records of objects that the step may call themselves, not only their methods.
        self._called: set[type] = set()
        self._names: set[str] | None = None
        self._values_read: tuple[Entry, ...] | None = None
        self._records_of: dict[int, list[Record]] = {}
        # Objects that need no attribute to be reached: roots, cells, globals, classes.
        self._roots: set[int] = set()
        queue: deque[_Found] = deque(_Found(one, name, "", None) for name, one in roots.items())
        # Classes, and values reached only through their code, come last: a library names all of
        # itself.
        classes: deque[_Found] = deque()
        while (queue or classes) and len(self._records) < MAX_CONTAINERS:
            is_of_class = not queue
            found = classes.popleft() if is_of_class else queue.popleft()
            if is_plain(found.value):
                continue
            if is_left_out is not None and is_left_out(found.value):
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
                inside: Iterable[_Found] = (part,) if isinstance(part, _Found) else part.inside()
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
        """Return the entries that have changed, those nearest to the step first.

        Entries that no code of the step names are left out: an engine may change objects that the
        step's owner holds for other purposes, for example in another thread.
        """
        found = tuple(self._changed())
        return self._read_by_step(found) if found else ()

    def values_read(self) -> tuple[Entry, ...]:
        """Return the entries that the step's code may read and that may change."""
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
        """Return the containers that the step's code may read and that may get further entries."""
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
        """Return whether everything is still as recorded."""
        return not any(True for _ in self._changed())

    def _changed(self) -> Iterator[Entry]:
        """Yield the entries that have changed, whether or not the step reads them."""
        now = [*itertools.chain.from_iterable(self._views)]
        is_seen = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        for record in self._records:
            if not (is_seen and record.views):
                yield from record.changes()

    def _read_by_step(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Return the entries that code of the step names.

        Functions are followed by their names, so that a method beside ``forward`` that nothing
        there names, such as a server's own loop, is left out, and so is what only it reads.
        """
        names = self._names_read()
        if names & _DYNAMIC:  # attributes by names computed at run time
            return tuple(entries)
        reached = self._reached()
        return tuple(
            entry
            for entry in entries
            if id(entry.record.holder) in reached and _is_named(entry.record, entry.key, names)
        )

    def _reached(self) -> set[int]:
        """Return the objects that the step reaches by attributes that its code names."""
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
        # A value in a closure, a global or an attribute may be called by any name.
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
    """Restore entries, last first. Containers are never replaced, since others may hold them."""
    for entry in reversed(tuple(entries)):
        entry.restore()


def is_same(before: Any, after: Any) -> bool:
    """Return whether an entry is unchanged: the same object, or an equal plain value."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, float):
        return bool(before.hex() == after.hex())  # distinguishes zeros, and NaN equals itself
    if isinstance(before, (*_PLAIN, _Address, _Copied, _Contents)):
        return bool(before == after)
    if isinstance(before, types.MethodType):
        return before.__func__ is after.__func__ and before.__self__ is after.__self__
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    return False


# -- records -------------------------------------------------------------------------------------


@attrs.frozen
class _Found:
    """An object found in the walk.

    Attributes:
        value: The object.
        path: How the step reaches it.
        owner: The class or function that holds it, in words.
        site: That class or function, to find the line that writes it.
        is_entry: It is an entry of a container, rather than a root or named by a function.
        is_installed: It was found in the code of an installed package, of whose globals only plain
            containers are followed, since such a package names much of itself.
        is_method: It is a function of a class.
        is_owner: A method is bound to it, which does not show whether it is called itself.
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
    """How containers of one kind are read and written.

    Attributes:
        read: Returns the entries of one by key.
        write: Sets one entry, or removes it for ``MISSING``. None: it cannot be restored.
        join: Makes the path of an entry from that of the container and its key.
        is_entered: Contents of the entries are recorded, too.
        get: Returns one entry by key, or ``MISSING``, if that is faster than reading all of them.
        views: Returns iterables that can be repeated: as long as they yield the same objects, the
            entries are unchanged. Empty if the entries must be read.
    """

    read: Callable[[Any], Mapping[Any, Any]]
    write: Callable[[Any, Any, Any], None] | None
    join: Callable[[str, Any], str]
    is_entered: bool = True
    get: Callable[[Any, Any], Any] | None = None
    views: Callable[[Any], tuple[Iterable[Any], ...]] = lambda _: ()


class Record:
    """One container as it was.

    Args:
        kind: Its kind.
        found: The object, and where it was found.

    Attributes:
        saved: Its entries by key; the values themselves, not copies.
        views: Iterables that show by identity whether they are unchanged.
        seen: The objects that these yielded.
        holder: The object it is, or is part of.
        is_of_class: It is reached only through classes and the code they name.
    """

    def __init__(self, kind: Kind, found: _Found) -> None:
        self.kind, self.target = kind, found.value
        self.path, self.owner, self.site = found.path, found.owner, found.site
        self.holder: Any = found.value
        self.is_of_class: bool = False
        self._is_installed = found.is_installed
        self.views = kind.views(found.value)
        self.seen = [*itertools.chain.from_iterable(self.views)]
        self.saved: dict[Any, Any] = dict(kind.read(found.value))

    def inside(self) -> Iterator[_Found]:
        """Yield the contents of the entries."""
        if not self.kind.is_entered:
            return
        for key, value in self.saved.items():
            if not is_plain(value) and not (self._is_installed and type(value) not in _CONTAINERS):
                path = self.kind.join(self.path, key)
                yield _Found(value, path, self.owner, self.site, True, self._is_installed)

    def changes(self) -> Iterator[Entry]:
        """Yield the entries that have changed."""
        now = self.kind.read(self.target)
        for key, value in self.saved.items():
            one = now.get(key, MISSING)
            if one is not value and not is_same(value, one):
                yield Entry(self, key)
        yield from self.added(now)

    def added(self, now: Mapping[Any, Any]) -> Iterator[Entry]:
        """Yield the entries that are new."""
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
    """Set or remove an attribute of a module; hooks that it did not have are removed one by one."""
    if value is MISSING and key in _BOOKKEEPING:
        target[key].clear()
    else:
        _set_item(target, key, value)


def _set_at(target: Any, index: int, value: Any) -> None:
    """Set or remove the item of a sequence; entries come last first, so that indices hold."""
    if value is MISSING:
        del target[index]
    elif index < len(target):
        target[index] = value
    else:
        target.extend([None] * (index - len(target)))
        target.append(value)


def _set_attribute(target: Any, name: str, value: Any) -> None:
    # Bypasses a frozen class's __setattr__, since the restored value was there before.
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
    """Return the data of a class, without methods, descriptors and Python's own attributes."""
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
    except ValueError:  # nothing was put in yet
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
    """The globals that one function names."""

    values: dict[str, Any]
    names: frozenset[str]

    def read(self) -> dict[str, Any]:
        return {
            name: self.values[name]
            for name in self.names & self.values.keys()
            if not isinstance(self.values[name], types.ModuleType) or self.values[name] is random
        }


class _Address:
    """A tensor of a script module, for which each read returns a different Python object."""

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


class _Copied:
    """A container of a script module, of which each read returns a copy."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._content = _content_of(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Copied) and is_same(self._content, other._content)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _content_of(value: Any) -> Any:
    """Return a value with tuples for containers, and addresses for tensors."""
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
    return _Copied(value) if isinstance(value, (dict, list, tuple)) else value


def _read_script(target: Any) -> dict[str, Any]:
    read = target._c.getattr
    known: Any = getattr(target, "_concrete_type", None)
    if known is None:  # of a frozen module
        known = torch._C.ConcreteModuleType.from_jit_type(target._c._type())
    return {name: _readable(read(name)) for name in known.get_attributes()}


def _write_script(target: Any, name: str, value: Any) -> None:
    if isinstance(value, _Address):
        value = value.tensor
    elif isinstance(value, _Copied):
        value = value.value
    target._c.setattr(name, value)


def _read_module(held: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module, including its hooks."""
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
class _Each:
    """The result of a function for some arguments, computed again by each iteration."""

    get: Callable[..., Any]
    arguments: tuple[Iterable[Any], ...]

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, *self.arguments)


def _read_dict(target: Any) -> dict[Any, Any]:
    # Bypasses a subclass's own access to items, which may create a new object for each read.
    return dict.copy(target) if type(target) is dict else dict(dict.items(target))


def _read_sequence(target: Any) -> dict[int, Any]:
    base: Any = next(one for one in (list, deque, tuple, frozenset) if isinstance(target, one))
    return dict(enumerate(base.__iter__(target)))


def _views_of_dict(target: Any) -> tuple[Iterable[Any], ...]:
    # Bypasses a subclass's own access.
    return dict.keys(target), dict.values(target)


def _views_of_module(held: dict[str, Any]) -> tuple[Iterable[Any], ...]:
    hooks = [one for name, one in held.items() if name in _BOOKKEEPING and type(one) is OrderedDict]
    return *_views_of_dict(held), *hooks


def _views_of_sequence(target: Any) -> tuple[Iterable[Any], ...]:
    return (target,) if type(target) in (list, deque) else ()


def _views_of_class(target: type) -> tuple[Iterable[Any], ...]:
    return vars(target).keys(), vars(target).values()


def _views_of_globals(target: _Globals) -> tuple[Iterable[Any], ...]:
    return (_Each(target.values.get, (target.names, itertools.repeat(MISSING))),)


_MAPPING = Kind(_read_dict, _set_item, _indexed, get=_get_item, views=_views_of_dict)
_ATTRIBUTES = Kind(lambda one: one, _set_item, _dotted, get=_get_item, views=_views_of_dict)
#: Parameters, buffers or submodules of a module.
_MEMBER = Kind(lambda one: one, _set_item, _dotted, get=_get_item, views=_views_of_dict)
_MODULE = Kind(_read_module, _set_in_module, _dotted, get=_get_item, views=_views_of_module)
_SEQUENCE = Kind(_read_sequence, _set_at, _indexed, get=_get_at, views=_views_of_sequence)
# Immutable: its items are the same as long as it is.
_TUPLE = Kind(_read_sequence, None, _indexed, views=lambda _: ((),))
_SLOTS = Kind(_read_slots, _set_attribute, _dotted, get=_get_attribute)
_CLASS = Kind(_read_class, _set_on_class, _dotted, get=_get_attribute, views=_views_of_class)
_CELL = Kind(
    _read_cell,
    _write_cell,
    _itself,
    get=_get_cell,
    views=lambda one: (_Each(_get_cell, ((one,), ("",))),),
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


#: Methods by which an object is called.
_CALLS = frozenset({"forward", "__call__"})
#: Attributes that a module's call looks up without its class naming them.
_ALWAYS_READ = frozenset({"training"}) | {
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, OrderedDict)
}
#: Names in code that accesses attributes by computed names.
_DYNAMIC = frozenset({"setattr", "__setattr__", "__dict__", "vars"})
#: Kinds whose entries are reached by an attribute's name.
_NAMED = (_ATTRIBUTES, _MODULE, _SLOTS, _CLASS)
#: Kinds whose containers may get further entries, which their length shows.
_GROWING = (_MAPPING, _SEQUENCE, _ATTRIBUTES, _MEMBER, _MODULE)
#: Functions that return a length without running code of a subclass.
_LENGTHS = (dict.__len__, OrderedDict.__len__, list.__len__, deque.__len__)


class _Contents:
    """The whole contents of an object, compared by value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Contents) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]  # what an object holds may not have one


def _whole(read: Callable[[Any], Any], write: Callable[[Any, Any], Any] | None) -> Kind:
    """Return the kind of an object that is compared and restored as a whole."""
    put = None if write is None else (lambda one, _key, saved: write(one, saved.value))
    return Kind(lambda one: {"": _Contents(read(one))}, put, _itself, is_entered=False)


def _put_set(target: set[Any], value: frozenset[Any]) -> None:
    target.clear()
    target.update(value)


def _put_bytes(target: Any, value: bytes) -> None:
    target[:] = value if isinstance(target, bytearray) else array.array(target.typecode, value)


def _iterator(one: Any) -> Any:
    """Return the position of an iterator, without advancing it.

    ``count`` and ``repeat`` show it in their ``repr``, others of ``itertools`` in the iterators
    and values that they hold. Their internal counters are not visible: the position of a ``cycle``
    after its first pass, or of an ``islice`` between two items.
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
    """Return a key of the objects that an iterator holds, which shows whether it advanced."""
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
    """Return whether a value is an iterator of the runtime or of itertools."""
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
    views=lambda one: (_Each(getattr, ((one,), ("grad",))),),
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


# -- what there is of an object ------------------------------------------------------------------


def _parts(found: _Found) -> Iterator[Record | _Found]:
    """Yield the records of one object, and its other references."""
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
    """Return how the items of an object are read; None if it has only attributes."""
    for types_, kind in _KINDS:
        if isinstance(value, types_):
            return kind
    if isinstance(value, torch.Tensor):
        return _GRADIENT if value.is_leaf and value.requires_grad else None
    if _is_iterator(value):
        return _ITERATOR
    return _numpy_kind(value)


def _of_attributes(value: Any, path: str) -> Iterator[Record | _Found]:
    """Yield the attributes of an object, its slots, and its class.

    Objects of libraries have their own state, such as a logger's cache, so only torch modules and
    attribute containers are entered. A runner held by the step's owner is not state of the step,
    nor are objects declared as bookkeeping.
    """
    cls: Any = type(value)
    owner = cls.__qualname__
    if _is_ours(cls) or not _BOOKKEEPING_CLASSES.isdisjoint(cls.__mro__):
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield _Found(wrapped, path, "", None)
        return
    if _is_library(cls) and not isinstance(value, (torch.nn.Module, types.SimpleNamespace)):
        return
    if isinstance(value, torch.jit.ScriptModule) and hasattr(value, "_c"):
        for name, module in value.named_modules():
            inner = _dotted(path, name) if name else path
            yield Record(_SCRIPT, _Found(module, inner, type(module).__qualname__, None))
        return
    held = getattr(value, "__dict__", None)
    if isinstance(value, torch.nn.Module):
        yield Record(_MODULE, _Found(held, path, owner, cls))
        for name in _MEMBERS:
            yield Record(_MEMBER, _Found(vars(value)[name], path, owner, cls))
    elif isinstance(held, dict):
        yield Record(_ATTRIBUTES, _Found(held, path, owner, cls))
    if not _is_library(cls):
        if _read_slots(value):
            yield Record(_SLOTS, _Found(value, path, owner, cls))
        yield _Found(cls, owner, "", cls)


def _of_class(cls: type) -> Iterator[Record | _Found]:
    """Yield the data, bases and methods of a user-defined class."""
    if _is_library(cls) or _is_own_module(cls.__module__):
        return
    name, installed = cls.__qualname__, _is_installed(cls)
    yield Record(_CLASS, _Found(cls, name, f"class {name}", cls, is_installed=installed))
    for base in cls.__bases__:
        yield _Found(base, base.__qualname__, "", base)
    for fn in _own_functions(cls):
        yield _Found(fn, fn.__qualname__, "", fn, is_method=True)


def _of_function(fn: Any, found: _Found) -> Iterator[Record | _Found]:
    """Yield a function's references: bound objects, cells, globals, defaults."""
    owner = getattr(fn, "__self__", None)
    yield _Found(owner, found.path, "", None, found.is_entry, is_owner=True)
    if isinstance(fn, functools.partial):
        for one in (fn.func, *fn.args, *fn.keywords.values()):
            yield _Found(one, found.path, "", None, found.is_entry)
    for plain in functions_of(fn):
        if _is_library(plain):
            continue
        owner = f"function {plain.__code__.co_qualname}"
        names = frozenset(name for code in codes_of(plain.__code__) for name in code.co_names)
        installed = _is_installed(plain)
        if not _is_own_module(plain.__module__ or ""):  # a graphed step closes over all of it
            globals_named = _Globals(plain.__globals__, names)
            yield _Found(globals_named, "", owner, plain, is_installed=installed)
            for default in (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values()):
                yield _Found(default, f"a default of {plain.__code__.co_qualname}", owner, plain)
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            yield _Found(cell, name, owner, plain)


def is_plain(value: Any) -> bool:
    """Return whether a value is deeply immutable."""
    return isinstance(value, _PLAIN)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a code uses, including strings: ``setattr(self, "calls", 1)``."""
    found: set[str] = set()
    for part in codes_of(code):
        found.update(part.co_names)
        found.update(one for one in part.co_consts if isinstance(one, str) and one.isidentifier())
    return found


def _own_functions(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions of a class, in methods and properties of it, without its bases."""
    for member in vars(cls).values():
        for fn in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
            if isinstance(fn, types.FunctionType):
                yield fn


@functools.lru_cache(maxsize=4096)
def _methods(cls: type) -> tuple[types.FunctionType, ...]:
    """Return the methods of a class and its bases that a step may run."""
    return tuple(
        fn
        for base in cls.__mro__
        if base is not torch.nn.Module
        for fn in _own_functions(base)
        if fn.__name__ != "__init__"
    )


@functools.lru_cache(maxsize=4096)
def _is_ours(cls: Any) -> bool:
    """Return whether a class, or one of its bases, belongs to dispatchkit or its plugins.

    Runners, backends and decoders have bookkeeping that steps do not read.
    """
    return any(_is_own_module(base.__module__) for base in cls.__mro__)


@functools.cache
def _is_own_module(name: str) -> bool:
    """Return whether a module belongs to dispatchkit or its plugins.

    Its state is not state of a step, but the class of a step's owner often names it to create
    runners, and from there the whole package would be reached. The models of the demo and the test
    kits count as user code.
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
    """Return ``file:line`` of the code of a class or function that writes a name, if known."""
    if isinstance(site, type):
        members = [
            one for base in site.__mro__ if not _is_library(base) for one in vars(base).values()
        ]
        codes = [one.__code__ for one in members if isinstance(one, types.FunctionType)]
        codes.sort(key=lambda code: code.co_name == "__init__")  # code that a call runs comes first
    elif isinstance(site, types.FunctionType):
        codes = list(codes_of(site.__code__))
    else:
        return ""
    for code in codes:
        for one in dis.get_instructions(code):
            if one.opname in _WRITES and one.argval == name and one.positions is not None:
                return f"{code.co_filename}:{one.positions.lineno}"
    return f"{codes[0].co_filename}:{codes[0].co_firstlineno}" if codes else ""
