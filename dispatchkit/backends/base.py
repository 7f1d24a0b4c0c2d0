"""The protocols that every backend must implement, without torch.

A backend owns streams, events, memory pools, and the capture and replay of one callable. It decides
nothing. Every backend must pass the same ``BackendTests``. Optional features are in ``optional``.

Terms are those of torch: see "CUDA semantics", section "CUDA Graphs", in torch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import attrs


@attrs.frozen
class BackendCapabilities:
    """The capabilities of a backend, read before anything is decided.

    Attributes:
        graphs: It can capture and replay graphs.
        max_streams: Number of independent streams of the device (None: no known limit).
        device_timing: Timing events measure device time rather than host time.
        concurrent_streams: Work on two streams may overlap in time.
        poisons_outputs: Outputs read before the first replay hold recognizable poison rather than
            old memory contents.
        stream_priorities: ``new_stream`` takes ``priority``, as ``PriorityBackend`` says.
        steps_beside_captures: While one thread captures, others may run and replay the same
            operations, provided that the callable has no outside effects.
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
        """Return whether the work before the event is done, without blocking."""
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
        """The raw handle, which is cheap to compare."""
        ...

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the event."""
        ...

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for all work currently queued on another."""
        ...

    def query(self) -> bool:
        """Return whether all queued work is done, without blocking."""
        ...

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        ...


@runtime_checkable
class CapturedGraph(Protocol):
    """One captured graph: fixed addresses, replayed without running Python."""

    @property
    def outputs(self) -> Any:
        """The callable's result at capture; overwritten by every replay."""
        ...

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws from a random generator."""
        ...

    def replay(self) -> None:
        """Queue the graph once on the current stream."""
        ...

    def release(self) -> None:
        """Release the graph and what it holds; a later replay raises ReplayError."""
        ...


class GraphBackend(Protocol):
    """A device that captures and replays.

    Thread safety: every method may be called from any thread. ``capture`` holds a process-wide lock
    per device, so that one capture runs at a time.
    """

    @property
    def name(self) -> str:
        """Its name (``cuda``, ``tape``)."""
        ...

    @property
    def torch_device(self) -> str:
        """The device string for tensors (``cuda:0``, ``cpu``)."""
        ...

    @property
    def capabilities(self) -> BackendCapabilities:
        """The backend's capabilities."""
        ...

    def device_info(self) -> dict[str, str]:
        """Return the device name and the driver and library versions, for reports."""
        ...

    # -- streams and events -------------------------------------------------------------

    def current_stream(self) -> Stream:
        """Return the current stream of this thread."""
        ...

    def current_stream_handle(self) -> int:
        """Return the raw handle of the current stream; the cheapest query."""
        ...

    def new_stream(self) -> Stream:
        """Return a stream; beyond ``max_streams``, raise a ConfigError with the limit."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream current for the duration of a ``with`` block."""
        ...

    def new_event(self, *, timing: bool = False) -> Event:
        """Return a new event; only timing events measure time."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
        ...

    # -- memory -------------------------------------------------------------------------

    def new_pool(self) -> Any:
        """Return an opaque handle of a private memory pool for captures."""
        ...

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes that the pool currently reserves; 0 once it is unused."""
        ...

    # -- graphs -------------------------------------------------------------------------

    def warmup(self, run: Callable[[], Any], *, stream: Stream, iterations: int = 1) -> Any:
        """Run the callable eagerly on a stream, ordered after the caller's stream.

        Returns:
            The result of the last run. The caller's stream waits for the warmup.
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

        The callable has no effects on the device during capture; random generators and all storages
        outside the graph are left as they were. Nested captures are refused. Intermediates that
        user code keeps stay alive with the graph.

        The stream must come from ``new_stream()``: the default stream cannot be captured.

        Raises:
            CaptureError: The original exception is its ``__cause__``. The current stream, the
                generators, the garbage collector and outside storage are as before.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether this thread is inside a capture, ours or the caller's."""
        ...
