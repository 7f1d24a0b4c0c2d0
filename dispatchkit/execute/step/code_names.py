"""Find the functions that an object runs, and the names in their code."""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch

from dispatchkit.execute.step.origins import is_library

CACHED = functools._lru_cache_wrapper
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_WRITES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"})
#: Methods that run when a class is called.
_CREATES = frozenset({"__new__", "__init__", "__post_init__", "__attrs_post_init__"})


def functions_of(fn: Any) -> Iterator[types.FunctionType]:
    """Yield the function that a callable runs, followed by the functions that it wraps."""
    if isinstance(fn, functools.partial):
        fn = fn.func
    if not isinstance(fn, (types.FunctionType, types.MethodType, torch.nn.Module)):
        fn = getattr(type(fn), "__call__", None)  # noqa: B004 - the method itself is needed
    seen: set[int] = set()
    while isinstance(fn := getattr(fn, "__func__", fn), types.FunctionType) and id(fn) not in seen:
        seen.add(id(fn))
        yield fn
        fn = getattr(fn, "__wrapped__", None)


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and, recursively, the code objects nested in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_of(const)


@functools.lru_cache(maxsize=4096)
def has_imports(code: types.CodeType) -> bool:
    """Return whether a code object contains import statements."""
    # Every second byte is an opcode. Comparing bytes is far faster than disassembling the code.
    return any(_IMPORT_NAME in part.co_code[::2] for part in codes_of(code))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names in a code object, and the strings in it that may be names.

    For example, ``setattr(self, "calls", 1)`` contains the name ``calls`` as a string.
    """
    found: set[str] = set()
    for part in codes_of(code):
        found.update(part.co_names)
        found.update(one for one in part.co_consts if isinstance(one, str) and one.isidentifier())
    return frozenset(found)


def names_at(site: Any) -> frozenset[str]:
    """Return the names in the code of a class or function."""
    if isinstance(site, type):
        return frozenset().union(*(names_in(fn.__code__) for _, fn in methods_of(site)))
    return names_in(site.__code__) if isinstance(site, types.FunctionType) else frozenset()


def names_of_getter(value: Any) -> frozenset[str]:
    """Return the names in an ``attrgetter`` or ``methodcaller``; empty for any other object."""
    if not isinstance(value, (operator.attrgetter, operator.methodcaller)):
        return frozenset()
    reduced: Any = value.__reduce__()
    made, arguments = reduced
    if isinstance(value, operator.methodcaller):  # with keyword arguments, ``made`` is a partial
        arguments = getattr(made, "args", arguments)[:1]
    return frozenset(name for path in arguments for name in str(path).split("."))


def own_functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield attribute names and functions of a class, without those of its bases."""
    for name, member in vars(cls).items():
        for fn in _functions_in(member):
            if isinstance(fn, types.FunctionType):
                yield name, fn


def constructors(cls: type) -> set[types.CodeType]:
    """Return the code that runs when a user-defined class is instantiated."""
    functions = [one for base in cls.__mro__ if not is_library(base) for one in own_functions(base)]
    return {fn.__code__ for name, fn in functions if name in _CREATES}


@functools.lru_cache(maxsize=4096)
def names_called(code: types.CodeType) -> frozenset[str]:
    """Return the names whose values a code object calls, as in ``A()`` and ``module.A()``."""
    found = set()
    for part in codes_of(code):
        last = ("", "")
        for one in dis.get_instructions(part):
            # The bytecode of a call pushes NULL next to the function, or loads a method.
            if "NULL" in one.argrepr or one.opname == "LOAD_METHOD" or last[0] == "PUSH_NULL":
                found.add(one.argval)
            elif one.opname == "PUSH_NULL":
                found.add(last[1])
            last = (one.opname, one.argval)
    return frozenset(one for one in found if isinstance(one, str))


def _functions_in(member: Any) -> tuple[Any, ...]:
    """Return the functions behind an attribute of a class."""
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    if isinstance(member, (classmethod, staticmethod)):
        return (member.__func__,)
    if isinstance(member, functools.singledispatchmethod):
        return member.func, member.dispatcher
    if isinstance(member, (functools.partialmethod, functools.cached_property)):
        return (member.func,)
    return (member.__wrapped__,) if isinstance(member, CACHED) else (member,)


@functools.lru_cache(maxsize=4096)
def methods_of(cls: type) -> tuple[tuple[str, types.FunctionType], ...]:
    """Return the methods that a class defines or inherits.

    ``__init__`` and the methods of ``torch.nn.Module`` are excluded.
    """
    return tuple(
        (name, fn)
        for base in cls.__mro__
        if base is not torch.nn.Module
        for name, fn in own_functions(base)
        if name != "__init__"
    )


def line_that_writes(site: Any, name: Any) -> str:
    """Return ``file:line`` where a class or function writes a name.

    If no line writes the name, return the first line of the code; without code, return "".
    """
    if isinstance(site, type):
        members = [
            one for base in site.__mro__ if not is_library(base) for one in vars(base).values()
        ]
        codes = [one.__code__ for one in members if isinstance(one, types.FunctionType)]
        # Search __init__ last, because steps do not call it.
        codes.sort(key=lambda code: code.co_name == "__init__")
    elif isinstance(site, types.FunctionType):
        codes = list(codes_of(site.__code__))
    else:
        return ""
    for code in codes:
        for one in dis.get_instructions(code):
            if one.opname in _WRITES and one.argval == name and one.positions is not None:
                return f"{code.co_filename}:{one.positions.lineno}"
    return f"{codes[0].co_filename}:{codes[0].co_firstlineno}" if codes else ""
