"""Optional backend protocols, and ``features_of`` to find those that a backend offers.

A backend implements the protocols that its device supports. It offers a protocol by defining the
protocol's methods. If a protocol adds arguments to a required method, the backend must also set a
field of ``BackendCapabilities`` to offer the protocol.

If a protocol is not offered, the runner uses an alternative where possible: a warmup instead of a
rehearsal, ``replay`` instead of a direct launch, or copies by torch instead of a copy node. Memory
that can sleep and lanes with priorities have no alternative, and are refused. ``BackendTests``
tests all offered protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import attrs

from dispatchkit.backends.base import CapturedGraph, GraphBackend, Stream

_T = TypeVar("_T")

#: Function of the device's runtime that launches a graph on a stream. Its arguments are the graph
#: handle from ``direct_launch`` and the stream's raw handle as ``ctypes.c_void_p``. It returns an
#: error code, or 0 or None for success.
LaunchCall = Callable[[Any, Any], int | None]


class RehearsingBackend(Protocol):
    """A backend that measures the memory of a capture in advance.

    Without this protocol, memory budgets estimate the memory of a graph from the peak memory of the
    first warmup, scaled to the size of the graph. A graph that turns out to exceed the budget is
    released after its capture.
    """

    def rehearse(
        self,
        run: Callable[[], Any],
        *,
        stream: Stream,
        pool: Any,
        generators: Iterable[Any] = (),
    ) -> int:
        """Return an upper bound on the bytes that a capture would add to the pool.

        The callable runs once on the stream, as in a warmup, and the caller restores the state that
        the callable changes. The pool does not change.

        Raises:
            CaptureError: The rehearsal failed for a reason that would also make a capture fail.
        """
        ...


class PriorityBackend(Protocol):
    """A backend whose streams have priorities.

    A backend offers this protocol by setting ``capabilities.stream_priorities``. Without this
    protocol, lanes with priorities are refused.
    """

    def new_stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream.

        Args:
            priority: Priority of the stream, at least 0. Streams with a higher priority run first.
                A priority above the device's maximum is reduced to the maximum. A graph keeps the
                priority of the stream that captured it.

        Raises:
            ConfigError: All streams of the device are in use. The message states the limit.
        """
        ...


class DirectLaunchBackend(Protocol):
    """A backend that launches graphs through the device's runtime, bypassing ``replay``.

    Without this protocol, ``replay`` launches each graph. Graphs with random state always use
    ``replay``, which advances their generators.
    """

    def direct_launch(self, graph: CapturedGraph) -> tuple[LaunchCall, Any] | None:
        """Return the launch function and the graph's handle, or None if ``replay`` must be used.

        The result is valid until the graph is released. The launch function is called in every
        step, so it must not acquire a lock or create an object.

        Args:
            graph: A graph of this backend, or another object with ``replay()``.

        Raises:
            ReplayError: The graph was released.
        """
        ...


class UploadingBackend(Protocol):
    """A backend that can prepare a graph on the device before its first launch.

    Without this protocol, the first launch of a graph takes longer than its later launches.
    """

    def upload(self, graph: CapturedGraph, stream: Stream) -> bool:
        """Queue the preparation of a graph on a stream; return whether it was queued.

        Raises:
            ReplayError: The graph was released.
        """
        ...


