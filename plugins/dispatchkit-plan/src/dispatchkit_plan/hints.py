"""Hints for schedulers: the number of tokens that fit into a step at no extra cost.

Replacing padding with real tokens does not change the time of a step. A hint is the number of
tokens or requests that a scheduler can add before the step needs a larger bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from dispatchkit.errors import DescriptorError

__all__ = ["Hint", "free_tokens", "hint"]


@attrs.frozen
class Hint:
    """Free capacity in the bucket of a step.

    Attributes:
        bucket: Size that the step is padded to; None if it exceeds all buckets.
        free_tokens: Number of tokens that can be added at no extra cost.
        free_requests: Number of requests of ``query_len`` tokens that can be added at no extra
            cost.
        shrink_by: Number of tokens to remove to reach the next smaller bucket; None if there is no
            smaller bucket.
    """

    bucket: int | None
    free_tokens: int
    free_requests: int
    shrink_by: int | None


def free_tokens(table: Sequence[int], num_tokens: int) -> int:
    """Return the number of tokens that still fit into a step's bucket.

    The number is 0 if the step exceeds the largest bucket.

    A call takes one list access and one subtraction, cheap enough for every scheduling decision.

    Args:
        table: Padding table, as returned by ``dispatchkit.keys.padding_table``.
        num_tokens: Number of tokens of the step so far, at least 0.

    Raises:
        DescriptorError: ``num_tokens`` is negative.

    Example:
        >>> from dispatchkit.keys import padding_table
        >>> free_tokens(padding_table((1, 2, 4, 8)), 5)
        3
    """
    if 0 <= num_tokens < len(table):
        return table[num_tokens] - num_tokens
    if num_tokens < 0:
        raise DescriptorError("num_tokens", num_tokens, "at least 0")
    return 0


def hint(
    table: Sequence[int],
    num_tokens: int,
    *,
    query_len: int = 1,
    num_reqs: int | None = None,
    max_num_seqs: int | None = None,
) -> Hint:
    """Return the free capacity in the bucket of a step.

    Args:
        table: Padding table, as returned by ``dispatchkit.keys.padding_table``.
        num_tokens: Number of tokens of the step so far.
        query_len: Number of tokens of each added request.
        num_reqs: Number of requests of the step so far; required with ``max_num_seqs``, otherwise
            ignored.
        max_num_seqs: Maximum number of requests of a step.

    Raises:
        DescriptorError: A number is negative, ``query_len`` is below 1, or ``max_num_seqs`` is
            given without ``num_reqs``.
    """
    if query_len < 1:
        raise DescriptorError("query_len", query_len, "at least 1")
    free = free_tokens(table, num_tokens)
    requests = free // query_len
    if max_num_seqs is not None:
        if num_reqs is None or num_reqs < 0:
            raise DescriptorError("num_reqs", num_reqs, "at least 0 if max_num_seqs is given")
        requests = min(requests, max(0, max_num_seqs - num_reqs))
    inside = num_tokens < len(table)
    bucket = table[num_tokens] if inside else None
    return Hint(bucket, free, requests, _shrink(table, num_tokens))


def _shrink(table: Sequence[int], num_tokens: int) -> int | None:
    """Return ``Hint.shrink_by``, found by bisection."""
    if num_tokens >= len(table):
        return num_tokens - (len(table) - 1) if len(table) > 1 else None
    bucket = table[num_tokens]
    low, high = 0, num_tokens  # the first size of this bucket lies in [low, high]
    while low < high:
        middle = (low + high) // 2
        if table[middle] < bucket:
            low = middle + 1
        else:
            high = middle
    return num_tokens - (low - 1) if low > 1 else None
