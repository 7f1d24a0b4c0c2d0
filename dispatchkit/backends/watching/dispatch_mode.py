"""Base classes of dispatch modes that work with Dynamo without loading it needlessly.

torch wraps ``__torch_dispatch__`` of every mode so that Dynamo does not compile it. The wrapper
imports all of Dynamo on its first call, which takes seconds, in a process that may never compile
anything. Here the wrapping happens once a mode is entered with Dynamo loaded.

torch keeps one process-wide flag for whether a mode is active that Dynamo must not compile, and
each mode restores its earlier value on exit (``TorchDispatchMode.__enter__``). Two threads with
overlapping modes would leave it on permanently, and then nothing is compiled.
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
    """Yield the tensors among an operation's arguments or results, including those in lists.

    It takes a fifth of the time of a general tree walk, and modes run it for every operation.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def has_subclass(types: Iterable[Any]) -> bool:
    """Return whether the types include a subclass that handles operations itself.

    A mode leaves operations to it, and then sees the operations it runs.
    """
    plain = torch.Tensor.__torch_dispatch__
    return any(one.__torch_dispatch__ != plain for one in types)


class PerOperation(Generic[_Facts]):
    """A property of operations, determined once for each.

    Stored by identity: operations are hashed in Python, which would add up over many thousand
    calls.

    Args:
        find: Determines the property of an operation.
    """

    def __init__(self, find: Callable[[Any], _Facts]) -> None:
        self._find = find
        self._known: dict[int, tuple[Any, _Facts]] = {}

    def __call__(self, func: Any) -> _Facts:
        """Return the property of an operation."""
        known = self._known.get(id(func))
        if known is None:
            # Stored with the operation, so that its identity is not reused.
            known = self._known[id(func)] = (func, self._find(func))
        return known[1]


class WeakStorages:
    """A set of storages that does not keep them alive.

    Weak references are those of torch; a Python object for each would double the cost.
    """

    # Stored here, since the module may be torn down before the last of these sets.
    _free = staticmethod(torch.UntypedStorage._free_weak_ref)

    def __init__(self) -> None:
        self._refs: set[Any] = set()  # ints; torch annotates them differently

    def add(self, storage: torch.UntypedStorage) -> None:
        """Remember a storage."""
        # While there is a weak reference to it, its identity is not reused.
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
    """Restores torch's flags when the last of our modes ends, in any thread."""

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
        """Note that a mode is about to begin; under the lock."""
        if not self.on:
            self._were_off = [name for name in self._NAMES if not getattr(_python_dispatch, name)]
        self.on.set(self.on.here + 1)

    def end(self, depth: int | None = None) -> None:
        """Note that a mode has ended, or all but ``depth`` of this thread; under the lock."""
        self.on.set(self.on.here - 1 if depth is None else depth)
        if self.on:
            return
        for name in self._were_off:
            setattr(_python_dispatch, name, False)
        if self._NAMES[-1] in self._were_off:
            guards.set_is_in_mode_without_ignore_compile_internals(False)


_OVERLAPS = _Overlaps()


class DispatchMode(TorchDispatchMode):
    """Base of the modes here; a subclass defines ``__torch_dispatch__`` as usual.

    It also sees the operations of compiled functions, since they run eager under it. A mode whose
    ``ignore_compile_internals`` is True lets them run compiled, and sees the other operations.
    """

    #: Higher-order operators are also passed to ``__torch_dispatch__``.
    supports_higher_order_operators = True
    _is_hidden_from_dynamo = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch (2.12 and later ask) that the wrapping is done here."""
        return False

    def __enter__(self) -> Any:
        if dynamo_is_loaded():
            self._hide_from_dynamo()
        # If entered again from inside, as for the parts of an operation, it must be exited as
        # often.
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
            # Code first compiled in here, as by torch.cond, would be permanently marked to be
            # skipped.
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
    """A mode that sees plain operations only; subclasses define ``run_operation``.

    Calls that a tensor subclass handles, and higher-order operators (``torch.cond``), appear as the
    operations that they run.

    Attributes:
        is_paused: Operations run without being shown to the mode.
    """

    is_paused: bool = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if types and has_subclass(types):
            return NotImplemented  # operations run by the subclass arrive here
        if is_higher_order(func):
            return run_higher_order(self, func, args, kwargs)
        return self.run_operation(func, args, kwargs)

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result; the caller is two frames up."""
        raise NotImplementedError


def inference_mode(is_on: bool) -> AbstractContextManager[None]:
    """Return a context with inference mode on or off, for one ``with`` statement.

    torch's own class begins and ends it in Python. A signal handler may raise before that end. The
    mode then ends only when the object is freed, and resets the gradient mode to its value at the
    beginning. This context ends by a C call, which always happens.
    """
    return torch._C._InferenceMode(is_on)


class ThreadModes:
    """The active modes of this thread, and whether it records gradients.

    A signal handler may raise just as a ``with`` statement calls its context's exit, which then
    never runs. ``put_back`` ends the modes begun since, so that later calls of the thread are not
    refused, recorded or without gradients.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._num_dispatch = torch._C._len_torch_dispatch_stack()
        self._num_function = torch._C._len_torch_function_stack()
        self._num_on, self._num_eager = _OVERLAPS.on.here, FORCE_EAGER.on.here

    def put_back(self) -> None:
        """Restore them; a second call has no effect."""
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
