"""Which key comes next, by how often what followed what, of late.

Only changes count: a key that is asked for a hundred times in a row is one event, as its graph
is wanted once. Three sources are added up:

- what followed the last keys (contexts of up to ``order`` keys, the longer ones first);
- how far the next key lay from the last one of its kind: batches grow and shrink by a bucket,
  so that also keys that were never seen are expected beside those that were;
- how often each key came at all.

Every count decays with each new one beside it, so that traffic that changed is forgotten.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

from dispatchkit import GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

# How far beside a known key one is expected, in buckets, before any move was seen.
_REACH, _WIDTH = 6, 1.5
# What a key is worth that nothing speaks for: less than any that something does.
_PRIOR = 0.01
# Buckets that another kind of batch is taken to be away from what was seen.
_OTHER_KIND = 4.0

T = TypeVar("T", bound=Hashable)
_Move = tuple[Hashable, int]  # a kind, and buckets from its last key


class KeyPredictor:
    """Learns the order in which keys are asked for.

    Args:
        keys: All declared keys.
        order: Longest context, in keys.
        decay: What an earlier count is worth beside a new one, 0 to 1.

    Attributes:
        num_predicted: Changes that a key was expected for.
        num_right: Those at which it came.

    Raises:
        ConfigError: A setting cannot be used.
    """

    def __init__(self, keys: Iterable[GraphKey], *, order: int = 2, decay: float = 0.98) -> None:
        self._order = check_count(order, "order")
        if not 0.0 < decay <= 1.0:
            raise ConfigError("decay", decay, "above 0 and at most 1")
        self._decay = decay
        self._kinds: dict[Hashable, list[GraphKey]] = defaultdict(list)
        self._place: dict[GraphKey, tuple[Hashable, int]] = {}
        for key in sorted(keys, key=lambda one: one.num_tokens):
            kind = _kind(key)
            self._place[key] = (kind, len(self._kinds[kind]))
            self._kinds[kind].append(key)
        self._after: dict[tuple[GraphKey, ...], dict[GraphKey, float]] = defaultdict(dict)
        self._moves: dict[Hashable, dict[_Move, float]] = defaultdict(dict)
        self._often: dict[GraphKey, float] = {}
        self._recent: list[GraphKey] = []
        self._last_of: dict[Hashable, int] = {}
        self._scores: dict[GraphKey, float] | None = None
        self.num_predicted = self.num_right = 0

    @property
    def hit_rate(self) -> float:
        """Share of the changes at which the key came that was expected most."""
        return self.num_right / self.num_predicted if self.num_predicted else 0.0

    def see(self, key: GraphKey) -> None:
        """Learn that a key was asked for; one that is not declared, or the last one, is nothing."""
        place = self._place.get(key)
        recent = self._recent
        if place is None or (recent and recent[-1] == key):
            return
        kind, rank = place
        if recent:
            # Asked only where an answer is there already: what comes next is seldom wanted.
            if self._scores is not None:
                self.num_predicted += 1
                self.num_right += self.expected() == key
            for length in range(1, min(self._order, len(recent)) + 1):
                self._count(self._after[tuple(recent[-length:])], key)
            if kind in self._last_of:
                move = (kind, rank - self._last_of[kind])
                self._count(self._moves[self._place[recent[-1]][0]], move)
        self._count(self._often, key)
        self._last_of[kind] = rank
        self._recent = [*recent, key][-self._order :]
        self._scores = None

    def expected(self) -> GraphKey | None:
        """Return the key that is expected next; None before the first."""
        scores = self.scores()
        last = self._recent[-1] if self._recent else None
        return max((key for key in scores if key != last), key=scores.__getitem__, default=None)

    def scores(self) -> dict[GraphKey, float]:
        """Return how much each declared key is expected; only their order means something."""
        if self._scores is None:
            self._scores = self._add_up() if self._recent else dict.fromkeys(self._place, 0.0)
        return self._scores

    # -- inside -------------------------------------------------------------------------

    def _count(self, row: dict[T, float], what: T) -> None:
        for other in row:
            row[other] *= self._decay
        row[what] = row.get(what, 0.0) + 1.0

    def _add_up(self) -> dict[GraphKey, float]:
        recent, last = self._recent, self._recent[-1]
        scores = {key: self._prior(key, last) for key in self._place}
        total = sum(self._often.values())
        for key, count in self._often.items():
            scores[key] += count / total
        weight = 1.0
        for length in range(len(recent), 0, -1):
            row = self._after.get(tuple(recent[-length:]))
            if row:
                total = sum(row.values())
                for key, count in row.items():
                    scores[key] += weight * count / (total + 1.0)
                weight /= total + 1.0  # what a longer context knows, a shorter need not say
        moves = self._moves.get(self._place[last][0], {})
        total = sum(moves.values()) + 2.0
        for (kind, distance), count in moves.items():
            self._add_beside(scores, kind, distance, count / total)
        for kind in self._last_of:
            for distance in range(-_REACH, _REACH + 1):
                near = math.exp(-abs(distance) / _WIDTH)
                self._add_beside(scores, kind, distance, near / total / len(self._last_of))
        return scores

    def _add_beside(
        self, scores: dict[GraphKey, float], kind: Hashable, distance: int, worth: float
    ) -> None:
        ladder, rank = self._kinds[kind], self._last_of[kind] + distance
        if 0 <= rank < len(ladder):
            scores[ladder[rank]] += worth

    def _prior(self, key: GraphKey, last: GraphKey) -> float:
        kind, rank = self._place[key]
        away = _OTHER_KIND * (1.0 + abs(math.log2(key.num_tokens / last.num_tokens)))
        if kind in self._last_of:
            away = min(away, abs(rank - self._last_of[kind]))
        return _PRIOR / (1.0 + away)


def _kind(key: GraphKey) -> Hashable:
    """Return what a key shares with those that differ from it in size only."""
    own = key.descriptor
    return (
        key.mode,
        own.uniform,
        own.query_len,
        own.max_query_len,
        own.num_active_loras,
        own.axes,
    )
