"""Budgets: how many graphs and bytes there may be, and which graph goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.execute.captured import CapturedStep


def _least_recent(step: CapturedStep) -> float:
    return step.last_used


def _least_useful(step: CapturedStep) -> float:
    """Tokens served since the capture, per token that the graph has to hold memory for."""
    return step.hits / step.key.num_tokens


_SCORES: dict[str, Callable[[CapturedStep], float]] = {
    "lru": _least_recent,
    "benefit": _least_useful,
}


def _limit(minimum: int) -> Any:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < minimum
        ):
            raise ConfigError(attribute.name, value, f"None or a whole number from {minimum}")

    return check


@attrs.frozen(kw_only=True)
class Budget:
    """Limits that hold at every moment, also while one graph takes another's place.

    Attributes:
        max_graphs: Most live graphs; None for no limit.
        max_bytes: Most bytes that the graphs' pool and outputs take; None for no limit.
        eviction: Who goes first: ``lru``, the one not used for longest, or ``benefit``, the
            one with the fewest replays for its size.
    """

    max_graphs: int | None = attrs.field(default=None, validator=_limit(0))
    max_bytes: int | None = attrs.field(default=None, validator=_limit(0))
    eviction: str = "lru"

    def __attrs_post_init__(self) -> None:
        if self.eviction not in _SCORES:
            raise UnknownNameError("eviction", str(self.eviction), _SCORES)

    def victim(self, steps: Iterable[CapturedStep]) -> CapturedStep | None:
        """Return which of the live graphs goes first; None if there is none."""
        score = _SCORES[self.eviction]
        return min(steps, key=lambda step: (score(step), step.last_used), default=None)
