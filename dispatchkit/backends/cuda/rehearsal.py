"""Measure in advance how much memory a capture will add to a graph pool.

torch's allocator requests segments from the device, splits them into blocks, and serves each
request from the smallest sufficient free block (c10/cuda/CUDACachingAllocator.cpp). The growth of a
pool therefore depends on the order of all requests and on the free blocks. A rehearsal creates a
pool with the same segments and the same blocks in use, runs the callable in this copy, and measures
the growth of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dispatchkit.backends.cuda.segments import Segment, segments_of

# Requests up to this size, in bytes, use small segments, which have twice this size.
_SMALL = 1 << 20


def growth(
    run: Callable[[], object], present: Iterable[Segment], device_index: int, stream: int
) -> int:
    """Run a callable in a copy of a pool, and return the copy's growth in bytes.

    The copy's memory is returned to the device, and the callable's result is discarded.

    Args:
        run: Callable to run once in the copy.
        present: Segments of the pool to copy.
        device_index: Index of the device of the pool.
        stream: Handle of the current stream. Segments of other streams are not copied, because the
            stream cannot use their blocks.
    """
    ours = [one for one in present if one["stream"] == stream]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device_index):
        used = _copies_of(ours, device_index)
        is_copy = not ours or _is_copy(segments_of(pool.id), ours)
        if is_copy:
            run()
    if not is_copy:
        # The allocator behaved unexpectedly, so measure the growth of an empty pool.
        del used, pool
        return growth(run, (), device_index, stream)
    before, after = _total(ours, device_index), _total(segments_of(pool.id), device_index)
    del used
    return after - before


def _total(segments: Iterable[Segment], device_index: int) -> int:
    return sum(int(one["total_size"]) for one in segments if one["device"] == device_index)


def _is_copy(segments: Iterable[Segment], originals: Iterable[Segment]) -> bool:
    """Return whether two lists of segments have the same layout of used and free blocks."""

    def shapes(of: Iterable[Segment]) -> list[Any]:
        return sorted(
            (one["segment_type"], [(block["size"], _is_free(block)) for block in one["blocks"]])
            for one in of
        )

    return shapes(segments) == shapes(originals)


def _is_free(block: Mapping[str, Any]) -> bool:
    return bool(block["state"] == "inactive")


def _copies_of(segments: Iterable[Segment], device_index: int) -> list[torch.Tensor]:
    """Recreate segments in the current pool, and return tensors that occupy their used blocks.

    Segments are filled one after the other, from front to back. Because all earlier segments are
    full, each request is served from the current segment.
    """
    used: list[torch.Tensor] = []
    free: list[torch.Tensor] = []
    for segment in sorted(segments, key=lambda one: one["address"]):
        is_small = segment["segment_type"] == "small"
        # The first request determines the size of the segment.
        whole = _block(_SMALL if is_small else segment["total_size"], device_index)
        del whole
        for block in segment["blocks"]:
            held = free if _is_free(block) else used
            held += [_block(size, device_index) for size in _requests(block["size"], is_small)]
    return used


def _requests(num_bytes: int, is_small: bool) -> list[int]:
    """Return the request sizes that fill a block of a segment."""
    if not is_small or num_bytes <= _SMALL:
        return [num_bytes]
    return [_SMALL, num_bytes - _SMALL]


def _block(num_bytes: int, device_index: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device_index}")
