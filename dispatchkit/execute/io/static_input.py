"""One static input as it is declared: shape, dtype, fill, and where it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from dispatchkit.errors import ConfigError, InputError, UnknownNameError
from dispatchkit.keys.checks import whole_number


def parse_dtype(value: Any) -> torch.dtype:
    """Return the torch type for a dtype or its name (``"int64"``, ``"torch.bfloat16"``).

    Raises:
        UnknownNameError: torch has no type of that name.
    """
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = {n for n in vars(torch) if isinstance(getattr(torch, n), torch.dtype)}
        raise UnknownNameError("dtype", name, known)
    return found


def _shape(value: Any) -> tuple[int | str | None, ...]:
    shape = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    named = [size for size in shape if isinstance(size, str) and size.isidentifier()]
    sizes = [size for size in shape if size is not None and size not in named]
    if any((number := whole_number(size)) is None or number < 0 for size in sizes):
        raise ConfigError("shape", value, "whole numbers, with None for the batch dimension")
    if shape.count(None) > 1:
        raise ConfigError("shape", value, "a shape with None at most once, the batch dimension")
    return shape


def _is_value_of(fill: Any, dtype: torch.dtype) -> bool:
    """Return whether a type has a value, or one that it is rounded to; torch cuts others off."""
    try:
        held = torch.full((), fill, dtype=dtype).item()
        if dtype.is_floating_point and math.isfinite(fill):
            return bool(abs(fill) <= torch.finfo(dtype).max)
        return bool(held == fill or (held != held and fill != fill))
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False


@attrs.frozen
class StaticInput:
    """What a graph expects of one input.

    Attributes:
        shape: Its shape, None at the batch dimension (tokens). Without a None it is not
            batched and is copied whole. The name of an axis stands for the axis's value.
        dtype: Its type, as a torch dtype or a name.
        fill: What rows without a token hold, in warmup, capture and every replay.
        host: It is given in host memory: a numpy array, a CPU tensor (pinned or not), or a
            list. Its copy to the device is part of the graph.
    """

    shape: tuple[Any, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype = attrs.field(converter=parse_dtype)
    fill: float | int | bool = 0
    host: bool = False

    def __attrs_post_init__(self) -> None:
        if not _is_value_of(self.fill, self.dtype):
            raise ConfigError("fill", self.fill, f"a value of {self.dtype}")

    @property
    def batch_dim(self) -> int | None:
        """Index of the batch dimension, None where the input is not batched."""
        return self.shape.index(None) if None in self.shape else None

    def sized(self, num_rows: int) -> torch.Size:
        """Return the shape at a number of rows."""
        return torch.Size(num_rows if size is None else size for size in self.shape)

    def full(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return new memory of so many rows, all of it fill."""
        return torch.full(self.sized(num_rows), self.fill, dtype=self.dtype, device=device)


def inputs_from_example(example: Mapping[str, torch.Tensor]) -> dict[str, StaticInput]:
    """Derive static inputs from one example of each.

    The inputs that share the size of dimension 0 of the first tensor are batched along it;
    the others are not batched. An example whose other inputs happen to have that size is
    read wrongly: give ``inputs`` there.

    Raises:
        InputError: An example is no tensor, or the first has no dimension.
    """
    rows: int | None = None
    derived = {}
    for name, tensor in example.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(name, f"Example of {name!r} must be a tensor, got {tensor!r:.60}.")
        if rows is None:
            if tensor.dim() == 0:
                raise InputError(
                    name,
                    f"Example of {name!r} must have a batch dimension, got a 0-d tensor. Put a "
                    "batched input first, or declare `inputs`.",
                )
            rows = tensor.shape[0]
        batched = tensor.dim() > 0 and tensor.shape[0] == rows
        shape = (None, *tensor.shape[1:]) if batched else tuple(tensor.shape)
        derived[name] = StaticInput(shape, tensor.dtype)
    return derived
