"""Choose which graphs to capture in idle time and which to evict for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from dispatchkit import GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count, check_instance

from dispatchkit_predictive.predictor import KeyPredictor, is_number

# The last _LOOK_BACK prefetches are evaluated; a pause of prefetching lasts _REST changes of key.
_LOOK_BACK, _REST = 100, 100


class CapturePlanner:
    """A planner that chooses which graph to capture next and which to evict for it.

    It also chooses graphs to prefetch, that is, to capture before a step has missed them.
    Prefetching pauses if few prefetched graphs are used. This class needs no device.

    Args:
        predictor: Predictor of the next keys.
        max_graphs: Maximum number of live graphs; None for no limit.
        margin: Factor, at least 1, by which the score of a prefetched key must exceed the score of
            the key evicted for it.
        least_used: Minimum share (0 to 1) of the last 100 prefetched graphs that steps must have
            used. If the share is lower, prefetching pauses; keys that a step has missed are still
            captured.

    Attributes:
        predictor: The predictor of the next keys.
        num_ahead: Number of prefetched graphs.
        num_used: Number of prefetched graphs that a step used before they were evicted.
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
        check_instance(predictor, KeyPredictor, "predictor")
        if not is_number(margin) or not margin >= 1.0:
            raise ConfigError("margin", margin, "a number of at least 1")
        if not is_number(least_used) or not 0.0 <= least_used <= 1.0:
            raise ConfigError("least_used", least_used, "a number from 0 to 1")
        self.predictor = predictor
        self._max_graphs, self._margin, self._least_used = max_graphs, margin, least_used
        self._wanted: dict[GraphKey, None] = {}  # keys that steps have missed, latest last
        self._ahead: set[GraphKey] = set()
        self._outcomes: deque[bool] = deque(maxlen=_LOOK_BACK)
        self._uses: dict[GraphKey, int] = {}
        self._clock = self._off_until = 0
        self._last: GraphKey | None = None
        self.num_ahead = self.num_used = 0

    @property
    def is_on(self) -> bool:
        """Whether prefetching is active."""
        return self._clock >= self._off_until

    def record_use(self, key: GraphKey, *, has_graph: bool) -> None:
        """Record that a step needs a key, and whether the key has a graph."""
        if not has_graph:
            self._wanted.pop(key, None)
            self._wanted[key] = None
        if key == self._last:
            return
        self._last = key
        self._clock += 1
        self._uses[key] = self._clock
        self.predictor.record(key)
        if has_graph and key in self._ahead:
            self._ahead.discard(key)
            self.num_used += 1
            self._record_outcome(was_used=True)

    def next_capture(self, live: Collection[GraphKey]) -> tuple[GraphKey, GraphKey | None] | None:
        """Return the key to capture now and the key to evict for it.

        Keys that steps have missed come first, most recent first. The second key is None if no
        graph needs to be evicted. Returns None if no capture is worthwhile.
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
        if victim is not None and self.score(victim) * self._margin >= scores[best]:
            return None
        return best, victim

    def record_capture(self, key: GraphKey, *, ok: bool) -> None:
        """Record that a key was captured (``ok``), or that its capture failed."""
        was_wanted = key in self._wanted
        self._wanted.pop(key, None)
        if ok and not was_wanted:
            self._ahead.add(key)
            self.num_ahead += 1

    def record_eviction(self, key: GraphKey) -> None:
        """Record that a graph was evicted."""
        if key in self._ahead:
            self._ahead.discard(key)
            self._record_outcome(was_used=False)

    def score(self, key: GraphKey) -> float:
        """Return the score of a key; higher means more likely to be needed."""
        return self.predictor.scores().get(key, 0.0)

    def _victim(self, live: Collection[GraphKey], instead: GraphKey) -> GraphKey | None:
        if self._max_graphs is None or len(live) < self._max_graphs:
            return None
        others = [key for key in live if key != self._last] or list(live)
        if not self.is_on:
            return min(others, key=lambda key: self._uses.get(key, 0))
        return min(others, key=lambda key: (self.score(key), self._uses.get(key, 0)))

    def _record_outcome(self, *, was_used: bool) -> None:
        outcomes = self._outcomes
        outcomes.append(was_used)
        if len(outcomes) == _LOOK_BACK and sum(outcomes) < self._least_used * _LOOK_BACK:
            self._off_until = self._clock + _REST
            outcomes.clear()
