"""Optional parts of backends beyond ``GraphBackend``, and a record of those offered.

Each part is a Protocol, and a backend implements those that its device supports. Having the methods
means offering the part; if only the arguments of a required method differ, a field of
``BackendCapabilities`` indicates it. ``features_of`` is the only place that checks.

Without a part, the runner uses an alternative: a warmup instead of a rehearsal, ``replay`` instead
of a direct launch, copies by torch instead of a copy node. ``BackendTests`` tests each part that is
offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import attrs

from dispatchkit.backends.base import CapturedGraph, GraphBackend, Stream

_T = TypeVar("_T")

#: Launches a graph on a stream. The arguments are those of the device's runtime: the handle that
#: ``direct_launch`` returned for the graph, and the stream's raw handle as ``ctypes.c_void_p``. It
#: returns 0 or None, or the runtime's error code if nothing was launched.
LaunchCall = Callable[[Any, Any], int | None]


class RehearsingBackend(Protocol):
    """A backend that measures in advance how much memory a capture takes.

    Without it, a budget in bytes relies on the memory of the first warmup, and a graph that turns
    out larger is evicted after its capture.
    """

    def rehearse(
        self,
        run: Callable[[], Any],
        *,
        stream: Stream,
        pool: Any,
        generators: Iterable[Any] = (),
    ) -> int:
        """Return an upper bound, in bytes, of the pool's growth by a capture.

        The callable runs once on the stream, like a warmup: the caller restores what it changes.
        The pool does not change.

        Raises:
            CaptureError: The callable cannot be captured, as far as a rehearsal reveals.
        """
        ...


class PriorityBackend(Protocol):
    """A backend whose streams have priorities; ``capabilities.stream_priorities`` is True.

    Without it, lanes with priorities are refused.
    """

    def new_stream(self, *, priority: int = 0) -> Stream:
        """Return a stream.

        Args:
            priority: Urgency of its work, at least 0. Larger numbers go first, and a number beyond
                the device's range is reduced to the maximum. A graph keeps the priority of the
                stream that captured it.

        Raises:
            ConfigError: The device has no stream left; the error states the limit.
        """
        ...


class DirectLaunchBackend(Protocol):
    """A backend that launches graphs through the device's runtime, bypassing ``replay``.

    Without it, ``replay`` launches each graph. Only graphs without random state are launched
    directly, since they need not advance generators.
    """

    def direct_launch(self, graph: CapturedGraph) -> tuple[LaunchCall, Any] | None:
        """Return the launch function and the graph's handle; None if only ``replay`` can launch it.

        The result is valid until the graph is released. The function runs once per step: it must
        not take a lock or create an object.

        Args:
            graph: A graph of this backend, or another object with ``replay()``.

        Raises:
            ReplayError: The graph was released.
        """
        ...


class UploadingBackend(Protocol):
    """A backend that can prepare a graph on the device before its first launch.

    Without it, the first launch takes longer.
    """

    def upload(self, graph: CapturedGraph, stream: Stream) -> bool:
        """Queue the preparation on a stream; return whether it is supported.

        Raises:
            ReplayError: The graph was released.
        """
        ...


class WarmupNotes(Protocol):
    """What a warmup reveals about the operations of the capture that follows."""

    @property
    def is_plain(self) -> bool:
        """Whether the operations can be captured with these notes, without another watch."""
        ...

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note an operation before it runs; arguments as for ``__torch_dispatch__``."""
        ...


class WatchedGraph(CapturedGraph, Protocol):
    """A graph that keeps alive what its operations read and write, as far as it was watched."""

    @property
    def holds(self) -> list[Any]:
        """Device storages that are kept alive until release; the runner adds more."""
        ...

    @property
    def host_tensors(self) -> list[Any]:
        """Host memory that the graph copies from or to; each capture has its own."""
        ...

    @property
    def num_plain_operations(self) -> int:
        """Operations of functions of torch.compile that were captured without being compiled."""
        ...


