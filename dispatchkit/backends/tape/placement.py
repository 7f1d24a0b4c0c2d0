"""Plan where the intermediates of a recording are placed.

Memory is planned like a private pool of CUDA graphs: an intermediate takes a place when it is first
written and frees it after its last use. All graphs of a pool use the same segments, since they
never run at the same time.
"""

from __future__ import annotations

import math

import attrs

from dispatchkit.backends.tape.steps import Step

_ALIGNMENT = 64


class _Segment:
    """One span of memory with its holes, in bytes; a size of None means unlimited."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.holes: list[tuple[int, int | None]] = [(0, size)]
        self.high_water = 0

    def take(self, num_bytes: int) -> int | None:
        """Return the start of the smallest hole that is large enough, or None."""
        lengths = [math.inf if end is None else end - start for start, end in self.holes]
        fitting = [index for index, length in enumerate(lengths) if length >= num_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lengths.__getitem__)
        start, end = self.holes.pop(best)
        taken_end = start + num_bytes
        if end is None or taken_end < end:
            self.holes.insert(best, (taken_end, end))
        self.high_water = max(self.high_water, taken_end)
        return start

    def give_back(self, start: int, num_bytes: int) -> None:
        """Free a place, merging it with adjacent holes."""
        merged: list[tuple[int, int | None]] = []
        for hole in sorted([*self.holes, (start, start + num_bytes)], key=lambda hole: hole[0]):
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self.holes = merged


@attrs.frozen
class Placement:
    """Where each planned storage is placed, and how much new memory that takes.

    Attributes:
        where: Storage identity to (segment index, offset in bytes).
        new_bytes: Size of the segment to add, whose index is the number of existing ones.
    """

    where: dict[int, tuple[int, int]]
    new_bytes: int


def place(steps: list[Step], sizes: dict[int, int], segment_sizes: list[int]) -> Placement:
    """Assign places to storages so that no two live at the same time overlap.

    Args:
        steps: The steps in replay order.
        sizes: Bytes of each storage to place; others are ignored.
        segment_sizes: Bytes of the existing segments, all free.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for ref in step.refs():
            if ref.storage in sizes:
                first.setdefault(ref.storage, index)
                last[ref.storage] = index
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for storage, index in first.items():
        begins.setdefault(index, []).append(storage)
        ends.setdefault(last[storage], []).append(storage)
    segments = [_Segment(size) for size in segment_sizes] + [_Segment(None)]
    where: dict[int, tuple[int, int]] = {}
    for index in range(len(steps)):
        # Inputs and outputs of a step are both alive during it: new places are assigned before old
        # ones are freed, so that no operation overwrites what it reads.
        for storage in begins.get(index, ()):
            num_bytes = _aligned(sizes[storage])
            for number, segment in enumerate(segments):
                start = segment.take(num_bytes)
                if start is not None:
                    where[storage] = (number, start)
                    break
        for storage in ends.get(index, ()):
            number, start = where[storage]
            segments[number].give_back(start, _aligned(sizes[storage]))
    return Placement(where, segments[-1].high_water)


def _aligned(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
