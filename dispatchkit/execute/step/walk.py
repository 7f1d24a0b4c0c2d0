"""For an object that a step reaches, find its state and the objects that it refers to."""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

import attrs
import torch

from dispatchkit.execute.step.code_names import (
    CACHED,
    functions_of,
    has_imports,
    names_at,
    names_in,
    own_functions,
)
from dispatchkit.execute.step.container_kinds import (
    ATTRIBUTES,
    CELL,
    CLASS,
    GLOBALS,
    LIBRARY_ATTRIBUTES,
    MEMBER,
    METHODS,
    MODULE,
    SCRIPT,
    SLOTS,
    Globals,
    dotted,
    kind_of,
    read_slots,
)
from dispatchkit.execute.step.origins import (
    is_installed,
    is_internal,
    is_library,
    is_library_module,
    is_own_module,
)
from dispatchkit.execute.step.records import Node, Record

_Class = TypeVar("_Class")

FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
)
_BOOKKEEPING_CLASSES: set[type] = set()
_MEMBERS = ("_parameters", "_buffers", "_modules")
_VIEWS: Any = tuple(type(view({})) for view in (dict.keys, dict.values, dict.items))
#: Library classes whose instances hold attributes that users set.
_ENTERED = (torch.nn.Module, types.SimpleNamespace, argparse.Namespace, threading.local)

#: Functions that return the state of a library module, by the module's name.
_STATE_OF_LIBRARIES: Mapping[str, Callable[[Any], Any]] = {
    "random": lambda module: module._inst,
    "os": lambda module: module.environ,
}


def declare_bookkeeping(cls: type[_Class]) -> type[_Class]:
    """Decorate a class whose instance attributes are not part of a step's state.

    Attributes of instances of the class and its subclasses are neither compared nor restored. Use
    the decorator for callables that are pieces of a step and keep records of their calls. The
    ``__wrapped__`` attribute of an instance is still part of the step.
    """
    _BOOKKEEPING_CLASSES.add(cls)
    return cls


def parts_of(found: Node) -> Iterator[Record | Node]:
    """Yield the records of an object, and other objects that it refers to."""
    value = found.value
    own = found if found.owner else attrs.evolve(found, owner=type(value).__qualname__)
    if isinstance(value, types.ModuleType):
        for path, one in _in_modules((value,), names_at(found.site)):
            yield Node(one, path, own.owner, found.site, is_installed=found.is_installed)
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
    if isinstance(value, FUNCTIONS):
        yield from _of_function(value, found)
    if isinstance(value, collections.defaultdict):
        yield Node(value.default_factory, found.path, "", None)
    if (inner := _inside(value)) is not None:
        yield Node(inner, found.path, "", None, found.is_entry)
    kind = kind_of(value)
    if kind is not None:
        yield Record(kind, own)
    if not isinstance(value, types.FunctionType):
        yield from _of_attributes(value, found.path)


def _inside(value: Any) -> Any:
    """Return the object behind a dictionary view, a mapping proxy or a cached function, or None."""
    if isinstance(value, _VIEWS):
        value = value.mapping
    if isinstance(value, types.MappingProxyType):
        return gc.get_referents(value)[0]
    return value.__wrapped__ if isinstance(value, CACHED) else None


def _of_attributes(value: Any, path: str) -> Iterator[Record | Node]:
    """Yield the attributes, ``__slots__`` and class of an object.

    Of library objects, only plain values and tensors in public attributes are recorded, because
    other attributes are internal, such as the cache of a logger. The exceptions are torch modules,
    and objects made to hold user-defined attributes, such as a ``SimpleNamespace``. Runners and
    objects declared as bookkeeping are not part of the step's state.
    """
    cls: Any = type(value)
    owner = cls.__qualname__
    if is_internal(cls) or not _BOOKKEEPING_CLASSES.isdisjoint(cls.__mro__):
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield Node(wrapped, path, "", None)
        return
    if is_library(cls) and not isinstance(value, _ENTERED):
        if isinstance(held := getattr(value, "__dict__", None), dict):
            yield Record(LIBRARY_ATTRIBUTES, Node(held, path, owner, cls))
        return
    if isinstance(value, torch.jit.ScriptModule) and hasattr(value, "_c"):
        for name, module in value.named_modules():
            inner = dotted(path, name) if name else path
            yield Record(SCRIPT, Node(module, inner, type(module).__qualname__, None))
        return
    held = getattr(value, "__dict__", None)
    if isinstance(value, torch.nn.Module):
        yield Record(MODULE, Node(held, path, owner, cls))
        for name in _MEMBERS:
            yield Record(MEMBER, Node(vars(value)[name], path, owner, cls))
    elif isinstance(held, dict):
        yield Record(ATTRIBUTES, Node(held, path, owner, cls))
    if not is_library(cls):
        if read_slots(value):
            yield Record(SLOTS, Node(value, path, owner, cls))
        yield Node(cls, owner, "", cls, is_owner=True)


