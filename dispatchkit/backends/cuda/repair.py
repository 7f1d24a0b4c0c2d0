"""Cleaning up after a capture that failed.

Two kinds of failure differ. An exception of Python leaves the capture whole: it is ended and
its graph thrown away. A call that the driver refuses voids the capture: ending it fails, and
torch then leaves accounts open that it closes at a good end (aten/src/ATen/cuda/CUDAGraph.cpp,
``capture_end``). In torch 2.11: the device's and the host's allocator still send the capture's
allocations to the graph's pool, the pool counts one user too many, so that its memory never
comes back, and the generators believe that they are being captured, so that eager draws raise.
In 2.13 only the count of users is wrong.

So most such calls are refused before the driver sees them (watch.py). After one that
was not, ``repair`` puts an empty capture in the place of the voided one: torch ends that one
and closes its accounts itself. No account of torch is ever changed from here: where this way
fails, a graph and a pool are abandoned instead.
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

_logger = logging.getLogger(__name__)

# Graphs whose capture could not be begun or ended: the allocators may still ask them which
# streams they capture, so they must never be destroyed.
_undestroyable: list[torch.cuda.CUDAGraph] = []


class PoolState(enum.Enum):
    """What a pool is worth after a capture into it failed."""

    WHOLE = "whole"
    """As before; the graph may be reset."""
    PINNED = "pinned"
    """It can be captured into, but its memory stays with the process."""
    LOST = "lost"
    """It cannot be captured into again."""


def end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose graph may be empty, which nobody is warned of.

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
        end_quietly(graph)
    except RuntimeError as error:
        _logger.debug("A voided capture could not be ended in another's place: %s", error)
    else:
        return PoolState.WHOLE
    with suppress(DriverCallError):
        leave_stream_capture(stream.cuda_stream)
    abandon(graph, stream.device_index, handle)
    if _capture_small_graph(stream.device_index, handle, generators, mode):
        _logger.warning(
            "A capture was voided by the driver. The memory of graph pool %s stays reserved "
            "while the process runs.",
            handle,
        )
        return PoolState.PINNED
    _logger.warning(
        "A capture was voided by the driver, and graph pool %s is abandoned: its memory stays "
        "reserved, and later graphs share a new pool.",
        handle,
    )
    restore_generators(stream.device_index, generators, mode)
    return PoolState.LOST


def abandon(graph: torch.cuda.CUDAGraph, device_index: int, handle: Any) -> None:
    """Keep a graph for the life of the process: its capture could not be begun or ended."""
    _undestroyable.append(graph)
    # Left open, no memory that two streams used would come back. It erases or raises.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, handle)


def restore_generators(device_index: int, generators: Iterable[Any], mode: str) -> None:
    """Take generators out of capture mode, by a capture into a pool of its own that works."""
    if not _capture_small_graph(device_index, torch.cuda.graph_pool_handle(), generators, mode):
        _logger.critical(
            "After a voided capture this process can neither capture nor draw random numbers "
            "on cuda:%d any more; start it again.",
            device_index,
        )


def _capture_small_graph(
    device_index: int, handle: Any, generators: Iterable[Any], mode: str
) -> bool:
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
        abandon(graph, device_index, handle)
        return False
    graph.reset()
    return True
