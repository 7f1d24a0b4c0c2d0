"""Forecast what a set of graphs will take in memory, from a few that were captured.

Graphs of one lane share one pool: the largest graph, captured first, sizes it, and each
smaller one adds only what cannot be shared. So the forecast is the measured first graph plus
an increment for each other size. Increments are taken to be larger for larger sizes: between
two measured sizes the increment lies between theirs, at the smaller end at least, at the
larger end at most. What a pool reserves moves in whole segments, so one measured increment may
hold a segment that the next graph uses too; that too is inside the bar.

``high_bytes`` is what to keep free: under those assumptions the graphs never take more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import attrs

from dispatchkit.errors import ConfigError
from dispatchkit.keys.capture_sizes import check_count

__all__ = ["SEGMENT_BYTES", "MemoryForecast", "MemorySample", "forecast_memory"]

SEGMENT_BYTES = 2 * 1024 * 1024
"""Smallest step in which torch's caching allocator reserves memory (torch 2.x, kSmallBuffer)."""


@attrs.frozen
class MemorySample:
    """Memory of a pool after one more graph was captured into it.

    Attributes:
        size: Capture size of that graph.
        reserved_bytes: What the pool and the driver hold since before the first capture.
    """

    size: int
    reserved_bytes: int


@attrs.frozen
class MemoryForecast:
    """What a set of graphs will take.

    Attributes:
        expected_bytes: Best estimate.
        low_bytes: Least that the samples allow.
        high_bytes: Most that the samples allow; keep this much free.
        per_graph_bytes: Expected increment of each size but the largest.
    """

    expected_bytes: int
    low_bytes: int
    high_bytes: int
    per_graph_bytes: tuple[tuple[int, int], ...]


def forecast_memory(
    samples: Iterable[MemorySample],
    sizes: Sequence[int],
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemoryForecast:
    """Return what graphs of all sizes will take, from a few that were captured.

    Args:
        samples: Captured in this order, largest size first; the first one must be the
            largest of ``sizes``. Two or three more, spread over the sizes and with the
            smallest among them, make the bar narrow.
        sizes: All sizes that will be captured.
        segment_bytes: Step in which the pool grows.

    Raises:
        ConfigError: Fewer than two samples, not largest first, memory that shrinks, or a
            largest size that was not captured.
    """
    taken = list(samples)
    wanted = sorted({check_count(size, "size") for size in sizes}, reverse=True)
    if len(taken) < 2:
        raise ConfigError("samples", len(taken), "at least 2 captured sizes")
    if any(a.size <= b.size for a, b in itertools.pairwise(taken)):
        raise ConfigError("samples", [s.size for s in taken], "captured largest size first")
    if any(a.reserved_bytes > b.reserved_bytes for a, b in itertools.pairwise(taken)):
        raise ConfigError(
            "samples",
            [s.reserved_bytes for s in taken],
            "memory that never shrinks from one capture to the next",
        )
    if not wanted or wanted[0] != taken[0].size:
        raise ConfigError(
            "samples",
            taken[0].size,
            f"first of all the largest size to forecast ({wanted[0] if wanted else 'none'})",
        )
    increments = [
        (after.size, after.reserved_bytes - before.reserved_bytes)
        for before, after in itertools.pairwise(taken)
    ]
    increments.reverse()  # ascending in size
    first = taken[0].reserved_bytes
    expected = low = high = float(first)
    per_graph = []
    measured = dict(increments)
    for size in wanted[1:]:
        if size in measured:
            below = guess = above = float(measured[size])
        else:
            below, guess, above = _between(increments, size)
        expected, low, high = expected + guess, low + below, high + above
        per_graph.append((size, round(guess)))
    # A segment reserved for one graph may serve the next, or the next may need a new one.
    if any(size not in measured for size in wanted[1:]):
        high += segment_bytes
        low = max(
            float(taken[-1].reserved_bytes if _covers(wanted, taken) else first),
            low - segment_bytes,
        )
    return MemoryForecast(round(expected), round(low), round(high), tuple(per_graph))


def _covers(wanted: Sequence[int], taken: Sequence[MemorySample]) -> bool:
    return {sample.size for sample in taken} <= set(wanted)


def _between(increments: Sequence[tuple[int, int]], size: int) -> tuple[float, float, float]:
    """Return (least, expected, most) for a size that was not captured."""
    smaller = [(s, value) for s, value in increments if s < size]
    larger = [(s, value) for s, value in increments if s > size]
    # Increments should grow with size; where measured ones do not, the bar holds them all.
    least = min((value for _, value in smaller), default=0)
    most = max((value for _, value in increments), default=0)
    if larger:
        most = max([value for _, value in larger[:1]] + [value for _, value in smaller])
    if smaller and larger:
        (s0, v0), (s1, v1) = smaller[-1], larger[0]
        guess = v0 + (v1 - v0) * (size - s0) / (s1 - s0)
        return float(min(least, v1)), guess, float(most)
    if larger:  # below the smallest captured size
        return 0.0, float(larger[0][1]), float(most)
    # Above every captured increment (only the largest graph, the pool itself, is larger).
    s1, v1 = increments[-1]
    return float(least), float(v1), float(most) * max(1.0, size / s1)
