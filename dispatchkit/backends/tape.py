"""The tape: CUDA-graph semantics on a CPU, to prove on any machine what a device must do.

What it shares with graphs of a device: fixed addresses, Python runs once, at capture; calls
that wait for the device are refused by name; random numbers come as in eager; a capture
changes nothing outside itself, not even one that fails; what the callable stashed stays
alive; outputs hold poison until the first replay; intermediates share a pool's memory.

What differs: capturing runs the operations (and puts back what they changed); a graph keeps
alive the outside tensors it reads, which a device's graph does not; ``tensor.to("cpu")`` is
not refused, since here it cannot be told from moving to the device; Python lists and numbers
turned into tensors inside the callable are baked in.
"""

from __future__ import annotations

import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.base import BackendCapabilities
from dispatchkit.backends.capture_errors import capture_error, forget_frames
from dispatchkit.backends.capture_guard import (
    capturing_device,
    exclusive_capture,
    refuse_in_capture,
)
from dispatchkit.backends.host_sync import HostSyncGuard
from dispatchkit.backends.tape_plan import Materialiser, compile_replay, place, view_of_storage
from dispatchkit.backends.tape_poison import poison
from dispatchkit.backends.tape_recorder import Recorder
from dispatchkit.backends.tape_streams import (
    Scheduler,
    TapeEvent,
    TapeStream,
)
from dispatchkit.backends.warmup import run_warmup
from dispatchkit.errors import ConfigError, ReplayError

# torch's pool of CUDA streams holds 32 for each priority; a device is no larger here.
DEFAULT_MAX_STREAMS = 32


class TapePool:
    """Memory that the graphs of one lane share.

    Intermediates of all its graphs lie in the same segments, so that a replay overwrites
    the intermediates of every other graph of the pool. Outputs, and whatever else outlives
    the callable, have memory of their own and are overwritten by no other graph: as on a
    device, where a later capture reuses only what was free by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[Any] = []
        self._kept: list[tuple[StorageWeakRef, int]] = []
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved now: the segments, and outputs that are still alive."""
        with self._lock:
            if not self._graphs:
                self._segments.clear()
            self._kept = [pair for pair in self._kept if not pair[0].expired()]
            segments: int = sum(segment.nbytes() for segment in self._segments)
            return segments + sum(num_bytes for _, num_bytes in self._kept)

    def home(self, recorder: Recorder, kept: set[int]) -> Materialiser:
        """Give the intermediates of a recording their places; kept storages stay put."""
        sizes = {identity: recorder.storages[identity].nbytes() for identity in recorder.own - kept}
        with self._lock:
            if not self._graphs:
                self._segments.clear()
            placement = place(
                recorder.steps, sizes, [segment.nbytes() for segment in self._segments]
            )
            if placement.new_bytes:
                self._segments.append(torch.UntypedStorage(placement.new_bytes))
            homes = {
                identity: (storage, 0)
                for identity, storage in recorder.storages.items()
                if identity not in sizes
            }
            for identity, (number, start) in placement.where.items():
                homes[identity] = (self._segments[number], start)
            for identity in kept:
                storage = recorder.storages[identity]
                self._kept.append((StorageWeakRef(storage), storage.nbytes()))
        return Materialiser(homes)

    def add(self, graph: TapeGraph) -> None:
        """Count a graph as a user of the pool."""
        with self._lock:
            self._graphs.add(graph)

    def discard(self, graph: TapeGraph) -> None:
        """Count a graph no longer."""
        with self._lock:
            self._graphs.discard(graph)


def _refuse_replay() -> None:
    raise ReplayError(
        "A released graph was asked to replay. Capture it again, or keep it until its last use."
    )


