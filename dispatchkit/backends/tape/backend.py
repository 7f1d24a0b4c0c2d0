"""The tape: CUDA-graph semantics on a CPU, to prove on any machine what a device must do.

What it shares with graphs of a device: fixed addresses, Python runs once, at capture; calls
that wait for the device are refused by name; random numbers come as in eager; a capture
changes nothing outside itself, not even one that fails; what the callable stashed stays
alive; outputs hold poison until the first replay; intermediates share a pool's memory.

What differs: capturing runs the operations (and puts back what they changed); a graph keeps
alive the outside tensors it reads, which a device's graph does not; ``tensor.to("cpu")`` is
not refused, since the tape cannot tell it from moving to the device; Python lists and numbers
turned into tensors inside the callable are baked in.
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
from dispatchkit.backends.tape.stream_query import answering_capture
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

# torch's pool of CUDA streams holds 32 for each priority; a device is no larger here.
DEFAULT_MAX_STREAMS = 32
# Parts that a graph of a deferred tape runs in: enough for others to come in between.
MAX_PARTS = 8
# What a device would keep beside the pools: the driver for each step of a graph, and libraries
# for each stream that graphs were captured on.
DRIVER_BYTES = 64
WORKSPACE_BYTES = 4096


class _CurrentStream(threading.local):
    """The stream each thread has made current; None stands for the default stream."""

    stream: TapeStream | None = None


class TapeBackend:
    """Captures and replays on a CPU, with the semantics of CUDA graphs.

    Args:
        scheduler: Seed of the deferred scheduler, which makes missing waits visible; None
            runs all work at once (see streams.py).
        max_streams: Number of streams that may exist at a time, the default one apart.

    Raises:
        ConfigError: ``max_streams`` is not a whole number of at least 1.
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
        """The name it is chosen by."""
        return "tape"

    @property
    def torch_device(self) -> str:
        """The device string tensors are made on."""
        return "cpu"

    @property
    def capabilities(self) -> BackendCapabilities:
        """What this backend can do."""
        return BackendCapabilities(
            graphs=True,
            max_streams=self._max_streams,
            device_timing=False,
            concurrent_streams=False,
            poisons_outputs=True,
            stream_priorities=True,
            # Deferred, a capture holds what all streams need.
            steps_beside_captures=self._scheduler is None,
        )

    def device_info(self) -> dict[str, str]:
        """Return device name and library versions for reports."""
        return {
            "device": f"tape on {platform.processor() or platform.machine()}",
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        }

    # -- streams and events -------------------------------------------------------------

    def current_stream(self) -> TapeStream:
        """Return the stream that new work of this thread goes to."""
        stream = self._thread.stream
        return self._default_stream if stream is None else stream

    def current_stream_handle(self) -> int:
        """Return the raw handle of the current stream."""
        stream = self._thread.stream
        return 0 if stream is None else stream.handle

    def new_stream(self, *, priority: int = 0) -> TapeStream:
        """Return a new stream; its priority changes nothing on the tape.

        Raises:
            ConfigError: ``max_streams`` streams are alive already.
        """
        with self._streams_guard:
            if len(self._streams) >= self._max_streams:
                raise ConfigError(
                    "number of streams",
                    len(self._streams) + 1,
                    f"at most {self._max_streams} at a time on this device",
                    "Use fewer lanes, or drop streams that are not needed.",
                )
            stream = TapeStream(self._next_handle, self._scheduler)
            self._next_handle += 1
            self._streams.add(stream)
        return stream

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        """Make a stream current for the duration of a ``with`` block.

        Deferred, tensor operations inside the block are queued on the stream.
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
        """Return a new event; only a timing event measures, and it measures host time."""
        return TapeEvent(self.current_stream, timing=timing)

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
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
        """Return the bytes the pool reserves now; 0 once it is unused."""
        num_bytes: int = pool.num_bytes
        return num_bytes

    def sleep_problem(self) -> str:
        """Return why no memory can sleep here: it can."""
        return ""

    def new_sleeping_pool(self) -> TapePool:
        """Return a pool for captures, or for ``allocate``."""
        return self.new_pool()

    def allocate(self, pool: Any, make: Callable[[], _T]) -> _T:
        """Call what makes tensors; their memory sleeps with the pool."""
        with NewTensors() as made:
            result = make()
        pool.adopt(made.tensors)
        return result

    def sleep(self, pools: Sequence[Any]) -> int:
        """Let the memory of pools sleep: no graph of them may replay."""
        self.synchronize()
        return sum(pool.sleep() for pool in pools)

    def wake(self, pools: Sequence[Any]) -> None:
        """Wake the memory of pools up; what lay there is lost."""
        for pool in pools:
            pool.wake()

    def device_memory(self) -> DeviceMemory:
        """Return what a device would have handed out for the graphs of this tape."""
        with self._streams_guard:
            pools, streams = tuple(self._pools), tuple(self._streams)
        workspaces = sum(map(self.workspace_bytes, streams))
        reserved = workspaces + sum(pool.reserved_bytes for pool in pools)
        held = workspaces + sum(pool.held_bytes for pool in pools)
        asleep = sum(pool.reserved_bytes for pool in pools if pool.is_asleep)
        driver = DRIVER_BYTES * sum(pool.num_steps for pool in pools)
        return DeviceMemory(reserved - asleep + driver, reserved, held)

    def workspace_bytes(self, stream: TapeStream) -> int:
        """Return what libraries of a device would keep for a stream that was captured."""
        return WORKSPACE_BYTES if stream.was_captured else 0

    # -- graphs -------------------------------------------------------------------------

    def warmup(self, run: Callable[[], Any], *, stream: Any, iterations: int = 1) -> Any:
        """Run the callable eagerly on a stream, ordered after the caller's stream.

        Returns:
            What the last run returned. The caller's stream waits for the warm-up.
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
        """Record the callable; its effects outside the graph are put back.

        It runs in the caller's grad and inference mode. Other threads must not write the
        same outside tensors meanwhile: their writes would be put back as well.

        Raises:
            CaptureError: With reason ``host_sync``, ``out_of_memory``, ``nested`` or
                ``error``; its ``__cause__`` is the original exception. Nothing outside
                has changed.
        """
        handled = sys.exception()

        def capture() -> TapeGraph:
            stream.was_captured = True
            recorder, outputs = self._record(run, generators, handled)
            return self._make_graph(recorder, outputs, pool)

        return self._alone(stream, capture)

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
        """Record a callable that ends and begins segments, the first one begun.

        Functions of torch.compile run plainly, whatever ``compiled`` says.

        Raises:
            CaptureError: As for ``capture``; all graphs of it are released.
        """
        handled = sys.exception()

        def capture() -> _T:
            stream.was_captured = True
            made = partial(self._make_graph, outputs=None, pool=pool)
            segments = TapeSegments(made, [torch.default_generator, *generators])
            if self._scheduler is None:
                return segments.run(run, handled)
            from dispatchkit.backends.tape.deferred import deferred_operations

            with deferred_operations(stream):  # what runs between segments
                return segments.run(run, handled)

        return self._alone(stream, capture)

    def _make_graph(self, recorder: Recorder, outputs: Any, pool: TapePool) -> TapeGraph:
        """Return the graph of what was recorded."""
        kept = recorder.kept()
        tensors = pool.allocate(recorder, kept)
        steps = recorder.steps
        # Deferred, other streams may come in between any two parts, as between kernels.
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
        """Return by how many bytes a capture would make the pool grow: exact here.

        Raises:
            CaptureError: It could not be captured either.
        """
        handled = sys.exception()

        def grow() -> int:
            recorder, outputs = self._record(run, generators, handled)
            num_bytes: int = pool.growth(recorder, recorder.kept())
            del outputs  # kept until here: it shows what outlives the callable
            return num_bytes

        return self._alone(stream, grow)

    def _alone(self, stream: Any, run: Callable[[], _T]) -> _T:
        """Call what captures on a stream, while no other thread captures or runs deferred work."""
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
        """Run the callable once, noting what it does; what it changed is put back."""
        recorder = Recorder()
        try:
            recorder.add_generators([torch.default_generator, *generators])
            with answering_capture(), HostSyncGuard(recorder, "cpu"), recorder:
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
