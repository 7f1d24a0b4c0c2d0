"""Base classes that let dispatch modes run without importing Dynamo.

torch wraps ``__torch_dispatch__`` of every mode so that Dynamo does not compile it. The first call
of the wrapper imports Dynamo, which takes seconds, even in a process that never compiles. These
classes add the wrapper only if Dynamo is already imported when a mode is entered.

While a mode is active, torch sets process-wide flags, one of which disables compilation. On exit,
each mode restores the values that it found on entry (see ``TorchDispatchMode.__enter__``), so
overlapping modes in two threads could leave the flags set and disable compilation permanently.
These classes restore the flags when the last mode ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch._C._dynamo import guards
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dispatchkit.backends.watching.compiled_code import (
    FORCE_EAGER,
    ThreadCounts,
    dynamo_is_loaded,
)
from dispatchkit.backends.watching.higher_order import is_higher_order, run_higher_order

_Facts = TypeVar("_Facts")


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or results, including tensors in lists.

    Modes call this function for every operation. The function is five times faster than a generic
    tree traversal.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def has_subclass(types: Iterable[Any]) -> bool:
    """Return whether the types include a tensor subclass that handles operations itself.

    A mode delegates to the subclass, and then receives the operations that the subclass runs.
    """
    plain = torch.Tensor.__torch_dispatch__
    return any(one.__torch_dispatch__ != plain for one in types)


class PerOperation(Generic[_Facts]):
    """A cache for a property of operations.

    Operations are identified by ``id``, because hashing an operation runs Python code.

    Args:
        find: Function that returns the property of an operation.
    """

    def __init__(self, find: Callable[[Any], _Facts]) -> None:
        self._find = find
        self._known: dict[int, tuple[Any, _Facts]] = {}

    def __call__(self, func: Any) -> _Facts:
        """Return the property of an operation."""
        known = self._known.get(id(func))
        if known is None:
            # The operation is stored, too, so that its id is not reused.
            known = self._known[id(func)] = (func, self._find(func))
        return known[1]


class WeakStorages:
    """A set of storages that does not keep them alive.

    It uses torch's weak references, because Python's would take twice as long.
    """

    # A class attribute, because at exit, module globals may be deleted before the last
    # WeakStorages.
    _free = staticmethod(torch.UntypedStorage._free_weak_ref)

    # Replaced in ``__init__``, which a signal handler may interrupt.
    _refs: Any = ()

    def __init__(self) -> None:
        self._refs = set()  # of ints; torch annotates them differently

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add a storage."""
        # The weak reference prevents the identity from being reused.
        if storage._cdata not in self._refs:
            self._refs.add(storage._weak_ref())

    def alive(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storages that are still alive."""
        for ref in self._refs:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref)
            if storage is not None:
                yield storage

    def __del__(self) -> None:
        for ref in self._refs:
            self._free(ref)


class _Overlaps:
    """A counter of active modes, which restores torch's flags when the last mode ends."""

    _NAMES = (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on = ThreadCounts()
        self._were_off: list[str] = []

    def begin(self) -> None:
        """Record that a mode begins; the caller holds the lock."""
        if not self.on:
            self._were_off = [name for name in self._NAMES if not getattr(_python_dispatch, name)]
        self.on.set(self.on.here + 1)

    def end(self, depth: int | None = None) -> None:
        """Record that modes of this thread ended; the caller holds the lock."""
        self.on.set(self.on.here - 1 if depth is None else depth)
        if self.on:
            return
        for name in self._were_off:
            setattr(_python_dispatch, name, False)
        if self._NAMES[-1] in self._were_off:
            guards.set_is_in_mode_without_ignore_compile_internals(False)


_OVERLAPS = _Overlaps()


class DispatchMode(TorchDispatchMode):
    """Base class of dispatch modes; subclasses define ``__torch_dispatch__`` as usual.

    Compiled functions run eager under the mode, so it also receives their operations. If
    ``ignore_compile_internals`` returns True, compiled functions run compiled, and the mode does
    not receive their operations.
    """

    #: Whether ``__torch_dispatch__`` also receives higher-order operators.
    supports_higher_order_operators = True
    _is_hidden_from_dynamo = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because this class adds the wrapper itself.

        torch 2.12 and later call this method.
        """
        return False

    def __enter__(self) -> Any:
        if dynamo_is_loaded():
            self._hide_from_dynamo()
        # Lists, because an active mode may be entered again, for example to run the
        # operations that a composite operation calls.
        self.__dict__.setdefault("_had_dynamo", []).append(dynamo_is_loaded())
        begun = self.__dict__.setdefault("_has_begun", [])
        begun.append(not self.ignore_compile_internals() and FORCE_EAGER.begin())
        with _OVERLAPS.lock:
            _OVERLAPS.begin()
            return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        with _OVERLAPS.lock:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
            _OVERLAPS.end()
        if self.__dict__["_has_begun"].pop():
            FORCE_EAGER.end()
        if not self.__dict__["_had_dynamo"].pop() and dynamo_is_loaded():
            # Otherwise, Dynamo would permanently skip code that it first encountered under the
            # mode, for example in torch.cond.
            torch._dynamo.reset_code_caches()

    @classmethod
    def _hide_from_dynamo(cls) -> None:
        """Exclude the handlers of operations from compilation by Dynamo."""
        if not cls.__dict__.get("_is_hidden_from_dynamo"):
            raw = cls.__torch_dispatch__
            quiet = torch._disable_dynamo(raw, recursive=True)  # type: ignore[attr-defined]
            setattr(cls, "__torch_dispatch__", quiet)  # noqa: B010
            cls._is_hidden_from_dynamo = True


class OperationMode(DispatchMode):
    """A mode that receives only plain operations; subclasses define ``run_operation``.

    Higher-order operators, and operations on tensor subclasses, are replaced by the plain
    operations that they run. ``run_higher_order`` refuses operators such as ``torch.cond``.

    Attributes:
        is_paused: Whether operations bypass ``run_operation``.
    """

    is_paused: bool = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if types and has_subclass(types):
            return NotImplemented  # the mode then receives the operations that the subclass runs
        if is_higher_order(func):
            return run_higher_order(self, func, args, kwargs)
        return self.run_operation(func, args, kwargs)

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and return its result.

        In this method, ``sys._getframe(2)`` is the frame of the operation's caller or, if
        ``__torch_dispatch__`` is wrapped, of Dynamo's wrapper.
        """
        raise NotImplementedError


def inference_mode(is_on: bool) -> AbstractContextManager[None]:
    """Return a context that turns inference mode on or off, for one ``with`` statement.

    ``torch.inference_mode`` ends the mode in Python code, and a signal handler may raise before
    this code runs. The mode would then end only when the context object is freed, and would reset
    the gradient mode to an old value. This context ends the mode in a C call, which a signal
    handler cannot prevent.
    """
    return torch._C._InferenceMode(is_on)


class ThreadModes:
    """A snapshot of the active modes and the gradient mode of this thread.

    If a signal handler raises just before a ``with`` statement calls ``__exit__``, the mode does
    not end. ``put_back`` ends all modes entered since the snapshot, so that they do not affect
    later calls in the thread.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._num_dispatch = torch._C._len_torch_dispatch_stack()
        self._num_function = torch._C._len_torch_function_stack()
        self._num_on, self._num_eager = _OVERLAPS.on.here, FORCE_EAGER.on.here

    def put_back(self) -> None:
        """Restore the modes; a second call has no effect."""
        torch._C._set_grad_enabled(self._grad)
        while torch._C._len_torch_dispatch_stack() > self._num_dispatch:
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack() > self._num_function:
            torch._C._pop_torch_function_stack()
        if _OVERLAPS.on.here != self._num_on:
            with _OVERLAPS.lock:
                _OVERLAPS.end(self._num_on)
        if FORCE_EAGER.on.here != self._num_eager:
            FORCE_EAGER.end(self._num_eager)
