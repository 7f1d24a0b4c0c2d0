"""The memory pools that CUDA graphs share."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from dispatchkit.backends.cuda.segments import Segment, segments_of

#: Pools that ended, until torch's allocator of pinned memory is to give its part of them back.
MAX_ENDED: Final = 64


class IdleMemory:
    """Knows whether torch keeps memory for pools that no graph uses any more.

    Beside memory of the device that is 48 KB of the host for each pool, whether or not anything
    pinned was in it: torch's allocator of pinned memory (ATen/core/CachingHostAllocator.h of torch
    2.11 to 2.13) lets go of such lists with its whole cache alone.

    Attributes:
        is_there: There is some.
        num_ended: Pools that ended since that cache was emptied.
    """

    def __init__(self) -> None:
        self.is_there: bool = False
        self.num_ended: int = 0

    def note_end(self) -> None:
        """Note that a pool has ended."""
        self.is_there = True
        self.num_ended += 1

    def free(self) -> None:
        """Give it back to the device, and now and then to the host. It waits for the device.

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

    Torch frees a pool for good once its last graph is gone, and refuses captures into it from
    then on (torch 2.11 to 2.13, an internal assertion): a pool here is a row of torch's, one
    after the other.

    Attributes:
        guard: Held while a graph begins or ends to use the pool, so that torch's count of
            users and the one here cannot differ.
    """

    def __init__(self) -> None:
        self.guard: threading.RLock = threading.RLock()
        self._handle: Any = self._new_handle()
        self._uses = 0
        self._earlier: set[Any] = set()

    def take(self) -> Any:
        """Return torch's handle for one more capture; it counts until it is given back."""
        self._uses += 1
        return self._handle

    def give_back(self, handle: Any) -> None:
        """Take one graph off the count; the last one ends torch's pool."""
        if handle != self._handle:
            idle_memory.note_end()
            return
        self._uses -= 1
        if self._uses == 0:
            idle_memory.note_end()
            self.start_anew()

    def start_anew(self) -> None:
        """Capture into a new pool of torch's from here on; graphs keep the one they have."""
        self._earlier.add(self._handle)
        self._handle = self._new_handle()
        self._uses = 0

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def reserved_bytes(self, device_index: int) -> int:
        """Return the bytes of the device that torch reserves for this pool."""
        return sum(int(segment["total_size"]) for segment in self.segments(device_index))

    def segments(self, device_index: int) -> list[Segment]:
        """Return the segments of the device that torch reserves for this pool."""
        found: list[Segment] = []
        with self.guard:
            if self._uses > 0:
                found += segments_of(self._handle)
            # Torch forgets a pool of no graph once its memory is back; then it has none.
            for handle in tuple(self._earlier):
                earlier = segments_of(handle)
                if not earlier:
                    self._earlier.discard(handle)
                found += earlier
        return [segment for segment in found if segment["device"] == device_index]
