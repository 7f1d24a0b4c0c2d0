"""Axes of one's own: host values that a graph is made for, beside tokens, requests and adapters.

A sequence length, an image size, or any number that steers what a step does. Each value goes
to a bucket, the buckets of all axes and the adapters to one number, the variant: it takes the
place of the adapters in the table, so that those without axes pay nothing for them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, DescriptorError
from dispatchkit.keys.checks import check_count, whole_number

#: Buckets of the axes in their order; None where a value lies outside all of its axis.
AxisBuckets = tuple[int | None, ...]

# Up to here a value's bucket is looked up, and not searched for.
_MAX_LOOKUP = 1 << 16


def _buckets(value: Any) -> tuple[int, ...]:
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    return tuple(sorted({check_count(item, "buckets", minimum=0) for item in items}))


@attrs.frozen
class Axis:
    """One more fact of a batch that a graph is made for.

    Attributes:
        name: What callers, and the step, know it by.
        buckets: Values that graphs are made for, ascending.
        exact: A graph serves just its own value; otherwise all values up to it, from the
            bucket below on, and inputs that have the axis as a dimension are padded.

    Raises:
        ConfigError: The name is no identifier, or the buckets are no whole numbers.
    """

    name: str
    buckets: tuple[int, ...] = attrs.field(converter=_buckets)
    exact: bool = False
    _lookup: tuple[int, ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError("axis", name, "a name that could be an argument")
        if not self.buckets:
            raise ConfigError("buckets", self.buckets, "at least one value", f"Axis {self.name!r}.")
        top = self.buckets[-1]
        table = (self._search(value) for value in range(top + 1)) if top < _MAX_LOOKUP else ()
        object.__setattr__(self, "_lookup", tuple(table))

    def index(self, value: int) -> int:
        """Return the number of a value's bucket from 1, or 0 where it has none.

        Raises:
            DescriptorError: It is no whole number of at least 0.
        """
        number = whole_number(value)
        if number is None or number < 0:
            raise DescriptorError(self.name, value, "a whole number of at least 0")
        if number > self.buckets[-1]:
            return 0
        return self._lookup[number] if self._lookup else self._search(number)

    def _search(self, value: int) -> int:
        found = bisect_left(self.buckets, value)
        return 0 if self.exact and self.buckets[found] != value else found + 1


class Variant(int):
    """The number of a variant, with the values that it was made of.

    Attributes:
        values: The value of each axis, in their order.
    """

    values: tuple[int, ...] = ()


class Variants:
    """The numbers that stand for adapters and buckets together.

    Args:
        axes: The axes in their order.
        max_loras: Most adapters.

    Attributes:
        count: How many there are, numbers with a value outside its axis included.
    """

    def __init__(self, axes: tuple[Axis, ...], max_loras: int) -> None:
        self.axes = axes
        self._num_loras = max_loras + 1
        self._names = frozenset(axis.name for axis in axes)
        strides, stride = [], self._num_loras
        for axis in axes:
            strides.append(stride)
            stride *= len(axis.buckets) + 1
        self._strides = tuple(strides)
        self.count = stride

    def of_values(self, loras: int, values: Mapping[str, int]) -> Variant:
        """Return the variant of so many adapters and a value for each axis.

        Raises:
            DescriptorError: An axis is missing or unknown, or a value is none.
        """
        if values.keys() != self._names:
            allowed = f"given for each of {sorted(self._names)} and no other"
            raise DescriptorError("axes", sorted(values), allowed)
        loras = self._checked(loras)
        found = []
        for axis, stride in zip(self.axes, self._strides, strict=True):
            value = values[axis.name]
            loras += stride * axis.index(value)
            found.append(int(value))
        made = Variant(loras)
        made.values = tuple(found)
        return made

    def of_buckets(self, loras: int, buckets: AxisBuckets) -> int:
        """Return the variant of so many adapters and a bucket of each axis.

        Raises:
            DescriptorError: Not one for each axis, or not one of its buckets.
        """
        if not self.axes:
            return loras  # what such a batch has for axes is its maker's own
        loras = self._checked(loras)
        if len(buckets) != len(self.axes):
            names = ", ".join(axis.name for axis in self.axes)
            raise DescriptorError("axes", buckets, f"one bucket for each axis ({names})")
        for axis, stride, bucket in zip(self.axes, self._strides, buckets, strict=True):
            if bucket is None:
                continue
            if bucket not in axis.buckets:
                raise DescriptorError(axis.name, bucket, f"one of its buckets {axis.buckets}")
            loras += stride * (1 + axis.buckets.index(bucket))
        return loras

    def _checked(self, loras: int) -> int:
        number = whole_number(loras)
        if number is None or not 0 <= number < self._num_loras:
            allowed = f"a whole number from 0 to {self._num_loras - 1} (max_loras)"
            raise DescriptorError("loras", loras, allowed)
        return number

    def facts(self, variant: int) -> tuple[int, AxisBuckets]:
        """Return the adapters and the buckets of a variant."""
        rest, loras = divmod(variant, self._num_loras)
        buckets: list[int | None] = []
        for axis in self.axes:
            rest, index = divmod(rest, len(axis.buckets) + 1)
            buckets.append(axis.buckets[index - 1] if index else None)
        return loras, tuple(buckets)

    def values(self, variant: int) -> tuple[int, ...]:
        """Return the value of each axis, or ones that mean the same where they are not known.

        Of a plain number these are the buckets, and the number above the last bucket for a
        value outside.
        """
        if isinstance(variant, Variant):
            return variant.values
        _, buckets = self.facts(variant)
        return tuple(
            axis.buckets[-1] + 1 if bucket is None else bucket
            for axis, bucket in zip(self.axes, buckets, strict=True)
        )

    def combinations(self) -> list[tuple[int, ...]]:
        """Return the buckets that graphs are made for: each of an axis with each of the others."""
        return list(itertools.product(*(axis.buckets for axis in self.axes)))
