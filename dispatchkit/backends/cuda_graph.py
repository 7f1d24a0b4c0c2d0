"""Pools and captured graphs of a CUDA device, and how they are let go of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dispatchkit.backends.capture_guard import is_any_capturing
from dispatchkit.errors import ReplayError

# Graphs let go of while a capture was running: destroying one calls the driver, which could
# void that capture. They are destroyed after it.
_graveyard: list[Any] = []


def bury() -> None:
    """Destroy the graphs that were let go of, unless a capture is running."""
    while _graveyard and not is_any_capturing():
        _graveyard.pop().reset()


class CudaPool:
    """A private memory pool; its graphs must not run at the same time.

    Attributes:
        handle: torch's pool handle for the next capture.
        graphs: The live graphs.
    """

    def __init__(self) -> None:
        self.handle = self._new_handle()
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._given_up: list[Any] = []

    @staticmethod
    def _new_handle() -> Any:
        return torch.cuda.graph_pool_handle()

    @property
    def handles(self) -> list[Any]:
        """All handles that memory of this pool goes by."""
        return [self.handle, *self._given_up]

    def give_up_handle(self) -> None:
        """Capture into a new pool from here on; earlier graphs keep the old one."""
        self._given_up.append(self.handle)
        self.handle = self._new_handle()


def _refuse_replay() -> None:
    raise ReplayError(
        "A released graph was asked to replay. Capture it again, or keep it until its last use."
    )


class CudaGraph:
    """One captured and instantiated CUDA graph.

    It holds its outputs and the host memory that its copies use, not the device memory that
    it reads: whoever owns the graph must hold its inputs, weights and state.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Any,
        pool: CudaPool,
        *,
        host_tensors: list[torch.Tensor],
        generators: list[Any],
        draws: bool,
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._outputs = outputs
        self._pool = pool
        self._host_tensors = host_tensors
        self._generators = generators
        self._draws = draws
        self._launch: Callable[[], None] = self._first_replay if draws else graph.replay
        pool.graphs.add(self)

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

    def replay(self) -> None:
        """Queue the graph once on the current stream.

        Raises:
            ReplayError: The graph was released.
        """
        self._launch()

    def _first_replay(self) -> None:
        graph = self._graph
        if graph is None:
            return _refuse_replay()
        # Offsets live on the host and move when the graph is launched: no waiting here. A
        # draw of another thread meanwhile leaves the answer at yes, which is only slower.
        before = [generator.get_offset() for generator in self._generators]
        graph.replay()
        after = [generator.get_offset() for generator in self._generators]
        self._draws = before != after
        self._launch = graph.replay
        return None

    def release(self) -> None:
        """Let go of the graph and its memory; replays already queued still run."""
        graph, self._graph = self._graph, None
        self._launch = _refuse_replay
        self._outputs = None
        self._host_tensors = []
        self._pool.graphs.discard(self)
        if graph is not None:
            _graveyard.append(graph)
            bury()

    def __del__(self) -> None:
        # A collection may come in the middle of a capture; release knows what to do then.
        if getattr(self, "_graph", None) is not None:
            self.release()
