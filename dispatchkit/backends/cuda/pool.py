"""Memory pools shared by CUDA graphs."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from dispatchkit.backends.cuda.segments import Segment, segments_of

#: Number of ended pools after which torch's pinned-memory allocator must free its part of them.
MAX_ENDED: Final = 64


class IdleMemory:
    """Tracks whether torch keeps memory for pools without graphs.

    Besides device memory, that is 48 KB of host memory per pool, with or without pinned memory in
    it: torch's pinned-memory allocator (ATen/core/CachingHostAllocator.h of torch 2.11 to 2.13)
    frees these lists only together with its whole cache.

    Attributes:
        is_there: Whether there is such memory.
        num_ended: Pools that ended since that cache was last emptied.
    """

    def __init__(self) -> None:
        self.is_there: bool = False
        self.num_ended: int = 0

    def note_end(self) -> None:
        """Note that a pool has ended."""
        self.is_there = True
        self.num_ended += 1

    def free(self) -> None:
        """Return it to the device and, from time to time, to the host. Waits for the device.

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
    """A private memory pool; its graphs must not run at the same time.

    Torch permanently frees a pool once its last graph is gone, and then refuses captures into it
    (torch 2.11 to 2.13, an internal assertion). So a pool here is a sequence of torch's pools.

    Attributes:
        guard: Held while a graph starts or stops using the pool, so that torch's count of users and
            the one here cannot differ.
    """

    def __init__(self) -> None:
        self.guard: threading.RLock = threading.RLock()
        self._handle: Any = self._new_handle()
        self._uses = 0
        self._earlier: set[Any] = set()

    def take(self) -> Any:
        """Return torch's handle for one more capture, counted until it is returned."""
        self._uses += 1
        return self._handle

    def give_back(self, handle: Any) -> None:
        """Decrement the count of graphs; the last one ends torch's pool."""
        if handle != self._handle:
            idle_memory.note_end()
            return
        self._uses -= 1
        if self._uses == 0:
            idle_memory.note_end()
            self.start_anew()

    def start_anew(self) -> None:
        """Use a new pool of torch for later captures; existing graphs keep theirs."""
        self._earlier.add(self._handle)
        self._handle = self._new_handle()
        self._uses = 0

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def reserved_bytes(self, device_index: int) -> int:
        """Return the device memory that torch reserves for this pool, in bytes."""
        return sum(int(segment["total_size"]) for segment in self.segments(device_index))

    def segments(self, device_index: int) -> list[Segment]:
        """Return the segments of device memory that torch reserves for this pool."""
        found: list[Segment] = []
        with self.guard:
            if self._uses > 0:
                found += segments_of(self._handle)
            # Torch forgets a pool without graphs once its memory is returned; then it has no
            # segments.
            for handle in tuple(self._earlier):
                earlier = segments_of(handle)
                if not earlier:
                    self._earlier.discard(handle)
                found += earlier
        return [segment for segment in found if segment["device"] == device_index]
