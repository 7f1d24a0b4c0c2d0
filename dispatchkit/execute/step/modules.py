"""Find the modules that a callable, such as a step, refers to."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dispatchkit.execute.step.code_names import codes_of, functions_of, names_in


def held_modules(fn: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a callable refers to, including the callable itself.

    The search covers the owner of a method, closures, the globals that the code names, and
    arguments bound by ``partial``. In each of these objects, it also covers the attributes whose
    names occur in the code, one level deep. For example, it finds ``model`` in
    ``lambda x: model(x)`` and in ``self.model(x)``. Modules in lists, or in functions that the
    callable calls, are not found.
    """
    found: dict[int, torch.nn.Module] = {}
    for one in (fn, *_held(fn)):
        own = () if isinstance(one, torch.nn.Module) else _named(one, _names(fn))
        for module in (one, *own):
            if isinstance(module, torch.nn.Module):
                found[id(module)] = module
    return list(found.values())


def _held(fn: Any) -> Iterator[Any]:
    """Yield the objects that a callable refers to."""
    if isinstance(fn, functools.partial):
        yield from (fn.func, *fn.args, *fn.keywords.values(), *_held(fn.func))
        return
    if (owner := getattr(fn, "__self__", None)) is not None:
        yield owner
    for plain in functions_of(fn):
        for cell in plain.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                continue
        for name in sorted(_globals_named(plain.__code__)):
            if name in plain.__globals__:
                yield plain.__globals__[name]


def _names(fn: Any) -> set[str]:
    """Return the names in the code of a callable, including names given as strings."""
    return {name for plain in functions_of(fn) for name in names_in(plain.__code__)}


def _globals_named(code: types.CodeType) -> set[str]:
    """Return the names of globals in a code object; ``co_names`` would include attributes."""
    parts = [one for part in codes_of(code) for one in dis.get_instructions(part)]
    return {one.argval for one in parts if one.opname == "LOAD_GLOBAL"}


def _named(holder: Any, names: set[str]) -> Iterator[Any]:
    """Yield the values of the instance attributes that ``names`` contains."""
    held = getattr(holder, "__dict__", None)
    if isinstance(held, (dict, types.MappingProxyType)):
        yield from (held[name] for name in sorted(names & held.keys()))
