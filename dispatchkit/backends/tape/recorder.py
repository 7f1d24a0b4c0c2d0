"""Record the operations of a callable by running it once on a CPU.

A capture on a device runs no operations. On a CPU, a callable must run to be recorded, so its
effects are undone, even if it fails:

- Each storage outside the capture is saved before the first operation that writes it.
- Operations that draw random numbers use a copy of their generator.

A TorchDispatchMode records operations below autograd and autocast, so a training step is recorded
as plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.backends.tape.operations import (
    run_parts,
    run_step,
    writing_call,
    written_arguments,
)
from dispatchkit.backends.tape.steps import Step, TensorRef, flat_tensors, replace_tensors
from dispatchkit.backends.watching.collectives import (
    barrier_error,
    blocking,
    check_recordable,
    is_collective,
    writes_first_argument,
)
from dispatchkit.backends.watching.dispatch_mode import OperationMode, tensors_in
from dispatchkit.backends.watching.host_sync import sync_of

# Operations that allocate or alias memory without writing it. Replays skip them.
_WRITES_NOTHING = frozenset(
    "aten::" + name
    for name in (
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided "
        "resize_ resize_as_ set_ detach alias lift_fresh"
    ).split()
)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which is unique while the storage exists."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _check_dense(tensor: torch.Tensor) -> None:
    """Raise for a tensor that the tape cannot record: only dense CPU tensors can be recorded."""
    if tensor.is_nested:
        raise HostSyncError("an operation on a nested tensor", "its sizes are on the host")
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"the tape cannot record tensors on {tensor.device}; use CPU tensors, or another "
            "backend"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise RuntimeError(
            f"the tape cannot record {kind} tensors; convert them to dense tensors, or move the "
            "operation into an eager piece"
        )


class Recorder(OperationMode):
    """A mode that records the operations of one capture as a list of ``Step``.

    Attributes:
        steps: The operations of a replay, in order.
        storages: All storages used, by identity. They are kept alive so that identities stay
            unique.
        own: Identities of the storages created inside the capture.
        first_error: Error of the first refused call, even if the callable caught it.
        is_paused: Whether operations run without being recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first_error: HostSyncError | None = None
        self.is_paused = False
        self.restart()

    def restart(self) -> None:
        """Clear the recording."""
        self.steps: list[Step] = []
        self.storages: dict[int, Any] = {}
        self.own: set[int] = set()
        self._saved: dict[int, Any] = {}
        self._forks: dict[int, tuple[Any, Any, Any]] = {}

    # -- state of the capture -----------------------------------------------------------

    def note_error(self, error: HostSyncError) -> None:
        """Record a refused call, so that the capture fails even if the callable continues."""
        self.first_error = self.first_error or error

    def raise_swallowed_error(self) -> None:
        """Raise the error of the first refused call, if any, even if the callable caught it."""
        if self.first_error is not None:
            raise self.first_error

    def add_generators(self, generators: Any) -> None:
        """Copy the generators that the callable may use."""
        for generator in generators:
            self._fork(generator)

    def restore(self) -> None:
        """Restore the contents of all saved storages."""
        for identity, saved in self._saved.items():
            storage = self.storages[identity]
            if storage.nbytes() != saved.nbytes():
                storage.resize_(saved.nbytes())
            storage.copy_(saved)
        self._saved.clear()

    @property
    def draws(self) -> bool:
        """Whether the callable drew from any generator."""
        return any(
            not torch.equal(start, fork.get_state()) for _, fork, start in self._forks.values()
        )

    def kept(self) -> set[int]:
        """Return the identities of the storages that outlive the capture.

        They belong to outputs, and to other tensors that user code still references.

        Call this method only after the callable has returned. The recorder holds one reference to
        each storage, so any further reference belongs to other code.
        """
        return {
            identity
            for identity in self.own
            if torch._C._storage_Use_Count(self.storages[identity]._cdata) > 1
        }

    # -- recording ----------------------------------------------------------------------

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record an operation."""
        error = sync_of(func, args) or barrier_error(func)
        if error is not None:
            self.note_error(error)
            raise error
        check_recordable(func)
        if is_collective(func):
            return self._collective(func, args, kwargs)
        result = run_parts(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            self._save(tensor)
        inputs = list(tensors_in((*args, *kwargs.values())))
        for tensor in inputs:
            self._add_storage(tensor)
        refs = {id(tensor): self._ref(tensor) for tensor in inputs}
        with self._generators_forked(func, args, kwargs) as draw_again:
            call, result = run_step(func, args, kwargs)
            fresh = self._fresh(result)
            # Update the references of resized arguments, because replays do not resize tensors.
            refs |= {id(tensor): self._ref(tensor) for tensor in written}
            self._check_sizes(func, written)
            if not self._writes_data(func, written, fresh):
                return result
            out: tuple[str, ...] = ()
            kept = list(kwargs)
            if not func._schema.is_mutable:
                draw_again()
                call, kept, out = writing_call(func, args, kwargs, fresh)
        ref_args, ref_kwargs = replace_tensors(
            (args, {key: kwargs[key] for key in kept}), lambda tensor: refs[id(tensor)]
        )
        results = tuple((index, self._ref(tensor)) for index, tensor in fresh)
        if out:
            named = tuple(zip(out, (ref for _, ref in results), strict=True))
            self.steps.append(Step(call, tuple(ref_args), ref_kwargs, out=named))
        else:
            self.steps.append(Step(call, tuple(ref_args), ref_kwargs, copies=results))
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a collective; each replay runs it again and waits for it."""
        for tensor in tensors_in(args[:1]) if writes_first_argument(func) else ():
            self._save(tensor)
        inputs = list(tensors_in((*args, *kwargs.values())))
        for tensor in inputs:
            self._add_storage(tensor)
        refs = {id(tensor): self._ref(tensor) for tensor in inputs}
        call = blocking(func)
        result = call(*args, **kwargs)
        ref_args, ref_kwargs = replace_tensors((args, kwargs), lambda tensor: refs[id(tensor)])
        self.steps.append(Step(call, tuple(ref_args), ref_kwargs))
        return result

    @staticmethod
    def _writes_data(func: Any, written: list[Any], fresh: list[Any]) -> bool:
        """Return whether an operation writes data and must therefore run in replays."""
        if func._schema.name in _WRITES_NOTHING or torch.Tag.inplace_view in func.tags:
            return False
        return bool(written or fresh)

    def _check_sizes(self, func: Any, written: list[torch.Tensor]) -> None:
        """Raise if a tensor from outside the capture was resized, which may change its address."""
        for tensor in written:
            saved = self._saved.get(storage_id(tensor))
            if saved is not None and saved.nbytes() != tensor.untyped_storage().nbytes():
                raise RuntimeError(
                    f"{func._schema.name} resized a tensor created outside the capture "
                    f"(from {saved.nbytes()} to {tensor.untyped_storage().nbytes()} bytes); "
                    "create the tensor with its final size"
                )

    def _add_storage(self, tensor: torch.Tensor) -> None:
        """Add a tensor's storage to the recording; refuse tensors that cannot be recorded."""
        _check_dense(tensor)
        self.storages.setdefault(storage_id(tensor), tensor.untyped_storage())

    def _fresh(self, result: Any) -> list[tuple[int, torch.Tensor]]:
        """Return the results with new storages, and their positions in the flattened result."""
        fresh: list[tuple[int, torch.Tensor]] = []
        for index, tensor in enumerate(flat_tensors(result)):
            _check_dense(tensor)
            identity = storage_id(tensor)
            known = identity in self.storages
            if not known or any(identity == storage_id(other) for _, other in fresh):
                self._add_storage(tensor)
                self.own.add(identity)
                fresh.append((index, tensor))
        return fresh

    @staticmethod
    def _ref(tensor: torch.Tensor) -> TensorRef:
        return TensorRef(
            storage_id(tensor),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _save(self, tensor: torch.Tensor) -> None:
        """Save a tensor's storage before its first write, unless the capture created it."""
        _check_dense(tensor)
        identity = storage_id(tensor)
        if identity not in self.own and identity not in self._saved:
            self._add_storage(tensor)
            self._saved[identity] = tensor.untyped_storage().clone()

    # -- generators ---------------------------------------------------------------------

    def _fork(self, generator: Any) -> Any:
        """Return the copy that replaces a generator during the capture; create it if needed."""
        known = self._forks.get(id(generator))
        if known is None:
            state = generator.get_state()
            fork = torch.Generator()
            fork.set_state(state)
            known = self._forks[id(generator)] = (generator, fork, state)
        return known[1]

    @contextmanager
    def _generators_forked(self, func: Any, args: Any, kwargs: Any) -> Iterator[Callable[[], None]]:
        """Make an operation draw from copies of its generators.

        Yields:
            A function that resets the generators, so that the next draw repeats the same numbers.
        """
        custom = func.namespace not in ("aten", "prims")
        if not (custom or torch.Tag.nondeterministic_seeded in func.tags):
            yield lambda: None
            return
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        generators = given or [torch.default_generator]
        forks = [self._fork(generator) for generator in generators]
        real = [generator.get_state() for generator in generators]
        start = [fork.get_state() for fork in forks]

        drawn: list[Any] = []

        def draw_again() -> None:
            drawn.extend(generator.get_state() for generator in generators)
            for generator, state in zip(generators, start, strict=True):
                generator.set_state(state)

        try:
            for generator, state in zip(generators, start, strict=True):
                generator.set_state(state)
            yield draw_again
            ends = drawn or [generator.get_state() for generator in generators]
            for fork, state in zip(forks, ends, strict=True):
                fork.set_state(state)
        finally:
            for generator, state in zip(generators, real, strict=True):
                generator.set_state(state)
