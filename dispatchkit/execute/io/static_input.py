"""The declaration of a static input: shape, dtype, fill and location."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch

from dispatchkit.errors import ConfigError, InputError, UnknownNameError
from dispatchkit.keys.checks import whole_number


def parse_dtype(value: Any) -> torch.dtype:
    """Return the torch dtype for a dtype or its name (``"int64"``, ``"torch.bfloat16"``).

    Raises:
        UnknownNameError: torch has no dtype of that name.
    """
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = {n for n in vars(torch) if isinstance(getattr(torch, n), torch.dtype)}
        raise UnknownNameError("dtype", name, known)
    return found


# A dimension along an axis: its value, possibly plus or minus a number.
_OF_AXIS = re.compile(r"(?P<axis>[^\W\d]\w*)( ?(?P<sign>[+-]) ?(?P<more>\d+))?")
#: The fill of inputs along an axis whose last value is repeated.
LAST = "last"


def axis_of(size: str) -> tuple[str, int]:
    """Return the axis that a dimension follows, and its offset from the axis's value."""
    found = _OF_AXIS.fullmatch(size)
    if found is None:
        raise ConfigError(
            "shape", size, "an axis, or an axis plus or minus a number: 'requests + 1'"
        )
    more = int(found["more"] or 0)
    return found["axis"], -more if found["sign"] == "-" else more


def _shape(value: Any) -> tuple[int | str | None, ...]:
    shape = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    sizes = [
        size
        for size in shape
        if size is not None and not (isinstance(size, str) and _OF_AXIS.fullmatch(size))
    ]
    if any((number := whole_number(size)) is None or number < 0 for size in sizes):
        raise ConfigError("shape", value, "whole numbers, with None for the batch dimension")
    if shape.count(None) > 1:
        raise ConfigError("shape", value, "a shape with None at most once, the batch dimension")
    return shape


def _is_value_of(fill: Any, dtype: torch.dtype) -> bool:
    """Return whether a dtype can hold a value, possibly rounded; torch would truncate others."""
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
            batched and is copied whole. The name of an axis means the axis's value; ``"requests +
            1"`` means one more, as for offsets of packed sequences.
        dtype: Its dtype, as a torch dtype or a name.
        fill: Value of padding rows, in warmup, capture and every replay. ``"last"``, for an input
            along an axis without a batch dimension, repeats the last value of a call, as for
            offsets of packed sequences, where further sequences are empty.
        host: It is passed in host memory: a numpy array, a CPU tensor (pinned or not), or a list.
            Its copy to the device is part of the graph.
    """

    shape: tuple[Any, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype = attrs.field(converter=parse_dtype)
    fill: float | int | bool | str = 0
    host: bool = False

    #: What to do after a value of another kind was given; empty where the error says all.
    next_step: ClassVar[str] = ""

    def __attrs_post_init__(self) -> None:
        if self.fill == LAST:
            if self.batch_dim is not None or not self.named:
                raise ConfigError(
                    "fill",
                    self.fill,
                    "a value, unless the input is along an axis and not batched",
                    "Padding rows need the same value in every step.",
                )
        elif not _is_value_of(self.fill, self.dtype):
            raise ConfigError("fill", self.fill, f"a value of {self.dtype}")

    @property
    def named(self) -> tuple[str, ...]:
        """The dimensions that follow an axis."""
        return tuple(size for size in self.shape if isinstance(size, str))

    @property
    def fill_value(self) -> float | int | bool:
        """The contents of its memory before the first call."""
        return 0 if isinstance(self.fill, str) else self.fill

    def at(self, values: Mapping[str, int]) -> StaticInput:
        """Return the input for a value of each axis, with a single fill value."""

        def sized(size: Any) -> Any:
            if not isinstance(size, str):
                return size
            axis, more = axis_of(size)
            return max(0, values[axis] + more)

        shape = tuple(map(sized, self.shape))
        return attrs.evolve(self, shape=shape, fill=self.fill_value)

    @property
    def batch_dim(self) -> int | None:
        """Index of the batch dimension, or None if the input is not batched."""
        return self.shape.index(None) if None in self.shape else None

    def sized(self, num_rows: int) -> torch.Size:
        """Return the shape at a number of rows."""
        return torch.Size(num_rows if size is None else size for size in self.shape)

    def full(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return new memory of this many rows, filled with the fill value."""
        return torch.full(self.sized(num_rows), self.fill_value, dtype=self.dtype, device=device)


#: Calls a function that creates a tensor, in some pool's memory.
Allocate = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


def plainly(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call a function that creates a tensor, in default memory."""
    return make()


def inputs_from_example(example: Mapping[str, torch.Tensor]) -> dict[str, StaticInput]:
    """Derive static inputs from one example of each.

    The inputs that share the size of dimension 0 of the first tensor are batched along it;
    the others are not batched. If another input of the example happens to have that size, this is
    wrong: give ``inputs`` instead.

    Raises:
        InputError: An example is not a tensor, or the first has no dimensions.
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
