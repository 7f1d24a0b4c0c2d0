"""Queue tensor operations on streams, for the deferred tape.

Inside ``use_stream`` of a deferred tape, tensor operations are queued on the stream, as on a
device. Shapes are known immediately, but data is computed when the scheduler advances the stream.
Until then, new tensors contain poison (such as NaN). Missing waits therefore cause wrong results:
code that reads a result too early gets poison or old data, and code that overwrites an input too
early corrupts the result.

These operations are not deferred:

- views and allocations without initialization, which read no data;
- operations without tensor arguments (zeros, arange), whose results no other stream can use yet;
- operations that draw random numbers, because generators advance in submission order (the queued
  work of the stream runs first);
- operations whose result shape depends on data (the host waits for the stream, as on a device);
- operations without a meta kernel, higher-order operators, and operations that write some of their
  arguments but may also resize them or return new tensors (the host waits for the stream).

Host reads (``item``, ``tolist``, ``numpy``, printing) wait only for the current stream, as on a
device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dispatchkit.backends.capture_guard import capturing_device
from dispatchkit.backends.tape.operations import run_parts, written_arguments
from dispatchkit.backends.tape.poison import poison
from dispatchkit.backends.tape.steps import LAUNCH_KEYS, flat_tensors, replace_tensors
from dispatchkit.backends.tape.streams import TapeStream
from dispatchkit.backends.watching.dispatch_mode import DispatchMode, tensors_in
from dispatchkit.backends.watching.higher_order import is_higher_order
from dispatchkit.backends.watching.host_sync import SYNC_FUNCTIONS, is_data_dependent


class _Blocks(threading.local):
    """The modes of this thread's active ``use_stream`` blocks, innermost last.

    The modes of outer blocks are still active in an inner block, where they must ignore operations.
    """

    def __init__(self) -> None:
        self.modes: list[_DeferredOperations] = []

    def innermost(self) -> _DeferredOperations:
        """Return the mode of the innermost block, which queues this thread's operations."""
        return self.modes[-1]


_blocks = _Blocks()


class _HostReads(TorchFunctionMode):
    """A mode that waits for the stream before host reads that bypass torch's dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SYNC_FUNCTIONS and not capturing_device():
            _blocks.innermost().stream.synchronize()
        return func(*args, **(kwargs or {}))


class _DeferredOperations(DispatchMode):
    """A mode that queues the operations of one ``use_stream`` block."""

    def __init__(self, stream: TapeStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if capturing_device():
            return func(*args, **kwargs)  # the recorder, an inner mode, has already recorded it
        if _blocks.innermost() is not self:
            return func(*args, **kwargs)  # already handled by the inner block
        if is_higher_order(func):
            return self._run_now(func, args, kwargs)
        result = run_parts(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        if _reads_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws or is_data_dependent(func, args):
            return self._run_now(func, args, kwargs)
        if func._schema.is_mutable or written_arguments(func, args, kwargs):
            return self._defer_write(func, args, kwargs)
        shapes = _shapes_of(func, args, kwargs)
        if shapes is None:
            return self._run_now(func, args, kwargs)
        result = replace_tensors(shapes, _poisoned_like)
        self.stream.submit(_Deferred(func, args, kwargs, flat_tensors(result)))
        return result

    def _run_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.stream.synchronize()
        return func(*args, **kwargs)

    def _defer_write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operation that writes its arguments.

        If the operation may resize its arguments, or may return tensors other than its arguments,
        the host waits for the stream, and the operation runs immediately.
        """
        schema = func._schema
        returns_only_arguments = all(
            returned.alias_info is not None and returned.alias_info.is_write
            for returned in schema.returns
        )
        may_resize = any(argument.is_out for argument in schema.arguments)
        if not returns_only_arguments or may_resize:
            return self._run_now(func, args, kwargs)
        self.stream.submit(_Deferred(func, args, kwargs, []))
        written = written_arguments(func, args, kwargs)
        if not schema.returns:
            return None
        return written[0] if len(schema.returns) == 1 else tuple(written)


class _Deferred:
    """A queued operation, which writes its results to tensors already returned to the caller."""

    def __init__(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        self._func, self._results = func, results
        self._args, self._kwargs = args, kwargs

    def __call__(self) -> None:
        with torch._C._ExcludeDispatchKeyGuard(LAUNCH_KEYS):
            outputs = flat_tensors(self._func(*self._args, **self._kwargs))
            if self._results:
                for target, source in zip(self._results, outputs, strict=True):
                    target.copy_(source)


def _reads_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation accesses no existing data, and so can run before queued work."""
    schema = func._schema
    if schema.is_mutable:
        return torch.Tag.inplace_view in func.tags or schema.name == "aten::set_"
    if any(returned.alias_info is not None for returned in schema.returns):
        return True  # a view
    if schema.name.startswith(("aten::empty", "aten::new_empty")):
        return True
    return next(tensors_in((*args, *kwargs.values())), None) is None


# Cache of ``_shapes_of``, because many of torch's meta kernels are slow Python code.
_known_shapes: dict[Any, tuple[Any]] = {}
_MAX_KNOWN_SHAPES = 10_000


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's results as tensors without data, or None if shapes are unknown."""
    # The default dtype is part of the key, because it determines the dtype of integer quotients.
    call = func, _without_values(args), _without_values(kwargs), torch.get_default_dtype()
    known = _known_shapes.get(call)
    if known is None:
        if len(_known_shapes) >= _MAX_KNOWN_SHAPES:
            _known_shapes.clear()
        known = _known_shapes[call] = (_find_shapes(func, args, kwargs),)
    return known[0]


def _without_values(value: Any) -> Any:
    """Return the part of an operation's arguments that determines its result shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((key, _without_values(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_without_values, value))
    return type(value), value  # True, 1 and 1.0 are equal, but produce different dtypes


def _find_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    meta_args, meta_kwargs = replace_tensors((args, kwargs), without_data)
    if meta_kwargs.get("device") is not None:
        meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
    try:
        return func(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        # There is no meta kernel, or the shape depends on data. The caller then runs the operation,
        # which raises if the arguments are invalid.
        return None


def _poisoned_like(shape: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    poison(made)
    return made


@contextmanager
def deferred_operations(stream: TapeStream) -> Iterator[None]:
    """Queue the tensor operations of a ``with`` block on a stream."""
    stream.interception.depth += 1
    mode = _DeferredOperations(stream)
    _blocks.modes.append(mode)
    try:
        with _HostReads(), mode:
            yield
    finally:
        _blocks.modes.pop()
        stream.interception.depth -= 1
        if stream.handle == 0 and not stream.interception.depth:
            stream.synchronize()  # outside the block, host reads do not wait for queued work
