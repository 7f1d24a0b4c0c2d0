"""Predict the next graph key from several forecasts, weighted by their past accuracy.

Consecutive steps with the same key count as one event, because they need only one capture. Keys
that differ only in size are of the same *kind*. There are four forecasts, each based on one
statistic:

- how often each key occurred recently;
- how many buckets each key was away from the previous key of its kind (a *move*). Moves are
  grouped by the kind of the key just before the move. Batches tend to grow and shrink by one
  bucket, so this forecast includes keys that never occurred, if they are near recent keys;
- which keys followed earlier occurrences of the latest keys (the *context*, of up to ``order``
  keys). The more counts a longer context has, the less weight the shorter ones keep;
- how often each kind of key occurred, with equal shares for all keys of a kind.

Each forecast is a probability distribution over the keys. At each change of key, the weight of each
forecast is multiplied by the probability that the forecast assigned to the new key (a Bayesian
mixture). Part of the total weight is then redistributed evenly, so that a forecast recovers quickly
after a long series of misses.

Old traffic is forgotten: each new count after a context reduces the earlier counts after that
context, and each new move reduces the earlier moves of its group.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from dispatchkit import GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count, check_instance

# Decay factors of the long-run and of the recent counts of each key.
_SLOW, _FAST = 0.998, 0.95
# Widths, in buckets, over which a probability is spread to neighboring keys: for each observed key,
# for the last key of each kind, and for each observed move. A move is spread over ``_REACH``
# buckets in each direction.
_WIDTH, _NEAR, _MOVED, _REACH = 1.0, 1.5, 0.7, 6
# Share of the total weight that is redistributed evenly at each change.
_SHARE = 0.02
# Weights of the long-run and the recent frequency in a score. The forecast of the next change has
# weight 1. The frequencies keep common keys captured even if another key is expected next.
_LONG, _LATE = 0.3, 0.6

# Maximum number of recorded keys waiting to be learned; beyond it, the oldest are dropped.
_MAX_PENDING = 10_000

T = TypeVar("T", bound=Hashable)


def check_keys(keys: Any, setting: str) -> tuple[GraphKey, ...]:
    """Validate a list of keys, and return it as a tuple.

    Raises:
        ConfigError: ``keys`` is not iterable, or an item is not a key.
    """
    hint = f"For example, pass list(runner.registry) as {setting}."
    if not isinstance(keys, Iterable):
        raise ConfigError(setting, keys, "a list of GraphKeys", hint)
    return tuple(
        check_instance(key, GraphKey, f"{setting}[{index}]", hint) for index, key in enumerate(keys)
    )


def is_number(value: object) -> bool:
    """Return whether a value is a number other than a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class KeyPredictor:
    """A predictor that learns the order in which steps need keys.

    ``record`` only appends a key; learning happens when a prediction or a counter is read.

    Args:
        keys: All declared keys.
        order: Length of the longest context, in keys.
        decay: Factor by which each new count multiplies earlier counts (see the docstring of the
            module), above 0 and at most 1.

    Raises:
        ConfigError: A setting is invalid.
    """

    def __init__(self, keys: Iterable[GraphKey], *, order: int = 2, decay: float = 0.98) -> None:
        keys = check_keys(keys, "keys")
        self._order = check_count(order, "order")
        if not is_number(decay) or not 0.0 < decay <= 1.0:
            raise ConfigError("decay", decay, "a number greater than 0 and at most 1")
        self._decay = decay
        ladders: dict[Hashable, list[GraphKey]] = defaultdict(list)
        for key in sorted(keys, key=lambda one: one.num_tokens):
            ladders[_kind(key)].append(key)
        # Internally, keys are indices; keys of one kind are consecutive and sorted by size.
        self._keys: list[GraphKey] = []
        self._ranges: list[tuple[int, int]] = []
        self._kinds: list[int] = []
        for ladder in ladders.values():
            start = len(self._keys)
            self._keys += ladder
            self._kinds += [len(self._ranges)] * len(ladder)
            self._ranges.append((start, len(self._keys)))
        self._index = {key: index for index, key in enumerate(self._keys)}
        number = len(self._keys)
        self._often, self._late = [0.0] * number, [0.0] * number
        self._smooth = [0.0] * number  # like _often, with each count spread over neighboring keys
        self._after: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
        self._moves: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
        self._last_of: dict[int, int] = {}
        self._recent: list[int] = []
        self._weights: list[float] = []
        self._forecasts: list[list[float]] = []
        self._next: list[float] = []
        self._scores: dict[GraphKey, float] = dict.fromkeys(self._keys, 0.0)
        self._pending: deque[int] = deque(maxlen=_MAX_PENDING)
        self._last: int | None = None
        self._num_predicted = self._num_right = 0

    @property
    def num_predicted(self) -> int:
        """Number of key changes for which there was a prediction."""
        self._learn_all()
        return self._num_predicted

    @property
    def hit_rate(self) -> float:
        """Share of the predictions that were correct."""
        self._learn_all()
        return self._num_right / self._num_predicted if self._num_predicted else 0.0

    def record(self, key: GraphKey) -> None:
        """Record a key that a step needs; ignore undeclared keys and repetitions."""
        index = self._index.get(key)
        if index is not None and index != self._last:
            self._last = index
            self._pending.append(index)

    def expected(self) -> GraphKey | None:
        """Return the most likely next key; None if there is nothing to predict.

        There is nothing to predict before the first key, or if only one key is declared.
        """
        self._learn_all()
        best = self._expected()
        return None if best is None else self._keys[best]

    def scores(self) -> dict[GraphKey, float]:
        """Return a score for each declared key; the best key to capture has the highest score."""
        self._learn_all()
        return self._scores

    # -- learning -----------------------------------------------------------------------

    def _learn_all(self) -> None:
        while self._pending:
            self._learn(self._pending.popleft())

    def _learn(self, index: int) -> None:
        kind = self._kinds[index]
        recent = self._recent
        if recent:
            self._num_predicted += 1
            self._num_right += self._expected() == index
            self._update_weights(index)
            for length in range(1, min(self._order, len(recent)) + 1):
                _count(self._after[tuple(recent[-length:])], index, self._decay)
            if kind in self._last_of:
                row = self._moves[self._kinds[recent[-1]]]
                for key in row:
                    row[key] *= self._decay
                for away, share in _spread(_MOVED, range(-_REACH, _REACH + 1)):
                    move = (kind, index - self._last_of[kind] + away)
                    row[move] = row.get(move, 0.0) + share
        self._often = [count * _SLOW for count in self._often]
        self._smooth = [count * _SLOW for count in self._smooth]
        self._late = [count * _FAST for count in self._late]
        self._often[index] += 1.0
        self._late[index] += 1.0
        start, stop = self._ranges[kind]
        for away, share in _spread(_WIDTH, range(start - index, stop - index)):
            self._smooth[index + away] += share
        self._last_of[kind] = index
        self._recent = [*recent, index][-self._order :]
        self._update_forecasts(index)

    def _update_weights(self, index: int) -> None:
        """Multiply each forecast's weight by the probability it assigned to the actual key."""
        found = [
            weight * forecast[index]
            for weight, forecast in zip(self._weights, self._forecasts, strict=True)
        ]
        total, even = sum(found), _SHARE / len(found)
        self._weights = [(1.0 - _SHARE) * one / total + even for one in found]

    # -- forecasts ----------------------------------------------------------------------

    def _update_forecasts(self, last: int) -> None:
        smooth = _normal(self._smooth)
        near = _normal(self._near_last())
        even = 0.1 / len(self._keys)
        base = [0.7 * one + 0.2 * two + even for one, two in zip(smooth, near, strict=True)]
        late = _mixed(self._late, base)
        forecasts = [
            late,
            _mixed(self._from_moves(self._kinds[last]), base),
            self._from_contexts(base),
            self._from_kinds(),
        ]
        self._forecasts = [_without(forecast, last) for forecast in forecasts]
        self._weights = self._weights or [1.0 / len(forecasts)] * len(forecasts)
        self._next = [0.0] * len(self._keys)
        for weight, forecast in zip(self._weights, self._forecasts, strict=True):
            self._next = [one + weight * two for one, two in zip(self._next, forecast, strict=True)]
        self._scores = {
            key: one + _LONG * two + _LATE * three
            for key, one, two, three in zip(self._keys, self._next, smooth, late, strict=True)
        }

    def _expected(self) -> int | None:
        """Return the index of the most likely next key; None if there is nothing to predict."""
        if not self._recent or len(self._keys) == 1:
            return None
        return max(range(len(self._keys)), key=self._next.__getitem__)

    def _near_last(self) -> list[float]:
        found = [0.0] * len(self._keys)
        for kind, index in self._last_of.items():
            start, stop = self._ranges[kind]
            for other in range(start, stop):
                found[other] = math.exp(-abs(other - index) / _NEAR)
        return found

    def _from_moves(self, kind: int) -> list[float]:
        found = [0.0] * len(self._keys)
        for (other, distance), count in self._moves.get(kind, {}).items():
            start, stop = self._ranges[other]
            index = self._last_of[other] + distance
            if start <= index < stop:
                found[index] += count
        return found

    def _from_contexts(self, base: list[float]) -> list[float]:
        found = base
        for length in range(1, len(self._recent) + 1):
            row = self._after.get(tuple(self._recent[-length:]))
            if row:
                scale = 1.0 / (sum(row.values()) + 1.0)
                found = [one * scale for one in found]
                for index, count in row.items():
                    found[index] += count * scale
        return found

    def _from_kinds(self) -> list[float]:
        found: list[float] = []
        for start, stop in self._ranges:
            found += [sum(self._often[start:stop]) / (stop - start)] * (stop - start)
        return found


