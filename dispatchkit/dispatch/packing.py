"""Packing: group items of different lengths into steps before dispatch.

The dispatcher's table has no cell for a list of lengths. So a packer first divides the items of a
call into bins, and each bin runs as an ordinary step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs

from dispatchkit.errors import PolicyError


@attrs.frozen
class PackingLimits:
    """The limits of a bin, and the sizes of bins that replay without padding.

    Attributes:
        sizes: Captured numbers of tokens, ascending; a bin is padded to the next one.
        max_items: Most items in a bin; None means no limit.
    """

    sizes: tuple[int, ...]
    max_items: int | None = None

    @property
    def max_tokens(self) -> int:
        """Most tokens of a bin that a graph serves; a longer item gets its own bin."""
        return self.sizes[-1] if self.sizes else 0


class Packer(Protocol):
    """Divides the items of a call into bins."""

    def __call__(
        self, lengths: Sequence[int], limits: PackingLimits
    ) -> Iterable[Sequence[int]]:  # pragma: no cover - a contract
        """Return the items of each bin, as indices into ``lengths``.

        Each item is in one bin. A bin has at most ``limits.max_tokens`` tokens, unless it holds a
        single item, and at most ``limits.max_items`` items.

        Args:
            lengths: Tokens of each item, at least 1.
            limits: The limits of a bin.
        """


def checked_bins(
    packer: Packer, lengths: Sequence[int], limits: PackingLimits
) -> list[tuple[int, ...]]:
    """Return the bins of a packer.

    Raises:
        PolicyError: It raised, an item is missing or in two bins, or a bin exceeds its limits.
    """
    name = getattr(packer, "__name__", type(packer).__name__)
    try:
        answer: Any = packer(lengths, limits)
        bins = [tuple(one) for one in answer]
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}."
        raise PolicyError(name, "pack", problem) from error
    problem = _problem(bins, lengths, limits)
    if problem:
        raise PolicyError(name, "pack", problem, value=bins)
    return bins


def _problem(bins: Sequence[Sequence[Any]], lengths: Sequence[int], limits: PackingLimits) -> str:
    """Describe what is wrong with bins; empty if they are valid."""
    found = [item for one in bins for item in one]
    if any(type(item) is not int for item in found) or sorted(found) != list(range(len(lengths))):
        return f"returned {bins!r}, not each of {len(lengths)} items once."
    for one in bins:
        num_tokens = sum(lengths[item] for item in one)
        if not one:
            return "returned a bin without items."
        if num_tokens > limits.max_tokens and len(one) > 1:
            most = f"{limits.max_tokens}, the largest captured size"
            return f"put {num_tokens} tokens into a bin, more than {most}."
        if limits.max_items is not None and len(one) > limits.max_items:
            return f"put {len(one)} items into a bin, more than {limits.max_items}."
    return ""
