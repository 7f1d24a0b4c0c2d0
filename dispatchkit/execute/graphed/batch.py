"""Guess the batch dimension of each tensor of a call.

By default, the batch dimension is dimension 0 of the first tensor, and of each tensor with the same
size there. For recurrent states, whose dimension 0 counts layers, it is dimension 1. If these rules
find a batch dimension only in the first tensor, but another tensor has the same size in dimension 1
as the first, the first tensor is treated as a time-first sequence. The batch dimension of all
batched tensors is then dimension 1. A guess may be wrong, so each capture checks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def guess_batch_dims(
    tensors: Sequence[torch.Tensor],
    known: Sequence[int | None] | None,
    *,
    time_first: bool = False,
) -> list[int | None]:
    """Return the batch dimension of each tensor of a call; None for unbatched tensors.

    Args:
        tensors: Tensors of the call.
        known: Result for earlier calls of the same kind, or None. A tensor that was unbatched in
            those calls stays unbatched.
        time_first: Whether the target takes time-first sequences.
    """
    may_follow = [
        one.dim() > 0 and (known is None or known[index] is not None)
        for index, one in enumerate(tensors)
    ]
    first = next((one for one, may in zip(tensors, may_follow, strict=True) if may), None)
    if first is None:
        return [None] * len(tensors)
    if (time_first and first.dim() > 2) or _is_time_first(first, tensors, may_follow):
        rows = first.shape[1]
        return [
            1 if may and one.dim() > 2 and one.shape[1] == rows else None
            for one, may in zip(tensors, may_follow, strict=True)
        ]
    rows = first.shape[0]
    return [
        _dim_of(one, rows) if may else None for one, may in zip(tensors, may_follow, strict=True)
    ]


def _dim_of(tensor: torch.Tensor, rows: int) -> int | None:
    if tensor.shape[0] == rows:
        return 0
    return 1 if tensor.dim() > 2 and tensor.shape[1] == rows else None


def _is_time_first(
    first: torch.Tensor, tensors: Sequence[torch.Tensor], may_follow: Sequence[bool]
) -> bool:
    """Return whether the first tensor of a call is treated as a time-first sequence."""
    others = [one for one, may in zip(tensors, may_follow, strict=True) if may and one is not first]
    if first.dim() < 3 or not others:
        return False
    if any(_dim_of(one, first.shape[0]) is not None for one in others):
        return False
    return any(one.dim() > 2 and one.shape[1] == first.shape[1] for one in others)
