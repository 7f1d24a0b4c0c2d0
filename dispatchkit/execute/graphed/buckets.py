"""Choose buckets for an undeclared axis: powers of two at first, later planned for observed sizes.

A plan minimizes padding without using more buckets than before, so it needs no additional graphs.
New buckets invalidate all graphs of a form of calls. Buckets are therefore planned at most twice,
and a plan is used only if it saves enough padding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Final

#: The smallest bucket of an axis before buckets are planned.
MIN_BUCKET: Final = 16
#: Buckets extend to this multiple of the largest size, so that buckets are rarely added. Each
#: addition invalidates graphs.
_HEADROOM: Final = 4
#: Numbers of calls after which buckets are planned.
_PLAN_AFTER: Final = (512, 8192)
#: A plan is used if it reduces the number of computed positions, including padding, to at most this
#: fraction of the current number.
_MAX_PLANNED_RATIO: Final = 0.85
#: Granularity of counted sizes and planned buckets.
_STEP: Final = 8
#: Maximum number of sizes that a plan distinguishes; planning takes quadratic time.
_MAX_SIZES: Final = 128


class Buckets:
    """The buckets of one axis, adapted to observed sizes.

    Attributes:
        sizes: Buckets in ascending order.
        is_planned: Whether the buckets were planned from observed sizes.
        is_fixed: Whether planning is disabled, because graphs were captured in advance.
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
        """Record the size of a call, and return whether the buckets changed."""
        self._num_calls += 1
        self._counts[_stepped(size)] += 1
        if not self.sizes or size > self.sizes[-1]:
            self.sizes += _powers_of_two(self.sizes[-1] if self.sizes else 0, size * _HEADROOM)
            return True
        return self._num_calls == self._next_plan and self._plan()

    def _plan(self) -> bool:
        """Plan buckets from the sizes so far, and return whether they are used."""
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
        if then > _MAX_PLANNED_RATIO * now:
            return False
        self.sizes = (*planned, *(size for size in self.sizes if size > planned[-1]))
        self.is_planned = True
        return True

    def _bucket_of(self, size: int) -> int:
        return next((bucket for bucket in self.sizes if bucket >= size), self.sizes[-1])

    def __str__(self) -> str:
        if self.is_planned:
            return f"padded to {', '.join(map(str, self.sizes))}"
        return f"<= {self.sizes[-1]}"


def plan_buckets(counts: Mapping[int, int], num_buckets: int) -> tuple[int, ...]:
    """Return the buckets that minimize padding; the largest one fits all sizes.

    Args:
        counts: Number of calls by size.
        num_buckets: Maximum number of buckets, at least one.
    """
    step = 1
    while len({-(-size // step) for size in counts}) > _MAX_SIZES:
        step *= 2
    merged = Counter[int]()
    for size, count in counts.items():
        merged[-(-size // step) * step] += count
    sizes = sorted(merged)
    # calls[n] is the number of calls with one of the n smallest sizes.
    calls = [0, *itertools.accumulate(merged[size] for size in sizes)]
    # best[n - 1] is the minimum cost of the n smallest sizes, and the buckets with this cost. Each
    # iteration allows one more bucket.
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
    """Return the powers of two above ``above``, up to the first that is at least ``largest``.

    Powers below ``MIN_BUCKET`` are omitted.
    """
    found, bucket = [], MIN_BUCKET
    while bucket < largest or bucket <= above:
        found.append(bucket)
        bucket *= 2
    return tuple(one for one in (*found, bucket) if one > above)
