"""Capturing into a torch.cuda.CUDAGraph, and cleaning up after one that failed.

Two kinds of failure differ. An exception of Python leaves the capture whole: it is ended and
its graph thrown away. A call that the driver refuses voids the capture: ending it fails, and
torch then leaves accounts open that it closes at a good end (aten/src/ATen/cuda/CUDAGraph.cpp,
``capture_end``). In torch 2.11: the device's and the host's allocator still send the capture's
allocations to the graph's pool, the pool counts one user too many, so that its memory never
comes back, and the generators believe that they are being captured, so that eager draws raise.
In 2.13 only the count of users is wrong.

So most such calls are refused before the driver sees them (cuda_watch.py). After one that
was not, ``repair`` puts an empty capture in the place of the voided one: torch ends that one
and closes its accounts itself. No account of torch is ever changed from here: where this way
fails, a graph and a pool are given up instead.
"""

from __future__ import annotations

import enum
import logging
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from dispatchkit.backends.cuda.driver import (
    DriverCallError,
    begin_stream_capture,
    leave_stream_capture,
)
from dispatchkit.backends.cuda.graph import Burial, CudaPool

_logger = logging.getLogger(__name__)

# Graphs whose capture could not be begun or ended: the allocators may still ask them which
# streams they capture, so they must never be destroyed.
_doomed: list[torch.cuda.CUDAGraph] = []


class CaptureAttempt:
    """One capture from its beginning to its end, good or bad, on the current stream.

    Args:
        stream: The stream, which is the current one.
        pool: Where the graph's memory comes from.
        generators: Those to register, the default one apart.
        mode: The capture error mode.

    Attributes:
        graph: The graph.
        handle: Torch's handle of the pool, once it has begun.
    """

    def __init__(
        self, stream: torch.cuda.Stream, pool: CudaPool, generators: list[Any], mode: str
    ) -> None:
        self.graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph(keep_graph=True)
        self.handle: Any = None
        self._stream = stream
        self._pool = pool
        self._generators = generators
        self._mode = mode
        for generator in generators:
            self.graph.register_generator_state(generator)

    def begin(self) -> BaseException | None:
        """Begin; return what went wrong, after which there is nothing to end."""
        with self._pool.guard:
            self.handle = self._pool.take()
            try:
                self.graph.capture_begin(pool=self.handle, capture_error_mode=self._mode)
            except RuntimeError as error:
                give_up(self.graph, self._stream.device_index, self.handle)
                self._pool.start_anew()
                failure = error
            else:
                return None
        settle_generators(self._stream.device_index, self._generators, self._mode)
        return failure

    def end(self, failure: BaseException | None) -> BaseException | None:
        """End, and make the graph launchable; return the first thing that went wrong.

        Args:
            failure: What the callable raised.
        """
        try:
            if failure is None:
                self.graph.capture_end()
            else:
                end_failed_capture(self.graph)
        except RuntimeError as error:
            self._close_voided()
            return failure or error
        except Warning as warning:  # of an empty graph, where warnings are errors
            failure = failure or warning
        if failure is None:
            try:
                self.graph.instantiate()
            except RuntimeError as error:
                failure = error
        if failure is not None:
            self._discard()
        return failure

    def _close_voided(self) -> None:
        state = repair(
            self.graph,
            stream=self._stream,
            handle=self.handle,
            generators=self._generators,
            mode=self._mode,
        )
        if state is PoolState.WHOLE:
            self._discard()
        elif state is PoolState.LOST:
            with self._pool.guard:
                self._pool.start_anew()

    def _discard(self) -> None:
        Burial(self.graph, self._pool, self.handle).perform()


class PoolState(enum.Enum):
    """What a pool is worth after a capture into it failed."""

    WHOLE = "whole"
    """As before; the graph may be reset."""
    PINNED = "pinned"
    """It can be captured into, but its memory stays with the process."""
    LOST = "lost"
    """It cannot be captured into again."""


def end_failed_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose graph is not wanted; that it may be empty is nobody's concern.

    Raises:
        RuntimeError: The capture was voided; see ``repair``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def repair(
    graph: torch.cuda.CUDAGraph,
    *,
    stream: torch.cuda.Stream,
    handle: Any,
    generators: Iterable[Any],
    mode: str,
) -> PoolState:
    """Close what a capture left open whose end failed.

    Args:
        graph: The graph that could not be ended.
        stream: The stream it was captured on; it is the current one.
        handle: The pool captured into.
        generators: The registered generators, the default one apart.
        mode: The capture error mode.
    """
    try:
        leave_stream_capture(stream.cuda_stream)
        begin_stream_capture(stream.cuda_stream, mode)
        end_failed_capture(graph)
    except RuntimeError as error:
        _logger.debug("A voided capture could not be ended in another's place: %s", error)
    else:
        return PoolState.WHOLE
    with suppress(DriverCallError):
        leave_stream_capture(stream.cuda_stream)
    give_up(graph, stream.device_index, handle)
    if _capture_little(stream.device_index, handle, generators, mode):
        _logger.warning(
            "A capture was voided by the driver. The memory of graph pool %s stays reserved "
            "while the process runs.",
            handle,
        )
        return PoolState.PINNED
    _logger.warning(
        "A capture was voided by the driver, and graph pool %s is given up: its memory stays "
        "reserved, and later graphs share a new pool.",
        handle,
    )
    settle_generators(stream.device_index, generators, mode)
    return PoolState.LOST


def give_up(graph: torch.cuda.CUDAGraph, device_index: int, handle: Any) -> None:
    """Keep a graph for good whose capture could not be begun or ended."""
    _doomed.append(graph)
    # Left open, no memory that two streams used would come back. It erases or raises.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, handle)


def settle_generators(device_index: int, generators: Iterable[Any], mode: str) -> None:
    """Take generators out of capture mode, by a capture into a pool of its own that works."""
    if not _capture_little(device_index, torch.cuda.graph_pool_handle(), generators, mode):
        _logger.critical(
            "After a voided capture this process can neither capture nor draw random numbers "
            "on cuda:%d any more; start it again.",
            device_index,
        )


def _capture_little(device_index: int, handle: Any, generators: Iterable[Any], mode: str) -> bool:
    """Capture one small kernel and throw it away; return whether that worked."""
    spare = torch.zeros(1, device=f"cuda:{device_index}")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        graph.capture_begin(pool=handle, capture_error_mode=mode)
        spare.fill_(1.0)
        graph.capture_end()
    except RuntimeError as error:
        _logger.debug("No capture into pool %s: %s", handle, error)
        give_up(graph, device_index, handle)
        return False
    graph.reset()
    return True
