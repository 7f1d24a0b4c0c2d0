"""The segments of memory that torch's allocator reserves for a graph pool."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

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


def blocks_in_use(segments: Iterable[Segment]) -> set[int]:
    """Return the addresses of all blocks that are handed out."""
    found = set()
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:  # one behind the other
            if block["state"] != "inactive":
                found.add(address)
            address += block["size"]
    return found


def _references(parts: tuple[int, ...]) -> list[int]:
    return [sys.getrefcount(part) for part in parts]


def _put_back(parts: tuple[int, ...], before: list[int]) -> None:
    counts = zip(parts, before, _references(parts), strict=True)
    for part, dropped in {id(part): (part, had - has) for part, had, has in counts}.values():
        if 0 < dropped <= len(parts):  # more is the doing of other threads
            for _ in range(dropped):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
