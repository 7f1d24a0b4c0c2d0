"""Issue each warning only once, and locate the calling user code."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable

__all__ = ["Once", "line_of_call", "warn_at_call"]

# Packages whose frames are skipped when the user's call is located.
_NOT_THE_USERS = frozenset({"dispatchkit", "torch", "contextlib", "functools"})


def warn_at_call(message: str, category: type[Warning]) -> None:
    """Warn at the line that called dispatchkit."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and _package(frame.f_globals) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def line_of_call() -> str:
    """Return the file and line of the innermost user code; ``""`` if no frame is user code."""
    frame = inspect.currentframe()
    while frame is not None and _is_internal(frame.f_globals):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_internal(names: dict[str, object]) -> bool:
    """Return whether frames of a module are skipped when user code is located."""
    name = str(names.get("__name__", ""))
    # The demo's model counts as user code.
    return _package(names) in _NOT_THE_USERS and not name.startswith("dispatchkit.demo.")


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


class Once:
    """The set of keys for which ``first`` has been called.

    Thread safety: all methods may be called from any thread. If several threads call ``first`` with
    a key, only one thread gets True.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, object] = {}

    def first(self, key: Hashable = "") -> bool:
        """Return True for the first call with a key, and False afterwards."""
        if key in self._seen:
            return False
        own = object()
        return self._seen.setdefault(key, own) is own
