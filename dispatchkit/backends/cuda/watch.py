"""Watch the operations of captures and warmups on a CUDA device."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.backends.cuda.segments import Segment
from dispatchkit.backends.watching.compiled_code import Calls
from dispatchkit.backends.watching.dispatch_mode import (
    OperationMode,
    PerOperation,
    WeakStorages,
)
from dispatchkit.backends.watching.host_sync import (
    HostSyncGuard,
    is_composite,
    is_data_dependent,
    may_be_data_dependent,
    run_composite,
    sync_of,
)

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")


class _ArgumentStorages(WeakStorages):
    """Weak references to the device storages that operations read or write.

    The references are weak, because later operations must be able to reuse the memory of
    intermediates.
    """

    def record(self, values: Iterable[Any]) -> bool:
        """Record the tensor arguments of an operation; return whether any is on a device."""
        found = False
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_cuda:
                    found = True
                    self.add(value.untyped_storage())
            elif isinstance(value, (tuple, list)):
                found = self.record(value) or found
        return found

    def outside(self, segments: Iterable[Segment]) -> list[torch.UntypedStorage]:
        """Return the recorded storages that are alive and not in the graph's pool."""
        spans = [(one["address"], one["address"] + one["total_size"]) for one in segments]
        found = []
        for storage in self.alive():
            address = storage.data_ptr()
            if not any(start <= address < end for start, end in spans):
                found.append(storage)
        return found


class WarmupNotes:
    """Notes about the operations of a warmup.

    A capture of the same operations can use the notes instead of a watch.

    Attributes:
        is_plain: Whether the notes can be used. They cannot if an operation makes the host read
            device data, copies data between host and device, is composite, or is higher-order.
    """

    def __init__(self) -> None:
        self.is_plain: bool = True
        self._storages = _ArgumentStorages()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record an operation before it runs."""
        on_device = self._storages.record((*args, *kwargs.values()) if kwargs else args)
        may_wait, copies, is_hidden = _properties_of(func)
        if (
            is_hidden
            or (may_wait and on_device and is_data_dependent(func, args))
            or (copies and len(_kinds_of(func, args, kwargs)) > 1)
        ):
            self.is_plain = False

    def outside(self, segments: Iterable[Segment]) -> list[torch.UntypedStorage]:
        """Return the recorded storages that a graph of these operations must keep alive.

        Args:
            segments: Memory segments of the graph's pool. Storages in them are excluded.
        """
        return self._storages.outside(segments)


class CaptureWatch(OperationMode):
    """A mode that refuses calls that would invalidate a capture.

    It also records the storages that the graph must keep alive.

    Args:
        compiled: Whether the callable calls functions wrapped in torch.compile, whose kernels are
            not watched. If True, calls that wait for the device are recognized only by the
            operations that they run, because a function mode would cause recompilation inside the
            capture.

    Attributes:
        first_error: Error of the first refused call, even if the callable caught it.
        draws: Whether a watched operation may draw random numbers.
        host_tensors: Host tensors that captured copies read or write.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = Calls() if compiled else None
        self.first_error: HostSyncError | None = None
        self._begin()

    def _begin(self) -> None:
        self.draws: bool = False
        self.host_tensors: list[torch.Tensor] = []
        self._storages = _ArgumentStorages()

    def pause(self) -> None:
        """Ignore operations until ``resume``, because a segment has ended."""
        self.is_paused = True

    def resume(self) -> None:
        """Watch operations again, because the next segment has begun."""
        self.is_paused = False
        self._begin()

    @property
    def num_plain_operations(self) -> int:
        """Number of operations that ran uncompiled in functions wrapped in torch.compile."""
        return 0 if self._calls is None else self._calls.num_plain

    def outside(self, segments: Iterable[Segment]) -> list[torch.UntypedStorage]:
        """Return the device storages outside the pool that the graph reads or writes.

        Args:
            segments: Memory segments of the graph's pool. Storages in them are excluded.
        """
        return self._storages.outside(segments)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run compiled."""
        return True

    def note_error(self, error: HostSyncError) -> None:
        """Record a refused call, so that the capture fails even if the callable continues."""
        self.first_error = self.first_error or error

    def raise_swallowed_error(self) -> None:
        """Raise the error of a refused call if the callable caught it."""
        if self.first_error is not None:
            raise self.first_error

    def watching(self) -> ExitStack:
        """Return a context in which all calls of this thread are watched."""
        stack = ExitStack()
        if self._calls is None:
            stack.enter_context(HostSyncGuard(self, "cuda"))
        stack.enter_context(self)
        return stack

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation unless it would invalidate the capture, and record its arguments."""
        if self._calls is not None:
            self._calls.note(sys._getframe(2))
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        on_device = self._storages.record((*args, *kwargs.values()) if kwargs else args)
        error = sync_of(func, args) if on_device else None  # reading host tensors is allowed
        if error is None and func._schema.name in _COPIES:
            error = self._host_copy(func, args, kwargs)
        if error is not None:
            self.note_error(error)
            raise error
        result = run_composite(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        self.draws = self.draws or _may_draw(func)
        return func(*args, **kwargs)

    def _host_copy(self, func: Any, args: Any, kwargs: Any) -> HostSyncError | None:
        """Return the error of a copy that waits; otherwise record the copy's host tensors."""
        if not {"cpu", "cuda"} <= _kinds_of(func, args, kwargs):
            return None
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not non_blocking:
            return HostSyncError(
                "a copy between host and device",
                "it waits for the device",
                "Create constants on the device with device=, or once as a buffer, and pass "
                "changing values as inputs.",
            )
        tensors = [x for x in args[:2] if isinstance(x, torch.Tensor)]
        self.host_tensors += [tensor for tensor in tensors if tensor.device.type == "cpu"]
        return None


def _kinds_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str]:
    """Return the device types of a copy's source and destination."""
    kinds = {x.device.type for x in args[:2] if isinstance(x, torch.Tensor)}
    if func._schema.name == "aten::_to_copy" and kwargs.get("device") is not None:
        kinds.add(torch.device(kwargs["device"]).type)
    return kinds


@PerOperation
def _properties_of(func: Any) -> tuple[bool, bool, bool]:
    """Return three properties of an operation.

    Returns:
        Whether it may wait for the device, whether it is a copy, and whether it is composite or
        higher-order.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return False, False, True
    name = func._schema.name
    return may_be_data_dependent(func), name in _COPIES, is_composite(func)


@functools.lru_cache(maxsize=4096)
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
