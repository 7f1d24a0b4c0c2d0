"""CUDA graphs, streams and events, through torch.

Sources for the constraints on captured operations: torch's documentation, "CUDA semantics", section
"CUDA Graphs"; torch/cuda/graphs.py of torch 2.11 to 2.13.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from dispatchkit.backends.base import BackendCapabilities
from dispatchkit.backends.capture_errors import capture_error, clear_frames
from dispatchkit.backends.capture_guard import (
    capturing_device,
    refuse_in_capture,
    refuse_nested,
    run_as_capture,
)
from dispatchkit.backends.cuda.capture import CaptureAttempt
from dispatchkit.backends.cuda.copy import CopyNode, copy_node
from dispatchkit.backends.cuda.default_generator import begin_allowing_draws
from dispatchkit.backends.cuda.destroy import destroy_pending, free_idle_memory
from dispatchkit.backends.cuda.device import device_index, require_cuda
from dispatchkit.backends.cuda.draw_order import draw_order
from dispatchkit.backends.cuda.graph import CudaGraph
from dispatchkit.backends.cuda.launch import direct_launch, graph_upload
from dispatchkit.backends.cuda.pool import CudaPool
from dispatchkit.backends.cuda.rehearsal import growth
from dispatchkit.backends.cuda.segmented import CudaSegments
from dispatchkit.backends.cuda.sleeping import SleepingPool, UnavailableError, load_allocator
from dispatchkit.backends.cuda.streams import (
    MAX_STREAMS,
    CudaEvent,
    CudaStream,
    UseStream,
    make_current,
    return_when_unused,
    unused_streams,
)
from dispatchkit.backends.cuda.watch import CaptureWatch, WarmupNotes
from dispatchkit.backends.cuda.workspace import hold_workspace, workspace_bytes
from dispatchkit.backends.optional import DeviceMemory, LaunchCall, SegmentedCapture
from dispatchkit.backends.warmup import run_warmup
from dispatchkit.errors import CaptureError, ConfigError, ReplayError

_T = TypeVar("_T")

# torch's message for a captured kernel that draws from a generator not registered with the graph.
_NOT_REGISTERED = "generator not in capture mode"

CAPTURE_ERROR_MODES = ("thread_local", "global", "relaxed")


class CudaBackend:
    """A backend that captures and replays graphs on one CUDA device.

    Args:
        device: Index, ``"cuda"``, ``"cuda:1"`` or torch.device; None for the current device.
        capture_error_mode: Which calls the driver allows during a capture: ``"thread_local"``,
            ``"global"`` or ``"relaxed"``, as for ``torch.cuda.graph``. Unlike ``"global"``,
            ``"thread_local"`` allows other threads to query events, allocate memory and copy data.
        refuse_host_syncs: Whether to refuse calls that wait for the device, with an error that
            names the call, before the driver invalidates the capture. Set this to False only for
            functions that fail under a dispatch mode; functions wrapped in torch.compile work under
            such a mode. If False, torch or the driver refuses the calls without naming them, and an
            error that torch raises and the function catches is not detected. Failed captures are
            cleaned up in either case.
        copy_node: Whether graphs begin with a kernel that copies small inputs, if the kernel is
            available. Otherwise, torch copies device inputs before each launch, and graphs copy
            host inputs from pinned memory.

    Raises:
        BackendUnavailableError: torch has no CUDA support, or finds no device.
        ConfigError: The device does not exist, or the mode is unknown.

    Attributes:
        current_stream_handle: Function that returns the raw handle of the current stream.
    """

    def __init__(
        self,
        device: Any = None,
        *,
        capture_error_mode: str = "thread_local",
        refuse_host_syncs: bool = True,
        copy_node: bool = True,
    ) -> None:
        if capture_error_mode not in CAPTURE_ERROR_MODES:
            allowed = "one of " + ", ".join(map(repr, CAPTURE_ERROR_MODES))
            raise ConfigError("capture_error_mode", capture_error_mode, allowed)
        require_cuda()
        self._index = device_index(device)
        torch.cuda.init()
        self._order = draw_order(self._index)
        self._mode = capture_error_mode
        self._refuse_host_syncs = refuse_host_syncs
        self._has_copy_node = copy_node
        self._streams: weakref.WeakValueDictionary[int, CudaStream] = weakref.WeakValueDictionary()
        self._streams_guard = threading.Lock()
        # torch's C function without a Python wrapper, because it is called in every step.
        self.current_stream_handle: Callable[[], int] = partial(
            torch._C._cuda_getCurrentRawStream, self._index
        )

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "cuda"

    @property
    def torch_device(self) -> str:
        """The device string for tensors."""
        return f"cuda:{self._index}"

    @property
    def capabilities(self) -> BackendCapabilities:
        """Features and limits of the backend."""
        return BackendCapabilities(
            graphs=True,
            max_streams=MAX_STREAMS,
            device_timing=True,
            concurrent_streams=True,
            poisons_outputs=False,
            stream_priorities=True,
            unwatched_captures=True,
            steps_during_captures=True,
        )

    def device_info(self) -> dict[str, str]:
        """Return the name of the device and the versions of libraries, for reports."""
        properties = torch.cuda.get_device_properties(self._index)
        return {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_mib": str(properties.total_memory >> 20),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }

    # -- streams and events -------------------------------------------------------------

    def current_stream(self) -> CudaStream:
        """Return the current stream of this thread. The call takes 4 us."""
        return CudaStream(torch.cuda.current_stream(self._index))

    def new_stream(self, *, priority: int = 0) -> CudaStream:
        """Return a stream that is independent of all other live streams of this backend.

        Args:
            priority: Priority of the stream, at least 0. Work of streams with a higher priority
                runs first. A priority above the device's maximum is reduced to the maximum. A graph
                keeps the priority of the stream that captured it.

        Raises:
            ConfigError: All of the device's streams with this priority are in use.
        """
        with self._streams_guard:
            for raw in unused_streams(self._index, priority):
                stream = CudaStream(raw)
                if stream.handle not in self._streams:
                    self._streams[stream.handle] = stream
                    return_when_unused(stream, priority)
                    return stream
        raise ConfigError(
            "number of streams",
            len(self._streams) + 1,
            f"at most {MAX_STREAMS}",
            "Use fewer lanes, or drop all references to unused runners and streams.",
            message=f"All {MAX_STREAMS} streams of {self.torch_device} with priority {priority} "
            "are in use.",
        )

    def use_stream(self, stream: Any) -> UseStream:
        """Make a stream current for the duration of a ``with`` block."""
        return UseStream(stream.raw)

    def new_event(self, *, timing: bool = False) -> CudaEvent:
        """Return a new event; only timing events measure time."""
        return CudaEvent(self._index, timing=timing)

    def direct_launch(self, graph: Any) -> tuple[LaunchCall, Any] | None:
        """Return the runtime's launch function and the graph's handle, or None if unsupported.

        Raises:
            ReplayError: The graph was released.
        """
        handle = getattr(graph, "raw_exec_handle", None)  # None for other objects with replay()
        call = None if handle is None else direct_launch(self._index)
        return None if call is None else (call, ctypes.c_void_p(handle))

    def copy_node(self, num_regions: int, num_bytes: int, data_bytes: int = 0) -> CopyNode | str:
        """Return a copy node for a graph, or the reason why it is unavailable.

        Args:
            num_regions: Number of inputs to copy.
            num_bytes: Size of the largest input in bytes.
            data_bytes: Total size in bytes of the host inputs.
        """
        if not self._has_copy_node:
            return "the backend was created with copy_node=False"
        return copy_node(self._index, num_regions, num_bytes, data_bytes)

    def upload(self, graph: Any, stream: CudaStream) -> bool:
        """Queue the upload of a graph to the device; return whether it was queued.

        Raises:
            ReplayError: The graph was released.
        """
        call = graph_upload()
        handle = getattr(graph, "raw_exec_handle", None)
        if call is None or not handle:
            return False
        return call(ctypes.c_void_p(handle), ctypes.c_void_p(stream.handle)) == 0

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""
        refuse_in_capture("backend.synchronize()")
        torch.cuda.synchronize(self._index)

    # -- memory -------------------------------------------------------------------------

    def new_pool(self) -> CudaPool:
        """Return a private memory pool for captures."""
        return CudaPool()

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes that the pool currently reserves; 0 if no graph or tensor uses it.

        Unless a capture is running, this call first frees the memory that torch keeps for unused
        pools. Freeing synchronizes with the device, so do not call this method in every step.
        """
        free_idle_memory()
        return int(pool.reserved_bytes(self._index))

    def sleep_problem(self) -> str:
        """Return the reason why pools cannot sleep on this machine, or ``""`` if they can."""
        try:
            load_allocator()
        except UnavailableError as error:
            return str(error)
        return ""

    def new_sleeping_pool(self) -> SleepingPool:
        """Return a pool that can sleep, for captures or ``allocate``.

        Raises:
            UnavailableError: Pools cannot sleep on this machine.
        """
        return SleepingPool(load_allocator())

    def allocate(self, pool: Any, make: Callable[[], _T]) -> _T:
        """Call a function, allocating its new tensors from a pool, and return its result."""
        made: _T = pool.allocate(make, self._index)
        return made

    def sleep(self, pools: Sequence[Any]) -> int:
        """Wait for the device, then release the memory of pools; return the bytes released."""
        self.synchronize()
        free_idle_memory()
        return sum(pool.sleep(self._index) for pool in pools)

    def wake(self, pools: Sequence[Any]) -> None:
        """Map new memory to the addresses of pools; earlier contents are lost.

        Raises:
            ReplayError: The memory could not be mapped. All pools stay asleep.
        """
        free_idle_memory()
        awake: list[Any] = []
        try:
            for pool in pools:
                pool.wake()
                awake.append(pool)
        except ReplayError:
            for pool in awake:
                pool.sleep(self._index)
            raise

    def device_memory(self) -> DeviceMemory:
        """Return the device memory in use, and the part held by torch's allocator."""
        free, total = torch.cuda.mem_get_info(self._index)
        # torch.cuda.memory_reserved() is not used, because each call leaves a reference cycle for
        # the garbage collector (torch 2.11 to 2.13).
        stats = torch.cuda.memory_stats_as_nested_dict(self._index)
        reserved, allocated = (
            int(stats[name]["all"]["current"]) for name in ("reserved_bytes", "allocated_bytes")
        )
        return DeviceMemory(total - free, reserved, allocated)

    def workspace_bytes(self, stream: CudaStream) -> int:
        """Return the bytes of a stream's cuBLAS workspaces, which have their own pool."""
        return workspace_bytes(stream.raw)

    # -- graphs -------------------------------------------------------------------------

    def warmup(self, run: Callable[[], Any], *, stream: Any, iterations: int = 1) -> Any:
        """Run the callable eagerly on a stream, after all work queued on the caller's stream.

        Returns:
            The result of the last run. The caller's stream waits for the warmup.
        """

        def held() -> Any:
            hold_workspace(stream.raw)
            return run()

        result = self._run_on(stream, held, iterations)
        caller = torch.cuda.current_stream(self._index)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                # The memory belongs to the warmup stream, which must not reuse it while the
                # caller's stream reads it.
                leaf.record_stream(caller)
        return result

    def _run_on(self, stream: Any, run: Callable[[], Any], iterations: int = 1) -> Any:
        caller = torch.cuda.current_stream(self._index)
        try:
            return run_warmup(self, run, stream, iterations)
        finally:  # because a signal handler may have raised before the stream was restored
            if self.current_stream_handle() != caller.cuda_stream:
                make_current(caller)

    def new_notes(self) -> WarmupNotes:
        """Return empty notes, which a warmup fills for ``capture``."""
        return WarmupNotes()

    def capture(
        self,
        run: Callable[[], Any],
        *,
        stream: Any,
        pool: Any,
        generators: Iterable[Any] = (),
        watched: bool = True,
        notes: WarmupNotes | None = None,
        compiled: bool = False,
        draws: bool = True,
    ) -> CudaGraph:
        """Capture the callable on a stream into a pool; its kernels do not run.

        torch registers the default generator with the graph; ``generators`` must contain all other
        CUDA generators that the callable uses. Host generators draw only during the capture, not in
        replays.

        During the capture of a callable that may draw, torch (up to 2.12) refuses eager draws from
        the default generator in other threads.

        Args:
            run: The callable to capture.
            stream: A stream from ``new_stream()``, on which the callable is captured.
            pool: The pool for the graph's memory.
            generators: CUDA random generators, except the default generator.
            watched: Whether to watch each operation; see ``CaptureWatch``. Watching takes several
                microseconds per operation. It is not required if an earlier capture watched the
                same operations. Unwatched operations that cannot be captured fail with the
                driver's error.
            notes: Notes that a warmup of the same operations recorded. If given, operations are not
                watched.
            compiled: Whether the callable calls functions wrapped in torch.compile. If True, no
                function mode is used, because it would cause recompilation.
            draws: Whether the callable may draw random numbers. If False (because a warmup drew no
                numbers), other threads may draw during the capture.

        Raises:
            CaptureError: The capture failed with reason ``host_sync``, ``out_of_memory``,
                ``nested`` or ``error``. ``__cause__`` is the original exception. State outside the
                capture has not changed.
            ConfigError: A generator does not belong to this device, or the stream is the device's
                default stream.
        """
        own_generators = self._check_generators(generators)
        refuse_nested(self.torch_device)
        self._refuse_foreign_capture()
        free_idle_memory()
        handled = sys.exception()
        inner = partial(
            self._capture, run, stream.raw, pool, own_generators, handled, watched, notes, compiled
        )

        def ordered(draws: bool) -> Callable[[], CudaGraph]:
            return partial(self._in_order, stream, partial(inner, draws), draws)

        try:
            try:
                return run_as_capture(self.torch_device, ordered(draws))
            except CaptureError as error:
                if draws or _NOT_REGISTERED not in str(error.__cause__):
                    raise
            # The callable drew random numbers in the capture, but not in the warmup.
            return run_as_capture(self.torch_device, ordered(True))
        finally:
            destroy_pending()

    def _in_order(self, stream: Any, capture: Callable[[], _T], draws: bool) -> _T:
        """Run a capture on a stream, and return its result.

        A capture that may draw waits for other captures and launches that draw; see draw_order.py.
        """
        use = UseStream(stream.raw)
        try:
            with use:
                if stream.handle == torch.cuda.default_stream(self._index).cuda_stream:
                    raise ConfigError(
                        "stream",
                        "the default stream",
                        "a stream from new_stream()",
                        "Pass a stream from new_stream().",
                        message="Graphs cannot be captured on the default stream.",
                    )
                self._refuse_foreign_capture()
                hold_workspace(stream.raw)
                return self._order.capture(stream.raw, capture) if draws else capture()
        finally:
            # Repeated, because a signal handler may have raised at the end of the block.
            use.put_back()

    def _refuse_foreign_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"A capture on {self.torch_device!r} was started on a stream that other code is "
                "capturing; captures cannot be nested. Call the inner function directly: the "
                "outer capture records it.",
                reason="nested",
            )

    def _capture(
        self,
        run: Callable[[], Any],
        stream: torch.cuda.Stream,
        pool: CudaPool,
        generators: list[Any],
        handled: BaseException | None,
        watched: bool,
        notes: WarmupNotes | None,
        compiled: bool,
        draws: bool,
    ) -> CudaGraph:
        watched = watched and notes is None and self._refuse_host_syncs
        watch = CaptureWatch(compiled=compiled)
        attempt = self._new_attempt(stream, pool, generators, draws)
        outputs: Any = None
        try:
            try:
                failure = attempt.begin()
                if failure is None:
                    if watched:
                        with watch.watching():
                            outputs = run()
                    else:
                        outputs = run()
                    watch.raise_swallowed_error()
            except BaseException as error:  # noqa: BLE001 - raised below, after the capture has ended
                failure = error
            make_current(stream)  # the callable may have changed the current stream
            failure = attempt.end(failure)
        except BaseException as interrupt:  # raised by a signal handler
            attempt.close(interrupt)
            raise
        if failure is not None:
            outputs = None
            clear_frames(failure, handled)
            try:
                if not isinstance(failure, Exception):
                    raise failure
                raise capture_error(watch.first_error or failure) from failure
            finally:
                del failure  # break the cycle between frame and error
        seen = watch if watched else notes
        return self._make_graph(
            attempt,
            outputs,
            pool,
            generators,
            watch,
            holds=[] if seen is None else seen.outside(pool.segments(self._index)),
            # Unless all operations were watched, only the first replay shows whether the graph
            # draws.
            draws=draws and (watch.draws or not watched or compiled),
        )

    def _new_attempt(
        self,
        stream: torch.cuda.Stream,
        pool: CudaPool,
        generators: list[Any],
        draws: bool,
    ) -> CaptureAttempt:
        begin = partial(begin_allowing_draws, device_index=self._index)
        begin_by = None if draws else lambda torchs: self._order.pause(partial(begin, torchs))
        return CaptureAttempt(stream, pool, generators, self._mode, begin_by)

    def _make_graph(
        self,
        attempt: CaptureAttempt,
        outputs: Any,
        pool: CudaPool,
        generators: list[Any],
        watch: CaptureWatch,
        *,
        holds: list[Any],
        draws: bool,
    ) -> CudaGraph:
        return CudaGraph(
            attempt.graph,
            outputs,
            pool,
            attempt.handle,
            holds=holds,
            host_tensors=watch.host_tensors,
            generators=[torch.cuda.default_generators[self._index], *generators],
            order=self._order,
            draws=draws,
            num_plain_operations=watch.num_plain_operations,
        )

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
        """Capture a callable that ends and begins segments, and return its result.

        Raises:
            CaptureError: As for ``capture``. All graphs of the callable are released.
            ConfigError: As for ``capture``.
        """
        own_generators = self._check_generators(generators)
        refuse_nested(self.torch_device)
        self._refuse_foreign_capture()
        free_idle_memory()
        handled = sys.exception()
        is_watched = self._refuse_host_syncs
        watch = CaptureWatch(compiled=compiled)

        def make_graph(attempt: CaptureAttempt) -> CudaGraph:
            return self._make_graph(
                attempt,
                None,
                pool,
                own_generators,
                watch,
                holds=watch.outside(pool.segments(self._index)) if is_watched else [],
                draws=draws and (watch.draws or not is_watched or compiled),
            )

        segments = CudaSegments(
            stream.raw,
            partial(self._new_attempt, stream.raw, pool, own_generators, draws),
            make_graph,
            watch if is_watched else None,
            partial(pool.segments, self._index),
        )
        capture = partial(segments.run, run, handled)
        try:
            return run_as_capture(
                self.torch_device, partial(self._in_order, stream, capture, draws)
            )
        finally:
            destroy_pending()

    def _check_generators(self, generators: Iterable[Any]) -> list[Any]:
        own = list(generators)
        default = torch.cuda.default_generators[self._index]
        for index, generator in enumerate(own):
            device = getattr(generator, "device", None)
            if device is None or device.type != "cuda" or device.index not in (None, self._index):
                raise ConfigError(
                    f"generators[{index}]",
                    generator,
                    f"a torch.Generator on {self.torch_device}",
                    f"Create it with torch.Generator(device={self.torch_device!r}).",
                )
        return [generator for generator in own if generator is not default]

    def rehearse(
        self,
        run: Callable[[], Any],
        *,
        stream: Any,
        pool: Any,
        generators: Iterable[Any] = (),
    ) -> int:
        """Return the number of bytes that a capture would add to the pool; see rehearsal.py.

        The callable runs once in a temporary copy of the pool, so the result includes the
        allocator's rounding. The copy temporarily takes as much memory as the pool and a warmup
        together.
        """
        refuse_in_capture("backend.rehearse()")
        self._check_generators(generators)
        free_idle_memory()
        present = pool.segments(self._index)

        def in_copy() -> int:
            hold_workspace(stream.raw)
            return growth(run, present, self._index, stream.handle)

        grown: int = self._run_on(stream, in_copy)
        return grown

    def is_capturing(self) -> bool:
        """Return whether this thread is inside a capture, including captures by other code."""
        if capturing_device():
            return True
        # The default stream (handle 0) cannot be captured. Checking the handle is faster than
        # querying the driver.
        return self.current_stream_handle() != 0 and torch.cuda.is_current_stream_capturing()
