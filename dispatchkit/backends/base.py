"""Protocols that every backend must implement.

A backend provides streams, events and memory pools, captures callables into graphs, and replays the
graphs. It makes no decisions. Every backend must pass ``dispatchkit.testing.BackendTests``.
Protocols for optional features are in ``optional.py``.

The terms are torch's; see "CUDA semantics", section "CUDA Graphs", in torch's documentation. This
file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs


@attrs.frozen
class BackendCapabilities:
    """The features and limits of a backend.

    Attributes:
        graphs: Whether the backend can capture and replay graphs.
        max_streams: Number of independent streams on the device; None if the limit is unknown.
        device_timing: Whether timing events measure device time, not host time.
        concurrent_streams: Whether work on different streams may run concurrently.
        poisons_outputs: Whether outputs contain a recognizable poison value before the first
            replay, instead of old memory contents.
        stream_priorities: Whether ``new_stream`` accepts ``priority``; see ``PriorityBackend``.
        steps_during_captures: Whether other threads may run the callable that is being captured, or
            replay its earlier graphs, if the callable has no side effects.
        unwatched_captures: Whether ``capture`` accepts the arguments that
            ``UnwatchedCaptureBackend`` adds.
    """

    graphs: bool = True
    max_streams: int | None = None
    device_timing: bool = False
    concurrent_streams: bool = False
    poisons_outputs: bool = False
    stream_priorities: bool = False
    unwatched_captures: bool = False
    steps_during_captures: bool = False


class Event(Protocol):
    """A point in a stream's work, like torch.cuda.Event."""

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after all work queued on a stream (default: the current stream)."""
        ...

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of a stream (default: the current stream) wait for this event."""
        ...

    def query(self) -> bool:
        """Return whether all work before the event is done, without blocking."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work before the event is done."""
        ...

    def elapsed_us(self, end: Event) -> float:
        """Return the time to a later event in microseconds; both events must have completed."""
        ...


class Stream(Protocol):
    """An in-order queue of device work, like torch.cuda.Stream."""

    @property
    def handle(self) -> int:
        """The raw handle, which is cheap to compare."""
        ...

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the event."""
        ...

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for all work currently queued on another stream."""
        ...

    def query(self) -> bool:
        """Return whether all queued work is done, without blocking."""
        ...

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        ...


class CapturedGraph(Protocol):
    """A captured graph with fixed addresses, replayed without running Python code."""

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
        """Release the graph and its memory; a later replay raises ReplayError."""
        ...


class GraphBackend(Protocol):
    """A device that captures and replays graphs.

    Thread safety: every method may be called from any thread. ``capture`` holds the device's lock,
    so only one capture runs on a device at a time.
    """

    @property
    def name(self) -> str:
        """Name of the backend, such as ``cuda`` or ``tape``."""
        ...

    @property
    def torch_device(self) -> str:
        """The device string for tensors (``cuda:0``, ``cpu``)."""
        ...

    @property
    def capabilities(self) -> BackendCapabilities:
        """Features and limits of the backend."""
        ...

    def device_info(self) -> dict[str, str]:
        """Return the name of the device and the versions of libraries, for reports."""
        ...

    # -- streams and events -------------------------------------------------------------

    def current_stream(self) -> Stream:
        """Return the current stream of this thread."""
        ...

    def current_stream_handle(self) -> int:
        """Return the raw handle of the current stream."""
        ...

    def new_stream(self) -> Stream:
        """Return a new stream; raise ConfigError if all ``max_streams`` streams are in use."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream current for the duration of a ``with`` block."""
        ...

    def new_event(self, *, timing: bool = False) -> Event:
        """Return a new event; only timing events measure time."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""
        ...

    # -- memory -------------------------------------------------------------------------

    def new_pool(self) -> Any:
        """Return an opaque handle of a private memory pool for captures."""
        ...

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes that the pool currently reserves; 0 if no graph or tensor uses it."""
        ...

    # -- graphs -------------------------------------------------------------------------

    def warmup(self, run: Callable[[], Any], *, stream: Stream, iterations: int = 1) -> Any:
        """Run the callable eagerly on a stream, after all work queued on the caller's stream.

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
        """Capture the callable on a stream into a pool, and return the graph.

        A capture does not change random generators or storages outside the graph. Nested captures
        are refused. The memory of an intermediate tensor is not reused while user code references
        the tensor.

        The stream must come from ``new_stream()``, because the default stream cannot be captured.

        Raises:
            CaptureError: The capture failed. ``__cause__`` is the original exception. The current
                stream, the generators, the garbage collector's setting and storages outside the
                graph are restored.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether this thread is inside a capture, including captures by other code."""
        ...