class UnwatchedCaptureBackend(Protocol):
    """A backend that watches each operation of a capture, and can capture without.

    ``capabilities.unwatched_captures`` is True. A watch costs microseconds per operation. Of
    captures that run the same operations at different sizes, the runner watches one.
    """

    def new_notes(self) -> WarmupNotes | None:
        """Return empty notes for a warmup; None if a warmup cannot replace a watch."""
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
            run: The callable.
            stream: A stream from ``new_stream()``.
            pool: The pool for the graph's memory.
            generators: Random generators other than the default one.
            watched: Watch each operation. False: the caller watched the same operations in an
                earlier capture, and adds that graph's ``holds`` to this graph's.
            notes: Plain notes of a warmup of the same operations, which replace the watch. Memory
                that only the warmup used is not kept alive.
            compiled: The callable calls functions of torch.compile, which must run compiled.
            draws: It may draw random numbers. False: a warmup showed that it draws none, so that
                other threads may use the generators meanwhile.

        Raises:
            CaptureError: As for ``GraphBackend.capture``.
        """
        ...


class SegmentGraph(CapturedGraph, Protocol):
    """One segment of a capture: a graph that returns nothing by itself."""

    @property
    def num_operations(self) -> int:
        """Number of kernels, copies and fills that a replay queues; 0 if a replay does nothing."""
        ...


class SegmentedCapture(Protocol):
    """A capture with breaks, as seen by the callable that is captured."""

    def end(self) -> SegmentGraph:
        """End the segment; later calls run immediately.

        Nothing in the segment has run; a replay computes it. Live tensors keep their memory.

        Raises:
            CaptureError: No segment has begun, or it cannot be ended.
        """
        ...

    def begin(self) -> None:
        """Begin the next segment.

        Raises:
            CaptureError: A segment has already begun, or the device refuses.
        """
        ...

    def keeps(self, tensor: Any) -> bool:
        """Return whether a tensor's memory was allocated in this capture and stays in the pool.

        Called between segments. Such memory exists for as long as a graph of the capture, even if
        the tensor does not: later captures into the pool may then reuse it, and each replay writes
        it again at its point in the sequence. Memory allocated before the capture, or between
        segments, is not kept this way.
        """
        ...


class SegmentingBackend(Protocol):
    """A backend whose captures can end in the middle of a callable and resume later in it.

    Without it, a step that is one function has no PIECEWISE graphs.
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
        """Call a function that ends and begins segments, with the first one begun; return its
        result.

        ``end`` returns the graphs. A segment left open is refused, since nothing would replay it.
        Otherwise as for ``GraphBackend.capture``; calls between segments take effect.

        Args:
            run: The callable.
            stream: A stream from ``new_stream()``, which must be current at each end.
            pool: The pool for the memory of all segments.
            generators: Random generators other than the default one.
            compiled: The callable calls functions of torch.compile, which must run compiled.
            draws: It may draw random numbers.

        Raises:
            CaptureError: As for ``GraphBackend.capture``. All its graphs are released.
        """
        ...


class DeviceMemory(NamedTuple):
    """Memory in use on a device.

    Attributes:
        used_bytes: Of the whole device, including other processes and the driver.
        reserved_bytes: The part reserved by this process's allocator.
        held_bytes: The part of that in use while no graph runs.
    """

    used_bytes: int
    reserved_bytes: int
    held_bytes: int


class MeteringBackend(Protocol):
    """A backend that reports how the memory of its device is used.

    Without it, a memory account covers only pools and buffers, and a budget does not count the
    driver's memory per graph.
    """

    def device_memory(self) -> DeviceMemory:
        """Return the device memory in use, without synchronizing."""
        ...

    def workspace_bytes(self, stream: Stream) -> int:
        """Return the bytes of libraries' workspaces on a stream, kept for graphs captured there."""
        ...


