"""How much a capture will make a graph pool grow, told before it is made.

Torch's allocator takes memory from the device in segments, cuts them into blocks and gives
each request the smallest free block that holds it (c10/cuda/CUDACachingAllocator.cpp). So how
much a capture adds depends on every request in it, in order, and on the free blocks there are
before: it can be told only by asking the allocator. The callable runs once with its memory in
a copy of the pool, that is in segments of the same sizes with the same blocks in use, and
what that copy grows by is what the pool would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

# Of the whole process it takes the longer, the more tensors are alive.
CAN_SNAPSHOT_ONE = "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters
# Requests up to here come from small segments, which are twice as large.
_SMALL = 1 << 20

Segment = Mapping[str, Any]  # as in torch.cuda.memory_snapshot()


def growth(
    run: Callable[[], object], present: Iterable[Segment], device_index: int, stream: int
) -> int:
    """Run a callable with its memory in a copy of a pool; return by how many bytes it grew.

    The copy's memory goes back to the device, and the callable's result is let go of.

    Args:
        run: What to run.
        present: The segments of the pool.
        device_index: The device.
        stream: Handle of the current stream; blocks of others do not serve it.
    """
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device_index):
        used = _copies_of([one for one in present if one["stream"] == stream], device_index)
        before = _total(pool, device_index)
        run()
        after = _total(pool, device_index)
    del used
    return after - before


def _copies_of(segments: Iterable[Segment], device_index: int) -> list[torch.Tensor]:
    """Make segments of the same sizes in the current pool; return what holds their used blocks.

    One after the other is filled from front to back. While all before it are full, a request
    can only go to the one being filled.
    """
    used: list[torch.Tensor] = []
    free: list[torch.Tensor] = []
    for segment in sorted(segments, key=lambda one: one["address"]):
        is_small = segment["segment_type"] == "small"
        # The first request decides how large a segment is taken from the device.
        whole = _block(_SMALL if is_small else segment["total_size"], device_index)
        del whole
        for block in segment["blocks"]:
            held = free if block["state"] == "inactive" else used
            held += [_block(size, device_index) for size in _requests(block["size"], is_small)]
    return used


def _requests(num_bytes: int, is_small: bool) -> list[int]:
    """Return the requests that together fill a block of a segment."""
    if not is_small or num_bytes <= _SMALL:
        return [num_bytes]
    return [_SMALL, num_bytes - _SMALL]


def _block(num_bytes: int, device_index: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device_index}")


def _total(pool: torch.cuda.MemPool, device_index: int) -> int:
    return sum(one["total_size"] for one in pool.snapshot() if one["device"] == device_index)