class TapeGraph:
    """One captured graph of the tape."""

    def __init__(
        self,
        backend: TapeBackend,
        pool: TapePool,
        outputs: Any,
        launch: Callable[[], None],
        *,
        draws: bool,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._outputs = outputs
        self._launch = launch
        self._draws = draws
        self._released = False
        pool.add(self)

    @property
    def outputs(self) -> Any:
        """What the callable returned at capture; overwritten by every replay.

        Raises:
            ReplayError: The graph was released.
        """
        if self._released:
            _refuse_replay()
        return self._outputs

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws from a random generator."""
        return self._draws

    def replay(self) -> None:
        """Run the steps in the order of the current stream, no Python of the callable.

        Deferred, a graph that draws runs at once, after what its stream still holds:
        generators move in the order of submission, as the host's offsets on a device do.

        Raises:
            ReplayError: The graph was released, or this thread is inside a capture.
        """
        if capturing_device():
            raise ReplayError(
                "A replay inside a capture is not recorded by the tape. Call the captured "
                "function itself there."
            )
        stream = self._backend.current_stream()
        if stream.scheduler is None:
            with stream.lock:
                self._launch()
            return
        if self._released:
            _refuse_replay()
        stream.give(self._launch)
        if self._draws:
            stream.scheduler.drain(stream)

    def release(self) -> None:
        """Let go of the memory; replays already queued still run."""
        self._released = True
        self._launch = _refuse_replay
        self._outputs = None
        self._pool.discard(self)


class _CurrentStream(threading.local):
    """The stream each thread has made current; None stands for the default stream."""

    stream: TapeStream | None = None


class TapeBackend:
    """Captures and replays on a CPU, with the semantics of CUDA graphs.

    Args:
        scheduler: Seed of the deferred scheduler, which makes missing waits visible; None
            runs all work at once (see tape_streams).
        max_streams: Number of streams that may exist at a time, the default one apart.

    Raises:
        ConfigError: ``max_streams`` is not a positive whole number.
    """

    def __init__(
        self, *, scheduler: int | None = None, max_streams: int = DEFAULT_MAX_STREAMS
    ) -> None:
        if type(max_streams) is not int or max_streams < 1:
            raise ConfigError("max_streams", max_streams, "a positive whole number")
        self._scheduler = None if scheduler is None else Scheduler(scheduler)
        self._max_streams = max_streams
        self._default_stream = TapeStream(0, self._scheduler)
        self._streams: weakref.WeakSet[TapeStream] = weakref.WeakSet()
        self._streams_guard = threading.Lock()
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

    def new_stream(self) -> TapeStream:
        """Return a new stream.

        Raises:
            ConfigError: ``max_streams`` streams are alive already.
        """
        with self._streams_guard:
            if len(self._streams) >= self._max_streams:
                raise ConfigError(
                    "number of streams",
                    len(self._streams) + 1,
                    f"at most {self._max_streams} at a time on this device",
                    "Use fewer lanes, or let go of streams that are not needed.",
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
                from dispatchkit.backends.tape_deferred import deferred_operations

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
        return TapePool()

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes the pool reserves now; 0 once it is unused."""
        num_bytes: int = pool.num_bytes
        return num_bytes

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
        held = nullcontext() if self._scheduler is None else self._scheduler.lock
        with exclusive_capture(self.torch_device), held, self.use_stream(stream):
            recorder = Recorder()
            try:
                recorder.add_generators([torch.default_generator, *generators])
                with HostSyncGuard(recorder.note_error, "cpu"), recorder:
                    outputs = run()
                recorder.raise_swallowed_error()
            except Exception as error:
                forget_frames(error)
                raise capture_error(recorder.first_error or error) from error
            finally:
                recorder.restore()
            kept = recorder.kept()
            tensors = pool.home(recorder, kept)
            launch = compile_replay(recorder.steps, tensors)
            _poison(recorder, kept)
        return TapeGraph(self, pool, outputs, launch, draws=recorder.draws)

    def is_capturing(self) -> bool:
        """Return whether this thread is inside a capture."""
        return bool(capturing_device())


def _poison(recorder: Recorder, kept: set[int]) -> None:
    """Fill what outlives the callable, so that a read before the first replay shows."""
    for step in recorder.steps:
        for ref in step.refs():
            if ref.storage in kept:
                poison(view_of_storage(recorder.storages[ref.storage], ref))
