"""Counters of a runner: plain ints that steps increment, aggregated when read."""

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
    """One segment of a graph with breaks, where something runs eager.

    Attributes:
        operations: Kernels, copies and fills that a replay queues.
        elapsed_us: Microseconds of its replay in the capture, on the device.
    """

    operations: int
    elapsed_us: float


class StepCount:
    """The number of steps of one kind and of their tokens; the step increments both itself."""

    __slots__ = ("steps", "tokens")

    def __init__(self) -> None:
        self.steps: int = 0
        self.tokens: int = 0


class StepCounters:
    """The counters of one runner, by graph and by reason for eager.

    An eager step is counted with the smallest graph that could have served it, if any.
    """

    def __init__(self) -> None:
        self._hits: dict[tuple[GraphKey, ...], StepCount] = {}
        self._eager: dict[tuple[str, GraphKey | None], StepCount] = {}
        #: Replays that stopped at an eager call between two segments, by file and line.
        self.differing_calls: Counter[str] = Counter()
        #: The segments of keys that were captured in segments.
        self.segments: dict[GraphKey, tuple[SegmentStats, ...]] = {}
        #: How often background captures delayed steps for too long, by phase of the capture.
        self.long_pauses: Counter[str] = Counter()
        self.captures = 0
        self.capture_failures = 0
        self.replay_failures = 0
        self.evictions = 0
        self.failed_steps = 0

    def of_keys(self, *keys: GraphKey) -> StepCount:
        """Return the counter of steps that replay one graph, or one graph per part."""
        return self._hits.setdefault(keys, StepCount())

    def replays(self, key: GraphKey) -> int:
        """Return how often a key was replayed, including for parts of split steps."""
        return sum(count.steps * keys.count(key) for keys, count in self._hits.copy().items())

    def of_eager(self, reason: str, missed: GraphKey | None) -> StepCount:
        """Return the counter of eager steps for a reason and a missed key."""
        return self._eager.setdefault((reason, missed), StepCount())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Do not count steps inside the ``with`` block."""
        before = {count: (count.steps, count.tokens) for count in self._all()}
        try:
            yield
        finally:
            for count in self._all():
                count.steps, count.tokens = before.get(count, (0, 0))

    def _all(self) -> list[StepCount]:
        return [*self._hits.values(), *self._eager.values()]

    def misses(self, key: GraphKey | None) -> dict[str, int]:
        """Return the eager steps that a key could have served, by reason."""
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
        # Copy the dicts, which is atomic: steps may add entries meanwhile. A tuple of their items
        # is not atomic, since a garbage collection in between lets other threads run.
        for keys, count in self._hits.copy().items():
            by_mode[keys[0].mode.name] += count.steps
            if count.steps:
                name = format_keys(keys)
                hits[name] = count.steps
                hit_tokens[name] = count.tokens
            real += count.tokens
            padded += count.steps * sum(key.num_tokens for key in keys)
        for (given, _), count in self._eager.copy().items():
            reason = str(given)  # a plain string, which prints well in a dict
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
    """What a runner has done so far.

    Attributes:
        steps: Steps that returned a result.
        steps_by_mode: Those steps by runtime mode.
        hits: Replays by key, as text; a split step counts once, under all of its graphs.
        hit_tokens: Tokens that callers passed to those replays, before padding.
        eager_by_reason: Eager steps by reason.
        differing_calls: Replays that stopped at an eager call between two segments because it
            returned a different structure than in the capture, by file and line.
        segments: The segments with work of each key that was captured in segments, by key as text.
        real_tokens: Tokens (rows) that callers passed.
        padded_tokens: Tokens computed, including padding.
        long_pauses: How often a background capture delayed steps for longer than its
            ``max_pause_us``, by phase of the capture.
        captures: Graphs captured.
        capture_failures: Captures that failed.
        replay_failures: Replays that failed; each marked its key as failed.
        evictions: Graphs evicted.
        failed_steps: Steps that raised.
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
        """Return the sum of several records; a single record is returned as is."""
        first, *others = parts
        summed: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in attrs.asdict(first, recurse=False).items()
        }
        for other in others:
            for name, value in attrs.asdict(other, recurse=False).items():
                if isinstance(value, int):
                    summed[name] += value
                elif name == "segments":  # the same on each lane
                    summed[name] = value | summed[name]
                else:
                    for key, count in value.items():
                        summed[name][key] = summed[name].get(key, 0) + count
        return cls(**summed)

    @property
    def padding(self) -> float:
        """Fraction of the computed tokens that is padding, 0 to 1."""
        if not self.padded_tokens:
            return 0.0
        return 1.0 - self.real_tokens / self.padded_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {**attrs.asdict(self), "padding": self.padding}
