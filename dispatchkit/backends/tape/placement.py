"""Plan the memory of a recording's intermediates.

Memory is planned as in a private pool of CUDA graphs: it is allocated when an intermediate is first
written, and freed after its last use. All graphs of a pool use the same segments, because they
never run concurrently.
"""

from __future__ import annotations

import math

import attrs

from dispatchkit.backends.tape.steps import Step

_ALIGNMENT = 64


class _Segment:
    """A segment of memory and its free ranges, in bytes; unlimited if the size is None."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.holes: list[tuple[int, int | None]] = [(0, size)]
        self.high_water = 0

    def take(self, num_bytes: int) -> int | None:
        """Allocate from the smallest sufficient free range; return the offset, or None."""
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
        """Free a range, merging it with adjacent free ranges."""
        merged: list[tuple[int, int | None]] = []
        for hole in sorted([*self.holes, (start, start + num_bytes)], key=lambda hole: hole[0]):
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self.holes = merged


@attrs.frozen
class Placement:
    """The location of each storage, and the new memory required.

    Attributes:
        where: Segment index and offset in bytes of each storage, by identity.
        new_bytes: Size of the segment to add, whose index is the number of existing segments.
    """

    where: dict[int, tuple[int, int]]
    new_bytes: int


def place(steps: list[Step], sizes: dict[int, int], segment_sizes: list[int]) -> Placement:
    """Return locations for storages, so that concurrently live storages do not overlap.

    Args:
        steps: The operations in replay order.
        sizes: Size in bytes of each storage to place, by identity. Other storages are ignored.
        segment_sizes: Sizes in bytes of the existing segments, all of which are treated as free.
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
        # The inputs and outputs of an operation are alive at the same time. Allocate outputs before
        # freeing inputs, so that no operation overwrites its inputs.
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
