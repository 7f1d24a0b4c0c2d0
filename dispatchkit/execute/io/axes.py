"""Axes in the executor: validate their values, pad inputs along them and cut results.

An axis is either a dimension of inputs (a sequence length, an image size) or a number that changes
the behavior of the step. Inputs with such a dimension are padded to the bucket with the values that
their ``fill`` declares. Results are cut to the value of the axis. Graphs are captured at buckets. A
step whose signature includes the axis receives the bucket in a capture, and the value of the call
when it runs eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dispatchkit.errors import CaptureError, ConfigError, InputError
from dispatchkit.execute.io.host_arrays import host_array, numpy_module
from dispatchkit.execute.io.inputs import MAX_KEPT_SIZES, RESERVED_NAMES, InputSet
from dispatchkit.execute.io.static_input import LAST, StaticInput, axis_of
from dispatchkit.execute.io.structure import flatten, is_same_value
from dispatchkit.keys.axes import Axis, AxisBuckets
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig

#: An output dimension whose size depends on an axis: index of the output, index of the dimension,
#: index of the axis, and the dimension's size minus the axis value.
AxisCut = tuple[int, int, int, int]


class AxisCall(list[Any]):
    """The inputs of a call, padded to the buckets of its graph.

    Attributes:
        given: Inputs without padding.
        values: Value of each axis, in the order of the axes.
    """

    given: Sequence[Any]
    values: tuple[int, ...]


class AxisInputs:
    """The inputs of a runner with axes.

    Args:
        specs: Static inputs by name. Their shapes may contain axes.
        config: Configuration that declares the axes.
        device: Required device of the tensors in a call.

    Attributes:
        names: Names of the axes, in order.
        smallest: Inputs at the smallest bucket of each axis.

    Raises:
        ConfigError: An axis has a reserved name or the name of an input, or a shape names an
            unknown axis.
    """

    def __init__(
        self, specs: Mapping[str, StaticInput], config: DispatchConfig, device: torch.device
    ) -> None:
        self._specs, self._axes, self._variants = dict(specs), config.axes, config.variants
        self._device = device
        self.names: tuple[str, ...] = tuple(axis.name for axis in config.axes)
        for name in self.names:
            if name in RESERVED_NAMES or name in self._specs:
                raise ConfigError(
                    "axes",
                    name,
                    "named differently from the inputs and the keywords of calls "
                    f"({', '.join(sorted(RESERVED_NAMES))})",
                    "Rename the axis.",
                )
        for name, spec in self._specs.items():
            for size in spec.named:
                if axis_of(size)[0] not in self.names:
                    known = ", ".join(self.names) or "none"
                    raise ConfigError(
                        f"inputs[{name!r}]",
                        spec.shape,
                        f"a shape with declared axes ({known})",
                        "Correct the name, or add the axis to DispatchConfig(axes=...).",
                        message=f"The shape of input {name!r}, {spec.shape}, names the axis "
                        f"{axis_of(size)[0]!r}, but the declared axes are: {known}.",
                    )
        used = {axis_of(size)[0] for spec in self._specs.values() for size in spec.named}
        # Indices of the axes that are dimensions of inputs. Other axes do not change shapes.
        self._sizing = tuple(i for i, name in enumerate(self.names) if name in used)
        self._kept: dict[tuple[int, ...], InputSet] = {}
        self.smallest: InputSet = self.at(tuple(axis.buckets[0] for axis in self._axes))

    @property
    def has_dimensions(self) -> bool:
        """Whether any axis is a dimension of an input."""
        return bool(self._sizing)

    def at(self, values: Sequence[int]) -> InputSet:
        """Return the input set for these axis values, one per axis in declared order."""
        name = tuple(values[index] for index in self._sizing)
        found = self._kept.get(name)
        if found is None:
            by_name = dict(zip(self.names, values, strict=True))
            specs = {key: spec.at(by_name) for key, spec in self._specs.items()}
            if len(self._kept) >= MAX_KEPT_SIZES:
                self._kept.clear()
            found = self._kept[name] = InputSet(specs, self._device)
        return found

    def buckets(self, call: AxisCall) -> AxisBuckets:
        """Return the bucket of each axis for a call; None for values that no bucket can serve."""
        found = [axis.index(value) for axis, value in zip(self._axes, call.values, strict=True)]
        return tuple(
            axis.buckets[index - 1] if index else None
            for axis, index in zip(self._axes, found, strict=True)
        )

    def describe_outside(self, call: AxisCall) -> str:
        """Describe each axis value that no bucket can serve, and the bucket to add."""
        found = [
            f"Axis {axis.name!r} is {value}, but its buckets are "
            f"{', '.join(map(str, axis.buckets))}. "
            + (
                f"The axis is exact, so add the bucket {value}."
                if axis.exact
                else f"Add a bucket of at least {value}."
            )
            for axis, value in zip(self._axes, call.values, strict=True)
            if not axis.index(value)
        ]
        return " ".join(found)

    def same_exact_values(self, values: Sequence[int], others: Sequence[int]) -> bool:
        """Return whether two sequences of axis values agree on all exact axes."""
        each = zip(self._axes, values, others, strict=True)
        return all(one == other for axis, one, other in each if axis.exact)

    # -- a call -------------------------------------------------------------------------

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AxisCall:
        """Put the inputs of a call into declared order, and extract the axis values.

        Raises:
            InputError: An input or axis is missing, or an input is unknown or given twice.
        """
        missing = [name for name in self.names if name not in kwargs]
        if missing:
            raise InputError(
                missing[0],
                f"The call has no value for axis {missing[0]!r}. Pass a keyword argument for each "
                f"axis: {', '.join(self.names)}.",
            )
        call = AxisCall()
        call.values = tuple(kwargs.pop(name) for name in self.names)
        call.given = self.smallest.bind(args, kwargs)
        return call

    def variant(self, call: AxisCall, loras: int) -> int:
        """Return the ``loras`` argument of ``dispatch`` for a call.

        Raises:
            DescriptorError: A value is not a nonnegative whole number.
        """
        return self._variants.of_values(loras, dict(zip(self.names, call.values, strict=True)))

    def to_arrays(self, call: AxisCall) -> AxisCall:
        """Convert host inputs of a call to arrays."""
        call.given = self.smallest.to_arrays(call.given)
        return call

    def check(self, call: AxisCall) -> tuple[int, bool]:
        """Validate a call as ``InputSet.check`` does, and pad its inputs to the axes' buckets.

        Raises:
            InputError: An input is invalid.
        """
        rows, readable = self.at(call.values).check(call.given)
        indices = [axis.index(value) for axis, value in zip(self._axes, call.values, strict=True)]
        call[:] = call.given
        if self._sizing and all(indices):
            buckets = [axis.buckets[i - 1] for axis, i in zip(self._axes, indices, strict=True)]
            padded = zip(self._specs.values(), self.at(buckets), strict=True)
            for index, (declared, spec) in enumerate(padded):
                shape = spec.sized(rows)
                if tuple(call[index].shape) != tuple(shape):
                    call[index] = pad_input(call[index], declared, shape)
        return rows, readable  # still valid for the padded inputs, which are contiguous

    def part(self, call: AxisCall, start: int, num_rows: int) -> AxisCall:
        """Return views of some rows of a validated call."""
        found = AxisCall(self.smallest.part(call, start, num_rows))
        found.given = self.smallest.part(call.given, start, num_rows)
        found.values = call.values
        return found

    def eager_arguments(self, call: AxisCall | None) -> dict[str, Any]:
        """Return the arguments of an eager step: unpadded inputs and axis values by name.

        Raises:
            InputError: ``call`` is None, which means an in-place step.
        """
        if call is None:
            raise in_place_error(self.names)
        tensors = self.at(call.values).to_tensors(call.given)
        return self._named(self.smallest.names, tensors, call.values)

    # -- graphs -------------------------------------------------------------------------

    def graph_arguments(self, tensors: Sequence[Any], buckets: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of a step in a capture: static inputs and buckets by name."""
        return self._named(self.smallest.names, tensors, buckets)

    def _named(
        self, names: Sequence[str], tensors: Sequence[Any], values: Sequence[int]
    ) -> dict[str, Any]:
        return dict(zip((*names, *self.names), (*tensors, *values), strict=True))

    def measure_cuts(
        self, key: GraphKey, outputs: Any, run: Callable[[dict[str, Any]], Any]
    ) -> tuple[AxisCut, ...]:
        """Return the output dimensions whose size depends on an axis.

        Args:
            key: Key of the graph.
            outputs: Outputs at the buckets of the key.
            run: Function that runs the step with the given inputs and axis values, by name.

        Raises:
            CaptureError: The step fails at an axis value other than the key's bucket, or its
                outputs cannot be cut along an axis.
        """
        own: Any = key.descriptor.axes
        cuts: list[AxisCut] = []
        for index, axis in enumerate(self._axes):
            if axis.exact:
                continue
            other = [*own]
            other[index] = _other_value(axis, own[index])
            inputs = self.at(other)
            tensors = [spec.full(key.num_tokens, self._device) for spec in inputs]
            try:
                found = run(self._named(inputs.names, tensors, other))
            except Exception as error:
                raise CaptureError(
                    f"The step raised an error when it was run with {axis.name}={other[index]} to "
                    "measure its outputs. Fix the step, or declare the axis with exact=True to "
                    f"skip this run. Cause: {type(error).__name__}: {error}",
                    key=str(key),
                    reason="output_layout",
                ) from error
            cuts += _dimensions(outputs, found, index, axis, own[index], other[index])
        return tuple(cuts)


