"""CallReader: binds and validates the arguments of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet


class CallReader:
    """Binds and validates the arguments of calls.

    Args:
        inputs: The static inputs; with axes, at their smallest buckets.
        axes: The axes, if any.

    Attributes:
        bind: Puts arguments into declared order.
        to_arrays: Converts host inputs to arrays.
        check: Returns the rows of a valid call, and whether a copy node can read the inputs
            directly; raises InputError otherwise.
        axes: The axes.
        has_host: There are inputs in host memory.
        is_special: There are host inputs or axes, so that ``bind`` and ``check`` are not
            sufficient.
    """

    def __init__(self, inputs: InputSet, axes: AxisInputs | None) -> None:
        incoming: Any = inputs if axes is None else axes
        self.bind: Callable[..., Any] = incoming.bind
        self.to_arrays: Callable[[Any], Any] = incoming.to_arrays
        self.check: Callable[[Any], tuple[int, bool]] = incoming.check
        self.axes: AxisInputs | None = axes
        self.has_host: bool = bool(inputs.host)
        self.is_special: bool = self.has_host or axes is not None

    def read(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, int, bool]:
        """Return a call's bound and validated inputs, and the result of ``check``.

        Raises:
            InputError: An input is missing, unknown, or of another type, device or shape.
        """
        tensors = self.bind(args, inputs)
        if self.is_special:
            tensors = self.to_arrays(tensors)
        return (tensors, *self.check(tensors))
