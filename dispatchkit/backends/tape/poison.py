"""Poison: the contents of memory on the tape before results are computed."""

from __future__ import annotations

import torch


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """Return the poison value of a dtype: NaN, or the dtype's minimum or maximum."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the poison of its dtype."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(
            255
        )  # NaN in these dtypes, some of which do not support fill_
    else:
        tensor.fill_(poison_value(tensor.dtype))
