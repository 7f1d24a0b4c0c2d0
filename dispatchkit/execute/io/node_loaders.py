"""How calls get in by the first node of a graph; see ``small_copies``.

What a launch fills is never relied upon by later calls: whether it happened is not known when
the call is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.host_arrays import as_array
from dispatchkit.execute.io.inputs import TensorGuards, is_flagged, never
from dispatchkit.execute.io.loaders import ForeignLoader, Loader, UnstagedLoader, picker
from dispatchkit.execute.io.small_copies import FILL_BYTES, InputNode

if TYPE_CHECKING:
    from dispatchkit.execute.capture.captured import CapturedStep


def loader_of(step: CapturedStep, num_rows: int) -> Loader | NodeLoader:
    """Return what brings calls of a size in for a captured step."""
    node, buffers, bucket = step.input_node, step.buffers, step.key.num_tokens
    if isinstance(node, InputNode):
        # Also where it failed: a launch must not copy what another call of this size gave.
        kind = HostNodeLoader if node.host else NodeLoader
        return kind(node, buffers, num_rows, bucket)
    if step.is_foreign:
        return ForeignLoader(buffers, step.lane.buffers_of(step.key), num_rows, bucket)
    if step.staging is None and buffers.staging is not None:
        return UnstagedLoader(buffers, num_rows, bucket)
    return Loader(buffers, num_rows, bucket)


class NodeLoader:
    """Brings calls of one size in by the graph's first node; otherwise as ``Loader``.

    Args:
        node: The node.
        buffers: Where to.
        num_rows: Rows of the calls.
        bucket: Rows that the graph reads.
    """

    buffers: InputBuffers
    num_rows: int
    bucket: int

    def __init__(self, node: InputNode, buffers: InputBuffers, num_rows: int, bucket: int) -> None:
        self.buffers, self.num_rows, self.bucket = buffers, num_rows, bucket
        self._node, self._inputs = node, buffers.inputs
        views = buffers.views(num_rows)
        self._views = [views[index] for index in node.inputs]
        is_all = node.inputs == tuple(range(len(views)))
        self._pick = None if is_all or not node.inputs else picker(node.inputs)
        own = (*node.inputs, *node.host)
        self._rest = Loader(buffers, num_rows, bucket, own) if len(own) < len(views) else None
        pieces = [self._piece(index) for index in own]
        self._send = node.sender(pieces, tuple(node.host.values()))
        self._fits: Callable[..., bool] = never
        self._whole: Loader | None = None

    def load(self, values: Sequence[Any]) -> None:
        """Have the next launch bring a checked call in.

        Raises:
            ReplayError: The node can neither be set nor stopped.
        """
        buffers, inputs = self.buffers, self._inputs
        if buffers.clean_from < self.num_rows:
            buffers.clean_from = self.num_rows
        is_plain = inputs.plain is values
        inputs.plain = None
        if self._rest is not None:
            self._load_rest(values)
        picked = values if self._pick is None else self._pick(values)
        if not (is_plain or self._fits(*picked)):
            picked = self._made_plain(picked)
        self._node.is_idle = False
        code = self._send(picked)
        if code:
            self._load_instead(values, code)

    def is_settled(self) -> bool:
        """Note a call whose rows are in the buffers already; True if nothing is to be done."""
        buffers = self.buffers
        if (
            self._node.is_idle
            and buffers.clean_from <= self.num_rows
            and self.bucket <= buffers.clean_to
        ):
            buffers.clean_from = self.num_rows
            return True
        return False

    def settle(self) -> None:
        """Set stale rows behind a call whose rows are in the buffers already back to fill.

        Raises:
            ReplayError: The node cannot be stopped.
        """
        self._node.stop()
        whole = self._all_by_torch()
        if not whole.is_settled():
            whole.settle()

    def _load_instead(self, values: Sequence[Any], code: int) -> None:
        """Bring a call in by torch, since the node could not be set."""
        self._node.fail(code)
        self._all_by_torch().load(values)
        self._node.stop()

    def _all_by_torch(self) -> Loader:
        if self._whole is None:
            self._whole = Loader(self.buffers, self.num_rows, self.bucket)
        return self._whole

    def _load_rest(self, values: Sequence[Any]) -> None:
        """Bring in what the node is not for, tails too: they are known for all inputs only."""
        buffers = self.buffers
        buffers.clean_from = buffers.clean_to = 0
        if self._rest is not None:
            self._rest.load(values)
        buffers.clean_from = buffers.clean_to = 0

    def _piece(self, index: int) -> tuple[int, int, int, int]:
        spec = self.buffers.inputs.specs[self.buffers.inputs.names[index]]
        row, target = self.buffers.row_bytes(index), self.buffers.tensors[index].data_ptr()
        if spec.batch_dim is None:
            return (target, row, 0, 0)
        element = torch.full((1,), spec.fill, dtype=spec.dtype).view(torch.uint8).tolist()
        fill = int.from_bytes(bytes(element * (FILL_BYTES // len(element))), "little")
        return (target, row * self.num_rows, row * (self.bucket - self.num_rows), fill)

    def _made_plain(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return tensors to read: where one cannot be, its place, which then holds its rows."""
        are_plain = [_is_plain(value) for value in values]
        if all(are_plain):
            if TensorGuards is not None and self._fits is never:
                self._fits = TensorGuards(
                    *values,
                    dynamic_dims_sizes=[list(value.shape) for value in values],
                    dynamic_dims_strides=[list(value.stride()) for value in values],
                ).check
            return values
        made = list(values)
        for number, (view, is_plain) in enumerate(zip(self._views, are_plain, strict=True)):
            if not is_plain:
                view.copy_(made[number])
                made[number] = view
        return made


