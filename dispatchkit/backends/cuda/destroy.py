"""Destroying CUDA graphs and freeing their memory, which must wait until no capture runs."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple

import torch

from dispatchkit.backends.capture_guard import is_any_capturing
from dispatchkit.backends.cuda.draw_order import DrawOrder
from dispatchkit.backends.cuda.pool import CudaPool, idle_memory

_logger = logging.getLogger(__name__)


class PendingDestroy(NamedTuple):
    """A released graph that is still to be destroyed, and the pool that it used.

    Attributes:
        graph: The graph.
        pool: The pool.
        handle: Torch's handle of it.
        order: The order of draws that it took part in; None if it draws nothing.
    """

    graph: torch.cuda.CUDAGraph
    pool: CudaPool
    handle: Any
    order: DrawOrder | None = None

    def destroy(self) -> None:
        """Destroy the graph."""
        if self.order is not None:
            # The memory that a replay reads its seed from goes with the graph, and the
            # allocator could give it to somebody else at once.
            self.order.synchronize()
        with self.pool.guard:
            self.graph.reset()
            self.pool.give_back(self.handle)


# Destroying a graph calls the driver, which could void a capture that is running.
_pending: deque[PendingDestroy] = deque()


def destroy_later(graph: PendingDestroy) -> None:
    """Destroy a graph as soon as no capture runs."""
    _pending.append(graph)
    destroy_pending()


def destroy_pending() -> None:
    """Destroy released graphs, unless a capture is running."""
    while not is_any_capturing():
        try:
            graph = _pending.popleft()
        except IndexError:
            return
        graph.destroy()


def free_idle_memory() -> None:
    """Return memory of unused pools to the device, unless a capture is running.

    Torch would do so when memory runs out, but not in a capture. It waits for the device.
    """
    destroy_pending()
    if not idle_memory.is_there or is_any_capturing():
        return
    try:
        idle_memory.free()
    except RuntimeError as error:  # somebody else captures, past this package
        _logger.debug("Memory of unused graph pools cannot be freed yet: %s", error)
