"""Forecast what a set of graphs will take in memory, from a few that were captured.

Graphs of one lane share one pool. What a graph only works with, others use again: the pool
grows when a graph needs more at once than any before it, which the largest does, captured
first, and now and then a small one that picks another kernel. What a graph keeps to itself
(tensors that outlive its capture) each adds anew. So the forecast is what the pool holds after
the captured ones, plus what each other size will keep: between two measured sizes the amount
lies between theirs, at the smaller end at least, at the larger end at most.

Without ``held_bytes`` nothing tells the two apart, and all growth counts as kept: safe, and far
too much where a pool has grown once for all.

``high_bytes`` is what to keep free. It is never too low as long as no size that was left out
needs more at once than those captured; capture more of them where that is in doubt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import attrs

from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

__all__ = [
    "SEGMENT_BYTES",
    "MemoryForecast",
    "MemorySample",
    "forecast_memory",
    "spread_sizes",
]

SEGMENT_BYTES = 2 * 1024 * 1024
"""Smallest step in which torch's caching allocator reserves memory (torch 2.x, kSmallBuffer)."""

# Samples after the driver's first block that tell how fast it takes more.
_ENOUGH_BLOCKS = 3


@attrs.frozen
class MemorySample:
    """Memory after one more graph was captured, since before the first.

    Attributes:
        size: Capture size of that graph.
        reserved_bytes: What the pool holds, in whole segments.
        held_bytes: Of that, what is in use while no graph runs; None where not known.
        driver_bytes: What the driver took besides.
    """

    size: int
    reserved_bytes: int
    held_bytes: int | None = None
    driver_bytes: int = 0


@attrs.frozen
class MemoryForecast:
    """What a set of graphs will take.

    Attributes:
        expected_bytes: Best estimate for the pool.
        low_bytes: Least that the samples allow.
        high_bytes: Most that the samples allow; keep this much free.
        per_graph_bytes: Expected increment of each size but the largest.
        driver_bytes: What the driver will take besides the pool, in proportion to the samples.
        driver_high_bytes: The most it is, since it grows in whole blocks: wide where the
            samples took few of them.
    """

    expected_bytes: int
    low_bytes: int
    high_bytes: int
    per_graph_bytes: tuple[tuple[int, int], ...]
    driver_bytes: int = 0
    driver_high_bytes: int = 0

    def __str__(self) -> str:
        expected, low, high, driver, driver_high = (
            f"{num_bytes / (1 << 20):,.2f}"
            for num_bytes in (
                self.expected_bytes,
                self.low_bytes,
                self.high_bytes,
                self.driver_bytes,
                self.driver_high_bytes,
            )
        )
        return (
            f"{len(self.per_graph_bytes) + 1} sizes: {expected} MiB ({low} to {high}), and of the "
            f"driver {driver} MiB (up to {driver_high})"
        )


def forecast_memory(
    samples: Iterable[MemorySample],
    sizes: Sequence[int],
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemoryForecast:
    """Return what graphs of all sizes will take, from a few that were captured.

    Args:
        samples: Captured in this order, largest size first; the first one must be the
            largest of ``sizes``. Some more, each about half the one before and the smallest
            among them, find what makes a pool grow: other kernels are taken around powers
            of two.
        sizes: All sizes that will be captured.
        segment_bytes: Step in which the pool and the driver grow.

    Raises:
        ConfigError: Fewer than two samples, not largest first, memory that shrinks, or a
            largest size that was not captured.
    """
    taken = list(samples)
    wanted = sorted({check_count(size, "size") for size in sizes}, reverse=True)
    _check(taken, wanted)
    pairs = list(itertools.pairwise(taken))
    grown = {after.size: after.reserved_bytes - before.reserved_bytes for before, after in pairs}
    knows_held = all(sample.held_bytes is not None for sample in taken)
    kept = dict(grown)
    if knows_held:
        kept = {b.size: max(0, (b.held_bytes or 0) - (a.held_bytes or 0)) for a, b in pairs}
    increments = sorted(kept.items())
    first, last = taken[0].reserved_bytes, taken[-1].reserved_bytes
    expected = low = high = float(last)
    if any(size not in wanted for size in grown):
        low = float(first)  # the samples hold what the graphs will not
    per_graph, is_guessed = [], False
    for size in wanted[1:]:
        if size in grown:
            per_graph.append((size, grown[size]))
            continue
        below, guess, above = _between(increments, size)
        is_guessed = True
        expected, low, high = expected + guess, low + below, high + above
        per_graph.append((size, round(guess)))
    if is_guessed:
        # A segment reserved for one graph may serve the next, or the next may need a new one.
        low = max(float(last if low >= last else first), low - segment_bytes)
        high += segment_bytes
    driver, driver_high = _driver(taken, len(wanted), segment_bytes)
    return MemoryForecast(
        round(expected), round(low), round(high), tuple(per_graph), driver, driver_high
    )


def spread_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """Return about so many of the sizes, the largest first, in even ratios down to the smallest.

    In ratios, since it is around powers of two that libraries take another kernel, with
    other needs of memory.
    """
    largest, smallest = sizes[0], sizes[-1]
    wanted = [largest * (smallest / largest) ** (i / (count - 1)) for i in range(count)]
    return sorted({min(sizes, key=lambda size: abs(size - want)) for want in wanted}, reverse=True)


def _driver(taken: Sequence[MemorySample], num_sizes: int, block_bytes: int) -> tuple[int, int]:
    """Return (expected, most) of what the driver takes for so many sizes.

    It takes whole blocks, the first when the one it had before is full: only what comes
    after that first one tells how fast they fill.
    """
    seen = [sample.driver_bytes for sample in taken]
    rest = max(0, num_sizes - len(taken))
    begin = next((index for index, value in enumerate(seen) if value > 0), len(seen) - 1)
    spaces = len(seen) - 1 - begin
    if spaces >= _ENOUGH_BLOCKS:
        slope = (seen[-1] - seen[begin]) / spaces
        steepest = (seen[-1] - seen[begin] + block_bytes) / spaces
    else:
        slope = seen[-1] / len(seen)
        steepest = (seen[-1] + block_bytes) / len(seen)
    return round(seen[-1] + rest * slope), round(seen[-1] + rest * steepest)


def _check(taken: Sequence[MemorySample], wanted: Sequence[int]) -> None:
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
