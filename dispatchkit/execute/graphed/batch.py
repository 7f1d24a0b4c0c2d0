"""Which dimension of each tensor of a call is the batch, where nothing declares it.

It is dimension 0 of the first tensor and of those that share its size. A recurrent state has the
batch in dimension 1, behind the layers; and where nothing shares dimension 0 of a sequence but
dimension 1, as time-first sequences and their states do, dimension 1 is the batch of all. A guess
can be wrong, and is proven like any other.
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
    """Return the batch dimension of each tensor of a call; None where it has none.

    Args:
        tensors: Of the call.
        known: What an earlier call of the kind was taken for; a tensor that did not follow the
            batch once is unbatched from then on.
        time_first: What is called is known to take sequences so.
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
    """Return whether other tensors share dimension 1 of the first one, and none dimension 0."""
    others = [one for one, may in zip(tensors, may_follow, strict=True) if may and one is not first]
    if first.dim() < 3 or not others:
        return False
    if any(_dim_of(one, first.shape[0]) is not None for one in others):
        return False
    return any(one.dim() > 2 and one.shape[1] == first.shape[1] for one in others)
