"""The wrapper's names, loaded on first use: dispatchers need no torch, wrappers do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_WRAPPER = "dispatchkit_vllm.facade._wrapper"


def wrapper_names(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that looks names up in the wrapper's module.

    Args:
        module: Name of the module that gets the ``__getattr__``.
        **names: The name of each in the wrapper's module.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_WRAPPER), names[name])

    return __getattr__