def in_place_error(names: Sequence[str]) -> InputError:
    """Return the error for an in-place step of a runner with axes."""
    return InputError(
        names[0],
        "In-place steps do not support axes. Call the runner with tensors, and pass a keyword "
        f"argument for each axis: {', '.join(names)}.",
    )


def _other_value(axis: Axis, bucket: int) -> int:
    others = [one for one in axis.buckets if one != bucket and one > 0]
    return others[0] if others else max(1, 2 * bucket)


def _dimensions(
    outputs: Any, others: Any, index: int, axis: Axis, bucket: int, other: int
) -> list[AxisCut]:
    leaves, structure = flatten(outputs)
    found, other_structure = flatten(others)
    problem = "" if structure == other_structure else "the structure of the outputs changes"
    cuts: list[AxisCut] = []
    for number, (leaf, one) in enumerate(zip(leaves, found, strict=False)):
        if not isinstance(leaf, torch.Tensor) or not isinstance(one, torch.Tensor):
            if not is_same_value(leaf, one):
                problem = problem or f"output {number}, a Python value, changes"
            continue
        if leaf.dim() != one.dim():
            problem = problem or f"the rank of output {number} changes"
            continue
        for dim, sizes in enumerate(zip(leaf.shape, one.shape, strict=True)):
            if sizes[0] - sizes[1] == bucket - other:
                cuts.append((number, dim, index, sizes[0] - bucket))
            elif sizes[0] != sizes[1]:
                problem = problem or (
                    f"dimension {dim} of output {number} changes from {sizes[0]} to {sizes[1]}"
                )
    if problem:
        raise CaptureError(
            f"When {axis.name} changes from {bucket} to {other}, {problem}, so padded outputs "
            "cannot be cut to their unpadded size. Declare the axis with exact=True.",
            reason="output_layout",
        )
    return cuts


def pad_input(value: Any, spec: StaticInput, shape: torch.Size) -> Any:
    """Pad an input to a larger shape with the values that its ``fill`` declares.

    Args:
        value: Tensor, or numpy array for a host input.
        spec: Declaration of the input.
        shape: Padded shape; no dimension is smaller than that of ``value``.
    """
    inside = tuple(slice(0, size) for size in value.shape)
    padded: Any
    if isinstance(value, torch.Tensor):
        padded = torch.full(shape, spec.fill_value, dtype=value.dtype, device=value.device)
    else:
        padded = numpy_module().full(tuple(shape), _bits(spec), dtype=value.dtype)
    padded[inside] = value
    if spec.fill == LAST:
        for dim, size in enumerate(value.shape):
            if 0 < size < shape[dim]:
                before = (slice(None),) * dim
                padded[(*before, slice(size, None))] = padded[(*before, slice(size - 1, size))]
    return padded


def _bits(spec: StaticInput) -> Any:
    """Return the fill value as an array element; its bit pattern if numpy lacks the dtype."""
    return host_array(torch.full((1,), spec.fill_value, dtype=spec.dtype), spec.dtype)[0]
