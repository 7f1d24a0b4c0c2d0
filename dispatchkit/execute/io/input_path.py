"""Choose before a capture how inputs are copied into the graph, and record it.

If the backend has copy nodes, the graph begins with one. A call then only sets the node's
parameters, and the launch copies the rows of small inputs and fills the rows after them, up to the
bucket. The node reads the caller's tensors in the order of the stream that the graph is launched
on, which is the caller's own, like a copy before the launch.

The node also copies host inputs: either all of a graph's or none. They are written to the node's
own data, which the backend reads when the node is set, so that the next call may write immediately.
Host inputs that do not fit are copied from pinned memory by the graph (see ``staging``).

Everything else is copied before the launch: large inputs, inputs batched along a dimension other
than the first, and tensors whose memory cannot be read directly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import attrs

from dispatchkit.backends.base import CapturedGraph, GraphBackend
from dispatchkit.backends.optional import CopyNode, CopyNodeBackend, features_of
from dispatchkit.errors import ReplayError
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.staging import Staging

_logger = logging.getLogger(__name__)

#: Largest input that a node copies, in bytes at the size of the graph. Above it, device time
#: matters more than host time, and torch's copy kernel is faster.
MAX_BYTES = 256 << 10
#: Most inputs of one node.
MAX_INPUTS = 16
#: Largest element of an input that a node copies, in bytes; also the period of the fill.
FILL_BYTES = 8
# Alignment of host inputs in the node's data, which allows the widest words.
_ALIGNMENT = 16


@attrs.define(eq=False, kw_only=True)
class InputPath:
    """How inputs are copied into one graph.

    Attributes:
        buffers: The buffers that the graph reads.
        bucket: Rows that it reads.
        source: The buffers that steps in place write: the same ones, unless the graph was captured
            elsewhere.
        node: The copy node that the graph begins with, if any.
        device_inputs: Indices of the device inputs that the node copies.
        host_offsets: Offset in the node's data of each host input; either all of them or none.
        why_copied: Why there is no node.
        staging: The pinned memory that a launch copies host inputs from, if any.
        why_staged: Why it is used.
        is_idle: The node copies nothing when the graph is launched.
        node_problem: Why setting the node failed; empty if it never failed.
    """

    buffers: InputBuffers
    bucket: int
    source: InputBuffers
    node: CopyNode | None = None
    device_inputs: tuple[int, ...] = ()
    host_offsets: Mapping[int, int] = attrs.field(factory=dict)
    why_copied: str = ""
    staging: Staging | None = None
    why_staged: str = ""
    is_idle: bool = True
    node_problem: str = ""

    @property
    def is_foreign(self) -> bool:
        """Whether the graph was captured elsewhere and reads memory other than the lane's."""
        return self.buffers is not self.source

    def record(self, stream: int) -> None:
        """Queue the copies of inputs, as the first part of a capture.

        Args:
            stream: Raw handle of the capturing stream.
        """
        if self.node is not None:
            self.node.record(stream)
        if self.staging is not None:
            self.staging.queue_copy(self.bucket)

    def attach(self, graph: CapturedGraph) -> None:
        """Find the node in the captured graph; if not found, inputs are copied."""
        if self.node is not None:
            self.why_copied = self.node.attach(graph)
            if self.why_copied:
                self.node = None

    def stop_node(self) -> None:
        """Make later launches copy nothing.

        Raises:
            ReplayError: The node refused, so a launch would read inputs of an earlier call.
        """
        if self.node is None or self.is_idle:
            return
        code = self.node.stop()
        if code:
            raise ReplayError(
                f"The copy at the beginning of a graph cannot be stopped: CUDA error {code}."
            )
        self.is_idle = True

    def node_failed(self, code: int) -> None:
        """Note that the node could not be set; warn the first time."""
        if not self.node_problem:
            self.node_problem = f"the node failed with CUDA error {code}"
            _logger.warning("Inputs are copied by torch instead: %s.", self.node_problem)

    def __str__(self) -> str:
        problem = self.why_copied or self.node_problem
        path = f"copy: {problem}" if problem else "node"
        if self.staging is None:
            return path
        inputs, staged = self.buffers.inputs, f"staging: {self.why_staged}"
        has_device_inputs = len(inputs.host) < len(inputs.names)
        return f"{path}; host inputs: {staged}" if has_device_inputs else staged


def copied_path(
    buffers: InputBuffers, bucket: int, why: str, *, source: InputBuffers | None = None
) -> InputPath:
    """Return the path of a step without a copy node.

    Args:
        buffers: The buffers that its graphs read.
        bucket: Rows that they read.
        why: Why there is no node.
        source: The buffers that steps in place write; by default the same.
    """
    return InputPath(
        buffers=buffers,
        bucket=bucket,
        source=source or buffers,
        why_copied=why,
        staging=buffers.staging,
        why_staged=why,
    )


def choose_path(backend: GraphBackend, buffers: InputBuffers, bucket: int) -> InputPath:
    """Choose how inputs are copied into a graph of a size, before its capture."""
    maker = features_of(backend).copy_nodes
    if maker is None:
        return copied_path(buffers, bucket, "this backend has no such node")
    host = buffers.inputs.host
    sizes = {
        index: buffers.row_bytes(index) * (1 if spec.batch_dim is None else bucket)
        for index, spec in enumerate(buffers.inputs)
        if not spec.batch_dim  # rows are contiguous along the first dimension
        and buffers.tensors[index].is_contiguous()
        and spec.dtype.itemsize <= FILL_BYTES
    }
    small = [index for index, size in sizes.items() if 0 < size <= MAX_BYTES and index not in host]
    why_staged = ""
    if host:
        offsets, why_staged = _offsets(host, sizes, MAX_INPUTS - len(small))
        node = why_staged or _make_node(maker, small, sizes, offsets)
        if not isinstance(node, str):
            return InputPath(
                buffers=buffers,
                bucket=bucket,
                source=buffers,
                node=node,
                device_inputs=tuple(small),
                host_offsets=offsets,
            )
        why_staged = node
    small = small[:MAX_INPUTS]
    node = "no input on the device is small and batched along its first dimension"
    if small:
        node = _make_node(maker, small, sizes, {})
    return InputPath(
        buffers=buffers,
        bucket=bucket,
        source=buffers,
        node=None if isinstance(node, str) else node,
        device_inputs=tuple(small),
        why_copied=node if isinstance(node, str) else "",
        staging=buffers.staging,
        why_staged=why_staged,
    )


def _offsets(
    host: Sequence[int], sizes: Mapping[int, int], room: int
) -> tuple[dict[int, int], str]:
    """Return the offsets of host inputs in a node's data, or why they do not fit."""
    if len(host) > room:
        return {}, f"there are {len(host)}, and the node has room for {max(room, 0)} more inputs"
    offsets, end = {}, 0
    for index in host:
        if index not in sizes:
            return {}, (
                "one is batched along a dimension other than the first, or has elements of more "
                f"than {FILL_BYTES} bytes"
            )
        offsets[index] = end
        end += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
    return offsets, ""


def _make_node(
    maker: CopyNodeBackend,
    device_inputs: Sequence[int],
    sizes: Mapping[int, int],
    offsets: Mapping[int, int],
) -> CopyNode | str:
    largest = max(sizes[index] for index in (*device_inputs, *offsets))
    end = max((offset + sizes[index] for index, offset in offsets.items()), default=0)
    return maker.copy_node(len(device_inputs) + len(offsets), largest, data_bytes=end)