def _of_class(cls: type) -> Iterator[Record | Node]:
    """Yield the data attributes, bases and methods of a user-defined class."""
    if is_library(cls) or is_own_module(cls.__module__):
        return
    name, installed = cls.__qualname__, is_installed(cls)
    yield Record(CLASS, Node(cls, name, f"class {name}", cls, is_installed=installed))
    yield Record(METHODS, Node(cls, name, f"class {name}", cls, is_installed=installed))
    if not is_library(type(cls)):
        yield Node(type(cls), type(cls).__qualname__, "", type(cls), is_owner=True)
    for base in cls.__bases__:
        yield Node(base, base.__qualname__, "", base, is_owner=True)
    for _, fn in own_functions(cls):
        yield Node(fn, fn.__qualname__, "", fn, is_method=True)
    for key, member in vars(cls).items():
        is_bound = isinstance(member, types.MethodType)
        if is_bound or (hasattr(type(member), "__get__") and not is_library(type(member))):
            yield Node(member, f"{name}.{key}", f"class {name}", cls, is_installed=installed)


def _of_function(fn: Any, found: Node) -> Iterator[Record | Node]:
    """Yield the bound objects, cells, globals and defaults of a function."""
    owner = getattr(fn, "__self__", None)
    yield Node(owner, found.path, "", None, found.is_entry, is_owner=True)
    if isinstance(fn, functools.partial):
        site = next(functions_of(fn), None)
        for one in (fn.func, *fn.args, *fn.keywords.values()):
            yield Node(one, found.path, "", site, found.is_entry)
    for plain in functions_of(fn):
        if is_library(plain):
            continue
        owner = f"function {plain.__code__.co_qualname}"
        names = names_in(plain.__code__)
        installed = is_installed(plain)
        if not installed:
            yield Record(ATTRIBUTES, Node(vars(plain), plain.__name__, owner, plain))
        if not is_own_module(plain.__module__ or ""):  # globals would reach all of dispatchkit
            globals_named = Globals(plain.__globals__, names)
            yield Node(globals_named, "", owner, plain, is_installed=installed)
            held = plain.__globals__
            is_importing = has_imports(plain.__code__)
            imported = _modules_at(held, names) if is_importing else map(held.get, names)
            for path, one in _in_modules(imported, names):
                yield Node(one, path, owner, plain, is_installed=installed)
            for default in (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values()):
                yield Node(
                    default, f"a default argument of {plain.__code__.co_qualname}", owner, plain
                )
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            if name == "__class__":  # super() uses it, even if the step creates no instances
                yield Node(_class_in(cell), name, owner, plain, is_owner=True)
            else:
                yield Node(cell, name, owner, plain)


def _class_in(cell: types.CellType) -> type | None:
    try:
        return cell.cell_contents  # type: ignore[no-any-return]
    except ValueError:  # the class is being created
        return None


class ModulesNamed:
    """Python modules that functions name, each with the attribute names still to be recorded."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, bool], tuple[Node, set[str]]] = {}
        self._taken: dict[tuple[int, bool], set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, found: Node, *, of_class: bool) -> None:
        """Add the names that one function reads from a module."""
        key = id(found.value.values), of_class
        if new := found.value.names - self._taken.setdefault(key, set()):
            self._waiting.setdefault(key, (found, set()))[1].update(new)

    def take(self, *, of_class: bool) -> list[Node]:
        """Remove and return the waiting modules, each with the names not returned before."""
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
        names: Names in the code that reads the modules, including imported names.
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
        elif not is_library_module(path) and not is_own_module(path):
            values = vars(module)
            yield path, Globals(values, frozenset(names), is_imported=True)
            waiting.extend(values[name] for name in names & values.keys())


def _modules_at(values: Mapping[str, Any], names: Set[str]) -> Iterator[Any]:
    """Yield the modules that names in a function refer to; other objects may be among them.

    Args:
        values: Globals of the function.
        names: Names in the code of the function, including those in its own import statements.
    """
    package = values.get("__package__") or ""
    for name in names:
        yield values.get(name, sys.modules.get(name))
        parent = package
        while parent:  # names relative to the package or to one of its parents
            yield sys.modules.get(f"{parent}.{name}")
            parent = parent.rpartition(".")[0]
