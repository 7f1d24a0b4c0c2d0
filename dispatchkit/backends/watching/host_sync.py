"""Detect calls that wait for the device, so that captures can refuse and name them.

This requires two modes. A TorchDispatchMode recognizes operations by their tags. A
TorchFunctionMode intercepts calls that copy to the host, because some of them, such as ``tolist``
of a CPU tensor, do not reach a TorchDispatchMode.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispatchkit.backends.capture_guard import HostSyncError

_Tensor = torch.Tensor

# Functions with which the host reads tensors. On a device, most of them copy to the host and wait.
SYNC_FUNCTIONS: dict[Any, str] = {
    getattr(_Tensor, name): f"Tensor.{name}"
    for name in (
        "item tolist numpy cpu nonzero is_nonzero equal allclose apply_ map_ "
        "__bool__ __int__ __float__ __complex__ __index__ __repr__ __format__ "
        "__array__ __dlpack__"
    ).split()
}
SYNC_FUNCTIONS |= {torch.equal: "torch.equal", torch.nonzero: "torch.nonzero"}

# User-visible names of operations that have other names in torch's dispatcher.
_PUBLIC_NAMES = {
    "aten::_local_scalar_dense": "Tensor.item",
    "aten::index": "indexing by a mask",
    "aten::index_put_": "assignment by a mask",
    "aten::_index_put_impl_": "assignment by a mask",
    "aten::_unique2": "torch.unique",
    "aten::unique_dim": "torch.unique",
    "aten::_nested_tensor_from_mask_left_aligned": "conversion to nested tensors",
    "aten::_nested_tensor_from_mask": "conversion to nested tensors",
}

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_READS_BY_INDEX = ("aten::index", "aten::_unsafe_index")
_WRITES_BY_INDEX = ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
# Untagged operations for which the host reads a mask.
_READS_MASK = frozenset(
    {"aten::_nested_tensor_from_mask_left_aligned", "aten::_nested_tensor_from_mask"}
)
_DATA_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def run_composite(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operation so that the mode receives the operations that it calls.

    In inference mode, torch does not decompose composite operations such as ``reshape`` or
    ``linear``, and only the operations that they call show whether they copy or wait. This function
    runs the eager kernel, because torch's Python decompositions may draw different random numbers.

    Returns:
        The result, or NotImplemented for an operation with its own kernel.
    """
    if not is_composite(func):
        return NotImplemented
    with mode:
        return func._op_dk(_COMPOSITE, *args, **kwargs)


@functools.lru_cache(maxsize=4096)
def is_composite(func: Any) -> bool:
    """Return whether an operation has no kernel of its own, and only calls other operations."""
    name, has_kernel = func.name(), torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        has_kernel(name, _COMPOSITE)
        and not has_kernel(name, "CPU")
        and not has_kernel(name, "CUDA")
    )


def may_be_data_dependent(func: Any) -> bool:
    """Return whether ``is_data_dependent`` is true for some arguments of an operation."""
    return func._schema.name in (*_READS_BY_INDEX, *_WRITES_BY_INDEX) or _is_tagged(func)


def is_data_dependent(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the host must read data to run an operation on a device."""
    name = func._schema.name
    if name in _READS_BY_INDEX:
        # The operation is tagged, but its result shape depends on data only if an index is a mask.
        return _has_mask(args[1])
    if name in _WRITES_BY_INDEX:
        # The operation is not tagged, but the host reads a mask to convert it to indices, unless a
        # single value is written.
        return _has_mask(args[1]) and args[2].numel() != 1
    return _is_tagged(func)


@functools.lru_cache(maxsize=4096)
def _is_tagged(func: Any) -> bool:
    return func._schema.name in _READS_MASK or any(tag in func.tags for tag in _DATA_TAGS)


def _has_mask(indices: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(isinstance(index, _Tensor) and index.dtype in masks for index in indices)


def sync_of(func: Any, args: tuple[Any, ...]) -> HostSyncError | None:
    """Return a HostSyncError if an operation makes the host wait; otherwise None."""
    if not is_data_dependent(func, args):
        return None
    name = func._schema.name
    public = _PUBLIC_NAMES.get(name, name)
    if name in _READS_MASK:
        next_step = "Create torch.nn.TransformerEncoder with enable_nested_tensor=False."
        return HostSyncError(public, "the host reads the mask", next_step)
    return HostSyncError(public, "the host must read data to determine its result")


class Watch(Protocol):
    """The watch of a capture, as used by ``HostSyncGuard``.

    Attributes:
        is_paused: Whether the capture is paused. While it is, the host may read data.
    """

    is_paused: bool

    def note_error(self, error: HostSyncError) -> None:
        """Record a refused call, because the captured function may catch the error."""
        ...


class HostSyncGuard(TorchFunctionMode):
    """A mode that refuses calls that copy device data to the host.

    Args:
        watch: Watch of the capture, which records each refused call. The watch must not reference
            the guard, because only the garbage collector would free the reference cycle.
        device_type: Device type of the tensors that the host must not read.
    """

    def __init__(self, watch: Watch, device_type: str) -> None:
        super().__init__()
        self._watch = watch
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = None if self._watch.is_paused else SYNC_FUNCTIONS.get(func)
        if name is not None and args and args[0].device.type == self._device_type:
            error = HostSyncError(name)
            self._watch.note_error(error)
            raise error
        return func(*args, **(kwargs or {}))
