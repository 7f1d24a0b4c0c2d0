"""What a backend may offer beyond ``GraphBackend``, and the record of what one does offer.

Each part is a Protocol of its own, and a backend has as many of them as its device can do. A
method that is there is offered; where only the arguments of a required method differ, a field of
``BackendCapabilities`` says so. ``features_of`` is the one place that looks.

Without a part the runner does what it replaces: a warmup for a rehearsal, ``replay`` for a
direct launch, copies by torch for a copy node. ``BackendTests`` tests each part that is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import attrs

from dispatchkit.backends.base import CapturedGraph, GraphBackend, Stream

_T = TypeVar("_T")

#: Launches a graph on a stream. Both arguments are those of the device's runtime: what
#: ``direct_launch`` returned for the graph, and the stream's raw handle as ``ctypes.c_void_p``.
#: It returns 0 or None, or the runtime's error code if nothing was launched.
LaunchCall = Callable[[Any, Any], int | None]


class RehearsingBackend(Protocol):
    """A backend that measures beforehand how much memory a capture takes.

    Without it, a budget of bytes goes by the memory of the first warmup, and a graph that turns
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
        """Return by how many bytes at most a capture would make the pool grow.

        The callable runs once on the stream, like a warmup: the caller restores what it
        changes. The pool stays as it is.

        Raises:
            CaptureError: The callable cannot be captured, as far as a rehearsal shows.
        """
        ...


class PriorityBackend(Protocol):
    """A backend whose streams have priorities; ``capabilities.stream_priorities`` is True.

    Without it, lanes with priorities are refused.
    """

    def new_stream(self, *, priority: int = 0) -> Stream:
        """Return a stream.

        Args:
            priority: How urgent its work is, at least 0. Larger numbers go first, and a number
                beyond the device's range counts as the largest in it. A graph keeps the
                priority of the stream that captured it.

        Raises:
            ConfigError: The device has no stream left; the error says the limit.
        """
        ...


class DirectLaunchBackend(Protocol):
    """A backend that launches graphs by a call of the device's runtime, past ``replay``.

    Without it, ``replay`` launches each graph. Only graphs without random state are launched
    directly, since their generators need not move.
    """

    def direct_launch(self, graph: CapturedGraph) -> tuple[LaunchCall, Any] | None:
        """Return the call, and what stands for the graph in it; None if only replay launches it.

        The answer holds until the graph is released. The call runs once per step: it takes no
        lock and makes no object.

        Args:
            graph: A graph of this backend, or another object with ``replay()``.

        Raises:
            ReplayError: The graph is released.
        """
        ...


class UploadingBackend(Protocol):
    """A backend that can prepare a graph on the device before its first launch.

    Without it, the first launch takes longer.
    """

    def upload(self, graph: CapturedGraph, stream: Stream) -> bool:
        """Queue the preparation on a stream; return whether that could be done.

        Raises:
            ReplayError: The graph is released.
        """
        ...


class WarmupNotes(Protocol):
    """What a warmup shows about the operations of the capture that follows."""

    @property
    def is_plain(self) -> bool:
        """Whether the operations can be captured by these notes, without another watch."""
        ...

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note an operation before it runs, as ``__torch_dispatch__`` gets it."""
        ...


class WatchedGraph(CapturedGraph, Protocol):
    """A graph that keeps alive what its operations read and write, as far as it was watched."""

    @property
    def holds(self) -> list[Any]:
        """Storages on the device that are kept alive until release; the runner adds more."""
        ...

    @property
    def host_tensors(self) -> list[Any]:
        """Host memory that the graph copies from or to; another capture has its own."""
        ...

    @property
    def num_plain_operations(self) -> int:
        """Operations of functions of torch.compile that were captured without being compiled."""
        ...


class UnwatchedCaptureBackend(Protocol):
    """A backend that looks at each operation of a capture, and can do without.

    ``capabilities.unwatched_captures`` is True. A watch costs microseconds for each operation.
    The runner watches one capture of those that run the same operations at different sizes.
    """

    def new_notes(self) -> WarmupNotes | None:
        """Return empty notes for a warmup; None if no warmup can stand in for a watch."""
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
            stream: One of ``new_stream()``.
            pool: Where the graph's memory comes from.
            generators: Random generators beside the default one.
            watched: Look at each operation. False: the caller watched the same operations in
                an earlier capture, and adds to ``holds`` what that graph held.
            notes: Plain notes of a warmup of the same operations, which take the place of the
                watch. Memory that only the warmup used is not kept.
            compiled: The callable calls functions of torch.compile, which must run compiled.
            draws: It may draw random numbers. False: a warmup showed that it draws none, so
                that no generator need be kept from other threads meanwhile.

        Raises:
            CaptureError: As for ``GraphBackend.capture``.
        """
        ...


class SegmentGraph(CapturedGraph, Protocol):
    """One segment of a capture: a graph that returns nothing by itself."""

    @property
    def num_operations(self) -> int:
        """What a replay queues: kernels, copies and fills. 0: a replay would do nothing."""
        ...


class SegmentedCapture(Protocol):
    """A capture that breaks and goes on, as seen by the callable that is captured."""

    def end(self) -> SegmentGraph:
        """End the segment: what is called from here on runs at once.

        Nothing of the segment has run; its replay computes what was captured. Tensors that are
        alive keep their memory.

        Raises:
            CaptureError: No segment is begun, or it cannot be ended.
        """
        ...

    def begin(self) -> None:
        """Begin the next segment.

        Raises:
            CaptureError: A segment is begun already, or the device refuses.
        """
        ...

    def keeps(self, tensor: Any) -> bool:
        """Return whether a tensor's memory was handed out in this capture, and stays the pool's.

        Asked between segments. Such memory is there for as long as a graph of the capture, with or
        without the tensor: later captures of the pool may be given it then, and in its turn each
        replay writes it again. Memory that was there before, and memory of what runs between
        segments, is not kept.
        """
        ...


