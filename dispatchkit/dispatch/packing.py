"""Pack items of different lengths into steps before dispatch.

The dispatcher's table is indexed by a number of tokens, not by a list of lengths. A packer
therefore groups the items of a call into bins, and each bin runs as an ordinary step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs

from dispatchkit.errors import PolicyError, counted, describe_exception, format_value


@attrs.frozen
class PackingLimits:
    """The captured sizes, and the limits of each bin.

    Attributes:
        sizes: Captured sizes in tokens, ascending; a bin is padded to the next size.
        max_items: Largest number of items in a bin; None means no limit.
    """

    sizes: tuple[int, ...]
    max_items: int | None = None

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a bin; a longer item gets its own bin and runs eager."""
        return self.sizes[-1] if self.sizes else 0


class Packer(Protocol):
    """A function that groups the items of a call into bins."""

    def __call__(
        self, lengths: Sequence[int], limits: PackingLimits
    ) -> Iterable[Sequence[int]]:  # pragma: no cover - a protocol
        """Return the items of each bin, as indices into ``lengths``.

        Each item must be in exactly one bin, and no bin may be empty. A bin has at most
        ``limits.max_items`` items. A bin of several items has at most ``limits.max_tokens`` tokens.

        Args:
            lengths: Number of tokens of each item, at least 1.
            limits: The captured sizes, and the largest number of items in a bin.
        """


def pack_items(
    packer: Packer, lengths: Sequence[int], limits: PackingLimits
) -> list[tuple[int, ...]]:
    """Call a packer and return its bins, after validating them.

    Raises:
        PolicyError: The packer raised, an item is missing or in two bins, or a bin is empty or
            exceeds its limits.
    """
    name = getattr(packer, "__name__", type(packer).__name__)
    try:
        answer: Any = packer(lengths, limits)
        bins = [tuple(one) for one in answer]
    except Exception as error:
        problem = describe_exception(error)
        raise PolicyError(name, "pack", problem) from error
    problem = _problem(bins, lengths, limits)
    if problem:
        raise PolicyError(name, "pack", problem, value=bins)
    return bins


def _problem(bins: Sequence[Sequence[Any]], lengths: Sequence[int], limits: PackingLimits) -> str:
    """Return why bins are invalid; empty if they are valid."""
    found = [item for one in bins for item in one]
    if any(type(item) is not int for item in found) or sorted(found) != list(range(len(lengths))):
        text = f"returned {format_value(bins)}"
        if not lengths:
            return f"{text}; there are no items to pack, so return no bins."
        indices = f"each index from 0 to {len(lengths) - 1}" if len(lengths) > 1 else "index 0"
        return f"{text}; the bins must contain {indices} exactly once."
    for one in bins:
        num_tokens = sum(lengths[item] for item in one)
        if not one:
            return "returned a bin without items; omit empty bins."
        if num_tokens > limits.max_tokens and len(one) > 1:
            most = f"{limits.max_tokens} (the largest captured size)"
            return f"put {counted(num_tokens, 'token')} into a bin; the limit is {most}."
        if limits.max_items is not None and len(one) > limits.max_items:
            most = f"{limits.max_items} (max_items)"
            return f"put {counted(len(one), 'item')} into a bin; the limit is {most}."
    return ""
