"""Recorded operations, which a replay runs one by one, and references to their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from dispatchkit.backends.watching.dispatch_mode import inference_mode

_K = torch._C.DispatchKey


def _below_python_and_autograd() -> Any:
    """Return the dispatch keys that a replay excludes.

    Operations are recorded below autograd and autocast. A replay must not cast again if the caller
    uses autocast, and modes of the caller must not receive the operations of the replay.
    """
    keys = torch._C.DispatchKeySet(_K.AutogradCPU)
    for key in (_K.AutogradOther, _K.ADInplaceOrView, _K.AutocastCPU, _K.Python):
        keys = keys.add(key)
    return keys.add(_K.PythonTLSSnapshot)


LAUNCH_KEYS = _below_python_and_autograd()


@attrs.frozen
class TensorRef:
    """Describes a recorded tensor without keeping its storage alive.

    Attributes:
        storage: Identity of the storage.
        offset: Storage offset in elements.
        size: Shape.
        stride: Strides in elements.
        dtype: Element type.
        conj: Whether the tensor is lazily conjugated.
        neg: Whether the tensor is lazily negated.
    """

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False


@attrs.define(eq=False)
class Step:
    """One operation of a replay.

    Attributes:
        call: The function to call.
        args: Positional arguments, with TensorRefs instead of tensors.
        kwargs: Keyword arguments, with TensorRefs instead of tensors.
        out: Pairs of an output argument's keyword and the tensor to pass.
        copies: Pairs of an index into the flattened results and the tensor to copy that result to.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[tuple[str, TensorRef], ...] = ()
    copies: tuple[tuple[int, TensorRef], ...] = ()

    def refs(self) -> Iterable[TensorRef]:
        """Yield references to all tensors that the operation reads or writes."""
        yield from _refs_in((self.args, self.kwargs))
        for _, ref in (*self.out, *self.copies):
            yield ref


def _refs_in(value: Any) -> Iterable[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs_in(item)


def view_of_storage(storage: Any, ref: TensorRef, start_bytes: int = 0) -> torch.Tensor:
    """Return a new tensor on a storage, without an autograd graph."""
    offset = ref.offset + start_bytes // ref.dtype.itemsize
    with inference_mode(False):
        made = torch.empty(0, dtype=ref.dtype)
        made = made.set_(storage, offset, ref.size, ref.stride)
    if ref.conj:
        made = torch.conj(made)
    return torch._neg_view(made) if ref.neg else made


def replace_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """Return an operation's arguments or results with each tensor replaced."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, (tuple, list)):
        return type(value)([replace_tensors(item, replace) for item in value])
    if isinstance(value, dict):
        return {key: replace_tensors(item, replace) for key, item in value.items()}
    return value


def flat_tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors in the result of an operation, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in flat_tensors(item)]
    return []
