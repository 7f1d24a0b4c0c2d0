"""Import wrapper names on first use, because only wrappers require torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_WRAPPER = "dispatchkit_vllm.facade._wrapper"


def wrapper_names(module: str, **names: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that re-exports wrapper names.

    Args:
        module: Name of the module, for error messages.
        **names: Exported names, each with its name in ``facade._wrapper``.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_WRAPPER), names[name])

    return __getattr__
