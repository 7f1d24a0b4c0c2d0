"""How much a capture will make a graph pool grow, told before it is made.

Torch's allocator takes memory from the device in segments, cuts them into blocks and gives
each request the smallest free block that holds it (c10/cuda/CUDACachingAllocator.cpp). So how
much a capture adds depends on every request in it, in order, and on the free blocks there are
before: it can be told only by asking the allocator. The callable runs once with its memory in
a copy of the pool, that is in segments of the same sizes with the same blocks in use, and
what that copy grows by is what the pool would.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

# Requests up to here come from small segments, which are twice as large.
_SMALL = 1 << 20

Segment = Mapping[str, Any]  # as in torch.cuda.memory_snapshot()


def segments_of(handle: Iterable[int]) -> list[Segment]:
    """Return the segments that torch reserves for one pool; none where it knows no such pool.

    Not of the whole process: that takes the longer, the more tensors are alive.

    torch (2.11 to 2.13) drops references that it does not own: one to each part of what it is
    asked with (pytorch/pytorch#196366). Soon somebody's number is destroyed while it is still
    in use. What was dropped is put back here; where torch drops nothing, nothing is added.

    Args:
        handle: Torch's handle of the pool.
    """
    # Numbers of this call alone, apart from small ones, which the process shares.
    asked = (*(int(str(part)) for part in handle), False)
    spare = [*asked]  # so that none is gone before what was dropped is put back
    before = _references(asked)
    found: list[Segment] = torch.cuda.memory_snapshot(asked[:2], include_traces=asked[2])
    _put_back(asked, before)
    del spare
    return found


def _references(parts: tuple[int, ...]) -> list[int]:
    return [sys.getrefcount(part) for part in parts]


def _put_back(parts: tuple[int, ...], before: list[int]) -> None:
    counts = zip(parts, before, _references(parts), strict=True)
    for part, dropped in {id(part): (part, had - has) for part, had, has in counts}.values():
        if 0 < dropped <= len(parts):  # more is the doing of other threads
            for _ in range(dropped):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


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
    ours = [one for one in present if one["stream"] == stream]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device_index):
        used = _copies_of(ours, device_index)
        is_copy = not ours or _is_copy(segments_of(pool.id), ours)
        if is_copy:
            run()
    if not is_copy:
        # An allocator of other habits than known here: what an empty pool would grow by.
        del used, pool
        return growth(run, (), device_index, stream)
    before, after = _total(ours, device_index), _total(segments_of(pool.id), device_index)
    del used
    return after - before


def _total(segments: Iterable[Segment], device_index: int) -> int:
    return sum(int(one["total_size"]) for one in segments if one["device"] == device_index)


def _is_copy(segments: Iterable[Segment], originals: Iterable[Segment]) -> bool:
    """Return whether segments have the same blocks in use as others, wherever they lie."""

    def shapes(of: Iterable[Segment]) -> list[Any]:
        return sorted(
            (one["segment_type"], [(block["size"], _is_free(block)) for block in one["blocks"]])
            for one in of
        )

    return shapes(segments) == shapes(originals)


def _is_free(block: Mapping[str, Any]) -> bool:
    return bool(block["state"] == "inactive")


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
            held = free if _is_free(block) else used
            held += [_block(size, device_index) for size in _requests(block["size"], is_small)]
    return used


def _requests(num_bytes: int, is_small: bool) -> list[int]:
    """Return the requests that together fill a block of a segment."""
    if not is_small or num_bytes <= _SMALL:
        return [num_bytes]
    return [_SMALL, num_bytes - _SMALL]


def _block(num_bytes: int, device_index: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device_index}")
