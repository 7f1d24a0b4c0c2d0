"""What is said once for each key, such as one warning for each reason."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Once"]


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
