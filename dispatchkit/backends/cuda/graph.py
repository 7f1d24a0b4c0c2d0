"""Captured graphs of a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dispatchkit.backends.cuda.destroy import PendingDestroy, destroy_later
from dispatchkit.backends.cuda.draw_order import DrawOrder
from dispatchkit.backends.cuda.driver import count_nodes
from dispatchkit.backends.cuda.pool import CudaPool
from dispatchkit.errors import ReplayError


def _refuse_replay() -> None:
    raise ReplayError(
        "The graph was released. Capture the function again, or release the graph only after its "
        "last use."
    )


class CudaGraph:
    """One captured and instantiated CUDA graph.

    The graph keeps alive its outputs, the host tensors of its copies, and the device storages
    (inputs, weights and state) that were recorded in the capture or its warmup. All graphs of a
    pool share its memory.

    Attributes:
        holds: Device storages to keep alive.
        host_tensors: Host tensors to keep alive. Each capture uses different host tensors.
        num_plain_operations: Number of watched operations that were captured uncompiled, although
            their function is wrapped in torch.compile.
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
        """The result of the captured callable; overwritten by every replay.

        Raises:
            ReplayError: The graph was released.
        """
        if self._graph is None:
            _refuse_replay()
        return self._outputs

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws from a random generator.

        Before the first replay, the value is True if a captured operation may draw. In that case,
        the first replay determines the final value from the offsets of the generators.
        """
        return self._draws

    @property
    def raw_exec_handle(self) -> int:
        """The ``cudaGraphExec_t``, for launches that bypass torch.

        Graphs with random state must be launched with ``replay``.

        Raises:
            ReplayError: The graph was released.
        """
        if self._graph is None:
            _refuse_replay()
            return 0
        return int(self._graph.raw_cuda_graph_exec())

    @property
    def raw_graph_handle(self) -> int:
        """The ``cudaGraph_t``, whose nodes identify the nodes of the instantiated graph.

        Raises:
            ReplayError: The graph was released.
        """
        if self._graph is None:
            _refuse_replay()
            return 0
        return int(self._graph.raw_cuda_graph())

    @functools.cached_property
    def num_operations(self) -> int:
        """Number of kernels, copies and fills that a replay queues.

        Raises:
            ReplayError: The graph was released.
        """
        return count_nodes(self.raw_graph_handle)

    def replay(self) -> None:
        """Queue the graph once on the current stream.

        Raises:
            ReplayError: The graph was released.
        """
        self._launch()

    def _first_replay(self) -> None:
        self._order.replay(self._launch_and_observe)

    def _launch_and_observe(self) -> None:
        """Launch the graph, and determine whether it draws."""
        graph = self._graph
        if graph is None:
            return _refuse_replay()
        # The offsets are in host memory and advance at the launch, so reading them does not
        # synchronize. Draws by another thread also advance them. The graph is then treated as one
        # that draws, which is slower but correct.
        before = [generator.get_offset() for generator in self._generators]
        graph.replay()
        after = [generator.get_offset() for generator in self._generators]
        self._draws = before != after
        self._launch = partial(self._order.replay, graph.replay) if self._draws else graph.replay
        return None

    def release(self) -> None:
        """Release the graph and its memory; replays already queued still run.

        This waits for the device only if the graph draws random numbers.
        """
        graph, self._graph = self._graph, None
        self._launch = _refuse_replay
        self._outputs = None
        self.holds, self.host_tensors = [], []
        if graph is not None:
            order = self._order if self._draws else None
            destroy_later(PendingDestroy(graph, self._pool, self._handle, order))

    def __del__(self) -> None:
        # Safe even if the garbage collector runs during a capture, because ``release`` defers the
        # destruction of the graph.
        if getattr(self, "_graph", None) is not None:
            self.release()
