"""Destroy CUDA graphs and free their memory, deferred while a capture runs."""

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
    """A released graph that awaits destruction, and its pool.

    Attributes:
        graph: The graph.
        pool: The pool.
        handle: Torch's handle of the pool.
        order: The order of draws it takes part in; None if it does not draw.
    """

    graph: torch.cuda.CUDAGraph
    pool: CudaPool
    handle: Any
    order: DrawOrder | None = None

    def destroy(self) -> None:
        """Destroy the graph."""
        if self.order is not None:
            # The memory of the seed that a replay reads is freed with the graph, and the allocator
            # could reuse it immediately.
            self.order.synchronize()
        with self.pool.guard:
            self.graph.reset()
            self.pool.give_back(self.handle)


# Destroying a graph calls the driver, which could invalidate a running capture.
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
    """Return the memory of unused pools to the device, unless a capture is running.

    Torch does so itself when memory runs out, but not during a capture. It waits for the device.
    """
    destroy_pending()
    if not idle_memory.is_there or is_any_capturing():
        return
    try:
        idle_memory.free()
    except RuntimeError as error:  # other code captures, outside this package
        _logger.debug("Memory of unused graph pools cannot be freed yet: %s", error)
