"""Warnings: once for each key, such as a reason, and at the line of the user's call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable

__all__ = ["Once", "warn_at_call"]

# Packages between a user's call and a warning.
_NOT_THE_USERS = frozenset({"dispatchkit", "torch", "contextlib", "functools"})


def warn_at_call(message: str, category: type[Warning]) -> None:
    """Warn at the line from which dispatchkit was called."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and _package(frame.f_globals) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


class Once:
    """Says of each key whether it comes for the first time.

    Thread safety: any thread; of several that come with a key at once, one is the first.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, object] = {}

    def first(self, key: Hashable = "") -> bool:
        """Return True for the first call with a key, and False from then on."""
        if key in self._seen:
            return False
        own = object()
        return self._seen.setdefault(key, own) is own
