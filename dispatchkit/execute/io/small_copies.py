"""Small inputs, brought in by the first node of the graph itself.

Where a backend has such a node (``copy_node``), a call only tells it where its inputs lie, and
the launch does the rest: it copies the rows and fills those behind them, up to the bucket. It
reads the caller's tensors in the order of the stream that the graph is launched on, which is the
caller's own: as a copy before the launch would.

Host inputs go into the node's own data, all of a graph's or none. The backend takes that data
with it when the node is set, so that the next call may write at once: nothing is waited for.

What the node cannot read is copied to its place before the launch: tensors that are not
contiguous, or that torch would conjugate, negate or convert on the way. What it is not for is
left to the other copies: large inputs, and those not batched along their first dimension.

How calls get in by it is in ``node_loaders``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.backends.base import CapturedGraph, GraphBackend
from dispatchkit.errors import ReplayError
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.host_arrays import array_dtype, numpy_module

if TYPE_CHECKING:
    from dispatchkit.execute.capture.captured import CapturedStep

_logger = logging.getLogger(__name__)

#: Bytes of an input at the size of the graph above which torch copies it: from there on the time
#: on the device counts more than that of the host, and torch's kernel is the better one.
MAX_BYTES = 256 << 10
#: Inputs of one node at most.
MAX_INPUTS = 16
#: Bytes of an element at most, since fill is repeated every so many.
FILL_BYTES = 8
# Host inputs begin at multiples of this in the node's data, so that the widest words fit.
_ALIGNMENT = 16


class InputNode:
    """The first node of one graph, which brings some of its inputs in.

    Args:
        copy: The backend's node.
        inputs: Which inputs on the device, by index.
        host: Which host inputs, with their place in the node's data: all, or none.

    Attributes:
        is_idle: It copies nothing when the graph is launched.
        problem: Why it is used no more; empty while it works.
    """

    def __init__(
        self, copy: Any, inputs: tuple[int, ...], host: Mapping[int, int] | None = None
    ) -> None:
        self._copy = copy
        self.inputs: tuple[int, ...] = inputs
        self.host: dict[int, int] = dict(host or {})
        self.is_idle: bool = True
        self.problem: str = ""
        self.record: Callable[[int], None] = copy.record
        self.sender: Callable[..., Callable[[Sequence[torch.Tensor]], int]] = copy.sender

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
            _logger.warning("Inputs are copied by torch instead: %s.", self.problem)

    def array(self, index: int, buffers: InputBuffers, num_rows: int) -> Any:
        """Return the memory of a host input in the node's data, as an array of so many rows."""
        spec = buffers.inputs.specs[buffers.inputs.names[index]]
        shape, dtype = tuple(spec.sized(num_rows)), array_dtype(spec.dtype)
        return numpy_module().ndarray(shape, dtype, self._copy.data, self.host[index])


def input_node(
    backend: GraphBackend, buffers: InputBuffers, bucket: int
) -> tuple[InputNode | str, str]:
    """Return what a graph of a size is to begin with.

    Returns:
        The node, or why torch copies the inputs on the device; and why the graph must copy host
        inputs from pinned memory, empty where the node brings them or there are none.
    """
    make = getattr(backend, "copy_node", None)
    has_host = bool(buffers.inputs.host)
    if make is None:
        problem = "this backend has no such node"
        return problem, problem if has_host else ""
    sizes = {
        index: buffers.row_bytes(index) * (1 if spec.batch_dim is None else bucket)
        for index, spec in enumerate(buffers.inputs)
        if not spec.batch_dim  # rows are contiguous along the first dimension
        and buffers.tensors[index].is_contiguous()
        and spec.dtype.itemsize <= FILL_BYTES
    }
    small = tuple(
        index
        for index, size in sizes.items()
        if 0 < size <= MAX_BYTES and index not in buffers.inputs.host
    )
    why_staged = ""
    if has_host:
        host, why_staged = _in_data(buffers.inputs.host, sizes, MAX_INPUTS - len(small))
        if not why_staged:
            made = _made(make, small, sizes, host)
            if isinstance(made, InputNode):
                return made, ""
            why_staged = made
    if not small:
        return "no input on the device is small and batched along its first dimension", why_staged
    return _made(make, small[:MAX_INPUTS], sizes, {}), why_staged


def _in_data(
    host: Sequence[int], sizes: Mapping[int, int], room: int
) -> tuple[dict[int, int], str]:
    """Return where host inputs lie in a node's data, or why they cannot."""
    if len(host) > room:
        return {}, f"there are {len(host)} and the node has room for {max(room, 0)} more inputs"
    places, end = {}, 0
    for index in host:
        if index not in sizes:
            return {}, (
                "one is batched along another dimension than the first, or has elements of more "
                f"than {FILL_BYTES} bytes"
            )
        places[index] = end
        end += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
    return places, ""


def _made(
    make: Callable[..., Any],
    inputs: tuple[int, ...],
    sizes: Mapping[int, int],
    host: dict[int, int],
) -> InputNode | str:
    largest = max(sizes[index] for index in (*inputs, *host))
    end = max((place + sizes[index] for index, place in host.items()), default=0)
    made = make(len(inputs) + len(host), largest, data_bytes=end)
    return made if isinstance(made, str) else InputNode(made, inputs, host)


def input_path(step: CapturedStep) -> str:
    """Return how inputs come in, as text: ``node``, or ``copy`` and why.

    Host inputs that its graphs copy from pinned memory are told of behind it.
    """
    node, inputs = step.input_node, step.buffers.inputs
    problem = node if isinstance(node, str) else node.problem
    path = f"copy: {problem}" if problem else "node"
    if step.staging is None:
        return path
    staged = f"staging: {step.why_staged}"
    return staged if len(inputs.host) == len(inputs.names) else f"{path}; host inputs: {staged}"
