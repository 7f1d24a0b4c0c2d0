"""Pools and captured graphs of a CUDA device, and how they are let go of."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from dispatchkit.backends.capture_guard import is_any_capturing
from dispatchkit.backends.cuda.draws import DrawOrder
from dispatchkit.backends.cuda.memory import Segment, segments_of
from dispatchkit.errors import ReplayError

_logger = logging.getLogger(__name__)

# Graphs let go of while a capture was running: destroying one calls the driver, which could
# void that capture. They are destroyed after it.
_graveyard: deque[Burial] = deque()

# Whether torch keeps memory of pools that no graph uses any more.
_memory_lies_idle = threading.Event()


class Burial(NamedTuple):
    """A graph to destroy, and the pool that it then uses no more.

    Attributes:
        order: Where the graph draws, what it took its turns in.
    """

    graph: torch.cuda.CUDAGraph
    pool: CudaPool
    handle: Any
    order: DrawOrder | None = None

    def perform(self) -> None:
        """Destroy the graph."""
        if self.order is not None:
            # What a replay reads its seed from goes with the graph, and would at once be
            # memory for anybody.
            self.order.settle()
        with self.pool.guard:
            self.graph.reset()
            self.pool.give_back(self.handle)


def bury() -> None:
    """Destroy the graphs that were let go of, unless a capture is running."""
    while not is_any_capturing():
        try:
            burial = _graveyard.popleft()
        except IndexError:
            return
        burial.perform()


def return_idle_memory() -> None:
    """Give memory of unused pools back to the device, unless a capture is running.

    Torch would do so when memory runs out, but not in a capture. It waits for the device.
    """
    bury()
    if not _memory_lies_idle.is_set() or is_any_capturing():
        return
    _memory_lies_idle.clear()
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # somebody captures past us
        _memory_lies_idle.set()
        _logger.debug("Memory of unused graph pools is not given back yet: %s", error)


class CudaPool:
    """A private memory pool; its graphs must not run at the same time.

    Torch frees a pool for good once its last graph is gone, and refuses captures into it from
    then on (torch 2.11 to 2.13, an internal assertion): a pool here is a row of torch's, one
    after the other.

    Attributes:
        guard: Held while a graph begins or ends to use the pool, so that torch's count of
            users and the one here cannot differ.
    """

    def __init__(self) -> None:
        self.guard: threading.RLock = threading.RLock()
        self._handle: Any = torch.cuda.graph_pool_handle()
        self._uses = 0
        self._earlier: set[Any] = set()

    def take(self) -> Any:
        """Return torch's handle for one more capture; it counts until it is given back."""
        self._uses += 1
        return self._handle

    def give_back(self, handle: Any) -> None:
        """Take one graph off the count; with the last one torch's pool is done for."""
        if handle != self._handle:
            _memory_lies_idle.set()
            return
        self._uses -= 1
        if self._uses == 0:
            _memory_lies_idle.set()
            self.start_anew()

    def start_anew(self) -> None:
        """Capture into a new pool of torch's from here on; graphs keep the one they have."""
        self._earlier.add(self._handle)
        self._handle = torch.cuda.graph_pool_handle()
        self._uses = 0

    def reserved_bytes(self, device_index: int) -> int:
        """Return the bytes of the device that torch reserves for this pool."""
        return sum(int(segment["total_size"]) for segment in self.segments(device_index))

    def segments(self, device_index: int) -> list[Segment]:
        """Return the segments of the device that torch reserves for this pool."""
        found: list[Segment] = []
        with self.guard:
            if self._uses > 0:
                found += segments_of(self._handle)
            # Torch forgets a pool of no graph once its memory is back; then it has none.
            for handle in tuple(self._earlier):
                earlier = segments_of(handle)
                if not earlier:
                    self._earlier.discard(handle)
                found += earlier
        return [segment for segment in found if segment["device"] == device_index]


def _refuse_replay() -> None:
    raise ReplayError(
        "A released graph was asked to replay. Capture it again, or keep it until its last use."
    )


class CudaGraph:
    """One captured and instantiated CUDA graph.

    It holds its outputs and what it reads and writes: host memory that its copies use, and on
    the device inputs, weights and state, as far as the capture was watched. Memory of its own
    pool belongs to the pool's graphs together.

    Attributes:
        holds: Storages on the device that are kept alive.
        host_tensors: Host memory that is kept alive; it is another one in each capture.
        num_plain_operations: Operations of functions of torch.compile that were captured as they
            run plainly, as far as that was watched.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Any,
        pool: CudaPool,
        handle: Any,
        *,
        holds: list[Any],
        host_tensors: list[torch.Tensor],
        generators: list[Any],
        order: DrawOrder,
        draws: bool,
        num_plain_operations: int = 0,
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._outputs = outputs
        self._pool = pool
        self._handle = handle
        self.holds: list[Any] = holds
        self.host_tensors: list[torch.Tensor] = host_tensors
        self.num_plain_operations: int = num_plain_operations
        self._generators = generators
        self._order = order
        self._draws = draws
        self._launch: Callable[[], None] = self._first_replay if draws else graph.replay

    @property
    def outputs(self) -> Any:
        """What the callable returned at capture; overwritten by every replay.

        Raises:
            ReplayError: The graph was released.
        """
        if self._graph is None:
            _refuse_replay()
        return self._outputs

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws from a random generator.

        True from the start where an operation was seen that may draw; the first replay
        settles it by the generators' offsets.
        """
        return self._draws

    @property
    def raw_exec_handle(self) -> int:
        """The ``cudaGraphExec_t``, for launches past torch; only without random state.

        Raises:
            ReplayError: The graph was released.
        """
        if self._graph is None:
            _refuse_replay()
            return 0
        return int(self._graph.raw_cuda_graph_exec())

    @property
    def raw_graph_handle(self) -> int:
        """The ``cudaGraph_t`` that was instantiated; its nodes name those of the instance.

        Raises:
            ReplayError: The graph was released.
        """
        if self._graph is None:
            _refuse_replay()
            return 0
        return int(self._graph.raw_cuda_graph())

    def replay(self) -> None:
        """Queue the graph once on the current stream.

        Raises:
            ReplayError: The graph was released.
        """
        self._launch()

    def _first_replay(self) -> None:
        self._order.replay(self._settle)

    def _settle(self) -> None:
        """Launch, and see by that whether the graph draws."""
        graph = self._graph
        if graph is None:
            return _refuse_replay()
        # Offsets live on the host and move when the graph is launched: no waiting here. A
        # draw of another thread meanwhile leaves the answer at yes, which is only slower.
        before = [generator.get_offset() for generator in self._generators]
        graph.replay()
        after = [generator.get_offset() for generator in self._generators]
        self._draws = before != after
        self._launch = partial(self._order.replay, graph.replay) if self._draws else graph.replay
        return None

    def release(self) -> None:
        """Let go of the graph and its memory; replays already queued still run.

        Waits for the device only where the graph draws random numbers.
        """
        graph, self._graph = self._graph, None
        self._launch = _refuse_replay
        self._outputs = None
        self.holds, self.host_tensors = [], []
        if graph is not None:
            order = self._order if self._draws else None
            _graveyard.append(Burial(graph, self._pool, self._handle, order))
            bury()

    def __del__(self) -> None:
        # A collection may come in the middle of a capture; release knows what to do then.
        if getattr(self, "_graph", None) is not None:
            self.release()
