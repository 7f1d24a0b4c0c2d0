"""Choose, before a capture, how inputs reach the graph.

If the backend supports copy nodes, a graph with small inputs begins with a copy node. A call then
only sets the parameters of the node. When the graph is launched, the node copies the rows of small
inputs and fills the padding rows of the bucket. The node runs on the caller's stream, so it reads
the caller's tensors in stream order, like a copy before the launch.

The node copies either all host inputs of a graph or none of them. A call writes the host inputs to
the node's own host buffer. The backend reads this buffer when the call sets the node's parameters,
so the next call can write to it without waiting. If the node cannot copy the host inputs, the graph
copies them from pinned memory (see ``staging``).

Other inputs are copied before the launch, for example large inputs, inputs batched along a
dimension other than the first, and tensors whose memory cannot be read directly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import attrs

from dispatchkit.backends.base import CapturedGraph, GraphBackend
from dispatchkit.backends.optional import CopyNode, CopyNodeBackend, features_of
from dispatchkit.errors import ReplayError, counted
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.staging import StagingBuffers

_logger = logging.getLogger(__name__)

#: Maximum size of a device input that a node copies, in bytes at the graph's bucket. For larger
#: inputs, device time matters more than host time, and torch's copy kernel is faster.
MAX_BYTES = 256 << 10
#: Maximum number of inputs of one node.
MAX_INPUTS = 16
#: Largest element size that a node copies, in bytes; also the period of its fill pattern.
FILL_BYTES = 8
# Alignment in bytes of host inputs in the node's host buffer, required by the widest load
# instruction.
_ALIGNMENT = 16


@attrs.define(eq=False, kw_only=True)
class InputPath:
    """The path that inputs take into one graph.

    Attributes:
        buffers: Buffers that the graph reads.
        bucket: Number of rows that the graph reads.
        source: Buffers to which callers write the rows of in-place steps. They differ from
            ``buffers`` only if the graph was captured outside the runner.
        node: Copy node at the beginning of the graph, or None.
        device_inputs: Indices of the device inputs that the node copies.
        host_offsets: Offset of each host input in the node's host buffer. Empty if the node
            copies no host inputs.
        why_copied: Why there is no copy node; empty if there is one.
        staging: Pinned memory that the graph copies host inputs from, or None.
        why_staged: Why ``staging`` is used.
        is_idle: Whether the node is disabled in the next launch.
        node_problem: The first failure to set the parameters of the node; empty if there was none.
    """

    buffers: InputBuffers
    bucket: int
    source: InputBuffers
    node: CopyNode | None = None
    device_inputs: tuple[int, ...] = ()
    host_offsets: Mapping[int, int] = attrs.field(factory=dict)
    why_copied: str = ""
    staging: StagingBuffers | None = None
    why_staged: str = ""
    is_idle: bool = True
    node_problem: str = ""

    @property
    def is_external(self) -> bool:
        """Whether the graph was captured outside the runner and reads its own buffers."""
        return self.buffers is not self.source

    def record(self, stream: int) -> None:
        """Queue the input copies at the beginning of a capture.

        Args:
            stream: Raw handle of the capturing stream.
        """
        if self.node is not None:
            self.node.record(stream)
        if self.staging is not None:
            self.staging.queue_copy(self.bucket)

    def attach(self, graph: CapturedGraph) -> None:
        """Find the node in the captured graph; if the graph does not contain it, drop the node."""
        if self.node is not None:
            self.why_copied = self.node.attach(graph)
            if self.why_copied:
                self.node = None

    def stop_node(self) -> None:
        """Disable the node until its parameters are set again.

        Raises:
            ReplayError: The node cannot be disabled, so a launch would read inputs of an earlier
                call.
        """
        if self.node is None or self.is_idle:
            return
        code = self.node.stop()
        if code:
            raise ReplayError(
                f"Disabling the copy node of a graph failed with CUDA error {code}. Earlier work "
                "on the device may have failed. To find the failed call, run "
                "the program with CUDA_LAUNCH_BLOCKING=1."
            )
        self.is_idle = True

    def record_node_failure(self, code: int) -> None:
        """Record a failure to set the parameters of the node, and warn if it is the first."""
        if not self.node_problem:
            self.node_problem = f"the copy node failed with CUDA error {code}"
            _logger.warning(
                "The copy node of the graph for %s failed with CUDA error %d. The inputs of this "
                "call are copied without the node, which is slower. Later failures of the node are "
                "not reported.",
                counted(self.bucket, "row"),
                code,
            )

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
    """Return an input path without a copy node.

    Args:
        buffers: Buffers that the graphs read.
        bucket: Number of rows that the graphs read.
        why: Why there is no copy node.
        source: Buffers to which callers write the rows of in-place steps; by default ``buffers``.
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
    """Return the input path for a graph that is about to be captured at a bucket."""
    maker = features_of(backend).copy_nodes
    if maker is None:
        return copied_path(buffers, bucket, "the backend does not support copy nodes")
    host = buffers.inputs.host
    sizes = {
        index: buffers.row_bytes(index) * (1 if spec.batch_dim is None else bucket)
        for index, spec in enumerate(buffers.inputs)
        if not spec.batch_dim  # rows are contiguous only along dimension 0
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
    node = (
        f"every device input is larger than {MAX_BYTES >> 10} KiB, is batched along a dimension "
        f"other than 0, or has elements of more than {FILL_BYTES} bytes"
    )
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
    """Return the offsets of host inputs in a node's host buffer, and a reason.

    The reason says why the node cannot copy the inputs; it is empty if it can.
    """
    if len(host) > room:
        return {}, (
            f"the copy node has room for {counted(max(room, 0), 'host input')}, but the graph has "
            f"{len(host)}"
        )
    offsets, end = {}, 0
    for index in host:
        if index not in sizes:
            return {}, (
                "a host input is batched along a dimension other than 0 or has elements of more "
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
