"""Poison: contents of the tape's memory before anything is computed into it."""

from __future__ import annotations

import torch


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """Return the value that means "not computed": NaN, or an extreme of the dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the poison of its dtype."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(255)  # NaN in these dtypes; not all can be filled
    else:
        tensor.fill_(poison_value(tensor.dtype))
