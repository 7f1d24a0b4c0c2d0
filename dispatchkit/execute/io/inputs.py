"""The static inputs of a runner together, and the check of a call against them."""

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

# Expected shapes kept ready, one tuple per batch size; beyond it they are made again.
MAX_KEPT_SIZES = 4096
_ARRAY_FACTS = attrgetter("shape", "dtype")
# How often the quick check of a set of inputs is made anew for a size that has one: calls that
# differ in what it sees, and this package does not ask for, must not pay for making it each time.
_MAX_REMADE = 64
# Compares all that torch keeps of some tensors in one call, a fifth of the price of reading their
# properties one by one. Torch has it for compiled functions and does not document it: where it is
# missing, and whenever it says no, the properties are read.
TensorGuards: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)
#: Words of a call that no input may be named by.
RESERVED_NAMES = frozenset({"num_reqs", "uniform", "loras", "ceiling", "priority"})


class InputSet:
    """The static inputs of one runner, in declared order.

    Args:
        specs: Static inputs by name; at least one is batched.
        device: Where the tensors of a call must be.

    Raises:
        ConfigError: There is no batched input, or a name is a word of a call's own.
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
                "Without one nothing says how many rows a call has.",
            )
        self._lead, self._lead_dim = self.batched[0]
        self._expected: dict[int, tuple[Any, ...]] = {}
        self.host: tuple[int, ...] = tuple(index for index, spec in enumerate(self) if spec.host)
        self.on_device: tuple[int, ...] = tuple(
            index for index, spec in enumerate(self) if not spec.host
        )
        # What a value must have, read and compared in two calls. With one GPU in sight a flag
        # says that a tensor is there; a device would have to be made.
        is_only = device.type == "cuda" and torch.cuda.device_count() == 1
        self._place: Any = True if is_only else device
        self._facts: Any = attrgetter(
            "shape", "dtype", "is_cuda" if is_only else "device", "requires_grad", "layout"
        )
        if len(self.host) == len(self.names):
            self._facts = _ARRAY_FACTS
        self._quick: dict[int, tuple[Callable[..., bool], Callable[..., bool]]] = {}
        self._num_remade = 0
        # For a single name it gives the value and not a tuple of one.
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
        """Return the bytes on the device of buffers with so many rows."""
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

    # ``check(values)`` returns the number of rows of a call whose inputs all fit, and whether
    # all of them are known to be tensors whose memory can be read as it is (contiguous, without
    # lazy conjugation or negation), and autocast to be off. It raises InputError if one is not a
    # tensor, or has another type, device, rank, fixed dimension or number of rows than it should.
    # Host inputs are checked as arrays: see ``host_arrays``. It is not kept here: what an object
    # has bound to itself only the collector frees.

    @property
    def check(self) -> Callable[[Any], tuple[int, bool]]:
        """What checks calls of this kind of inputs."""
        if not self.host and TensorGuards is not None:
            return self._check_tensors
        return self._check_mixed if 0 < len(self.host) < len(self.names) else self._check_alike

    def _check_tensors(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Check device inputs by the tensors of an earlier call of this size."""
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
            validate(self.specs, self.device, values)  # a subclass has these facts, too
        self._note_fit(rows, values)
        return rows, False

    def _note_fit(self, rows: int, values: Sequence[torch.Tensor]) -> None:
        """Keep what a call that fits looks like: contiguous, and with any strides."""
        if self._num_remade >= _MAX_REMADE:
            self._quick.clear()
            return
        if rows in self._quick:
            self._num_remade += 1
        elif len(self._quick) >= MAX_KEPT_SIZES:
            self._quick.clear()
        # A tensor that requires a gradient fits while gradients are off, and not for good.
        if all(type(value) is torch.Tensor and not value.requires_grad for value in values):
            shapes = [list(value.shape) for value in values]
            guards = [
                TensorGuards(*values, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
                for strides in (
                    [_contiguous(shape) for shape in shapes],
                    [[None] * len(shape) for shape in shapes],
                )
            ]
            # The guard knows these flags and whether the device's autocast is on, and says yes
            # where they are alike.
            is_special = torch.is_autocast_enabled(self.device.type)
            is_readable = never if is_special or any(map(is_flagged, values)) else guards[0]
            self._quick[rows] = (is_readable, guards[1])

    def _check_alike(self, values: Sequence[Any]) -> tuple[int, bool]:
        """Check inputs that are all on the device, or all arrays."""
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
        """Return a call's values with those of host inputs as arrays, where they can be.

        Raises:
            InputError: An array was given for a type that numpy has no word for.
        """
        made: list[Any] | None = None
        for index, dtype, is_plain in self._host_types:
            value = values[index]
            if type(value) is self._array_type:
                if is_plain:
                    continue
                raise InputError(
                    self.names[index],
                    f"Input {self.names[index]!r} is {dtype}, which numpy has no type for: an "
                    f"array of {value.dtype} could mean anything. Give a tensor.",
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
        """Return a checked call as tensors on the device; arrays are copied, tensors are there."""
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
    """Return whether torch changes what is in a tensor's memory on the way."""
    return value.is_neg() or value.is_conj() or value._is_zerotensor()


def never(*_: Any) -> bool:
    """Return False: the check of calls that are not known yet."""
    return False
