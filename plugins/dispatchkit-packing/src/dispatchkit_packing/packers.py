"""Pack items into steps by first-fit decreasing, with the bin size that costs least.

Bin packing is NP-hard. First-fit decreasing uses at most 11/9 times the minimum number of bins,
plus 6/9 (Dósa, 2007). However, each bin becomes a step, which is padded to a captured size and has
a fixed cost. The packing with the fewest bins is therefore not always the cheapest: 33 tokens fit
into one step of 64 tokens, or into two steps of 32 and 1. The two steps cost less if the fixed cost
of a step is less than the cost of 31 tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from dispatchkit.dispatch import PackingLimits
from dispatchkit.errors import ConfigError

__all__ = ["CheapestPacking", "first_fit_decreasing"]

#: Fixed cost of a step, in tokens: an estimate for an encoder of 100 million parameters on a large
#: GPU, where a token takes about half a microsecond. Measure the cost of your own model.
STEP_TOKENS = 64


def first_fit_decreasing(lengths: Sequence[int], limits: PackingLimits) -> list[list[int]]:
    """Put each item, longest first, into the first bin that has room.

    Args:
        lengths: Number of tokens of each item.
        limits: Limits of a bin. An item with more than ``max_tokens`` tokens gets a separate bin.

    Returns:
        The indices of the items in each bin.
    """
    return _first_fit(lengths, limits.max_tokens, limits.max_items)


def _first_fit(lengths: Sequence[int], max_tokens: int, max_items: int | None) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        length = lengths[item]
        for index, left in enumerate(room):
            if length <= left and (max_items is None or len(bins[index]) < max_items):
                bins[index].append(item)
                room[index] -= length
                break
        else:
            bins.append([item])
            room.append(max_tokens - length)
    return bins


class CheapestPacking:
    """A packer that tries bins of different sizes, and returns the cheapest packing.

    For each captured size that the longest item fits into, it packs all items by first-fit
    decreasing into bins of this size. If the longest item fits into no captured size, only the
    largest is tried. The cheapest of these packings never costs more than the packing of
    ``first_fit_decreasing``.

    Args:
        cost: Function, such as ``graph_us`` of a cost model, that takes the number of tokens of a
            step and returns the step's cost in any unit. It is called with captured sizes, and with
            the number of tokens of a step that exceeds them all. By default, the cost is the number
            of tokens plus 64.

    Raises:
        ConfigError: ``cost`` is not callable.
    """

    def __init__(self, cost: Callable[[int], float] | None = None) -> None:
        if cost is not None and not callable(cost):
            raise ConfigError(
                "cost",
                cost,
                "a function that takes a number of tokens and returns the cost of a step",
            )
        self._cost: Callable[[int], float] = _tokens_and_step if cost is None else cost

    def __call__(self, lengths: Sequence[int], limits: PackingLimits) -> list[list[int]]:
        """Return the indices of the items in each bin, like ``first_fit_decreasing``."""
        longest = max(lengths, default=0)
        capacities = [size for size in limits.sizes if size >= longest] or [limits.max_tokens]
        answers = [_first_fit(lengths, size, limits.max_items) for size in capacities]
        return min(answers, key=lambda bins: self._total(bins, lengths, limits))

    def _total(
        self, bins: Sequence[Sequence[int]], lengths: Sequence[int], limits: PackingLimits
    ) -> float:
        total = 0.0
        for one in bins:
            num_tokens = sum(lengths[item] for item in one)
            at = bisect_left(limits.sizes, num_tokens)
            total += self._cost(limits.sizes[at] if at < len(limits.sizes) else num_tokens)
        return total


def _tokens_and_step(num_tokens: int) -> float:
    return num_tokens + STEP_TOKENS
