"""Buckets of an undeclared axis: powers of two first, then planned from observed sizes.

Planning does not need more graphs than are in use: the same number of buckets is placed where it
pads least. New buckets invalidate all graphs of a form, so they must pay off, and are planned at
most twice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Final

#: The smallest bucket of an axis.
MIN_BUCKET: Final = 16
#: Buckets exceed the largest size so far by this factor, since growing invalidates all graphs.
_ROOM: Final = 4
#: Numbers of calls after which buckets are planned.
_PLAN_AFTER: Final = (512, 8192)
#: Fraction of all positions, including padding, that a plan must not exceed to justify new graphs.
_WORTH: Final = 0.85
#: Sizes are counted and buckets planned in multiples of this.
_STEP: Final = 8
#: Number of sizes that a plan distinguishes; its time grows with the square.
_MAX_SIZES: Final = 128


class Buckets:
    """Buckets of one axis, adapted to the observed sizes.

    Attributes:
        sizes: The buckets, ascending.
        is_planned: They are planned rather than powers of two.
        is_fixed: Graphs were captured before calls, so no plan may invalidate them.
    """

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self.is_planned: bool = False
        self.is_fixed: bool = False
        self._counts: Counter[int] = Counter()
        self._num_calls = 0
        self._plan_after = iter(_PLAN_AFTER)
        self._next_plan = next(self._plan_after, 0)

    def note(self, size: int) -> bool:
        """Record the size of a call; return whether the buckets changed."""
        self._num_calls += 1
        self._counts[_stepped(size)] += 1
        if not self.sizes or size > self.sizes[-1]:
            self.sizes += _powers_of_two(self.sizes[-1] if self.sizes else 0, size * _ROOM)
            return True
        return self._num_calls == self._next_plan and self._plan()

    def _plan(self) -> bool:
        """Plan buckets from the sizes so far; return whether they pay off."""
        self._next_plan = next(self._plan_after, 0)
        if self.is_fixed:
            return False
        used = Counter[int]()
        for size, count in self._counts.items():
            used[self._bucket_of(size)] += count
        planned = plan_buckets(self._counts, len(used))
        now = sum(bucket * count for bucket, count in used.items())
        then = sum(
            next(bucket for bucket in planned if bucket >= size) * count
            for size, count in self._counts.items()
        )
        if then > _WORTH * now:
            return False
        self.sizes = (*planned, *(size for size in self.sizes if size > planned[-1]))
        self.is_planned = True
        return True

    def _bucket_of(self, size: int) -> int:
        return next((bucket for bucket in self.sizes if bucket >= size), self.sizes[-1])

    def __str__(self) -> str:
        if self.is_planned:
            return f"in {', '.join(map(str, self.sizes))}"
        return f"<= {self.sizes[-1]}"


def plan_buckets(counts: Mapping[int, int], num_buckets: int) -> tuple[int, ...]:
    """Return the buckets that pad sizes least, including the largest size.

    Args:
        counts: How often each size occurred.
        num_buckets: Most buckets, at least one.
    """
    step = 1
    while len({-(-size // step) for size in counts}) > _MAX_SIZES:
        step *= 2
    merged = Counter[int]()
    for size, count in counts.items():
        merged[-(-size // step) * step] += count
    sizes = sorted(merged)
    # Number of calls with one of the first sizes.
    calls = [0, *itertools.accumulate(merged[size] for size in sizes)]
    # The cost of the first sizes with this many buckets, and the buckets.
    best: list[tuple[int, tuple[int, ...]]] = [
        (calls[end] * sizes[end - 1], (sizes[end - 1],)) for end in range(1, len(sizes) + 1)
    ]
    for _ in range(min(num_buckets, len(sizes)) - 1):
        best = [
            min(
                [best[end - 1]]
                + [
                    (
                        best[start - 1][0] + (calls[end] - calls[start]) * sizes[end - 1],
                        (*best[start - 1][1], sizes[end - 1]),
                    )
                    for start in range(1, end)
                ]
            )
            for end in range(1, len(sizes) + 1)
        ]
    return best[-1][1]


def _stepped(size: int) -> int:
    return -(-size // _STEP) * _STEP


def _powers_of_two(above: int, largest: int) -> tuple[int, ...]:
    """Return powers of two from a smallest size up to at least a largest one."""
    found, bucket = [], MIN_BUCKET
    while bucket < largest or bucket <= above:
        found.append(bucket)
        bucket *= 2
    return tuple(one for one in (*found, bucket) if one > above)
