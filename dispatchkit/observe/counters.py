"""Counters of a runner: steps increment plain ints, and reading aggregates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from dispatchkit.dispatch import format_keys
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.modes import RuntimeMode


@attrs.frozen
class SegmentStats:
    """Statistics of one segment of a step with breaks.

    Attributes:
        operations: Number of kernels, copies and fills that a replay queues.
        elapsed_us: Device time of one replay, measured during the capture, in microseconds.
    """

    operations: int
    elapsed_us: float


class StepCount:
    """A counter of steps and of their tokens before padding."""

    __slots__ = ("steps", "tokens")

    def __init__(self) -> None:
        self.steps: int = 0
        self.tokens: int = 0


class StepCounters:
    """The step counters of a lane, by graph and by reason for running eager.

    An eager step is counted under the graph that it missed: the graph that was chosen for its
    batch, or else the smallest graph that could have run it, if any.
    """

    def __init__(self) -> None:
        self._hits: dict[tuple[GraphKey, ...], StepCount] = {}
        self._eager: dict[tuple[str, GraphKey | None], StepCount] = {}
        #: Number of replays that stopped at an eager call between segments, by file and line.
        self.differing_calls: Counter[str] = Counter()
        #: Segments of each key that was captured in segments.
        self.segments: dict[GraphKey, tuple[SegmentStats, ...]] = {}
        #: Number of long pauses of steps due to background captures, by phase of the capture.
        self.long_pauses: Counter[str] = Counter()
        self.captures = 0
        self.capture_failures = 0
        self.replay_failures = 0
        self.evictions = 0
        self.failed_steps = 0

    def of_keys(self, *keys: GraphKey) -> StepCount:
        """Return the counter of steps that replay the given graphs.

        Several keys are the graphs of a split batch, one per part.
        """
        return self._hits.setdefault(keys, StepCount())

    def replays(self, key: GraphKey) -> int:
        """Return the number of replays of a key, including replays for parts of split steps."""
        return sum(count.steps * keys.count(key) for keys, count in self._hits.copy().items())

    def of_eager(self, reason: str, missed: GraphKey | None) -> StepCount:
        """Return the counter of eager steps with the given reason and missed graph."""
        return self._eager.setdefault((reason, missed), StepCount())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Exclude the steps of a ``with`` block from the counters."""
        before = {count: (count.steps, count.tokens) for count in self._all()}
        try:
            yield
        finally:
            for count in self._all():
                count.steps, count.tokens = before.get(count, (0, 0))

    def _all(self) -> list[StepCount]:
        return [*self._hits.values(), *self._eager.values()]

    def misses(self, key: GraphKey | None) -> dict[str, int]:
        """Return the number of eager steps that missed the graph of a key, by reason.

        With None, return the number of eager steps that no graph could have run.
        """
        return {
            reason: count.steps
            for (reason, missed), count in sorted(
                self._eager.copy().items(), key=lambda item: item[0][0]
            )
            if missed == key and count.steps
        }

    def read(self) -> RunnerStats:
        """Return the aggregated counters."""
        by_mode = dict.fromkeys(RuntimeMode.__members__, 0)
        hits: dict[str, int] = {}
        hit_tokens: dict[str, int] = {}
        by_reason: dict[str, int] = {}
        real = padded = 0
        # Steps on other threads may add entries. Copying a dict is atomic; creating a tuple of its
        # items is not, because a garbage collection can let other threads run.
        for keys, count in self._hits.copy().items():
            by_mode[keys[0].mode.name] += count.steps
            if count.steps:
                name = format_keys(keys)
                hits[name] = count.steps
                hit_tokens[name] = count.tokens
            real += count.tokens
            padded += count.steps * sum(key.num_tokens for key in keys)
        for (given, _), count in self._eager.copy().items():
            reason = str(given)  # an enum member as a dictionary key would print as <Reason...>
            by_mode[RuntimeMode.NONE.name] += count.steps
            if count.steps:
                by_reason[reason] = by_reason.get(reason, 0) + count.steps
            real += count.tokens
            padded += count.tokens
        return RunnerStats(
            steps=sum(by_mode.values()),
            steps_by_mode=by_mode,
            hits=hits,
            hit_tokens=hit_tokens,
            eager_by_reason=by_reason,
            differing_calls=dict(self.differing_calls),
            segments={str(key): found for key, found in self.segments.copy().items()},
            real_tokens=real,
            padded_tokens=padded,
            long_pauses=dict(self.long_pauses),
            captures=self.captures,
            capture_failures=self.capture_failures,
            replay_failures=self.replay_failures,
            evictions=self.evictions,
            failed_steps=self.failed_steps,
        )


@attrs.frozen(kw_only=True)
class RunnerStats:
    """Counters of a runner since it was created.

    Attributes:
        steps: Number of steps that returned a result.
        steps_by_mode: Number of steps by runtime mode.
        hits: Number of steps that replayed graphs, by key as a string. A split batch counts once,
            under the joined names of its graphs.
        hit_tokens: Tokens of the steps in ``hits``, before padding, by key as a string.
        eager_by_reason: Number of eager steps by reason.
        differing_calls: Number of replays that stopped at an eager call between segments, by file
            and line. A replay stops if the result of the call differs from the result in the
            capture, for example in its shape.
        segments: The segments of each key that was captured in segments, by key as a string.
        real_tokens: Number of tokens (rows) passed by callers.
        padded_tokens: Number of tokens computed, including padding.
        long_pauses: Number of times that a background capture may have delayed steps for longer
            than its ``max_pause_us``, by phase of the capture.
        captures: Number of captured graphs.
        capture_failures: Number of failed captures.
        replay_failures: Number of failed replays. A graph is not replayed again after a failure.
        evictions: Number of evicted graphs, not including graphs that were invalidated, or removed
            by ``clear``.
        failed_steps: Number of steps that raised.
    """

    steps: int
    steps_by_mode: dict[str, int]
    hits: dict[str, int]
    hit_tokens: dict[str, int]
    eager_by_reason: dict[str, int]
    differing_calls: dict[str, int]
    segments: dict[str, tuple[SegmentStats, ...]]
    real_tokens: int
    padded_tokens: int
    long_pauses: dict[str, int]
    captures: int
    capture_failures: int
    replay_failures: int
    evictions: int
    failed_steps: int

    @classmethod
    def total(cls, parts: Iterable[RunnerStats]) -> RunnerStats:
        """Return the sum of several records."""
        first, *others = parts
        summed: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in attrs.asdict(first, recurse=False).items()
        }
        for other in others:
            for name, value in attrs.asdict(other, recurse=False).items():
                if isinstance(value, int):
                    summed[name] += value
                elif name == "segments":  # not summed: the first lane that has a key wins
                    summed[name] = value | summed[name]
                else:
                    for key, count in value.items():
                        summed[name][key] = summed[name].get(key, 0) + count
        return cls(**summed)

    @property
    def padding(self) -> float:
        """Padding as a fraction of the real tokens of replayed steps, as in plans and reports."""
        replayed = sum(self.hit_tokens.values())
        return (self.padded_tokens - self.real_tokens) / replayed if replayed else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counters and the padding as plain data."""
        return {**attrs.asdict(self), "padding": self.padding}
