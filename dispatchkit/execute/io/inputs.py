"""The set of a runner's static inputs, and the validation of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import attrs
import torch

from dispatchkit.errors import ConfigError, InputError
from dispatchkit.execute.io.host_arrays import (
    array_dtype,
    carrier_of,
    host_array,
    host_tensor,
    numpy_module,
)
from dispatchkit.execute.io.input_errors import CALL_OPTIONS, bind_or_raise, validate
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.keys.checks import check_instance

# Maximum number of entries in each cache that is keyed by batch size or axis values.
MAX_KEPT_SIZES = 4096
_ARRAY_FACTS = attrgetter("shape", "dtype")
# Number of times that an ``InputSet`` replaces fast checks before it stops using them. Calls can
# differ in properties that only the fast check compares, and a new check for each call would be
# expensive.
_MAX_REPLACED = 64
# Compares all metadata of several tensors in one call, five times as fast as reading the properties
# one by one. It is an undocumented part of torch.compile. If it is missing or returns False, the
# properties are read one by one.
TensorGuards: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)
#: Keywords of a call or of ``submit`` that are not allowed as input names.
RESERVED_NAMES = frozenset({*CALL_OPTIONS, "priority"})


class InputSet:
    """The static inputs of one runner, in declared order.

    Args:
        specs: Static inputs by name; at least one is batched.
        device: Required device of the tensors in a call.

    Raises:
        ConfigError: An input is not a StaticInput, a shape names an axis, no input is batched, or
            a name is reserved or not an identifier.
    """

    def __init__(self, specs: Mapping[str, StaticInput], device: torch.device) -> None:
        for name, spec in specs.items():
            hint = 'For example, pass StaticInput((None, 16), "float32").'
            check_instance(spec, StaticInput, f"inputs[{name!r}]", hint)
            if spec.named:
                raise ConfigError(
                    f"inputs[{name!r}]",
                    spec.shape,
                    "declared with a shape without axis names",
                    "The runner declares no axes. Add them to DispatchConfig(axes=...).",
                )
            if name in RESERVED_NAMES or not str(name).isidentifier():
                raise ConfigError(
                    "inputs",
                    name,
                    f"named by Python identifiers other than {', '.join(sorted(RESERVED_NAMES))}",
                    "Rename the input.",
                )
        self.specs: dict[str, StaticInput] = dict(specs)
        self.names: tuple[str, ...] = tuple(self.specs)
        self.device = device
        self.batched: tuple[tuple[int, int], ...] = tuple(
            (index, spec.batch_dim)
            for index, spec in enumerate(self.specs.values())
            if spec.batch_dim is not None
        )
        if not self.batched:
            raise ConfigError(
                "inputs",
                list(self.names),
                "declared with at least one batched input (None in its shape)",
                "Without a batched input, the number of rows in a call is unknown. Use None for "
                "the batch dimension.",
            )
        self._lead, self._lead_dim = self.batched[0]
        self._expected: dict[int, tuple[Any, ...]] = {}
        self.host: tuple[int, ...] = tuple(index for index, spec in enumerate(self) if spec.host)
        self.on_device: tuple[int, ...] = tuple(
            index for index, spec in enumerate(self) if not spec.host
        )
        # Reads the properties of a tensor that the check compares. With a single visible GPU, it
        # reads ``is_cuda``, because reading ``device`` would create an object.
        is_only = device.type == "cuda" and torch.cuda.device_count() == 1
        self._device_fact: Any = True if is_only else device
        self._facts: Any = attrgetter(
            "shape", "dtype", "is_cuda" if is_only else "device", "requires_grad", "layout"
        )
        if len(self.host) == len(self.names):
            self._facts = _ARRAY_FACTS
        self._quick: dict[int, tuple[Callable[..., bool], Callable[..., bool]]] = {}
        self._num_replaced = 0
        # With a single name, itemgetter would return the value instead of a tuple.
        self._pick: Any = itemgetter(*self.names) if len(self.names) > 1 else None
        self._host_types = tuple(
            (index, spec.dtype, carrier_of(spec.dtype) is spec.dtype)
            for index, spec in enumerate(self)
            if spec.host
        )
        self._array_type: Any = numpy_module().ndarray if self.host else None

    def __iter__(self) -> Iterator[StaticInput]:
        return iter(self.specs.values())

    def num_bytes(self, num_rows: int) -> int:
        """Return the size in bytes of device buffers with ``num_rows`` rows."""
        return sum(spec.sized(num_rows).numel() * spec.dtype.itemsize for spec in self)

    def as_device(self) -> InputSet:
        """Return these inputs, with host inputs declared as device inputs."""
        if not self.host:
            return self
        specs = {name: attrs.evolve(spec, host=False) for name, spec in self.specs.items()}
        return InputSet(specs, self.device)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Put the arguments of a call into declared order.

        Raises:
            InputError: An input is missing, unknown or given twice.
        """
        if not args:
            if len(kwargs) == len(self.names):
                try:
                    if self._pick is None:
                        return (kwargs[self.names[0]],)
                    picked: tuple[Any, ...] = self._pick(kwargs)
                    return picked
                except KeyError:
                    pass  # reported below, with names
        elif not kwargs and len(args) == len(self.names):
            return args
        return bind_or_raise(self.names, args, kwargs)

    # Not stored on the object: a bound method would form a reference cycle, which only the garbage
    # collector frees.
    @property
    def check(self) -> Callable[[Any], tuple[int, bool]]:
        """The function that validates the values of a call.

        It returns the number of rows, and True if a copy node can certainly read all inputs
        directly: the tensors are contiguous, without lazy conjugation or negation, and autocast is
        off. It raises InputError if a value is not a tensor, requires a gradient while gradients
        are enabled, or has the wrong dtype, device or shape. Host inputs must have been converted
        to arrays (see ``to_arrays``).
        """
        if not self.host and TensorGuards is not None:
            return self._check_tensors
        return self._check_mixed if 0 < len(self.host) < len(self.names) else self._check_uniform

    def _check_tensors(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Validate device inputs by comparing them with an earlier call of the same size."""
        try:
            rows: int = values[self._lead].shape[self._lead_dim]
            known = self._quick.get(rows)
            if known is not None:
                is_readable, fits = known
                if is_readable(*values):
                    return rows, True
                if fits(*values):
                    return rows, False
        except (AttributeError, IndexError, RuntimeError):
            pass  # reported below
        rows, _ = self._check_uniform(values)
        if any(type(value) is not torch.Tensor for value in values):
            validate(self.specs, self.device, values)  # rejects subclasses
        self._note_fit(rows, values)
        return rows, False

    def _note_fit(self, rows: int, values: Sequence[torch.Tensor]) -> None:
        """Store two fast checks for this size: one for contiguous tensors, one for any strides."""
        if self._num_replaced >= _MAX_REPLACED:
            self._quick.clear()
            return
        if rows in self._quick:
            self._num_replaced += 1
        elif len(self._quick) >= MAX_KEPT_SIZES:
            self._quick.clear()
        # Inputs that require a gradient are valid only while gradients are disabled.
        if all(type(value) is torch.Tensor and not value.requires_grad for value in values):
            shapes = [list(value.shape) for value in values]
            guards = [
                TensorGuards(*values, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
                for strides in (
                    [_contiguous(shape) for shape in shapes],
                    [[None] * len(shape) for shape in shapes],
                )
            ]
            # The guards also compare the lazy bits and the device's autocast state with those of
            # this call.
            is_special = torch.is_autocast_enabled(self.device.type)
            is_readable = never if is_special or any(map(has_lazy_bits, values)) else guards[0]
            self._quick[rows] = (is_readable, guards[1])

    def _check_uniform(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Validate inputs that are either all on the device or all in host memory."""
        try:
            rows: int = values[self._lead].shape[self._lead_dim]
            expected = self._expected.get(rows) or self._expect(rows)
            if tuple(map(self._facts, values)) == expected:
                return rows, False
        except (AttributeError, IndexError, RuntimeError):
            pass  # not a tensor, or too few dimensions: reported below
        return validate(self.specs, self.device, values), False

    def _check_mixed(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Validate a mix of device inputs and host inputs."""
        try:
            rows: int = values[self._lead].shape[self._lead_dim]
            expected = self._expected.get(rows) or self._expect(rows)
            found = (
                _ARRAY_FACTS(value) if spec.host else self._facts(value)
                for value, spec in zip(values, self, strict=True)
            )
            if tuple(found) == expected:
                return rows, False
        except (AttributeError, IndexError, RuntimeError):
            pass  # not a tensor or array, or too few dimensions: reported below
        return validate(self.specs, self.device, values), False

    def to_arrays(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a call, with host inputs converted to arrays where possible.

        Raises:
            InputError: A host input is an array, but numpy lacks its declared dtype.
        """
        made: list[Any] | None = None
        for index, dtype, is_plain in self._host_types:
            value = values[index]
            if type(value) is self._array_type:
                if is_plain:
                    continue
                raise InputError(
                    self.names[index],
                    f"Input {self.names[index]!r} must be a CPU tensor of {dtype}, because numpy "
                    f"lacks this dtype; got an array of {value.dtype}.",
                )
            if made is None:
                made = list(values)
            made[index] = host_array(value, dtype)
        return values if made is None else made

    def part(self, values: Sequence[Any], start: int, num_rows: int) -> list[Any]:
        """Return the values of a validated call, with views of some rows of batched inputs."""
        found = list(values)
        for index, dim in self.batched:
            value = found[index]
            if isinstance(value, torch.Tensor):
                found[index] = value.narrow(dim, start, num_rows)
            else:
                found[index] = value[(slice(None),) * dim + (slice(start, start + num_rows),)]
        return found

    def to_tensors(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the values of a validated call as device tensors; only arrays are copied."""
        if not self.host:
            return values
        return [
            value
            if isinstance(value, torch.Tensor)
            else host_tensor(value, spec.dtype, self.device)
            for value, spec in zip(values, self, strict=True)
        ]

    def _expect(self, rows: int) -> tuple[Any, ...]:
        if len(self._expected) >= MAX_KEPT_SIZES:
            self._expected.clear()
        expected = tuple(
            (spec.sized(rows), array_dtype(spec.dtype))
            if spec.host
            else (spec.sized(rows), spec.dtype, self._device_fact, False, torch.strided)
            for spec in self
        )
        self._expected[rows] = expected
        return expected


def _contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def has_lazy_bits(value: torch.Tensor) -> bool:
    """Return whether torch applies a lazy conversion (conj, neg, zero) when reading a tensor."""
    return value.is_neg() or value.is_conj() or value._is_zerotensor()


def never(*_: Any) -> bool:
    """Return False; used as a placeholder for a missing fast check."""
    return False
