"""Choose what to capture in an idle moment and what to evict for it, without a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from dispatchkit import GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

from dispatchkit_predictive.predictor import KeyPredictor

# The number of latest captures ahead that are judged, and of key changes that a pause lasts.
_LOOK_BACK, _REST = 100, 100


class Foresight:
    """Choose captures ahead, and pause when too few of them are used.

    Args:
        predictor: Predicts the next keys.
        max_graphs: Most live graphs; None for no limit.
        margin: Factor, at least 1, by which the score of a key must exceed that of the key
            evicted for it.
        least_used: Share of the captures ahead that must be used, 0 to 1. If fewer are used,
            capturing ahead pauses for a while; keys that a step missed are still captured.

    Attributes:
        predictor: The given predictor.
        num_ahead: Number of captures of keys that no step had missed since their last graph.
        num_used: Number of those that a step asked for before they were evicted.

    Raises:
        ConfigError: A setting is invalid.
    """

    def __init__(
        self,
        predictor: KeyPredictor,
        *,
        max_graphs: int | None = None,
        margin: float = 1.3,
        least_used: float = 0.01,
    ) -> None:
        if max_graphs is not None:
            check_count(max_graphs, "max_graphs")
        if not margin >= 1.0:
            raise ConfigError("margin", margin, "at least 1")
        if not 0.0 <= least_used <= 1.0:
            raise ConfigError("least_used", least_used, "0 to 1")
        self.predictor = predictor
        self._max_graphs, self._margin, self._least_used = max_graphs, margin, least_used
        self._wanted: dict[GraphKey, None] = {}  # missed by a step, latest last
        self._ahead: set[GraphKey] = set()
        self._outcomes: deque[bool] = deque(maxlen=_LOOK_BACK)
        self._uses: dict[GraphKey, int] = {}
        self._clock = self._off_until = 0
        self._last: GraphKey | None = None
        self.num_ahead = self.num_used = 0

    @property
    def is_on(self) -> bool:
        """Whether keys are captured ahead now."""
        return self._clock >= self._off_until

    def see(self, key: GraphKey, *, has_graph: bool) -> None:
        """Record that a step asked for a key."""
        if not has_graph:
            self._wanted.pop(key, None)
            self._wanted[key] = None
        if key == self._last:
            return
        self._last = key
        self._clock += 1
        self._uses[key] = self._clock
        self.predictor.see(key)
        if has_graph and key in self._ahead:
            self._ahead.discard(key)
            self.num_used += 1
            self._note(was_used=True)

    def next_capture(self, live: Collection[GraphKey]) -> tuple[GraphKey, GraphKey | None] | None:
        """Return the key to capture now and the key to evict first; None if nothing pays.

        Keys that a step missed come first, the latest before earlier ones.
        """
        while self._wanted:
            key = next(reversed(self._wanted))
            if key not in live:
                return key, self._victim(live, key)
            del self._wanted[key]
        if not self.is_on:
            return None
        scores = self.predictor.scores()
        others = [key for key in scores if key not in live and scores[key]]
        if not others:
            return None
        best = max(others, key=scores.__getitem__)
        victim = self._victim(live, best)
        if victim is not None and self.worth(victim) * self._margin >= scores[best]:
            return None
        return best, victim

    def captured(self, key: GraphKey, *, ok: bool) -> None:
        """Record that a key was captured, or that its capture failed."""
        was_wanted = key in self._wanted
        self._wanted.pop(key, None)
        if ok and not was_wanted:
            self._ahead.add(key)
            self.num_ahead += 1

    def evicted(self, key: GraphKey) -> None:
        """Record that the graph of a key was evicted."""
        if key in self._ahead:
            self._ahead.discard(key)
            self._note(was_used=False)

    def worth(self, key: GraphKey) -> float:
        """Return the score of a key; the key with the lowest score is evicted first."""
        return self.predictor.scores().get(key, 0.0)

    def _victim(self, live: Collection[GraphKey], instead: GraphKey) -> GraphKey | None:
        if self._max_graphs is None or len(live) < self._max_graphs:
            return None
        others = [key for key in live if key != self._last] or list(live)
        if not self.is_on:
            return min(others, key=lambda key: self._uses.get(key, 0))
        return min(others, key=lambda key: (self.worth(key), self._uses.get(key, 0)))

    def _note(self, *, was_used: bool) -> None:
        outcomes = self._outcomes
        outcomes.append(was_used)
        if len(outcomes) == _LOOK_BACK and sum(outcomes) < self._least_used * _LOOK_BACK:
            self._off_until = self._clock + _REST
            outcomes.clear()
