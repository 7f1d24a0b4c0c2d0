"""The tape: the semantics of CUDA graphs on a CPU, for tests on any machine.

As on a device, addresses are fixed, and Python code runs only during the capture. A capture refuses
calls that wait for the device, and the error names the call. Replays draw the same random numbers
as eager runs. A capture changes no tensors or generators outside the graph, even if it fails.
Tensors that user code still references after the capture stay alive, outputs contain poison (such
as NaN) until the first replay, and intermediates share the memory of a pool.

A *deferred* tape, created with a seed (``scheduler``), queues work on streams, so that missing
waits cause wrong results.

Differences from a device: A capture runs the operations and then undoes their effects. A graph
keeps alive the memory of all tensors that it reads or writes. ``tensor.to("cpu")`` is not refused,
because the tape cannot distinguish it from a copy to the device. Tensors created from Python lists
and numbers inside the callable become constants, whereas on a device their creation is refused.
"""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from dispatchkit.backends.base import BackendCapabilities
from dispatchkit.backends.capture_errors import capture_error, clear_frames
from dispatchkit.backends.capture_guard import (
    capturing_device,
    refuse_in_capture,
    run_as_capture,
)
from dispatchkit.backends.optional import DeviceMemory, SegmentedCapture
from dispatchkit.backends.tape.graph import TapeGraph, poison_kept
from dispatchkit.backends.tape.pool import NewTensors, TapePool
from dispatchkit.backends.tape.recorder import Recorder
from dispatchkit.backends.tape.replay import compile_replay
from dispatchkit.backends.tape.segmented import TapeSegments
from dispatchkit.backends.tape.stream_query import reporting_capture
from dispatchkit.backends.tape.streams import (
    Scheduler,
    TapeEvent,
    TapeStream,
)
from dispatchkit.backends.warmup import run_warmup
from dispatchkit.backends.watching.host_sync import HostSyncGuard
from dispatchkit.errors import ConfigError
from dispatchkit.keys.checks import check_count

_T = TypeVar("_T")

# As on CUDA, where torch has 32 streams per priority.
DEFAULT_MAX_STREAMS = 32
# Maximum number of parts of a graph on a deferred tape. Other work can run between the parts.
MAX_PARTS = 8
# Bytes that a device would use in addition to pools: driver memory per operation of a graph, and
# library workspaces per captured stream.
DRIVER_BYTES = 64
WORKSPACE_BYTES = 4096


class _CurrentStream(threading.local):
    """The current stream of each thread; None for the default stream."""

    stream: TapeStream | None = None