class WarmupNotes(Protocol):
    """Properties of operations, recorded in a warmup for the next capture."""

    @property
    def is_plain(self) -> bool:
        """Whether a capture can use these notes instead of watching each operation."""
        ...

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record an operation before it runs, with the arguments of ``__torch_dispatch__``."""
        ...


class WatchedGraph(CapturedGraph, Protocol):
    """A graph that keeps alive the memory that watched operations read and write."""

    @property
    def holds(self) -> list[Any]:
        """Device storages that the graph keeps alive; the runner may add storages."""
        ...

    @property
    def host_tensors(self) -> list[Any]:
        """Host tensors that the graph reads or writes; each capture has its own host tensors."""
        ...

    @property
    def num_plain_operations(self) -> int:
        """Number of operations captured uncompiled from functions wrapped in torch.compile."""
        ...


class UnwatchedCaptureBackend(Protocol):
    """A backend that can capture with or without watching each operation.

    A backend offers this protocol by setting ``capabilities.unwatched_captures``. Watching takes
    microseconds per operation. If captures of different sizes run the same operations, the runner
    watches only one of these captures.
    """

    def new_notes(self) -> WarmupNotes | None:
        """Return empty notes for a warmup, or None if captures cannot use notes."""
        ...

    def capture(
        self,
        run: Callable[[], Any],
        *,
        stream: Stream,
        pool: Any,
        generators: Iterable[Any] = (),
        watched: bool = True,
        notes: WarmupNotes | None = None,
        compiled: bool = False,
        draws: bool = True,
    ) -> WatchedGraph:
        """Capture as ``GraphBackend.capture`` does.

        Args:
            run: Callable to capture.
            stream: A stream from ``new_stream()``.
            pool: The pool for the graph's memory.
            generators: Random generators, except the default generator.
            watched: Whether to watch each operation. False if an earlier capture watched the same
                operations; the caller then adds the earlier graph's ``holds`` to the new graph's.
            notes: Notes from a warmup of the same operations, used instead of watching the capture.
                ``is_plain`` of the notes must be True. Memory used only by the warmup is not kept
                alive.
            compiled: Whether the callable calls functions wrapped in torch.compile, which must run
                compiled.
            draws: Whether the callable may draw random numbers. If False (because a warmup drew no
                numbers), other threads may use the generators during the capture.

        Raises:
            CaptureError: As for ``GraphBackend.capture``.
        """
        ...


class SegmentGraph(CapturedGraph, Protocol):
    """The graph of one segment; ``outputs`` is None."""

    @property
    def num_operations(self) -> int:
        """Number of kernels, copies and fills that a replay queues."""
        ...


class SegmentedCapture(Protocol):
    """An object that lets a captured callable end and begin segments."""

    def end(self) -> SegmentGraph:
        """End the segment, and return its graph; later operations run immediately.

        The operations of the segment run only when its graph is replayed. Tensors created in the
        segment keep their memory while they are alive.

        Raises:
            CaptureError: No segment is open, or the device cannot end the segment.
        """
        ...

    def begin(self) -> None:
        """Begin the next segment.

        Raises:
            CaptureError: A segment is already open, or the device cannot begin a segment.
        """
        ...

    def keeps(self, tensor: Any) -> bool:
        """Return whether a tensor's memory was allocated from the pool in this capture's segments.

        Call this method between segments. The pool keeps this memory as long as a graph of the
        capture exists, even if the tensor is freed. Later captures into the pool may reuse the
        memory, because each replay of the segment writes to it again. Memory allocated before the
        capture or between segments is not kept in the pool.
        """
        ...


class SegmentingBackend(Protocol):
    """A backend whose captures can break and resume within a callable.

    Without this protocol, a step that is a single function has no PIECEWISE graphs.
    """

    def capture_segments(
        self,
        run: Callable[[SegmentedCapture], _T],
        *,
        stream: Stream,
        pool: Any,
        generators: Iterable[Any] = (),
        compiled: bool = False,
        draws: bool = True,
    ) -> _T:
        """Capture a callable in segments, and return its result.

        The first segment is open when the callable is called. ``end`` returns the graph of a
        segment. The callable must not return with an open segment, whose graph would be lost. Calls
        between segments take effect immediately. In all other respects, the rules of
        ``GraphBackend.capture`` apply.

        Args:
            run: Callable to capture, which ends and begins segments through its argument.
            stream: A stream from ``new_stream()``, which must be current when a segment ends.
            pool: The pool for the memory of all segments.
            generators: Random generators, except the default generator.
            compiled: Whether the callable calls functions wrapped in torch.compile, which must run
                compiled.
            draws: Whether the callable may draw random numbers.

        Raises:
            CaptureError: As for ``GraphBackend.capture``. The graphs of all segments of this
                capture are released.
        """
        ...


class DeviceMemory(NamedTuple):
    """Memory in use on a device.

    Attributes:
        used_bytes: Memory in use on the device, including by other processes and the driver.
        reserved_bytes: Memory reserved by this process's allocator.
        held_bytes: The part of ``reserved_bytes`` that is in use even while no graph runs.
    """

    used_bytes: int
    reserved_bytes: int
    held_bytes: int


class MeteringBackend(Protocol):
    """A backend that reports the memory usage of its device.

    Without this protocol, memory reports cover only pools and buffers, and budgets exclude the
    driver's memory per graph.
    """

    def device_memory(self) -> DeviceMemory:
        """Return the device memory in use, without synchronizing."""
        ...

    def workspace_bytes(self, stream: Stream) -> int:
        """Return the bytes of library workspaces kept for graphs captured on a stream."""
        ...


class SleepingBackend(Protocol):
    """A backend that can return memory to the device while keeping its addresses.

    Without this protocol, a ``GraphMemory`` that can sleep is refused.
    """

    def sleep_problem(self) -> str:
        """Return the reason why memory cannot sleep, or ``""`` if it can."""
        ...

    def new_sleeping_pool(self) -> Any:
        """Return a pool whose memory can sleep, for captures or for ``allocate``."""
        ...

    def allocate(self, pool: Any, make: Callable[[], _T]) -> _T:
        """Call a function, allocating its new tensors from a pool, and return its result."""
        ...

    def sleep(self, pools: Sequence[Any]) -> int:
        """Wait for the device, then release the memory of pools; return the bytes released.

        Until ``wake``, the memory must not be used, and nothing can be captured into the pools. A
        replay raises on the tape, but may crash the process on a device. Graphs may be released
        while their memory sleeps.
        """
        ...

    def wake(self, pools: Sequence[Any]) -> None:
        """Map new memory to the addresses of pools; earlier contents are lost.

        Raises:
            ReplayError: There is not enough memory. All pools stay asleep.
        """
        ...


class CopyRegion(NamedTuple):
    """The copy of one input by a copy node.

    Attributes:
        target: Device address of the destination.
        num_bytes: Size of the rows in bytes.
        tail_bytes: Number of fill bytes to write after the rows.
        fill: Pattern of eight fill bytes, repeated as needed, as a little-endian number.
    """

    target: int
    num_bytes: int
    tail_bytes: int
    fill: int


class CopyNode(Protocol):
    """The first node of a graph, which copies each batch into static inputs.

    The node copies nothing until its parameters are set. Each launch uses the latest parameters.
    """

    @property
    def data(self) -> Any:
        """Host buffer for the rows of host inputs, read when the node's parameters are set."""
        ...

    def record(self, stream: int) -> None:
        """Queue the node on a capturing stream, before any other work."""
        ...

    def attach(self, graph: CapturedGraph) -> str:
        """Find the node in its captured graph; return the problem, or ``""`` on success."""
        ...

    def setter(
        self, regions: Sequence[CopyRegion], offsets: Sequence[int] = ()
    ) -> Callable[[Sequence[Any]], int]:
        """Return a function that sets the node's parameters for batches of one size.

        The function accepts one contiguous tensor per region, except for the last ``len(offsets)``
        regions, whose rows are in ``data`` at these offsets. The graph reads the tensors when it
        runs, but ``data`` may be overwritten as soon as the function has returned. A tensor that is
        already at its target address is not copied. The function returns an error code, or 0 for
        success.
        """
        ...

    def stop(self) -> int:
        """Make later launches copy nothing; return an error code, or 0 for success."""
        ...


