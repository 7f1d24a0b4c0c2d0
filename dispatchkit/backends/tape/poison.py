"""The poison values that the tape's memory contains before results are computed."""

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
        # Some float8 dtypes do not support fill_. NaN is byte 128 in the fnuz dtypes, and byte 255
        # in the other float8 dtypes.
        tensor.view(torch.uint8).fill_(128 if str(tensor.dtype).endswith("fnuz") else 255)
    else:
        tensor.fill_(poison_value(tensor.dtype))
