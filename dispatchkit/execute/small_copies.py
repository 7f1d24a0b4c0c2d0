"""Small device inputs, brought in by the first node of the graph itself.

Where a backend has such a node (``copy_node``), a call only tells it where its inputs lie, and
the launch does the rest: it copies the rows and fills those behind them, up to the bucket. It
reads the caller's tensors in the order of the stream that the graph is launched on, which is the
caller's own: as a copy before the launch would.

What the node cannot read is copied to its place before the launch: tensors that are not
contiguous, or that torch would conjugate, negate or convert on the way. What it is not for is
left to the other copies: host inputs, large ones, and those not batched along their first
dimension.

What a launch fills is never relied upon by later calls: whether it happened is not known when
the call is prepared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.backends.base import CapturedGraph, GraphBackend
from dispatchkit.errors import ReplayError
from dispatchkit.execute.buffers import InputBuffers, Loader, picker
from dispatchkit.execute.inputs import TensorGuards, is_flagged, never

if TYPE_CHECKING:
    from dispatchkit.execute.captured import CapturedStep

_logger = logging.getLogger(__name__)

#: Bytes of an input at the size of the graph above which torch copies it: from there on the time
#: on the device counts more than that of the host, and torch's kernel is the better one.
MAX_BYTES = 256 << 10
#: Inputs of one node at most.
MAX_INPUTS = 16
_FILL_BYTES = 8


class InputNode:
    """The first node of one graph, which brings some of its inputs in.

    Args:
        copy: The backend's node.
        inputs: Which inputs, by index.

    Attributes:
        is_idle: It copies nothing when the graph is launched.
        problem: Why it is used no more; empty while it works.
    """

    def __init__(self, copy: Any, inputs: tuple[int, ...]) -> None:
        self._copy = copy
        self.inputs: tuple[int, ...] = inputs
        self.is_idle: bool = True
        self.problem: str = ""
        self.record: Callable[[int], None] = copy.record
        self.sender: Callable[[Any], Callable[[Sequence[torch.Tensor]], int]] = copy.sender

    def attached(self, graph: CapturedGraph) -> InputNode | str:
        """Return itself once it knows the graph it is in, or why it cannot be used."""
        problem: str = self._copy.attach(graph)
        return problem or self

    def stop(self) -> None:
        """Let the next launches copy nothing.

        Raises:
            ReplayError: It cannot be stopped: a launch would read what an earlier call gave.
        """
        if self.is_idle:
            return
        code = self._copy.stop()
        if code:
            raise ReplayError(
                f"The copy at the beginning of a graph cannot be stopped: CUDA error {code}."
            )
        self.is_idle = True

    def fail(self, code: int) -> None:
        """Note that it could not be set."""
        if not self.problem:
            self.problem = f"the node failed with CUDA error {code}"
            _logger.warning("Inputs are copied by torch from now on: %s.", self.problem)


def input_node(backend: GraphBackend, buffers: InputBuffers, bucket: int) -> InputNode | str:
    """Return what a graph of a size is to begin with, or why torch copies its inputs."""
    make = getattr(backend, "copy_node", None)
    if make is None:
        return "this backend has no such node"
    sizes = {
        index: buffers.row_bytes(index) * (1 if spec.batch_dim is None else bucket)
        for index, spec in enumerate(buffers.inputs)
        if not (spec.host or spec.batch_dim)  # rows are contiguous along the first dimension
        and buffers.tensors[index].is_contiguous()
        and spec.dtype.itemsize <= _FILL_BYTES
    }
    chosen = tuple(index for index, size in sizes.items() if 0 < size <= MAX_BYTES)[:MAX_INPUTS]
    if not chosen:
        return "no input on the device is small and batched along its first dimension"
    made = make(len(chosen), max(sizes[index] for index in chosen))
    return made if isinstance(made, str) else InputNode(made, chosen)


def input_path(node: InputNode | str) -> str:
    """Return how device inputs come in, as text: ``node``, or ``copy`` and why."""
    if isinstance(node, str):
        return f"copy: {node}"
    return f"copy: {node.problem}" if node.problem else "node"


def loader_of(step: CapturedStep, num_rows: int) -> Loader | NodeLoader:
    """Return what brings calls of a size in for a captured step."""
    node, bucket = step.input_node, step.key.num_tokens
    if isinstance(node, InputNode) and not node.problem:
        return NodeLoader(node, step.buffers, num_rows, bucket)
    return Loader(step.buffers, num_rows, bucket)


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
        self._pick = None if is_all else picker(node.inputs)
        is_rest = len(node.inputs) < len(views)
        self._rest = Loader(buffers, num_rows, bucket, node.inputs) if is_rest else None
        self._send = node.sender([self._piece(index) for index in node.inputs])
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
            self._node.fail(code)
            self._all_by_torch().load(values)
            self._node.stop()

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
        fill = int.from_bytes(bytes(element * (_FILL_BYTES // len(element))), "little")
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


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor's memory is what it says, row by row."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_contiguous()
        and not is_flagged(value)
    )
