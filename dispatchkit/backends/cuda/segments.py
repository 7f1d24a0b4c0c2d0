"""Query the memory segments that torch's allocator reserves for a graph pool."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

Segment = Mapping[str, Any]  # as in torch.cuda.memory_snapshot()


def segments_of(handle: Iterable[int]) -> list[Segment]:
    """Return the segments that torch reserves for a pool; empty if the pool is unknown.

    Only this pool is queried, because the time of a full snapshot grows with the number of live
    tensors. For each int of the query, torch 2.11 to 2.13 drops a reference that it does not own
    (pytorch/pytorch#196366). Repeated queries would destroy ints in use elsewhere, so this function
    restores the references.

    Args:
        handle: torch's handle of the pool, which consists of two ints.
    """
    # New int objects for this call, except for small ints, which are shared.
    asked = (*(int(str(part)) for part in handle), False)
    spare = [*asked]  # additional references until the dropped references are restored
    before = _references(asked)
    found: list[Segment] = torch.cuda.memory_snapshot(asked[:2], include_traces=asked[2])
    _put_back(asked, before)
    del spare
    return found


def blocks_in_use(segments: Iterable[Segment]) -> set[int]:
    """Return the addresses of all allocated blocks."""
    found = set()
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:  # blocks are contiguous
            if block["state"] != "inactive":
                found.add(address)
            address += block["size"]
    return found


def _references(parts: tuple[int, ...]) -> list[int]:
    return [sys.getrefcount(part) for part in parts]


def _put_back(parts: tuple[int, ...], before: list[int]) -> None:
    counts = zip(parts, before, _references(parts), strict=True)
    for part, dropped in {id(part): (part, had - has) for part, had, has in counts}.values():
        if 0 < dropped <= len(parts):  # larger counts come from other threads
            for _ in range(dropped):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
