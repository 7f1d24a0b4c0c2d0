"""Save the state that a step changes, and restore it after a warmup.

A warmup runs the step on dummy rows, so everything that it writes must be restored: tensors that
the user declared as state, random generators, and undeclared tensors. Undeclared writes are
detected in the first warmup by a torch dispatch mode. Before an operation writes to a storage that
the step did not create, the storage is saved, up to a limit.

Functions wrapped in torch.compile run uncompiled in this warmup, because a dispatch mode does not
intercept the operations of compiled code.

The dispatch mode does not detect a write if its kernel is launched without an operator, or if the
operator does not declare the write as a mutation. ``ContentWatch`` detects such writes to tensors
that the step is known to reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.optional import WarmupNotes
from dispatchkit.backends.watching.collectives import is_collective, writes_first_argument
from dispatchkit.backends.watching.compiled_code import Calls, dynamo_is_loaded
from dispatchkit.backends.watching.dispatch_mode import (
    OperationMode,
    PerOperation,
    WeakStorages,
    inference_mode,
    tensors_in,
)
from dispatchkit.backends.watching.host_sync import run_composite
from dispatchkit.errors import CaptureError, ConfigError, counted
from dispatchkit.keys.checks import refuses_unknown_names


def _tensors(value: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Convert a list of tensors to a tuple; reject a single tensor, which is also iterable."""
    if isinstance(value, torch.Tensor):
        hint = f"Put the tensor into a list: {name}=[tensor]."
        raise ConfigError(name, value, "a list of tensors", hint)
    if not isinstance(value, Iterable):
        raise ConfigError(name, value, "a list of tensors")
    tensors = tuple(value)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name}[{index}]", tensor, "a tensor")
    return tensors