def _count(row: dict[T, float], what: T, decay: float) -> None:
    for other in row:
        row[other] *= decay
    row[what] = row.get(what, 0.0) + 1.0


def _spread(width: float, distances: range) -> list[tuple[int, float]]:
    """Return a (distance, share) pair for each distance.

    The shares decrease with distance and sum to 1.
    """
    shares = [math.exp(-abs(away) / width) for away in distances]
    total = sum(shares)
    return [(away, share / total) for away, share in zip(distances, shares, strict=True)]


def _normal(found: list[float]) -> list[float]:
    total = sum(found)
    return [one / total for one in found] if total else found


def _mixed(found: list[float], base: list[float]) -> list[float]:
    """Return 90% of the normalized counts plus 10% of ``base``; ``base`` if all counts are 0."""
    total = sum(found)
    if not total:
        return base
    return [0.9 * one / total + 0.1 * other for one, other in zip(found, base, strict=True)]


def _without(forecast: list[float], last: int) -> list[float]:
    """Return a forecast without the last key, because the next key differs from it."""
    found = [max(one, 1e-9) for one in forecast]
    found[last] = 1e-9
    return _normal(found)


def _kind(key: GraphKey) -> Hashable:
    """Return the features that keys share if they differ only in size."""
    own = key.descriptor
    return (
        key.mode,
        own.uniform,
        own.query_len,
        own.max_query_len,
        own.num_active_loras,
        own.axes,
    )
