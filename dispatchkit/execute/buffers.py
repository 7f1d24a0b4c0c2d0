"""The memory that graphs read their inputs from.

A graph reads its inputs at the addresses of the capture. Each lane holds one buffer per
input, as large as its largest bucket; a call copies its rows to the front. What an earlier,
larger call left behind those rows is set back to the input's fill value, and only that: the
buffers remember up to which row they hold anything but fill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dispatchkit.errors import ConfigError
from dispatchkit.execute.inputs import InputSet


class InputBuffers:
    """The memory that graphs read their inputs from.

    Args:
        inputs: What is declared.
        num_rows: Rows to make room for.
        tensors: Memory made elsewhere, in declared order; new memory by default.

    Attributes:
        tensors: One buffer per input, in declared order.
        num_rows: Rows there is room for.
        dirty: Rows from here on hold fill in every batched buffer.
    """

    def __init__(
        self,
        inputs: InputSet,
        num_rows: int,
        tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.inputs = inputs
        self.num_rows = num_rows
        if tensors is None:
            # Not under the caller's inference mode: such memory could not be written outside.
            with torch.inference_mode(False):
                self.tensors = [spec.full(num_rows, inputs.device) for spec in inputs]
            self.dirty = 0
        else:
            self.tensors = list(tensors)
            self.dirty = num_rows  # what they hold is not known
        self._tails = [
            (self.tensors[index], dim, spec.fill)
            for index, spec in enumerate(inputs)
            if (dim := spec.batch_dim) is not None
        ]

    def views(self, num_rows: int) -> list[torch.Tensor]:
        """Return the first rows of each batched buffer, and the others whole.

        Raises:
            ConfigError: There is no room for so many rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise ConfigError("rows", num_rows, f"0..{self.num_rows}, the rows of the buffers")
        views = list(self.tensors)
        for index, dim in self.inputs.batched:
            views[index] = views[index].narrow(dim, 0, num_rows)
        return views

    def load(self, views: list[torch.Tensor], tensors: list[torch.Tensor], num_rows: int) -> None:
        """Copy a call's inputs in, and set stale rows behind them back to fill.

        Args:
            views: What ``views(num_rows)`` returned, kept by the caller.
            tensors: The inputs, checked, in declared order.
            num_rows: Rows of the call.
        """
        dirty = self.dirty
        if num_rows > dirty:
            self.dirty = num_rows  # before the copy: a copy that fails half-way leaves dirt
        if len(views) == 1:
            views[0].copy_(tensors[0])
        else:
            torch._foreach_copy_(views, tensors)
        if num_rows < dirty:
            for buffer, dim, fill in self._tails:
                buffer.narrow(dim, num_rows, dirty - num_rows).fill_(fill)
            self.dirty = num_rows

    def reset(self) -> None:
        """Set every row that holds anything else back to fill."""
        if self.dirty:
            for buffer, dim, fill in self._tails:
                buffer.narrow(dim, 0, self.dirty).fill_(fill)
            self.dirty = 0

    def poison(self, value: float = float("nan")) -> None:
        """Overwrite all rows with what no call gives; the next use must not show it."""
        for buffer, _, _ in self._tails:
            if buffer.is_floating_point():
                buffer.fill_(value)
        self.dirty = self.num_rows
