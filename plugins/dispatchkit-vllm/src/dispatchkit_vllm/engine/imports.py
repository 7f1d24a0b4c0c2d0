"""Run a function once a module has been imported, without importing the module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["clear_import_hooks", "when_imported"]

_waiting: dict[str, Callable[[ModuleType], None]] = {}


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act`` with a module: now if it has been imported, otherwise right after its import.

    A later call for the same module replaces a pending function. Exceptions raised by ``act``
    propagate, from this call or from the import.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    _waiting[name] = act
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def clear_import_hooks() -> None:
    """Remove all pending functions."""
    _waiting.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)  # skips this finder in the nested search
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # inspect reads sources with the original loader
            module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        act = _waiting.pop(module.__name__, None)
        if act is not None:
            act(module)


_FINDER = _Finder()
