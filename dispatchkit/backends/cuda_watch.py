"""What is watched while a callable is captured on a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.backends.cuda_memory import Segment
from dispatchkit.backends.dispatch_mode import DispatchMode, tensors_in
from dispatchkit.backends.host_sync import HostSyncGuard, run_composite, sync_of

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")


class CaptureWatch(DispatchMode):
    """Refuses what would void a capture, and notes what the graph must hold.

    Attributes:
        first_error: The first refused call, also where the callable swallowed it.
        draws: An operation was seen that may draw.
        host_tensors: Host memory that captured copies read or write.
    """

    # Storages on the device that operations were given, without keeping them: most of them
    # are intermediates, whose memory later operations use again.
    _given: dict[int, StorageWeakRef]

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first_error: HostSyncError | None = None
        self.draws: bool = False
        self.host_tensors: list[torch.Tensor] = []
        self._given = {}

    def outside(self, segments: Iterable[Segment]) -> list[torch.UntypedStorage]:
        """Return what the graph reads or writes on the device and does not own itself.

        Args:
            segments: Those of the graph's pool: what lies there is owned by its graphs.
        """
        spans = [(one["address"], one["address"] + one["total_size"]) for one in segments]
        found = []
        for ref in self._given.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                continue  # an intermediate, gone by now
            address = storage.data_ptr()
            if not any(start <= address < end for start, end in spans):
                found.append(storage)
        return found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled: this mode only looks."""
        return True

    def note_error(self, error: HostSyncError) -> None:
        """Remember a refused call: the capture is lost even if the callable goes on."""
        self.first_error = self.first_error or error

    def raise_swallowed_error(self) -> None:
        """Raise a refused call that the callable caught."""
        if self.first_error is not None:
            raise self.first_error

    def watching(self) -> ExitStack:
        """Return a context in which everything this thread calls is watched."""
        stack = ExitStack()
        stack.enter_context(HostSyncGuard(self.note_error, "cuda"))
        stack.enter_context(self)
        return stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        on_device = False
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.is_cuda:
                on_device = True
                self._note_given(tensor)
        error = sync_of(func, args) if on_device else None  # host tensors may be read
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

    def _note_given(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # What lies outside was there before, so that no identity of it is used anew.
        if storage._cdata not in self._given:
            self._given[storage._cdata] = StorageWeakRef(storage)

    def _host_copy(self, func: Any, args: Any, kwargs: Any) -> HostSyncError | None:
        """Return the error for a copy that waits; hold the host memory of one that does not."""
        name = func._schema.name
        tensors = [x for x in args[:2] if isinstance(x, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            kinds.add(torch.device(kwargs["device"]).type)
        if not {"cpu", "cuda"} <= kinds:
            return None
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not non_blocking:
            return HostSyncError(
                "a copy between host and device",
                "it waits; use pinned memory and non_blocking=True",
            )
        self.host_tensors += [tensor for tensor in tensors if tensor.device.type == "cpu"]
        return None


@functools.lru_cache(maxsize=4096)
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
