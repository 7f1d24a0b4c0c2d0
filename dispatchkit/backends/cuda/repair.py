"""Clean up after a failed capture.

There are two kinds of failure. If the callable raises a Python exception, the capture is still
valid: it is ended, and its graph is discarded. If the callable makes a call that the driver
refuses, the capture is invalidated. Ending the capture fails, and torch then does not update its
own state as it would after a success (aten/src/ATen/cuda/CUDAGraph.cpp, ``capture_end``). In torch
2.11:

- The device and host allocators keep serving the stream's allocations from the graph's pool.
- The pool counts one user too many, so its memory is never freed.
- The generators stay marked as captured, so eager draws raise.

In torch 2.13, only the number of users is wrong.

Most calls that the driver would refuse are therefore refused earlier (watch.py). If a call
nevertheless invalidates the capture, ``repair`` replaces the invalidated capture with an empty one,
which torch can end. If the replacement fails, the graph is kept until the process exits. The pool
is then abandoned only if a capture into it fails, too.
"""

from __future__ import annotations

import ctypes
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

# Graphs whose capture could not begin or end. They must not be destroyed, because allocators may
# still query them.
_undestroyable: list[torch.cuda.CUDAGraph] = []


class PoolState(enum.Enum):
    """The state of a pool after a failed capture."""

    WHOLE = "whole"
    """The pool is usable, and the graph may be reset."""
    PINNED = "pinned"
    """The pool is usable for captures, but its memory is never freed."""
    LOST = "lost"
    """The pool cannot be used for captures."""


def end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose graph may be empty, without a warning.

    Raises:
        RuntimeError: The capture was invalidated; see ``repair``.
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
    """Clean up after a capture that could not be ended, and return the state of its pool.

    Args:
        graph: torch's object for the graph.
        stream: The stream of the capture, which must be the current stream.
        handle: torch's handle of the pool.
        generators: The registered generators, excluding the default generator.
        mode: torch's ``capture_error_mode`` of the capture.
    """
    try:
        leave_stream_capture(stream.cuda_stream)
        begin_stream_capture(stream.cuda_stream, mode)
        end_quietly(graph)
    except RuntimeError as error:
        _logger.debug("An invalidated capture could not be replaced and ended: %s", error)
    else:
        return PoolState.WHOLE
    with suppress(DriverCallError):
        leave_stream_capture(stream.cuda_stream)
    abandon(graph, stream.device_index, handle)
    if _capture_small_graph(stream.device_index, handle, generators, mode):
        _logger.warning(
            "The driver invalidated a capture. The memory of graph pool %s stays reserved until "
            "the process exits.",
            handle,
        )
        return PoolState.PINNED
    _logger.warning(
        "The driver invalidated a capture, and graph pool %s is abandoned: its memory stays "
        "reserved, and later graphs share a new pool.",
        handle,
    )
    restore_generators(stream.device_index, generators, mode)
    return PoolState.LOST


def abandon(graph: torch.cuda.CUDAGraph, device_index: int, handle: Any) -> None:
    """Keep a graph until the process exits, because its capture could not begin or end."""
    _undestroyable.append(graph)
    # The interpreter empties the list at its exit, where the destructor could abort the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
    # While torch considers a capture open, it does not free memory that two streams use. This call
    # makes torch stop allocating from the pool, but may raise.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, handle)


def restore_generators(device_index: int, generators: Iterable[Any], mode: str) -> None:
    """Make generators usable again, through a successful capture into another pool."""
    if not _capture_small_graph(device_index, torch.cuda.graph_pool_handle(), generators, mode):
        _logger.critical(
            "After a failed capture, this process cannot capture or draw random numbers on "
            "cuda:%d. Restart the process.",
            device_index,
        )


def _capture_small_graph(
    device_index: int, handle: Any, generators: Iterable[Any], mode: str
) -> bool:
    """Capture a small graph and discard it; return whether the capture succeeded."""
    spare = torch.zeros(1, device=f"cuda:{device_index}")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        graph.capture_begin(pool=handle, capture_error_mode=mode)
        spare.fill_(1.0)
        graph.capture_end()
    except RuntimeError as error:
        _logger.debug("Capture into pool %s failed: %s", handle, error)
        abandon(graph, device_index, handle)
        return False
    graph.reset()
    return True
