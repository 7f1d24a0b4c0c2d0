"""How much a capture will make a graph pool grow, told before it is made.

Torch's allocator takes memory from the device in segments and cuts them into blocks
(c10/cuda/CUDACachingAllocator.cpp): what a capture needs can only be told by asking for it.
So the callable runs once with its memory in a pool of its own. The segments which that pool
ends up with are as many as a capture into an empty pool would take; in a pool that has
segments already, those that find a free block of their size in there are not taken again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

# Of the whole process it takes the longer, the more tensors are alive.
_CAN_SNAPSHOT_ONE = "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters

Segment = Mapping[str, Any]  # as in torch.cuda.memory_snapshot()


def segments_taken(run: Callable[[], object], device_index: int) -> list[Segment]:
    """Run a callable with its memory in a pool of its own; return what that pool took.

    The memory goes back to the device. The result of the callable is let go of.
    """
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device_index):
        run()
    return [one for one in pool.snapshot() if one["device"] == device_index]


def segments_of(pools: Collection[Any], device_index: int) -> list[Segment]:
    """Return the segments that belong to pools, by torch's handles."""
    found: list[Segment] = []
    for pool in pools if _CAN_SNAPSHOT_ONE else [None]:
        found += torch.cuda.memory_snapshot(**({"mempool_id": pool} if pool else {}))
    return [
        segment
        for segment in found
        if segment["device"] == device_index and tuple(segment["segment_pool_id"]) in pools
    ]


def growth(needed: Iterable[Segment], present: Iterable[Segment]) -> int:
    """Return by how many bytes present segments grow at most, so that needed ones fit.

    The largest needed segment goes first, into the smallest free block that holds it and on
    the same stream; what is left of the block may hold another. Small and large blocks do
    not mix, as in the allocator.
    """
    free: dict[tuple[str, int], list[int]] = {}
    for segment in present:
        blocks = free.setdefault(_kind(segment), [])
        blocks += [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
    missing = 0
    for segment in sorted(needed, key=lambda one: -one["total_size"]):
        size: int = segment["total_size"]
        blocks = free.get(_kind(segment), [])
        room = min((block for block in blocks if block >= size), default=None)
        if room is None:
            missing += size
            continue
        blocks.remove(room)
        if room > size:
            blocks.append(room - size)
    return missing


def _kind(segment: Segment) -> tuple[str, int]:
    return segment["segment_type"], segment["stream"]
