"""CallReader: binds and validates the arguments of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet


class CallReader:
    """The functions that read calls, selected once per runner.

    Args:
        inputs: Static inputs, at the smallest bucket of each axis.
        axes: Inputs of a runner with axes, otherwise None.

    Attributes:
        bind: Function that puts arguments into declared order.
        to_arrays: Function that converts host inputs to arrays.
        check: Function that validates a call (see ``InputSet.check``).
        axes: Inputs of a runner with axes, otherwise None.
        has_host: Whether any input is in host memory.
        is_special: Whether there are host inputs or axes, so that reading a call needs more than
            ``bind`` and ``check``.
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
        """Return the bound inputs of a call and the two results of ``check``.

        Raises:
            InputError: An input is missing, unknown, given twice or invalid.
        """
        tensors = self.bind(args, inputs)
        if self.is_special:
            tensors = self.to_arrays(tensors)
        return (tensors, *self.check(tensors))
