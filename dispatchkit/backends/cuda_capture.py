"""Capturing into a torch.cuda.CUDAGraph, and cleaning up after one that failed.

Two kinds of failure differ. An exception of Python leaves the capture whole: it is ended and
its graph thrown away. A call that the driver refuses voids the capture: ending it fails, and
torch then leaves open what it would have closed after the end (torch 2.11 to 2.13,
aten/src/ATen/cuda/CUDAGraph.cpp, ``capture_end``):

- the allocator still sends this stream's allocations to the graph's pool,
- the pool counts one user too many, so its memory never comes back,
- up to 2.11 the generators still believe that they are being captured, and eager draws raise.

So most such calls are refused before the driver sees them (``CaptureWatch``), and what is
left open otherwise is closed by ``repair``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.backends.host_sync import HostSyncGuard, run_composite, sync_of

_logger = logging.getLogger(__name__)

# Graphs whose capture could not be ended. The allocators' filters may still point into them.
_doomed: list[torch.cuda.CUDAGraph] = []

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")


class CaptureWatch(TorchDispatchMode):
    """Refuses what would void a capture, and notes what the graph must hold.

    Attributes:
        first_error: The first refused call, also where the callable swallowed it.
        draws: An operation was seen that may draw.
        host_tensors: Host memory that captured copies read or write.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first_error: HostSyncError | None = None
        self.draws = False
        self.host_tensors: list[torch.Tensor] = []

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
        on_device = any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves(args))
        error = sync_of(func, args) if on_device else None  # host tensors may be read
        error = error or self._host_copy(func, args, kwargs)
        if error is not None:
            self.note_error(error)
            raise error
        result = run_composite(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = True
        return func(*args, **kwargs)

    def _host_copy(self, func: Any, args: Any, kwargs: Any) -> HostSyncError | None:
        """Return the error for a copy that waits; hold the host memory of one that does not."""
        name = func._schema.name
        if name not in _COPIES:
            return None
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


def repair(
    graph: torch.cuda.CUDAGraph,
    *,
    device_index: int,
    handle: Any,
    generators: Iterable[Any],
    mode: str,
) -> bool:
    """Close what a capture left open whose end failed; the current stream is its stream.

    Args:
        graph: The graph that could not be ended; it is kept for good, without memory.
        device_index: The device.
        handle: The pool captured into.
        generators: The registered generators, the default one apart.
        mode: The capture error mode.

    Returns:
        Whether the pool can be captured into again.
    """
    graph.reset()
    _doomed.append(graph)
    close_pool(device_index, handle)
    # A capture that succeeds resets the generators and shows that the pool still works.
    try:
        _capture_little(device_index, handle, generators, mode)
    except RuntimeError as error:
        _logger.warning("Graph pool %s is given up after a failed capture: %s", handle, error)
        close_pool_if_open(device_index, handle)
        try:
            _capture_little(device_index, torch.cuda.graph_pool_handle(), generators, mode)
        except RuntimeError as again:
            _logger.critical("The device captures no more after a failed capture: %s", again)
        return False
    return True


def close_pool(device_index: int, handle: Any) -> None:
    """Close a pool whose capture began and could not be ended."""
    _end_allocation(device_index, handle)
    try:
        torch._C._cuda_releasePool(device_index, handle)
    except RuntimeError as error:
        _logger.debug("Pool %s had no use to take back: %s", handle, error)


def close_pool_if_open(device_index: int, handle: Any) -> None:
    """Close a pool whose capture could not begin, if the beginning came as far as that."""
    if _end_allocation(device_index, handle):
        torch._C._cuda_releasePool(device_index, handle)


def _end_allocation(device_index: int, handle: Any) -> bool:
    try:
        torch._C._cuda_endAllocateToPool(device_index, handle)
    except RuntimeError as error:
        _logger.debug("Pool %s was not open any more: %s", handle, error)
        return False
    return True


def _capture_little(device_index: int, handle: Any, generators: Iterable[Any], mode: str) -> None:
    """Capture one small kernel and throw it away."""
    spare = torch.zeros(1, device=f"cuda:{device_index}")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    graph.capture_begin(pool=handle, capture_error_mode=mode)
    try:
        spare.fill_(1.0)
    finally:
        graph.capture_end()
        graph.reset()
