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
from dispatchkit.execute.io.input_errors import bind_or_raise, validate
from dispatchkit.execute.io.static_input import StaticInput

# Number of cached tuples of expected shapes, one per batch size.
MAX_KEPT_SIZES = 4096
_ARRAY_FACTS = attrgetter("shape", "dtype")
# How often the fast check of a size may be replaced: calls that differ in properties that only the
# fast check requires must not pay for a new one each time.
_MAX_REMADE = 64
# Compares all metadata of some tensors in one call, in a fifth of the time of reading their
# properties one by one. torch has it for compiled functions and does not document it: if it is
# missing or returns False, the properties are read.
TensorGuards: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)
#: Reserved keywords of calls, not allowed as names of inputs.
RESERVED_NAMES = frozenset({"num_reqs", "uniform", "loras", "ceiling", "priority"})


class InputSet:
    """The static inputs of one runner, in declared order.

    Args:
        specs: Static inputs by name; at least one is batched.
        device: The required device of a call's tensors.

    Raises:
        ConfigError: There is no batched input, or a name is reserved.
    """

    def __init__(self, specs: Mapping[str, StaticInput], device: torch.device) -> None:
        for name, spec in specs.items():
            if not isinstance(spec, StaticInput):
                raise ConfigError(f"inputs[{name!r}]", spec, "a StaticInput")
            if spec.named:
                raise ConfigError(f"inputs[{name!r}]", spec.named, "declared as axes of the runner")
            if name in RESERVED_NAMES or not str(name).isidentifier():
                raise ConfigError("inputs", name, f"names other than {sorted(RESERVED_NAMES)}")
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
                "Without one the number of rows of a call is unknown.",
            )
        self._lead, self._lead_dim = self.batched[0]
        self._expected: dict[int, tuple[Any, ...]] = {}
        self.host: tuple[int, ...] = tuple(index for index, spec in enumerate(self) if spec.host)
        self.on_device: tuple[int, ...] = tuple(
            index for index, spec in enumerate(self) if not spec.host
        )
        # Required properties of a value, read and compared in two calls. With a single visible GPU,
        # a flag tells that a tensor is on it, which avoids creating a device object.
        is_only = device.type == "cuda" and torch.cuda.device_count() == 1
        self._place: Any = True if is_only else device
        self._facts: Any = attrgetter(
            "shape", "dtype", "is_cuda" if is_only else "device", "requires_grad", "layout"
        )
        if len(self.host) == len(self.names):
            self._facts = _ARRAY_FACTS
        self._quick: dict[int, tuple[Callable[..., bool], Callable[..., bool]]] = {}
        self._num_remade = 0
        # For a single name it returns the value rather than a tuple of one.
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
        """Return the device bytes of buffers with this many rows."""
        return sum(spec.sized(num_rows).numel() * spec.dtype.itemsize for spec in self)

    def as_device(self) -> InputSet:
        """Return the same inputs, all of them on the device."""
        if not self.host:
            return self
        specs = {name: attrs.evolve(spec, host=False) for name, spec in self.specs.items()}
        return InputSet(specs, self.device)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Put the arguments of a call into declared order.

        Raises:
            InputError: One is missing, unknown or given twice.
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

    # ``check(values)`` returns the number of rows of a valid call, and whether all inputs are known
    # to be tensors whose memory can be read directly (contiguous, without lazy conjugation or
    # negation), with autocast off. It raises InputError if one is not a tensor, or has a wrong
    # dtype, device, rank, fixed dimension or number of rows. Host inputs are checked as arrays: see
    # ``host_arrays``. It is not stored on the object, since only the garbage collector would free
    # the cycle.

    @property
    def check(self) -> Callable[[Any], tuple[int, bool]]:
        """The check for this kind of inputs."""
        if not self.host and TensorGuards is not None:
            return self._check_tensors
        return self._check_mixed if 0 < len(self.host) < len(self.names) else self._check_alike

    def _check_tensors(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Check device inputs by comparison with an earlier call of this size."""
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
        rows, _ = self._check_alike(values)
        if any(type(value) is not torch.Tensor for value in values):
            validate(self.specs, self.device, values)  # a subclass has these properties, too
        self._note_fit(rows, values)
        return rows, False

    def _note_fit(self, rows: int, values: Sequence[torch.Tensor]) -> None:
        """Store the fast checks of a valid call: contiguous, and with any strides."""
        if self._num_remade >= _MAX_REMADE:
            self._quick.clear()
            return
        if rows in self._quick:
            self._num_remade += 1
        elif len(self._quick) >= MAX_KEPT_SIZES:
            self._quick.clear()
        # A tensor that requires a gradient is valid only while gradients are disabled.
        if all(type(value) is torch.Tensor and not value.requires_grad for value in values):
            shapes = [list(value.shape) for value in values]
            guards = [
                TensorGuards(*values, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
                for strides in (
                    [_contiguous(shape) for shape in shapes],
                    [[None] * len(shape) for shape in shapes],
                )
            ]
            # The guard compares these flags and whether the device's autocast is on.
            is_special = torch.is_autocast_enabled(self.device.type)
            is_readable = never if is_special or any(map(is_flagged, values)) else guards[0]
            self._quick[rows] = (is_readable, guards[1])

    def _check_alike(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Check inputs that are all on the device or all arrays."""
        try:
            rows: int = values[self._lead].shape[self._lead_dim]
            expected = self._expected.get(rows) or self._expect(rows)
            if tuple(map(self._facts, values)) == expected:
                return rows, False
        except (AttributeError, IndexError, RuntimeError):
            pass  # not a tensor, or of too low a rank: reported below
        return validate(self.specs, self.device, values), False

    def _check_mixed(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Check inputs of which some are on the device and some are arrays."""
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
            pass  # not a tensor or an array, or of too low a rank: reported below
        return validate(self.specs, self.device, values), False

    def to_arrays(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return a call's values, with those of host inputs converted to arrays if possible.

        Raises:
            InputError: An array was given for a dtype that numpy lacks.
        """
        made: list[Any] | None = None
        for index, dtype, is_plain in self._host_types:
            value = values[index]
            if type(value) is self._array_type:
                if is_plain:
                    continue
                raise InputError(
                    self.names[index],
                    f"Input {self.names[index]!r} is {dtype}, which numpy lacks, so an array of "
                    f"{value.dtype} is ambiguous. Pass a tensor.",
                )
            if made is None:
                made = list(values)
            made[index] = host_array(value, dtype)
        return values if made is None else made

    def part(self, values: Sequence[Any], start: int, num_rows: int) -> list[Any]:
        """Return some rows of a checked call's values, as views."""
        found = list(values)
        for index, dim in self.batched:
            value = found[index]
            if isinstance(value, torch.Tensor):
                found[index] = value.narrow(dim, start, num_rows)
            else:
                found[index] = value[(slice(None),) * dim + (slice(start, start + num_rows),)]
        return found

    def to_tensors(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return a checked call as tensors on the device; only arrays are copied."""
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
            else (spec.sized(rows), spec.dtype, self._place, False, torch.strided)
            for spec in self
        )
        self._expected[rows] = expected
        return expected


def _contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of contiguous memory of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def is_flagged(value: torch.Tensor) -> bool:
    """Return whether torch converts a tensor's memory lazily when reading it."""
    return value.is_neg() or value.is_conj() or value._is_zerotensor()


def never(*_: Any) -> bool:
    """Return False: the fast check before any call is known."""
    return False