class SleepingBackend(Protocol):
    """A backend whose memory can be returned to the device while its addresses stay.

    Without it, a ``GraphMemory`` that is to sleep is refused.
    """

    def sleep_problem(self) -> str:
        """Return why memory cannot sleep here; ``""`` if it can."""
        ...

    def new_sleeping_pool(self) -> Any:
        """Return a pool for captures, as ``new_pool`` does, or for ``allocate``."""
        ...

    def allocate(self, pool: Any, make: Callable[[], _T]) -> _T:
        """Call a function that creates tensors on the device in a pool's memory."""
        ...

    def sleep(self, pools: Sequence[Any]) -> int:
        """Release the memory of pools after all work of the device is done.

        Until ``wake``, nothing may use it and nothing may be captured into the pools. A replay then
        raises on the tape, and would end the process on a device. Graphs may be released.

        Returns:
            The bytes released.
        """
        ...

    def wake(self, pools: Sequence[Any]) -> None:
        """Map memory to the addresses of pools again; earlier contents are lost.

        Raises:
            ReplayError: There is not enough memory; all of it stays asleep.
        """
        ...


class CopyRegion(NamedTuple):
    """The copy that a node makes for one input.

    Attributes:
        target: Device address of the destination.
        num_bytes: Bytes of the rows.
        tail_bytes: Bytes of fill to write after the rows.
        fill: Eight bytes of fill as a little-endian number, repeated.
    """

    target: int
    num_bytes: int
    tail_bytes: int
    fill: int


class CopyNode(Protocol):
    """The first node of one graph: it copies inputs to where the graph reads them.

    Until its parameters are set it copies nothing; every launch uses the last parameters set.
    """

    @property
    def data(self) -> Any:
        """Host memory, as a writable buffer, whose contents are read when the node is set."""
        ...

    def record(self, stream: int) -> None:
        """Queue the node on a capturing stream, before anything else."""
        ...

    def attach(self, graph: CapturedGraph) -> str:
        """Find the node in its captured graph; return the problem, or ``""``."""
        ...

    def setter(
        self, regions: Sequence[CopyRegion], offsets: Sequence[int] = ()
    ) -> Callable[[Sequence[Any]], int]:
        """Return a function that sets the node for batches of one size.

        The function takes contiguous tensors, one per region except the last ``len(offsets)``
        regions, whose rows are in ``data`` at these offsets. The graph reads the tensors when it
        runs; ``data`` may be overwritten immediately. A tensor that is its own target is not
        copied. The function returns an error code, 0 for success.
        """
        ...

    def stop(self) -> int:
        """Make later launches copy nothing; return an error code, 0 for success."""
        ...


class CopyNodeBackend(Protocol):
    """A backend whose graphs can begin with a node that copies small inputs in.

    Without it, torch copies inputs before each launch.
    """

    def copy_node(self, num_regions: int, num_bytes: int, data_bytes: int = 0) -> CopyNode | str:
        """Return a node, or why there is none.

        Args:
            num_regions: Number of inputs to copy.
            num_bytes: Bytes of the largest.
            data_bytes: Total bytes of the inputs in the node's ``data``.
        """
        ...


@attrs.frozen
class BackendFeatures:
    """The optional parts of one backend: the backend itself for parts it offers, else None.

    Attributes:
        rehearsals: It measures the memory of a capture in advance.
        priorities: Its streams have priorities.
        direct_launches: It launches graphs, bypassing ``replay``.
        uploads: It prepares graphs before their first launch.
        unwatched_captures: It captures without watching each operation.
        copy_nodes: Its graphs can copy their own inputs.
        meters: It reports how the memory of its device is used.
        sleepers: Its memory can be released while addresses stay.
        segments: Its captures can break and resume.
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
    """Return which optional parts a backend offers."""
    # Looked up on the object, not on its class: a backend may delegate to another one.
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