class HostNodeLoader(NodeLoader):
    """As ``NodeLoader``, where the node brings the host inputs too.

    A step in place sets it as well: host inputs lie in memory of the host until then. The rows of
    device inputs are where they belong, and the node only fills behind them.
    """

    def __init__(self, node: InputNode, buffers: InputBuffers, num_rows: int, bucket: int) -> None:
        super().__init__(node, buffers, num_rows, bucket)
        self._rows = [(index, node.array(index, buffers, num_rows)) for index in node.host]
        self._in_place = [
            (rows, as_array(there))
            for (_, rows), (_, there) in zip(self._rows, buffers.host_rows(num_rows), strict=True)
        ]
        self._settler: Loader | None = None

    def load(self, values: Sequence[Any]) -> None:
        """Have the next launch bring a checked call in.

        Raises:
            ReplayError: The node can neither be set nor stopped.
        """
        buffers = self.buffers
        if buffers.clean_from < self.num_rows:
            buffers.clean_from = self.num_rows
        if self._rest is not None:
            self._load_rest(values)
        for index, rows in self._rows:
            rows[...] = values[index]
        tensors: Sequence[torch.Tensor] = ()
        if self._pick is not None:
            tensors = self._pick(values)
            if not self._fits(*tensors):
                tensors = self._made_plain(tensors)
        self._node.is_idle = False
        code = self._send(tensors)
        if code:
            self._load_instead(values, code)

    def is_settled(self) -> bool:
        """Return False: what the host wrote in place is never on the device yet."""
        return False

    def settle(self) -> None:
        """Have the next launch bring in what the host wrote in place, and fill behind all rows.

        Raises:
            ReplayError: The node can neither be set nor stopped.
        """
        if self._rest is None:
            self.buffers.written(self.num_rows)
        else:
            if self._settler is None:
                self._settler = Loader(self.buffers, self.num_rows, self.bucket)
            if not self._settler.is_settled():
                self._settler.settle()
        for rows, there in self._in_place:
            rows[...] = there
        self._node.is_idle = False
        code = self._send(self._views)
        if code:
            self._node.fail(code)
            self._all_by_torch().settle()
            self._node.stop()

    def _all_by_torch(self) -> Loader:
        if self._whole is None:
            self._whole = UnstagedLoader(self.buffers, self.num_rows, self.bucket)
        return self._whole


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor's memory is what it says, row by row."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_contiguous()
        and not is_flagged(value)
    )
