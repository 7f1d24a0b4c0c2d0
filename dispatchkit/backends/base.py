"""What a device must do for dispatchkit: one Protocol, no torch.

A backend owns streams, events, memory pools and the capture and replay of one callable.
It decides nothing. The same ``BackendTests`` pass on every backend. What a backend may offer
beyond this is in ``optional``.

Words are torch's: see "CUDA semantics", section "CUDA Graphs", in torch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import attrs


@attrs.frozen
class BackendCapabilities:
    """What a backend can do, asked by the core before it decides anything.

    Attributes:
        graphs: It can capture and replay at all.
        max_streams: Number of distinct streams the device gives (None: no limit known).
        device_timing: Timing events measure device time; otherwise times are host times.
        concurrent_streams: Work on two streams may overlap in time.
        poisons_outputs: Outputs read before the first replay hold recognisable poison;
            otherwise they hold whatever was in the memory.
        stream_priorities: ``new_stream`` takes ``priority``, as ``PriorityBackend`` says.
        steps_beside_captures: While one thread captures, others may run and replay what the
            callable does, as long as it changes nothing outside.
        unwatched_captures: ``capture`` takes ``watched``, ``notes`` and ``compiled``, as
            ``UnwatchedCaptureBackend`` says.
    """

    graphs: bool = True
    max_streams: int | None = None
    device_timing: bool = False
    concurrent_streams: bool = False
    poisons_outputs: bool = False
    stream_priorities: bool = False
    unwatched_captures: bool = False
    steps_beside_captures: bool = False


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work (torch.cuda.Event)."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of the work queued so far on a stream (default: the current one)."""
        ...

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of a stream (default: the current one) wait for this event."""
        ...

    def query(self) -> bool:
        """Return whether the work before the event is done; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the host until the work before the event is done."""
        ...

    def elapsed_us(self, end: Event) -> float:
        """Return microseconds from this event to a later one; both must be done."""
        ...


@runtime_checkable
class Stream(Protocol):
    """An in-order queue of device work (torch.cuda.Stream)."""

    @property
    def handle(self) -> int:
        """The raw handle, cheap to compare."""
        ...

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the event."""
        ...

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for all work now queued on another."""
        ...

    def query(self) -> bool:
        """Return whether all queued work is done; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        ...


@runtime_checkable
class CapturedGraph(Protocol):
    """One captured graph: fixed addresses, replayed without running Python."""

    @property
    def outputs(self) -> Any:
        """What the callable returned at capture; overwritten by every replay."""
        ...

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws from a random generator."""
        ...

    def replay(self) -> None:
        """Queue the graph once on the current stream."""
        ...

    def release(self) -> None:
        """Release the graph and what it holds; a replay afterwards raises ReplayError."""
        ...


class GraphBackend(Protocol):
    """What every backend has: a device that captures and replays.

    Thread safety: every method may be called from any thread. ``capture`` holds a lock of
    the whole process per device, so that one capture runs at a time.
    """

    @property
    def name(self) -> str:
        """The name it is chosen by (``cuda``, ``tape``)."""
        ...

    @property
    def torch_device(self) -> str:
        """The device string tensors are made on (``cuda:0``, ``cpu``)."""
        ...

    @property
    def capabilities(self) -> BackendCapabilities:
        """What this backend can do."""
        ...

    def device_info(self) -> dict[str, str]:
        """Return device name, driver and library versions for reports."""
        ...

    # -- streams and events -------------------------------------------------------------

    def current_stream(self) -> Stream:
        """Return the stream that new work of this thread goes to."""
        ...

    def current_stream_handle(self) -> int:
        """Return the raw handle of the current stream; the cheapest way to ask."""
        ...

    def new_stream(self) -> Stream:
        """Return a stream; beyond ``max_streams`` raise ConfigError saying the limit."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream current for the duration of a ``with`` block."""
        ...

    def new_event(self, *, timing: bool = False) -> Event:
        """Return a new event; only a timing event measures."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
        ...

    # -- memory -------------------------------------------------------------------------

    def new_pool(self) -> Any:
        """Return an opaque handle of a private memory pool for captures."""
        ...

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes the pool reserves now; 0 once it is unused."""
        ...

    # -- graphs -------------------------------------------------------------------------

    def warmup(self, run: Callable[[], Any], *, stream: Stream, iterations: int = 1) -> Any:
        """Run the callable eagerly on a stream, ordered after the caller's stream.

        Returns:
            What the last run returned. The caller's stream waits for the warmup.
        """
        ...

    def capture(
        self,
        run: Callable[[], Any],
        *,
        stream: Stream,
        pool: Any,
        generators: Iterable[Any] = (),
    ) -> CapturedGraph:
        """Capture the callable on a stream into a pool.

        The callable's effects on the device do not happen at capture; random generators
        and every storage outside the graph are left as they were. Nested captures are
        refused. Intermediates that user code keeps stay alive with the graph.

        The stream is one of ``new_stream()``: a device captures no default stream.

        Raises:
            CaptureError: From the original exception, which is its ``__cause__``.
                The current stream, the generators, the garbage collector and outside
                storage are as before.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether this thread is inside a capture, ours or the caller's."""
        ...