class CopyNodeBackend(Protocol):
    """A backend whose graphs can begin with a node that copies small inputs.

    Without this protocol, torch copies inputs before each launch.
    """

    def copy_node(self, num_regions: int, num_bytes: int, data_bytes: int = 0) -> CopyNode | str:
        """Return a copy node, or the reason why it is unavailable.

        Args:
            num_regions: Number of inputs to copy.
            num_bytes: Size of the largest input in bytes.
            data_bytes: Total size in bytes of the host inputs.
        """
        ...


@attrs.frozen
class BackendFeatures:
    """The optional protocols that a backend offers.

    Each attribute is the backend itself, or None if it does not offer the protocol.

    Attributes:
        rehearsals: Measures the memory of a capture in advance.
        priorities: Creates streams with priorities.
        direct_launches: Launches graphs, bypassing ``replay``.
        uploads: Prepares graphs before their first launch.
        unwatched_captures: Captures without watching each operation.
        copy_nodes: Creates graph nodes that copy inputs.
        meters: Reports the memory usage of the device.
        sleepers: Releases memory while keeping its addresses.
        segments: Captures callables in segments.
    """

    rehearsals: RehearsingBackend | None = None
    priorities: PriorityBackend | None = None
    direct_launches: DirectLaunchBackend | None = None
    uploads: UploadingBackend | None = None
    unwatched_captures: UnwatchedCaptureBackend | None = None
    copy_nodes: CopyNodeBackend | None = None
    meters: MeteringBackend | None = None
    sleepers: SleepingBackend | None = None
    segments: SegmentingBackend | None = None


def features_of(backend: GraphBackend) -> BackendFeatures:
    """Return the optional protocols that a backend offers."""
    # Methods are looked up on the object, not its class, because a backend may delegate to another
    # backend.
    capabilities, offer = backend.capabilities, cast(Any, backend)

    def offering(method: str) -> Any:
        return offer if callable(getattr(offer, method, None)) else None

    return BackendFeatures(
        rehearsals=offering("rehearse"),
        priorities=offer if capabilities.stream_priorities else None,
        direct_launches=offering("direct_launch"),
        uploads=offering("upload"),
        unwatched_captures=offer if capabilities.unwatched_captures else None,
        copy_nodes=offering("copy_node"),
        meters=offering("device_memory"),
        sleepers=offering("new_sleeping_pool"),
        segments=offering("capture_segments"),
    )
