"""User-defined axes: dimensions and host values, other than the batch size, with buckets.

An axis may be a sequence length, an image size, or any other number that changes what a step
computes. Each value is mapped to a bucket. The buckets of all axes and the number of adapters are
then combined into one number, the variant. The dispatcher's table has one index for the variant, in
place of one for the number of adapters, so a configuration without axes has no extra cost.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, DescriptorError
from dispatchkit.keys.checks import check_counts, refuses_unknown_names, whole_number

#: The bucket of each axis, in order; None for a value outside all buckets of its axis.
AxisBuckets = tuple[int | None, ...]

# Axes whose largest bucket is below this limit use a lookup table; others use a binary search.
_MAX_LOOKUP = 1 << 16


def _buckets(value: Any) -> tuple[int, ...]:
    return tuple(sorted(set(check_counts(value, "buckets", minimum=0))))


@refuses_unknown_names
@attrs.frozen
class Axis:
    """A user-defined dimension or host value, with the buckets to capture graphs for.

    Attributes:
        name: The name that callers and the step use.
        buckets: Values to capture graphs for, ascending.
        exact: Whether a graph serves only the exact value of its bucket. If False, the graph also
            serves smaller values that are above the next smaller bucket, and inputs that have the
            axis as a dimension are padded to the bucket.

    Raises:
        ConfigError: The name is not an identifier, there are no buckets, or a bucket is not a whole
            number of at least 0.
    """

    name: str
    buckets: tuple[int, ...] = attrs.field(converter=_buckets)
    exact: bool = False
    _lookup: tuple[int, ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError("axis name", name, "a valid Python identifier")
        if not self.buckets:
            message = f"Axis {name!r} needs at least one bucket, as in Axis({name!r}, [64])."
            raise ConfigError("buckets", self.buckets, "at least one value", message=message)
        top = self.buckets[-1]
        table = (self._search(value) for value in range(top + 1)) if top < _MAX_LOOKUP else ()
        object.__setattr__(self, "_lookup", tuple(table))

    def index(self, value: int) -> int:
        """Return the 1-based index of a value's bucket; 0 if the value is outside all buckets.

        Raises:
            DescriptorError: The value is not a non-negative whole number.
        """
        number = whole_number(value)
        if number is None or number < 0:
            raise DescriptorError(self.name, value, "a non-negative whole number")
        if number > self.buckets[-1]:
            return 0
        return self._lookup[number] if self._lookup else self._search(number)

    def _search(self, value: int) -> int:
        found = bisect_left(self.buckets, value)
        return 0 if self.exact and self.buckets[found] != value else found + 1


class Variant(int):
    """A variant number together with the axis values it was computed from.

    Attributes:
        values: The value of each axis, in order.
    """

    values: tuple[int, ...] = ()


class Variants:
    """A numbering of all combinations of adapter counts and axis buckets.

    Args:
        axes: The configured axes, in order.
        max_loras: Largest number of adapters.

    Attributes:
        count: Number of variants, including variants with values outside all buckets.
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
        """Return the variant for a number of adapters and the value of each axis.

        Raises:
            DescriptorError: An axis is missing or unknown, or a value is invalid.
        """
        if values.keys() != self._names:
            names = ", ".join(sorted(self._names))
            given = ", ".join(sorted(values)) or "no axis"
            message = (
                f"Give one value for each axis ({names}); got values for {given}."
                if names
                else f"Unknown argument or axis: {given}. No axis is configured. "
                "Correct the name, or declare the axis with DispatchConfig(axes=[...])."
            )
            allowed = f"a value for each of: {names}" if names else "omitted without axes"
            raise DescriptorError("axes", sorted(values), allowed, message=message)
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
        """Return the variant for a number of adapters and the bucket of each axis.

        Raises:
            DescriptorError: The number of buckets differs from the number of axes, or a value is
                not a bucket of its axis.
        """
        if not self.axes:
            return loras  # without configured axes, any buckets are ignored
        loras = self._checked(loras)
        if len(buckets) != len(self.axes):
            names = ", ".join(axis.name for axis in self.axes)
            raise DescriptorError("axes", buckets, f"one bucket per axis ({names})")
        for axis, stride, bucket in zip(self.axes, self._strides, buckets, strict=True):
            if bucket is None:
                continue
            if bucket not in axis.buckets:
                allowed = f"one of its buckets ({', '.join(map(str, axis.buckets))})"
                raise DescriptorError(axis.name, bucket, allowed)
            loras += stride * (1 + axis.buckets.index(bucket))
        return loras

    def _checked(self, loras: int) -> int:
        number = whole_number(loras)
        if number is None or not 0 <= number < self._num_loras:
            most = self._num_loras - 1
            allowed = f"{f'a whole number from 0 to {most}' if most else 0} (max_loras)"
            is_above = number is not None and number > most
            hint = f"Increase max_loras to at least {number}." if is_above else ""
            raise DescriptorError("loras", loras, allowed, hint)
        return number

    def facts(self, variant: int) -> tuple[int, AxisBuckets]:
        """Return the number of adapters and the buckets of a variant."""
        rest, loras = divmod(variant, self._num_loras)
        buckets: list[int | None] = []
        for axis in self.axes:
            rest, index = divmod(rest, len(axis.buckets) + 1)
            buckets.append(axis.buckets[index - 1] if index else None)
        return loras, tuple(buckets)

    def values(self, variant: int) -> tuple[int, ...]:
        """Return one value per axis for a variant.

        A ``Variant`` has the values that it was computed from. A plain int encodes only the
        buckets, so each bucket is returned as the value. For an axis whose value was outside all
        buckets, the largest bucket plus 1 is returned.
        """
        if isinstance(variant, Variant):
            return variant.values
        _, buckets = self.facts(variant)
        return tuple(
            axis.buckets[-1] + 1 if bucket is None else bucket
            for axis, bucket in zip(self.axes, buckets, strict=True)
        )

    def combinations(self) -> list[tuple[int, ...]]:
        """Return all combinations of buckets."""
        return list(itertools.product(*(axis.buckets for axis in self.axes)))
