"""Forecast the memory of a set of graphs from a few captures.

Graphs of one lane share a pool and reuse each other's temporary memory. For temporary memory, the
pool grows only when a graph needs more than any earlier graph. This is the case for the largest
graph, which is captured first, and sometimes for a small graph whose kernels need more memory than
those of larger graphs. Memory that a graph keeps (tensors that outlive its capture) is added for
each graph. The forecast is therefore the size of the pool after the sampled captures, plus the
memory that the graph of each unsampled size will keep. The memory kept by a size between two
samples is assumed to be between the memory kept by the two samples.

Without ``held_bytes``, the two kinds of growth cannot be distinguished, and all growth counts as
kept memory. This forecast is safe, but far too high if most of the growth was temporary memory,
which all graphs share.

Keep ``high_bytes + driver_high_bytes`` free. ``high_bytes`` is high enough if each unsampled size
keeps no more memory than assumed above, and needs no more temporary memory than the sampled sizes.
If in doubt, capture more samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import attrs

from dispatchkit.errors import ConfigError, counted
from dispatchkit.keys import check_counts

__all__ = [
    "SEGMENT_BYTES",
    "MemoryForecast",
    "MemorySample",
    "forecast_memory",
    "spread_sizes",
]

SEGMENT_BYTES = 2 * 1024 * 1024
"""Smallest unit in which torch's caching allocator reserves memory (torch 2.x, kSmallBuffer)."""

# Measuring how driver memory grows requires this many samples after the first driver block.
_ENOUGH_BLOCKS = 3


@attrs.frozen
class MemorySample:
    """Total growth of memory due to a capture and all earlier captures.

    Attributes:
        size: Capture size of the last of these captures.
        reserved_bytes: Growth of the pool.
        held_bytes: Part of the growth that is in use while no graph runs; None if unknown.
        driver_bytes: Memory that the driver allocated in addition to the pool.
    """

    size: int
    reserved_bytes: int
    held_bytes: int | None = None
    driver_bytes: int = 0


@attrs.frozen
class MemoryForecast:
    """Memory forecast for a set of graphs.

    Attributes:
        expected_bytes: Best estimate of the size of the pool.
        low_bytes: Lower bound of this size, derived from the samples.
        high_bytes: Upper bound of this size, derived from the samples; keep this much memory free.
        per_graph_bytes: (size, expected growth of the pool) pairs for all sizes except the largest.
        driver_bytes: Memory that the driver will allocate in addition to the pool, extrapolated
            from the samples.
        driver_high_bytes: Upper bound of the memory that the driver will allocate. The driver
            allocates whole blocks, so the bound is loose if the sampled captures needed few blocks.
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
        sizes = counted(len(self.per_graph_bytes) + 1, "size")
        pool = f"{expected} MiB ({low} to {high})"
        return f"{sizes}: {pool}, plus {driver} MiB for the driver (up to {driver_high})"


def forecast_memory(
    samples: Iterable[MemorySample],
    sizes: Sequence[int],
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemoryForecast:
    """Return the memory forecast for graphs of all sizes, from a few captures.

    Args:
        samples: Samples in the order of capture, largest size first. The first sample must be
            of the largest size. Include the smallest size. In between, take about half the size of
            the previous sample each time: libraries switch kernels around powers of two, and a
            different kernel may need a larger pool.
        sizes: All sizes that will be captured.
        segment_bytes: Unit in which the pool and the driver's memory grow.

    Raises:
        ConfigError: There are fewer than two samples, they are not sorted by descending size,
            reserved memory shrinks, or the first sample is not of the largest size.
    """
    taken = list(samples)
    wanted = sorted(set(check_counts(sizes, "sizes")), reverse=True)
    _check(taken, wanted)
    pairs = list(itertools.pairwise(taken))
    grown = {after.size: after.reserved_bytes - before.reserved_bytes for before, after in pairs}
    has_held = all(sample.held_bytes is not None for sample in taken)
    kept = dict(grown)
    if has_held:
        kept = {b.size: max(0, (b.held_bytes or 0) - (a.held_bytes or 0)) for a, b in pairs}
    increments = sorted(kept.items())
    first, last = taken[0].reserved_bytes, taken[-1].reserved_bytes
    expected = low = high = float(last)
    if any(size not in wanted for size in grown):
        low = float(first)  # samples outside ``sizes`` may hold part of the pool
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
        # The graph of an unsampled size may fit into a reserved segment, or need a new segment.
        low = max(float(last if low >= last else first), low - segment_bytes)
        high += segment_bytes
    driver, driver_high = _driver(taken, len(wanted), segment_bytes)
    return MemoryForecast(
        round(expected), round(low), round(high), tuple(per_graph), driver, driver_high
    )


def spread_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the sizes, largest first, evenly spaced on a log scale.

    The scale is logarithmic because libraries switch to kernels with different memory requirements
    around powers of two.
    """
    largest, smallest = sizes[0], sizes[-1]
    wanted = [largest * (smallest / largest) ** (i / (count - 1)) for i in range(count)]
    return sorted({min(sizes, key=lambda size: abs(size - want)) for want in wanted}, reverse=True)


def _driver(taken: Sequence[MemorySample], num_sizes: int, block_bytes: int) -> tuple[int, int]:
    """Return the expected and the maximum driver memory for ``num_sizes`` sizes.

    The driver allocates another whole block when the current block is full. How full the block was
    before the first sample is unknown. If enough samples follow the first new block, the growth is
    measured from that block on.
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
        raise ConfigError("samples", taken, "a list of at least two samples", "Capture more sizes.")
    if any(a.size <= b.size for a, b in itertools.pairwise(taken)):
        raise ConfigError(
            "sizes of samples",
            [s.size for s in taken],
            "distinct and in descending order",
            "Capture the largest size first.",
        )
    if any(a.reserved_bytes > b.reserved_bytes for a, b in itertools.pairwise(taken)):
        raise ConfigError(
            "reserved_bytes of samples",
            [s.reserved_bytes for s in taken],
            "in non-decreasing order",
            "Measure again while no other code releases memory.",
        )
    if not wanted:
        raise ConfigError("sizes", [], "a list of at least one size")
    if wanted[0] != taken[0].size:
        raise ConfigError(
            "size of the first sample",
            taken[0].size,
            f"{wanted[0]}, the largest value in sizes",
            f"Capture size {wanted[0]} first.",
        )


def _between(increments: Sequence[tuple[int, int]], size: int) -> tuple[float, float, float]:
    """Return the minimum, expected and maximum increment of a size without a sample."""
    smaller = [(s, value) for s, value in increments if s < size]
    larger = [(s, value) for s, value in increments if s > size]
    # Increments should grow with size, but measured increments sometimes do not. The bounds
    # therefore include the increments of all smaller sizes and of the next larger size.
    least = min((value for _, value in smaller), default=0)
    most = max((value for _, value in increments), default=0)
    if larger:
        most = max([value for _, value in larger[:1]] + [value for _, value in smaller])
    if smaller and larger:
        (s0, v0), (s1, v1) = smaller[-1], larger[0]
        guess = v0 + (v1 - v0) * (size - s0) / (s1 - s0)
        return float(min(least, v1)), guess, float(most)
    if larger:  # the size is below the smallest captured size
        return 0.0, float(larger[0][1]), float(most)
    # The size is above all sampled sizes except the largest, which has no increment.
    s1, v1 = increments[-1]
    return float(least), float(v1), float(most) * max(1.0, size / s1)