class TapeBackend:
    """A backend that captures and replays graphs on a CPU, as CUDA does on a GPU.

    Args:
        scheduler: Seed of the deferred scheduler, which exposes missing waits; None runs all work
            immediately. See streams.py.
        max_streams: Maximum number of live streams, excluding the default stream.

    Raises:
        ConfigError: ``max_streams`` is not a positive integer.
    """

    def __init__(
        self, *, scheduler: int | None = None, max_streams: int = DEFAULT_MAX_STREAMS
    ) -> None:
        max_streams = check_count(max_streams, "max_streams")
        self._scheduler = None if scheduler is None else Scheduler(scheduler)
        self._max_streams = max_streams
        self._default_stream = TapeStream(0, self._scheduler)
        self._streams: weakref.WeakSet[TapeStream] = weakref.WeakSet()
        self._streams_guard = threading.Lock()
        self._pools: weakref.WeakSet[TapePool] = weakref.WeakSet()
        self._next_handle = 1
        self._thread = _CurrentStream()

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "tape"

    @property
    def torch_device(self) -> str:
        """The device string for tensors."""
        return "cpu"

    @property
    def capabilities(self) -> BackendCapabilities:
        """Features and limits of the backend."""
        return BackendCapabilities(
            graphs=True,
            max_streams=self._max_streams,
            device_timing=False,
            concurrent_streams=False,
            poisons_outputs=True,
            stream_priorities=True,
            # On a deferred tape, captures hold the lock that all streams need.
            steps_during_captures=self._scheduler is None,
        )

    def device_info(self) -> dict[str, str]:
        """Return the device name and library versions, for reports."""
        return {
            "device": f"tape on {platform.processor() or platform.machine()}",
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        }

    # -- streams and events -------------------------------------------------------------

    def current_stream(self) -> TapeStream:
        """Return the current stream of this thread."""
        stream = self._thread.stream
        return self._default_stream if stream is None else stream

    def current_stream_handle(self) -> int:
        """Return the raw handle of the current stream."""
        stream = self._thread.stream
        return 0 if stream is None else stream.handle

    def new_stream(self, *, priority: int = 0) -> TapeStream:
        """Return a new stream; the priority has no effect on the tape.

        Raises:
            ConfigError: ``max_streams`` streams are already in use.
        """
        with self._streams_guard:
            if len(self._streams) >= self._max_streams:
                raise ConfigError(
                    "number of streams",
                    len(self._streams) + 1,
                    f"at most {self._max_streams}",
                    "Use fewer lanes, drop references to unused streams, or create the "
                    "TapeBackend with a larger max_streams.",
                    message=f"All streams of {self.torch_device} are in use "
                    f"(max_streams={self._max_streams}).",
                )
            stream = TapeStream(self._next_handle, self._scheduler)
            self._next_handle += 1
            self._streams.add(stream)
        return stream

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        """Make a stream current for the duration of a ``with`` block.

        On a deferred tape, tensor operations inside the block are queued on the stream.
        """
        before = self._thread.stream
        self._thread.stream = stream
        try:
            if self._scheduler is None or capturing_device():
                yield
            else:
                from dispatchkit.backends.tape.deferred import deferred_operations

                with deferred_operations(stream):
                    yield
        finally:
            self._thread.stream = before

    def new_event(self, *, timing: bool = False) -> TapeEvent:
        """Return a new event; timing events measure host time."""
        return TapeEvent(self.current_stream, timing=timing)

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""
        refuse_in_capture("backend.synchronize()")
        if self._scheduler is not None:
            self._scheduler.drain_all()

    # -- memory -------------------------------------------------------------------------

    def new_pool(self) -> TapePool:
        """Return a private memory pool for captures."""
        pool = TapePool()
        with self._streams_guard:
            self._pools.add(pool)
        return pool

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes that the pool reserves for graphs and live outputs; 0 while asleep."""
        num_bytes: int = pool.num_bytes
        return num_bytes

    def sleep_problem(self) -> str:
        """Return ``""``, because memory can sleep on the tape."""
        return ""

    def new_sleeping_pool(self) -> TapePool:
        """Return a pool for captures, or for ``allocate``."""
        return self.new_pool()

    def allocate(self, pool: Any, make: Callable[[], _T]) -> _T:
        """Call a function, adding its new tensors to a pool, and return its result."""
        with NewTensors() as made:
            result = make()
        pool.adopt(made.tensors)
        return result

    def sleep(self, pools: Sequence[Any]) -> int:
        """Put the memory of pools to sleep; return the bytes that a device would release."""
        self.synchronize()
        return sum(pool.sleep() for pool in pools)

    def wake(self, pools: Sequence[Any]) -> None:
        """Wake the memory of pools; earlier contents are lost."""
        for pool in pools:
            pool.wake()

    def device_memory(self) -> DeviceMemory:
        """Return the memory that a device would use for the tape's graphs and streams."""
        with self._streams_guard:
            pools, streams = tuple(self._pools), tuple(self._streams)
        workspaces = sum(map(self.workspace_bytes, streams))
        reserved = workspaces + sum(pool.reserved_bytes for pool in pools)
        held = workspaces + sum(pool.held_bytes for pool in pools)
        asleep = sum(pool.reserved_bytes for pool in pools if pool.is_asleep)
        driver = DRIVER_BYTES * sum(pool.num_steps for pool in pools)
        return DeviceMemory(reserved - asleep + driver, reserved, held)

    def workspace_bytes(self, stream: TapeStream) -> int:
        """Return the bytes of library workspaces that a device would keep for a stream."""
        return WORKSPACE_BYTES if stream.was_captured else 0

    # -- graphs -------------------------------------------------------------------------

    def warmup(self, run: Callable[[], Any], *, stream: Any, iterations: int = 1) -> Any:
        """Run the callable eagerly on a stream, after all work queued on the caller's stream.

        Returns:
            The result of the last run. The caller's stream waits for the warmup.
        """
        return run_warmup(self, run, stream, iterations)

    def capture(
        self,
        run: Callable[[], Any],
        *,
        stream: Any,
        pool: Any,
        generators: Iterable[Any] = (),
    ) -> TapeGraph:
        """Record the callable, undo its effects outside the graph, and return the graph.

        The callable runs in the caller's gradient and inference modes. During the capture, other
        threads must not write to tensors that the callable writes, because their writes would also
        be undone.

        Raises:
            CaptureError: The capture failed with reason ``host_sync``, ``out_of_memory``,
                ``nested`` or ``error``. ``__cause__`` is the original exception. Tensors and
                generators outside the capture have not changed.
        """
        handled = sys.exception()

        def capture() -> TapeGraph:
            stream.was_captured = True
            recorder, outputs = self._record(run, generators, handled)
            return self._make_graph(recorder, outputs, pool)

        return self._run_exclusively(stream, capture)

    def capture_segments(
        self,
        run: Callable[[SegmentedCapture], _T],
        *,
        stream: Any,
        pool: Any,
        generators: Iterable[Any] = (),
        compiled: bool = False,
        draws: bool = True,
    ) -> _T:
        """Record a callable that ends and begins segments, and return its result.

        Functions wrapped in torch.compile run eager, regardless of ``compiled``.

        Raises:
            CaptureError: As for ``capture``. The graphs of all segments of this capture are
                released.
        """
        handled = sys.exception()

        def capture() -> _T:
            stream.was_captured = True
            made = partial(self._make_graph, outputs=None, pool=pool)
            segments = TapeSegments(made, [torch.default_generator, *generators])
            if self._scheduler is None:
                return segments.run(run, handled)
            from dispatchkit.backends.tape.deferred import deferred_operations

            with deferred_operations(stream):  # calls between segments
                return segments.run(run, handled)

        return self._run_exclusively(stream, capture)

    def _make_graph(self, recorder: Recorder, outputs: Any, pool: TapePool) -> TapeGraph:
        """Return the graph of a recording."""
        kept = recorder.kept()
        tensors = pool.allocate(recorder, kept)
        steps = recorder.steps
        # On a deferred tape, work of other streams may run between parts, as between kernels on a
        # device.
        size = max(1, len(steps) if self._scheduler is None else -(-len(steps) // MAX_PARTS))
        parts = [steps[start : start + size] for start in range(0, len(steps), size)] or [[]]
        launches = tuple(compile_replay(part, tensors) for part in parts)
        if (overwrite := pool.overwriting(recorder, kept)) is not None:
            launches = (overwrite, *launches)
        poison_kept(recorder, kept)
        return TapeGraph(
            self.current_stream,
            pool,
            outputs,
            launches,
            draws=recorder.draws,
            num_steps=len(recorder.steps),
        )

    def rehearse(
        self,
        run: Callable[[], Any],
        *,
        stream: Any,
        pool: Any,
        generators: Iterable[Any] = (),
    ) -> int:
        """Return the exact number of bytes that a capture would add to the pool.

        Raises:
            CaptureError: The callable cannot be captured.
        """
        handled = sys.exception()

        def grow() -> int:
            recorder, outputs = self._record(run, generators, handled)
            num_bytes: int = pool.growth(recorder, recorder.kept())
            del outputs  # kept alive until here, so that ``kept`` includes the outputs
            return num_bytes

        return self._run_exclusively(stream, grow)

    def _run_exclusively(self, stream: Any, run: Callable[[], _T]) -> _T:
        """Run a capture while other threads' captures and deferred work wait; return its result."""
        held = nullcontext() if self._scheduler is None else self._scheduler.lock

        def on_stream() -> _T:
            with held, self.use_stream(stream):
                stream.capturing_thread = threading.get_ident()
                try:
                    return run()
                finally:
                    stream.capturing_thread = None

        return run_as_capture(self.torch_device, on_stream)

    def _record(
        self,
        run: Callable[[], Any],
        generators: Iterable[Any],
        handled: BaseException | None,
    ) -> tuple[Recorder, Any]:
        """Run the callable once, and undo its effects; return the recording and the result."""
        recorder = Recorder()
        try:
            recorder.add_generators([torch.default_generator, *generators])
            with reporting_capture(), HostSyncGuard(recorder, "cpu"), recorder:
                outputs = run()
            recorder.raise_swallowed_error()
        except Exception as error:
            clear_frames(error, handled)
            raise capture_error(recorder.first_error or error) from error
        finally:
            recorder.restore()
        return recorder, outputs

    def is_capturing(self) -> bool:
        """Return whether this thread is inside a capture."""
        return bool(capturing_device())