class SegmentingBackend(Protocol):
    """A backend whose captures can end in the middle of a callable, and go on behind.

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
        """Call what ends and begins segments, the first one begun; return what it returns.

        The graphs are those that ``end`` returned. A segment that is open at the end is refused,
        since nothing would replay it. All else is as for ``GraphBackend.capture``; what runs
        between segments takes effect.

        Args:
            run: The callable.
            stream: One of ``new_stream()``, the current one at each end.
            pool: Where the memory of all segments comes from.
            generators: Random generators beside the default one.
            compiled: The callable calls functions of torch.compile, which must run compiled.
            draws: It may draw random numbers.

        Raises:
            CaptureError: As for ``GraphBackend.capture``. All graphs of it are released.
        """
        ...


class DeviceMemory(NamedTuple):
    """What a device has handed out, to whomever.

    Attributes:
        used_bytes: Of the device as a whole: other processes and the driver included.
        reserved_bytes: Of that, what this process's allocator has taken from the device.
        held_bytes: Of that, what is in use while no graph runs.
    """

    used_bytes: int
    reserved_bytes: int
    held_bytes: int


class MeteringBackend(Protocol):
    """A backend that says where the memory of its device has gone.

    Without it, an account of memory knows of pools and buffers alone, and a budget does not
    count what the driver keeps for each graph.
    """

    def device_memory(self) -> DeviceMemory:
        """Return what the device has handed out now; never waits for it."""
        ...

    def workspace_bytes(self, stream: Stream) -> int:
        """Return what libraries work in on a stream, kept for graphs that were captured there."""
        ...


class SleepingBackend(Protocol):
    """A backend whose memory can be given back to the device while its addresses stay.

    Without it, a ``GraphMemory`` that is to sleep is refused.
    """

    def sleep_problem(self) -> str:
        """Return why no memory can sleep here; ``""`` where it can."""
        ...

    def new_sleeping_pool(self) -> Any:
        """Return a pool for captures, as ``new_pool`` does, or for ``allocate``."""
        ...

    def allocate(self, pool: Any, make: Callable[[], _T]) -> _T:
        """Call what makes tensors on the device; their memory is of the pool."""
        ...

    def sleep(self, pools: Sequence[Any]) -> int:
        """Give the memory of pools back, once all work of the device is done.

        Until ``wake`` nothing may use it, and nothing may be captured into the pools; a replay of
        a graph of the tape raises then, and one of a device would end the process. Graphs may be
        released.

        Returns:
            The bytes that were given back.
        """
        ...

    def wake(self, pools: Sequence[Any]) -> None:
        """Have memory for the addresses of pools again; what lay there is lost.

        Raises:
            ReplayError: There is not enough; all of it sleeps on.
        """
        ...


class CopyRegion(NamedTuple):
    """What a copy node does for one input.

    Attributes:
        target: Address on the device that the rows go to.
        num_bytes: Bytes of the rows.
        tail_bytes: Bytes of fill to write behind them.
        fill: Eight bytes of fill as a little-endian number; they repeat.
    """

    target: int
    num_bytes: int
    tail_bytes: int
    fill: int


class CopyNode(Protocol):
    """The first node of one graph: it copies inputs to where the graph reads them.

    Until its parameters are set it copies nothing; what was set last is done by every launch.
    """

    @property
    def data(self) -> Any:
        """Host memory, as a writable buffer, whose contents are taken when the node is set."""
        ...

    def record(self, stream: int) -> None:
        """Queue the node on a stream that is being captured, before anything else."""
        ...

    def attach(self, graph: CapturedGraph) -> str:
        """Find the node in the graph it was recorded in; return the problem, or ``""``."""
        ...

    def setter(
        self, regions: Sequence[CopyRegion], offsets: Sequence[int] = ()
    ) -> Callable[[Sequence[Any]], int]:
        """Return a function that sets the node for batches of one size.

        The function takes contiguous tensors, one per region except the last
        ``len(offsets)``, whose rows lie in ``data`` at these offsets. The graph reads the
        tensors when it runs; ``data`` may be written again at once. A tensor that is its own
        target is not copied. The function returns an error code, 0 for success.
        """
        ...

    def stop(self) -> int:
        """Make later launches copy nothing; return an error code, 0 for success."""
        ...


class CopyNodeBackend(Protocol):
    """A backend whose graphs can begin with a node that brings small inputs in.

    Without it, torch copies inputs before each launch.
    """

    def copy_node(self, num_regions: int, num_bytes: int, data_bytes: int = 0) -> CopyNode | str:
        """Return a node, or why there is none.

        Args:
            num_regions: Inputs that it copies.
            num_bytes: Bytes of the largest.
            data_bytes: Bytes of those that lie in the node's ``data``, all together.
        """
        ...


@attrs.frozen
class BackendFeatures:
    """The optional parts of one backend: the backend itself where it offers one, else None.

    Attributes:
        rehearsals: It measures the memory of a capture beforehand.
        priorities: Its streams have priorities.
        direct_launches: It launches graphs past ``replay``.
        uploads: It prepares graphs before their first launch.
        unwatched_captures: It captures without watching each operation.
        copy_nodes: Its graphs can copy their own inputs.
        meters: It says where the memory of its device has gone.
        sleepers: Its memory can be given back while addresses stay.
        segments: Its captures can break and go on.
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
