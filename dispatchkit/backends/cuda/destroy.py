"""Destroy CUDA graphs and free their memory while no capture is running."""

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
    """A released graph that has not been destroyed yet.

    Attributes:
        graph: torch's object for the graph.
        pool: Pool to which the graph's memory returns.
        handle: torch's handle of the pool.
        order: DrawOrder of the device; None if the graph draws no random numbers.
    """

    graph: torch.cuda.CUDAGraph
    pool: CudaPool
    handle: Any
    order: DrawOrder | None = None

    def destroy(self) -> None:
        """Destroy the graph."""
        if self.order is not None:
            # Replays read a seed from memory that is freed with the graph. Wait for these replays,
            # because the allocator could reuse the memory immediately.
            self.order.synchronize()
        with self.pool.guard:
            self.graph.reset()
            self.pool.give_back(self.handle)


# Released graphs to destroy after all captures, because the required driver calls could invalidate
# a capture.
_pending: deque[PendingDestroy] = deque()


def destroy_later(graph: PendingDestroy) -> None:
    """Destroy a graph now, or after the captures that are running."""
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

    torch itself frees this memory only if an allocation outside a capture runs out of memory.
    Freeing the memory synchronizes with the device.
    """
    destroy_pending()
    if not idle_memory.is_there or is_any_capturing():
        return
    try:
        idle_memory.free()
    except RuntimeError as error:  # other code is capturing
        _logger.debug("Memory of unused graph pools cannot be freed yet: %s", error)
