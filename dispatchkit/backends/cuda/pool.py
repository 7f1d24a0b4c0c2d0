"""Memory pools shared by CUDA graphs."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from dispatchkit.backends.cuda.segments import Segment, segments_of

#: Number of pools that may end before the cache of torch's pinned-memory allocator is emptied.
MAX_ENDED: Final = 64


class IdleMemory:
    """A record of the memory that torch keeps for pools without graphs.

    A pool ends when its last graph is destroyed. In addition to device memory, torch keeps 48 KB of
    host memory per pool, even if the pool has no pinned memory. torch's pinned-memory allocator
    (ATen/core/CachingHostAllocator.h of torch 2.11 to 2.13) frees this memory only together with
    its entire cache.

    Attributes:
        is_there: Whether a pool has ended since ``free`` last succeeded.
        num_ended: Number of pools that ended since the pinned-memory cache was last emptied.
    """

    def __init__(self) -> None:
        self.is_there: bool = False
        self.num_ended: int = 0

    def note_end(self) -> None:
        """Record that a pool has ended."""
        self.is_there = True
        self.num_ended += 1

    def free(self) -> None:
        """Free the memory of ended pools, and synchronize with the device.

        Host memory is freed after every ``MAX_ENDED`` pools.

        Raises:
            RuntimeError: A capture is running.
        """
        self.is_there = False
        try:
            torch.cuda.empty_cache()
            if self.num_ended >= MAX_ENDED:
                self.num_ended = 0
                torch._C._host_emptyCache()
        except RuntimeError:
            self.is_there = True
            raise


idle_memory: IdleMemory = IdleMemory()


class CudaPool:
    """A private memory pool, whose graphs must not run concurrently.

    When the last graph of a torch pool is destroyed, torch frees the pool, and an internal
    assertion rejects further captures into it (torch 2.11 to 2.13). A CudaPool therefore uses a
    sequence of torch pools.

    Attributes:
        guard: Lock to hold while a graph starts or stops using the pool, so that the number of
            graphs matches torch's count.
    """

    def __init__(self) -> None:
        self.guard: threading.RLock = threading.RLock()
        self._handle: Any = self._new_handle()
        self._uses = 0
        self._earlier: set[Any] = set()

    def take(self) -> Any:
        """Return the handle of the torch pool for a new graph, and count the graph."""
        self._uses += 1
        return self._handle

    def give_back(self, handle: Any) -> None:
        """Decrement the count of graphs; if no graph is left, start a new torch pool."""
        if handle != self._handle:
            idle_memory.note_end()
            return
        self._uses -= 1
        if self._uses == 0:
            idle_memory.note_end()
            self.start_anew()

    def start_anew(self) -> None:
        """Use a new torch pool for later captures; existing graphs keep their pool."""
        self._earlier.add(self._handle)
        self._handle = self._new_handle()
        self._uses = 0

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def reserved_bytes(self, device_index: int) -> int:
        """Return the bytes of device memory that torch reserves for the pool."""
        return sum(int(segment["total_size"]) for segment in self.segments(device_index))

    def segments(self, device_index: int) -> list[Segment]:
        """Return the segments of device memory that torch reserves for the pool."""
        found: list[Segment] = []
        with self.guard:
            if self._uses > 0:
                found += segments_of(self._handle)
            # A torch pool without graphs is deleted when its memory is returned; it then has no
            # segments.
            for handle in tuple(self._earlier):
                earlier = segments_of(handle)
                if not earlier:
                    self._earlier.discard(handle)
                found += earlier
        return [segment for segment in found if segment["device"] == device_index]
