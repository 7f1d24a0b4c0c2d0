"""A dispatch mode that gets on with Dynamo, and does not load it for nothing.

torch wraps ``__torch_dispatch__`` of every mode so that Dynamo leaves it alone, and that
wrapper imports the whole of Dynamo on its first call: seconds, in a process that may never
compile anything. Here that is done once a mode is entered with Dynamo loaded.

Whether any mode is on that Dynamo has to leave alone, torch keeps for the whole process, and each
mode puts it back at its end as it was at its beginning (``TorchDispatchMode.__enter__``). Two
threads whose modes overlap would leave it on for good, and from then on nothing is compiled.
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
    """Yield the tensors among an operation's arguments or results, those in lists too.

    A fifth of the time of a general tree walk, and modes look at every operation.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def has_subclass(types: Iterable[Any]) -> bool:
    """Return whether there is a subclass among types that handles operations itself.

    A mode leaves those to it: what it does then comes to the mode.
    """
    plain = torch.Tensor.__torch_dispatch__
    return any(one.__torch_dispatch__ != plain for one in types)


class PerOperation(Generic[_Facts]):
    """What is found out about each operation once.

    By identity: operations hash in Python, several times in each of many thousand calls.

    Args:
        find: Finds it out.
    """

    def __init__(self, find: Callable[[Any], _Facts]) -> None:
        self._find = find
        self._known: dict[int, tuple[Any, _Facts]] = {}

    def __call__(self, func: Any) -> _Facts:
        """Return what is known of an operation."""
        known = self._known.get(id(func))
        if known is None:
            # Kept with the operation, so that no other one gets its identity.
            known = self._known[id(func)] = (func, self._find(func))
        return known[1]


class WeakStorages:
    """Storages, without keeping them.

    Weak references are kept as torch counts them: an object for each would double the price.
    """

    # Kept here, since the module may be gone before the last of these.
    _free = staticmethod(torch.UntypedStorage._free_weak_ref)

    def __init__(self) -> None:
        self._refs: set[Any] = set()  # numbers; torch annotates them otherwise

    def add(self, storage: torch.UntypedStorage) -> None:
        """Remember a storage."""
        # While there is a reference to it, no other storage has its identity.
        if storage._cdata not in self._refs:
            self._refs.add(storage._weak_ref())

    def alive(self) -> Iterator[torch.UntypedStorage]:
        """Yield those that somebody keeps."""
        for ref in self._refs:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref)
            if storage is not None:
                yield storage

    def __del__(self) -> None:
        for ref in self._refs:
            self._free(ref)


class _Overlaps:
    """Puts torch's flags back once the last mode of ours ends, whichever thread it was in."""

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

    It sees the operations of compiled functions as well, since they run eager under it. One
    whose ``ignore_compile_internals`` is True lets them run compiled, and sees what is left.
    """

    #: Operators that are given functions come to ``__torch_dispatch__``, too.
    supports_higher_order_operators = True
    _is_hidden_from_dynamo = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch (2.12 and later ask) that the wrapping is done here."""
        return False

    def __enter__(self) -> Any:
        if dynamo_is_loaded():
            self._hide_from_dynamo()
        # Entered again from inside, as for the parts of an operation, it must end as often.
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
            # What was compiled first in here, as by torch.cond, is marked to be skipped for good.
            torch._dynamo.reset_code_caches()

    @classmethod
    def _hide_from_dynamo(cls) -> None:
        """Have Dynamo leave what handles an operation alone, instead of compiling it."""
        if not cls.__dict__.get("_is_hidden_from_dynamo"):
            raw = cls.__torch_dispatch__
            quiet = torch._disable_dynamo(raw, recursive=True)  # type: ignore[attr-defined]
            setattr(cls, "__torch_dispatch__", quiet)  # noqa: B010
            cls._is_hidden_from_dynamo = True


class OperationMode(DispatchMode):
    """A mode that is shown operations alone; a subclass defines ``run_operation``.

    What a tensor subclass handles by itself, and what is given functions (``torch.cond``), comes
    as the operations that it runs.

    Attributes:
        is_paused: Operations run as they are, and are not shown.
    """

    is_paused: bool = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if types and has_subclass(types):
            return NotImplemented  # what the subclass does by itself comes here
        if is_higher_order(func):
            return run_higher_order(self, func, args, kwargs)
        return self.run_operation(func, args, kwargs)

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and return its result; what called it is two frames up."""
        raise NotImplementedError


def inference_mode(is_on: bool) -> AbstractContextManager[None]:
    """Return a context with inference mode on or off, for one ``with`` statement.

    torch's own class begins and ends it in Python. An exception of a signal may come before that
    end: the mode then ends where the object is freed, whenever that is, and gradients are from
    there on as they were at its beginning. This one's end is a call of C, which always comes.
    """
    return torch._C._InferenceMode(is_on)


class ThreadModes:
    """The modes that this thread has on, and whether it records gradients.

    A signal's exception may come where a ``with`` statement calls its context's end, which then
    never runs. ``put_back`` ends what was begun since, so that later calls of the thread are not
    refused, recorded or without gradients.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._num_dispatch = torch._C._len_torch_dispatch_stack()
        self._num_function = torch._C._len_torch_function_stack()
        self._num_on, self._num_eager = _OVERLAPS.on.here, FORCE_EAGER.on.here

    def put_back(self) -> None:
        """Make it as it was; a second call changes nothing."""
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
