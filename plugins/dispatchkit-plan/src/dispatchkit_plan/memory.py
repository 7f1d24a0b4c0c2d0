"""Forecast the memory of a set of graphs from a few that were captured.

Graphs of one lane share one pool, and reuse each other's temporary memory: the pool grows only
when a graph needs more at once than any before it. That is the largest graph, which is captured
first, and sometimes a small one that uses another kernel. Memory that a graph keeps (tensors
that outlive its capture) is added for each graph. So the forecast is the pool's size after the
sampled captures, plus what each other size will keep. Between two measured sizes, that amount
lies between theirs.

Without ``held_bytes`` the two cannot be distinguished, and all growth counts as kept: safe, but
far too high if the pool has grown once for all graphs.

``high_bytes`` is the amount to keep free. It is never too low as long as no unsampled size
needs more memory at once than the sampled ones; capture more samples if that is in doubt.
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
"""Smallest unit in which torch's caching allocator reserves memory (torch 2.x, kSmallBuffer)."""

# Samples needed after the driver's first block to measure how fast it takes more.
_ENOUGH_BLOCKS = 3


@attrs.frozen
class MemorySample:
    """Memory growth up to one more captured graph, counted from before the first.

    Attributes:
        size: Capture size of that graph.
        reserved_bytes: Memory of the pool, in whole segments.
        held_bytes: The part of it in use while no graph runs; None if not known.
        driver_bytes: Memory that the driver took in addition.
    """

    size: int
    reserved_bytes: int
    held_bytes: int | None = None
    driver_bytes: int = 0


@attrs.frozen
class MemoryForecast:
    """Forecast memory of a set of graphs.

    Attributes:
        expected_bytes: Best estimate for the pool.
        low_bytes: Lower bound from the samples.
        high_bytes: Upper bound from the samples; keep this much free.
        per_graph_bytes: Expected increment of each size except the largest.
        driver_bytes: Memory that the driver will take in addition to the pool, in proportion
            to the samples.
        driver_high_bytes: Its upper bound: the driver takes whole blocks, so the bound is wide
            if the samples took few of them.
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
            f"{len(self.per_graph_bytes) + 1} sizes: {expected} MiB ({low} to {high}), and the "
            f"driver {driver} MiB (up to {driver_high})"
        )


def forecast_memory(
    samples: Iterable[MemorySample],
    sizes: Sequence[int],
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemoryForecast:
    """Return the forecast memory of graphs of all sizes, from a few that were captured.

    Args:
        samples: Samples in the order of capture, largest size first; the first one must be
            the largest of ``sizes``. Include the smallest size, and others about half the one
            before: libraries choose other kernels around powers of two, which may grow the
            pool.
        sizes: All sizes that will be captured.
        segment_bytes: Unit in which the pool and the driver's memory grow.

    Raises:
        ConfigError: There are fewer than two samples, they are not largest first, memory
            shrinks, or the largest size was not captured.
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
        low = float(first)  # samples of other sizes may hold memory these graphs do not need
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
        # The next graph may fit into a segment reserved for this one, or need a new one.
        low = max(float(last if low >= last else first), low - segment_bytes)
        high += segment_bytes
    driver, driver_high = _driver(taken, len(wanted), segment_bytes)
    return MemoryForecast(
        round(expected), round(low), round(high), tuple(per_graph), driver, driver_high
    )


def spread_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """Return about ``count`` of the sizes, largest first, in even ratios down to the smallest.

    Ratios are used because libraries choose other kernels, which need other amounts of memory,
    around powers of two.
    """
    largest, smallest = sizes[0], sizes[-1]
    wanted = [largest * (smallest / largest) ** (i / (count - 1)) for i in range(count)]
    return sorted({min(sizes, key=lambda size: abs(size - want)) for want in wanted}, reverse=True)


def _driver(taken: Sequence[MemorySample], num_sizes: int, block_bytes: int) -> tuple[int, int]:
    """Return (expected, maximum) memory that the driver takes for ``num_sizes`` sizes.

    The driver takes whole blocks, and a new one only when the current one is full. How full that
    was at the start is unknown, so only growth after the first new block shows how fast
    blocks fill.
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
            "memory that never shrinks between captures",
        )
    if not wanted or wanted[0] != taken[0].size:
        raise ConfigError(
            "samples",
            taken[0].size,
            f"first the largest size to forecast ({wanted[0] if wanted else 'none'})",
        )


def _between(increments: Sequence[tuple[int, int]], size: int) -> tuple[float, float, float]:
    """Return (minimum, expected, maximum) for a size that was not captured."""
    smaller = [(s, value) for s, value in increments if s < size]
    larger = [(s, value) for s, value in increments if s > size]
    # Increments should grow with size; if measured ones do not, the bounds include them all.
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
    # Above every captured increment; only the largest graph, the pool itself, is larger.
    s1, v1 = increments[-1]
    return float(least), float(v1), float(most) * max(1.0, size / s1)
