"""Budgets: how many graphs and bytes there may be, and which graph goes first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from dispatchkit.errors import CaptureError, ConfigError, UnknownNameError
from dispatchkit.execute.captured import CapturedStep
from dispatchkit.execute.lanes import Lane
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters

# Evictions for each graph there is room for, after which churn is warned of.
_CHURN = 4


class ChurnWarning(RuntimeWarning):
    """Graphs are captured and given up again and again."""


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


class Room:
    """Keeps the graphs of a lane within their budget.

    Args:
        budget: The limits.
        lane: Whose memory.
        counters: What evictions and captures are counted in.
        forecast: Returns the bytes a key's graph is expected to need, None if not known.
        live: Returns the captured steps by key.
        evict: Gives up the graph of a key, with a reason.
    """

    def __init__(
        self,
        budget: Budget,
        lane: Lane,
        counters: StepCounters,
        forecast: Callable[[GraphKey], int | None],
        live: Callable[[], Mapping[GraphKey, CapturedStep]],
        evict: Callable[[GraphKey, str], None],
    ) -> None:
        self._budget, self._lane, self._counters = budget, lane, counters
        self._forecast, self._live, self._evict = forecast, live, evict
        self._is_churn_told = False

    @property
    def refusal(self) -> str:
        """What a key is told that there is no room for."""
        return f"over_budget: max_graphs is {self._budget.max_graphs}"

    def for_one_more(self) -> bool:
        """Return whether one more graph may live; one that serves several keys counts once."""
        limit = self._budget.max_graphs
        return limit is None or len({id(step) for step in self._live().values()}) < limit

    def make(self) -> None:
        """Evict until one more graph may live."""
        limit = self._budget.max_graphs
        if limit == 0:
            raise CaptureError("max_graphs is 0: no graph may live.", reason="over_budget")
        while not self.for_one_more():
            self._evict_one()

    def _evict_one(self) -> None:
        live = self._live()
        step = self._budget.victim(live.values())
        for key, one in live.items():
            if one is step:
                self._evict(key, "budget")

    def admit(self, key: GraphKey, *, evict: bool) -> None:
        """Refuse a capture that is forecast to break the budget of bytes, or make room.

        Graphs of one pool share memory, so that evicting one frees little: when that is not
        enough the pool goes as a whole, and what was in it is captured anew when asked for.
        """
        limit = self._budget.max_bytes
        if limit is None:
            return
        need = self._forecast(key) or 0
        if need > limit:
            raise _over_budget(key, need, limit)
        if self._lane.num_bytes() + self._growth(need) <= limit:
            return
        if not evict:
            raise _over_budget(key, self._lane.num_bytes() + self._growth(need), limit)
        while self._live() and self._lane.num_bytes() + self._growth(need) > limit:
            self._evict_one()
        if self._lane.num_bytes() + self._growth(need) > limit:
            self._lane.drop_pool()

    def _growth(self, need: int) -> int:
        """Return how much more memory a graph takes that needs so much by itself."""
        reserved = [self._forecast(key) or 0 for key in self._live()]
        return max(0, need - max(reserved, default=0))

    def check(self, key: GraphKey, step: CapturedStep) -> None:
        """Give up a graph that took more than was forecast, and more than there may be."""
        limit = self._budget.max_bytes
        if limit is None or self._lane.num_bytes() <= limit:
            return
        taken = self._lane.num_bytes()
        self._lane.settle()
        step.release()
        while self._live() and self._lane.num_bytes() > limit:
            self._evict_one()
        if self._lane.num_bytes() > limit:
            self._lane.drop_pool()
        raise _over_budget(key, taken, limit)

    def warn_of_churn(self) -> None:
        """Warn once when most captured graphs are given up again."""
        evictions, room = self._counters.evictions, self._budget.max_graphs or 1
        if self._is_churn_told or evictions < _CHURN * max(room, 4):
            return
        if evictions > 0.5 * self._counters.captures:
            self._is_churn_told = True
            warnings.warn(
                f"{evictions} of {self._counters.captures} captured graphs were given up again: "
                "the batches need more graphs than the budget holds. Raise max_graphs or "
                "max_bytes, use fewer sizes, or raise capture_after.",
                ChurnWarning,
                stacklevel=2,
            )


def _over_budget(key: GraphKey, need: int, limit: int) -> CaptureError:
    return CaptureError(
        f"{key} would bring the graphs to {need} bytes, and max_bytes is {limit}.",
        key=str(key),
        reason="over_budget",
    )