def _declared(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return _tensors(tensors, "tensors")


def _scratch(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return _tensors(tensors, "scratch")


def _generators(generators: Iterable[torch.Generator]) -> tuple[torch.Generator, ...]:
    if isinstance(generators, torch.Generator):
        hint = "Put the generator into a list: generators=[generator]."
        raise ConfigError("generators", generators, "a list of torch.Generator objects", hint)
    if not isinstance(generators, Iterable):
        raise ConfigError("generators", generators, "a list of torch.Generator objects")
    found = tuple(generators)
    for index, generator in enumerate(found):
        if not isinstance(generator, torch.Generator):
            raise ConfigError(f"generators[{index}]", generator, "a torch.Generator")
    return found


@refuses_unknown_names
@attrs.frozen(eq=False, repr=False)
class StepState:
    """The state that a step changes besides its outputs, as declared by the user.

    Attributes:
        tensors: Tensors that the step changes, such as a KV cache. They are saved before warmups
            and restored afterwards.
        scratch: Tensors that warmups may change, because padding rows write only to locations that
            are never read. They are not saved.
        generators: Random generators that the step uses besides the default generators.
    """

    tensors: tuple[torch.Tensor, ...] = attrs.field(default=(), converter=_declared)
    scratch: tuple[torch.Tensor, ...] = attrs.field(default=(), converter=_scratch)
    generators: tuple[torch.Generator, ...] = attrs.field(default=(), converter=_generators)

    @classmethod
    def of(cls, state: StepState | Iterable[torch.Tensor]) -> StepState:
        """Convert a list of tensors to declared state."""
        return state if isinstance(state, StepState) else cls(_tensors(state, "state"))

    def __repr__(self) -> str:
        # Tensors are only counted, because printing a tensor waits for the device.
        return (
            f"<StepState of {counted(len(self.tensors), 'tensor')}, "
            f"{counted(len(self.scratch), 'scratch tensor')}, "
            f"{counted(len(self.generators), 'generator')}>"
        )


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while the storage is alive."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain and strided, and has memory."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not is_plain or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.untyped_storage().nbytes() > 0


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the given dtype that views a whole storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor; for inference tensors, an alias for use outside inference mode."""
    if not tensor.is_inference() or tensor.layout is not torch.strided:
        return tensor
    with inference_mode(False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


class StorageSet:
    """Set of storages, kept alive so that their identities are not reused.

    Args:
        tensors: Tensors whose storages are added.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Add the storage of a tensor."""
        self._storages[storage_of(tensor)] = tensor.untyped_storage()
        self._dtypes.setdefault(storage_of(tensor), tensor.dtype)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._storages

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the set contains a storage."""
        return storage._cdata in self._storages

    def __iter__(self) -> Iterator[torch.UntypedStorage]:
        return iter(self._storages.values())

    def __len__(self) -> int:
        return len(self._storages)

    def typed(self) -> Iterator[tuple[torch.UntypedStorage, torch.dtype]]:
        """Yield each storage with the dtype of the first tensor that was added for it."""
        for identity, storage in self._storages.items():
            yield storage, self._dtypes[identity]


class Snapshot:
    """Copies of storages and generator states that can be restored.

    Args:
        device: Device whose default generator is saved, in addition to that of the CPU.
        generators: Additional generators to save.
        wait: Function that is called with a storage before the storage is saved, waits for steps of
            other runners that change the storage, and returns whether there are such runners. If
            None, saving does not wait.
        end: Function that is called after a restore if ``wait`` has returned True for a storage.

    Attributes:
        draws: Whether the step may draw random numbers; if not, generators are not restored.
    """

    draws: bool

    def __init__(
        self,
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
        wait: Callable[[torch.UntypedStorage], bool] | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._wait, self._end, self._is_shared = wait, end, False
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        found = [torch.default_generator, *generators]
        if device.type == "cuda":
            found.append(torch.cuda.default_generators[device.index])
        self._generators = [(one, one.get_state()) for one in found]
        self.draws = True

    @property
    def generators(self) -> list[torch.Generator]:
        """The saved random generators."""
        return [one for one, _ in self._generators]

    @property
    def saved_generator_states(self) -> bytes:
        """The saved generator states as bytes; empty if the step draws no random numbers."""
        states = (state for _, state in self._generators if self.draws)
        return b"".join(bytes(state.tolist()) for state in states)

    def generator_states(self) -> bytes:
        """Return the current generator states, in the format of ``saved_generator_states``."""
        states = (one.get_state() for one in self.generators if self.draws)
        return b"".join(bytes(state.tolist()) for state in states)

    def save(self, storage: torch.UntypedStorage) -> None:
        """Copy a storage, unless it is already saved."""
        if storage._cdata not in self._saved:
            if self._wait is not None and self._wait(storage):
                self._is_shared = True
            self._saved[storage._cdata] = (storage, storage.clone())

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._saved

    def saved(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
        """Return the saved contents of a storage as a tensor of a dtype."""
        return typed(self._saved[storage._cdata][1], dtype)

    def save_as(self, storage: torch.UntypedStorage, saved: torch.UntypedStorage) -> None:
        """Use an existing copy of a storage, unless the storage is already saved."""
        self._saved.setdefault(storage._cdata, (storage, saved))

    def contents(self) -> list[torch.Tensor]:
        """Return copies of the current contents of the saved storages, as uint8 tensors."""
        return [typed(one.clone(), torch.uint8) for one, _ in self._saved.values()]

    def restore(self) -> None:
        """Restore the storages on the current stream; if ``draws`` is True, also the generators."""
        for storage, saved in self._saved.values():
            storage.copy_(saved)
        if self._is_shared:
            self._end()
        if not self.draws:
            return  # numbers that another thread drew after the snapshot must not be repeated
        for generator, state in self._generators:
            generator.set_state(state)


@attrs.frozen
class CompiledCode:
    """Properties of functions wrapped in torch.compile, recorded in an uncompiled run.

    Attributes:
        reads: Storages that the functions read and that the step did not create. The graph must
            keep them alive.
        num_operations: Number of operations that the functions ran.
    """

    reads: tuple[torch.UntypedStorage, ...]
    num_operations: int


class WriteWatch(OperationMode):
    """Dispatch mode that records the peak memory of a run and its writes to existing memory.

    Args:
        inputs: Storages of the static inputs, which the step must not write.
        ignore: Storages that the step may write: declared scratch and state.
        check_write: Function that checks each write to a tensor other than an input, given the
            tensor and the operation; None allows all of these writes.
        snapshot: Snapshot that saves undeclared storages before their first write.
        limit: Maximum number of bytes of undeclared storages to save.
        meter: Whether to measure ``peak_bytes``, which takes time.
        notes: Object that records each operation of the run, for use in the next capture.

    Attributes:
        written: Undeclared tensors that existed before the run and that the step wrote.
        peak_bytes: Peak size in bytes of live tensors that the run created.
        draws: Whether an operation changed the state of a generator. An operation that may draw
            random numbers does not always do so: attention, for example, draws only with dropout.
        accepts_any_number: Whether all operations accept arbitrary numbers. False after an
            operation that converts floating-point numbers to integers, draws from given
            probabilities, asserts, or is not part of torch.
    """

    def __init__(
        self,
        *,
        inputs: StorageSet,
        ignore: Sequence[StorageSet],
        check_write: Callable[[torch.Tensor, str], None] | None = None,
        snapshot: Snapshot,
        limit: int,
        meter: bool = True,
        notes: WarmupNotes | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.written: list[torch.Tensor] = []
        self.peak_bytes: int = 0
        self.draws: bool = False
        self.accepts_any_number: bool = True
        self._computed: set[torch.dtype] = set()
        self._calls = Calls(id(sys._getframe(1))) if dynamo_is_loaded() else None
        self._outside_reads = WeakStorages()
        self._inputs, self._ignore, self._check_write = inputs, ignore, check_write
        self._snapshot, self._left = snapshot, limit
        self._meter, self._notes = meter, notes
        self._own: set[int] = set()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record its writes and the memory that it allocates."""
        if self._notes is not None:
            self._notes.record(func, args, kwargs)
        facts = _facts_of(func)
        if self._calls is not None and self._calls.note(sys._getframe(2)):
            self._record_outside_reads(args, kwargs)
        if torch.is_inference_mode_enabled():
            result = run_composite(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        for tensor in _written_by(func, args, kwargs):
            self._before_write(tensor, func._schema.name)
        if facts.may_draw and not self.draws:
            result = self._run_drawing(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if facts.returns_nothing:
            return None  # required by torch, even if the operation returns its list argument
        if type(result) is torch.Tensor:  # fast path for nearly all operations
            self._computed.add(result.dtype)
        else:
            self._computed.update(tensor.dtype for tensor in tensors_in((result,)))
        if facts.may_reject_numbers or (facts.is_conversion and _makes_integers(args, result)):
            self.accepts_any_number = False
        if facts.makes_new:
            given = () if facts.is_trusted else (*args, *kwargs.values())
            self._record_new(result, given)
        return result

    def rounding(self) -> float:
        """Return the largest ``eps`` of the results' dtypes; 0 if all results are integers."""
        types = (one for one in self._computed if one.is_floating_point or one.is_complex)
        return max((torch.finfo(one).eps for one in types), default=0.0)

    def compiled_code(self) -> CompiledCode | None:
        """Return properties of compiled functions; None if the step calls no such function."""
        if self._calls is None or not self._calls.num_plain:
            return None
        reads = tuple(one for one in self._outside_reads.alive() if one._cdata not in self._own)
        return CompiledCode(reads, self._calls.num_plain)

    def _run_drawing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that may draw random numbers, and record whether it does."""
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        generators = [*self._snapshot.generators, *given]
        before = [one.get_state() for one in generators]
        self.draws = True  # stays True if the operation raises
        result = func(*args, **kwargs)
        after = [one.get_state() for one in generators]
        self.draws = not all(map(torch.equal, before, after))
        return result

    def _record_outside_reads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors_in((*args, *kwargs.values())):
            if not self._is_own(tensor):
                self._outside_reads.add(tensor.untyped_storage())

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._own

    def _before_write(self, tensor: torch.Tensor, operation: str) -> None:
        if tensor in self._inputs:
            raise CaptureError(
                f"The step writes to one of its inputs with {operation}. An eager step would "
                "change the caller's tensor, but a graph changes only its static copy. Clone the "
                "input in the step, or declare the tensor as state instead of as an input.",
                reason="input_written",
            )
        if self._check_write is not None:
            self._check_write(tensor, operation)
        if (
            any(tensor in known for known in self._ignore)
            or tensor in self._snapshot
            or self._is_own(tensor)
        ):
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() > self._left:
            raise CaptureError(
                f"The step writes to an undeclared {tensor.dtype} tensor of shape "
                f"{tuple(tensor.shape)} with {operation}. Its storage has {storage.nbytes():,} "
                f"bytes, but only {self._left:,} more bytes of undeclared state can be saved "
                "during warmups. Declare the tensor with state=[tensor], or with "
                "state=StepState(scratch=[tensor]) if padding rows write only to locations that "
                "are never read. Alternatively, increase state_limit_bytes by at least "
                f"{storage.nbytes() - self._left:,}.",
                reason="undeclared_state",
            )
        self._left -= storage.nbytes()
        self._snapshot.save(storage)
        self.written.append(tensor)

    def _record_new(self, result: Any, given: tuple[Any, ...]) -> None:
        known = {storage_of(tensor) for tensor in tensors_in(given)} if given else ()
        for tensor in tensors_in((result,)):
            identity = storage_of(tensor)
            if identity not in known:
                # Storages from before the run are alive, so their identities cannot be reused here.
                self._own.add(identity)
                if self._meter:
                    storage = tensor.untyped_storage()
                    self._alive[identity] = (StorageWeakRef(storage), storage.nbytes())
        if self._meter:
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            alive = sum(num_bytes for _, num_bytes in self._alive.values())
            self.peak_bytes = max(self.peak_bytes, alive)


class OperatorWrites(OperationMode):
    """Dispatch mode that records the writes declared in operator schemas.

    Attributes:
        written: Storages that were written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.written: StorageSet = StorageSet()

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record the storages that it writes."""
        if torch.is_inference_mode_enabled():
            result = run_composite(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        for tensor in _written_by(func, args, kwargs):
            self.written.add(tensor)
        return func(*args, **kwargs)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the argument tensors that an operation writes, according to its schema."""
    for index, name in _facts_of(func).writes:
        yield from tensors_in((args[index] if index < len(args) else kwargs.get(name),))


@attrs.frozen
class _Facts:
    """Properties of an operation, derived from its schema and name.

    Attributes:
        writes: Index and name of each argument that the operation writes.
        returns_nothing: Whether the operation has no result.
        makes_new: Whether a result may be in new memory.
        is_trusted: Whether results that the schema does not mark as views are always in new memory.
        may_draw: Whether the operation may draw random numbers.
        may_reject_numbers: Whether the operation may fail for some numbers.
        is_conversion: Whether the operation may convert between dtypes.
    """

    writes: tuple[tuple[int, str], ...]
    returns_nothing: bool
    makes_new: bool
    is_trusted: bool
    may_draw: bool
    may_reject_numbers: bool
    is_conversion: bool


# Operations that contain a device assertion, for example that numbers are in 0..1 or nonnegative.
_MAY_REJECT_NUMBERS = frozenset(
    f"aten::{name}"
    for name in (
        *("bernoulli", "bernoulli_", "binomial", "multinomial", "poisson", "normal"),
        *("_standard_gamma", "_sample_dirichlet", "_dirichlet_grad", "binary_cross_entropy"),
        *("_assert_async", "_functional_assert_async", "_assert_scalar"),
    )
)


def _makes_integers(args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a conversion turns floating-point numbers into integers (not booleans)."""
    made = {one.dtype for one in tensors_in((result,))} - {torch.bool}
    if not made or any(one.is_floating_point or one.is_complex for one in made):
        return False
    given = [one.dtype for one in tensors_in(args)]
    return any(one.is_floating_point or one.is_complex for one in given)


_CONVERSIONS = frozenset(f"aten::{name}" for name in ("_to_copy", "to", "copy_", "copy", "type_as"))


@PerOperation
def _facts_of(func: Any) -> _Facts:
    schema = func._schema
    writes = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if is_collective(func) and writes_first_argument(func):
        writes = ((0, schema.arguments[0].name),)
    return _Facts(
        writes=writes,
        returns_nothing=not schema.returns,
        makes_new=any(one.alias_info is None for one in schema.returns),
        is_trusted=schema.name.startswith("aten::") and schema.name != "aten::_unsafe_view",
        may_draw=torch.Tag.nondeterministic_seeded in func.tags,
        may_reject_numbers=schema.name in _MAY_REJECT_NUMBERS
        or not schema.name.startswith(("aten::", "prims::", "prim::")),
        is_conversion=schema.name in _CONVERSIONS,
    )


@contextmanager
def restored(snapshot: Snapshot) -> Iterator[Snapshot]:
    """Restore a snapshot on exit, even after an error."""
    is_restored = False
    try:
        try:
            yield snapshot
        finally:
            snapshot.restore()
            is_restored = True
    finally:
        if not is_restored:  # a signal handler has raised in the first call
            snapshot.restore()


class ContentWatch:
    """Detector of writes that no operator schema declares.

    For example, BatchNorm in training mode updates its running statistics through operations whose
    schemas do not declare the write. Contents before and after a run are compared: copies of small
    tensors, and sums of large tensors, which are usually weights.

    Args:
        tensors: Tensors that the step reaches.
        limit: Maximum number of bytes to copy.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], limit: int) -> None:
        small: dict[torch.device, list[torch.Tensor]] = {}
        large: dict[torch.device, list[torch.Tensor]] = {}
        seen: set[int] = set()
        for tensor in sorted(tensors, key=lambda one: one.untyped_storage().nbytes()):
            storage = tensor.untyped_storage()
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            group = small if storage.nbytes() <= limit else large
            if group is small:
                limit -= storage.nbytes()
            group.setdefault(tensor.device, []).append(tensor)
        self._copies = [_Copies(one) for one in small.values()]
        self._sums = [_Sums(one) for one in large.values()]

    def changed(self) -> list[tuple[torch.Tensor, torch.UntypedStorage]]:
        """Return the written tensors that were copied, each with the copy of its storage."""
        return [found for one in self._copies for found in one.changed()]

    def changed_beyond_limit(self) -> list[torch.Tensor]:
        """Return the written tensors that were not copied, because of the limit."""
        return [found for one in self._sums for found in one.changed()]


#: Alignment of the copies, in bytes; it lets kernels use wide loads.
_ALIGNMENT: Final = 16
#: Number of columns that are summed separately. The number is prime: a write that only moves
#: values, such as a roll, then usually moves them to other columns and changes the sums.
_COLUMNS: Final = 1021


class _Copies:
    """Copies of storages on one device, kept in one block so that few kernels compare them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._bytes = [_bytes(one.untyped_storage()) for one in tensors]
        self._memory, self._copies = self._read()

    def changed(self) -> list[tuple[torch.Tensor, torch.UntypedStorage]]:
        memory, copies = self._read()
        if torch.equal(memory, self._memory):
            return []
        return [
            (tensor, before.clone().untyped_storage())
            for tensor, before, now in zip(self._tensors, self._copies, copies, strict=True)
            if not torch.equal(before, now)
        ]

    def _read(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy the current contents; return the block and the copy of each storage in it."""
        sizes = [-(-one.numel() // _ALIGNMENT) * _ALIGNMENT for one in self._bytes]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._bytes[0].device)
        pairs = zip(memory.split(sizes), self._bytes, strict=True)
        copies = [part[: one.numel()] for part, one in pairs]
        torch._foreach_copy_(copies, self._bytes)
        return memory.view(torch.int64), copies


class _Sums:
    """Sums over storages on one device; almost every write changes a sum."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._parts = [_summed(one.untyped_storage()) for one in tensors]
        self._before = self._read()

    def changed(self) -> list[torch.Tensor]:
        now = self._read()
        if torch.equal(now, self._before):
            return []
        sizes = [_COLUMNS + words.numel() + rest.numel() for _, words, rest in self._parts]
        parts = zip(self._tensors, self._before.split(sizes), now.split(sizes), strict=True)
        return [tensor for tensor, before, one in parts if not torch.equal(before, one)]

    def _read(self) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for rows, words, rest in self._parts:
            parts += [rows.sum(0), words]
            if rest.numel():
                parts.append(rest.long())
        return torch.cat(parts)


def _summed(storage: torch.UntypedStorage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a storage into rows of ``_COLUMNS`` words, the remaining words and the last bytes."""
    content = _bytes(storage)
    num_words = content.numel() // 8
    num_rows = num_words // _COLUMNS
    words = content[: num_words * 8].view(torch.int64)
    rows = words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS)
    return rows, words[num_rows * _COLUMNS :], content[num_words * 8 :]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return typed(storage, torch.uint8)
