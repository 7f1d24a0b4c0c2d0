"""Declarations of static inputs: shape, dtype, fill value and location."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch

from dispatchkit.errors import ConfigError, InputError, UnknownNameError, format_value
from dispatchkit.keys.checks import check_flag, refuses_unknown_names, whole_number
from dispatchkit.keys.records import setting


def parse_dtype(value: Any) -> torch.dtype:
    """Convert a dtype or its name (``"int64"``, ``"torch.bfloat16"``) to a torch dtype.

    Raises:
        UnknownNameError: torch has no dtype with this name.
    """
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = {n for n in vars(torch) if isinstance(getattr(torch, n), torch.dtype)}
        hint = (
            "Common dtypes: bool, int32, int64, float16, bfloat16, float32. A torch.dtype is also "
            "accepted."
        )
        raise UnknownNameError("dtype", name, known, hint)
    return found


# A dimension along an axis: the axis's name, optionally plus or minus a number.
_OF_AXIS = re.compile(r"(?P<axis>[^\W\d]\w*)( ?(?P<sign>[+-]) ?(?P<more>\d+))?")
#: The ``fill`` that repeats the last value of an input along an axis.
LAST = "last"


def axis_of(size: str) -> tuple[str, int]:
    """Split a dimension such as ``"requests + 1"`` into the name of the axis and the offset."""
    found = _OF_AXIS.fullmatch(size)
    if found is None:
        raise ConfigError(
            "shape", size, "made of None, numbers, and axes such as 'requests' or 'requests + 1'"
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
    are_sizes = all((number := whole_number(size)) is not None and number >= 0 for size in sizes)
    # A bare string is more likely a misplaced argument, such as a name, than a single axis.
    if isinstance(value, str) or not are_sizes or shape.count(None) > 1:
        raise ConfigError(
            "shape",
            value,
            "a tuple of non-negative whole numbers and axes such as 'requests' or 'requests + 1', "
            "with at most one None (the batch dimension)",
            "For example, pass (None, 16).",
        )
    return shape


def _is_value_of(fill: Any, dtype: torch.dtype) -> bool:
    """Return whether a dtype can hold a fill value; rounding is allowed, truncation is not."""
    try:
        held = torch.full((), fill, dtype=dtype).item()
        if dtype.is_floating_point and math.isfinite(fill):
            return bool(abs(fill) <= torch.finfo(dtype).max)
        return bool(held == fill or (held != held and fill != fill))
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False


@refuses_unknown_names
@attrs.frozen
class StaticInput:
    """The declaration of one static input.

    Attributes:
        shape: Shape of the input, with None as the batch dimension (tokens). An input without None
            is not batched and is copied whole. A dimension may be an axis, or an axis plus or minus
            a number. For example, offsets of packed sequences have the dimension
            ``"requests + 1"``.
        dtype: Data type, as a torch dtype or its name.
        fill: Value of padding rows and of padding along axes, in warmups, captures and replays.
            ``"last"`` repeats the input's last value along the axis. It is allowed only for
            unbatched inputs that have an axis as a dimension. For offsets of packed sequences,
            ``"last"`` makes the padding sequences empty.
        host: Whether calls pass the input in host memory, as a numpy array, a CPU tensor (pinned or
            not) or a list. The graph then includes the copy to the device.
    """

    shape: tuple[Any, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype = attrs.field(converter=parse_dtype)
    fill: float | int | bool | str = 0
    host: bool = setting(False, check_flag)

    #: Next step that is appended to errors about values of the wrong kind; may be empty.
    next_step: ClassVar[str] = ""

    def __attrs_post_init__(self) -> None:
        if self.fill == LAST:
            if self.batch_dim is not None or not self.named:
                raise ConfigError(
                    "fill",
                    self.fill,
                    "a number, unless the input is unbatched and has an axis as a dimension",
                    "Padding rows of other inputs must have the same value in every step.",
                )
        elif not _is_value_of(self.fill, self.dtype):
            raise ConfigError(
                "fill",
                self.fill,
                f"a number that {self.dtype} can represent, or {LAST!r} for an unbatched input "
                "that has an axis as a dimension",
            )

    @property
    def named(self) -> tuple[str, ...]:
        """The dimensions that depend on an axis."""
        return tuple(size for size in self.shape if isinstance(size, str))

    @property
    def fill_value(self) -> float | int | bool:
        """The fill as a number; 0 if ``fill`` is ``"last"``."""
        return 0 if isinstance(self.fill, str) else self.fill

    def at(self, values: Mapping[str, int]) -> StaticInput:
        """Return a copy with all axes replaced by their values, and ``"last"`` by 0."""

        def sized(size: Any) -> Any:
            if not isinstance(size, str):
                return size
            axis, more = axis_of(size)
            return max(0, values[axis] + more)

        shape = tuple(map(sized, self.shape))
        return attrs.evolve(self, shape=shape, fill=self.fill_value)

    @property
    def batch_dim(self) -> int | None:
        """The index of the batch dimension, or None if the input is not batched."""
        return self.shape.index(None) if None in self.shape else None

    def sized(self, num_rows: int) -> torch.Size:
        """Return the shape with ``num_rows`` rows."""
        return torch.Size(num_rows if size is None else size for size in self.shape)

    def full(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return a new tensor with ``num_rows`` rows of the fill value."""
        return torch.full(self.sized(num_rows), self.fill_value, dtype=self.dtype, device=device)


#: Function that calls its argument to create a tensor, and chooses the tensor's memory pool.
Allocate = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


def allocate_default(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Create a tensor with the default allocator."""
    return make()


def inputs_from_example(example: Mapping[str, torch.Tensor]) -> dict[str, StaticInput]:
    """Derive static inputs from example tensors.

    An input is batched along dimension 0 if this dimension has the same size as in the first
    tensor. If an unbatched input happens to have that size, declare ``inputs`` instead of passing
    an example.

    Raises:
        InputError: A value is not a tensor, or the first tensor has no dimensions.
    """
    rows: int | None = None
    derived = {}
    for name, tensor in example.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(
                name,
                f"The example for input {name!r} must be a tensor, got {format_value(tensor)}. "
                "Pass a tensor, or declare `inputs` instead of `example`.",
            )
        if rows is None:
            if tensor.dim() == 0:
                raise InputError(
                    name,
                    f"The example for the first input, {name!r}, must have a batch dimension, got "
                    "a 0-d tensor. Put a batched input first, or declare `inputs` instead of "
                    "`example`.",
                )
            rows = tensor.shape[0]
        batched = tensor.dim() > 0 and tensor.shape[0] == rows
        shape = (None, *tensor.shape[1:]) if batched else tuple(tensor.shape)
        derived[name] = StaticInput(shape, tensor.dtype)
    return derived
