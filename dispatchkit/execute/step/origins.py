"""Where classes and functions come from: libraries, installed packages, dispatchkit, the user."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any, Final

#: Packages whose globals and class attributes do not count as state of a step.
_LIBRARIES: Final = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "torch",
    "numpy",
    "attr",
    "attrs",
}


@functools.lru_cache(maxsize=4096)
def is_internal(cls: Any) -> bool:
    """Return whether a class or one of its bases belongs to dispatchkit or its plugins.

    Runners, backends and decoders contain bookkeeping that steps do not read.
    """
    return any(is_own_module(base.__module__) for base in cls.__mro__)


@functools.cache
def is_own_module(name: str) -> bool:
    """Return whether a module belongs to dispatchkit or its plugins.

    The state of such a Python module is not part of a step's state. The class that owns a step
    often creates runners, so its code refers to dispatchkit. The search for the step's state would
    otherwise reach the whole package. The demo and the test kits contain models, so they count as
    user code.
    """
    top, _, rest = name.partition(".")
    if top.startswith("dispatchkit_"):
        return True
    return top == "dispatchkit" and rest.partition(".")[0] not in ("demo", "testing")


@functools.cache
def is_library_module(name: str) -> bool:
    """Return whether a module belongs to the standard library, torch, numpy or attrs."""
    return name.partition(".")[0] in _LIBRARIES


def is_library(thing: Any) -> bool:
    """Return whether a class or function belongs to the standard library, torch, numpy or attrs."""
    return is_library_module(getattr(thing, "__module__", None) or "")


def is_installed(thing: Any) -> bool:
    """Return whether a class or function belongs to an installed package."""
    return _is_installed_module(thing.__module__ or "")


@functools.cache
def _is_installed_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & set(pathlib.Path(file).parts))
