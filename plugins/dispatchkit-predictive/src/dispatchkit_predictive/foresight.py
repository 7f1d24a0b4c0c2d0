"""What to capture in an idle moment, and what to give up for it. No device, no runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from dispatchkit import GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

from dispatchkit_predictive.predictor import KeyPredictor

# Captures ahead that are looked back on, and key changes before it is tried again.
_LOOK_BACK, _REST = 100, 100


class Foresight:
    """Chooses captures ahead, and stops when too few of them are used.

    Args:
        predictor: Knows what comes.
        max_graphs: Most live graphs; None for no limit.
        margin: How many times as much a key must be expected as the one that goes for it.
        least_used: Share of the captures ahead that must be used, 0 to 1; of fewer, nothing is
            captured ahead for a while. What is asked for in vain is captured all the same.

    Attributes:
        predictor: What was given.
        num_ahead: Captures of keys that nobody had asked for since they last had a graph.
        num_used: Those that were asked for before they were given up.

    Raises:
        ConfigError: A setting cannot be used.
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
        self._wanted: dict[GraphKey, None] = {}  # asked for in vain, the latest last
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
        """Note that a step asked for a key."""
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
        """Return what to capture now and what to give up before, None if nothing is worth it.

        What was asked for in vain goes first, the latest before earlier ones.
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
        """Note that a key was captured, or could not be."""
        was_wanted = key in self._wanted
        self._wanted.pop(key, None)
        if ok and not was_wanted:
            self._ahead.add(key)
            self.num_ahead += 1

    def evicted(self, key: GraphKey) -> None:
        """Note that the graph of a key is gone."""
        if key in self._ahead:
            self._ahead.discard(key)
            self._note(was_used=False)

    def worth(self, key: GraphKey) -> float:
        """Return how much a key is expected; the least expected goes first."""
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
