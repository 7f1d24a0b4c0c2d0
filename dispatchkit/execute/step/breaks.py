"""Marks for breaks in a model's code, and the protocol of objects that handle the marks.

The marks do nothing in eager runs. A tracer records them as operators without arguments or results.
During a capture in segments, the ``Breaker`` of the thread ends a segment at each mark.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, overload

import torch

from dispatchkit.errors import ConfigError
from dispatchkit.once import line_of_call

__all__ = ["eager_region", "graph_break"]

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

# Kept alive, because torch unregisters operators when their library is garbage-collected.
_LIBRARY = torch.library.Library("dispatchkit", "DEF")
for _name in ("graph_break", "eager_begin", "eager_end"):
    _LIBRARY.define(f"{_name}() -> ()")
    _LIBRARY.impl(_name, lambda: None, "CompositeExplicitAutograd")


class Breaker(Protocol):
    """Protocol for objects that handle the marks a step reaches in a capture."""

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, line: str) -> Any:
        """Call a function that must run eager, and return the result that the step must use.

        Args:
            fn: Function to call.
            args: Positional arguments.
            kwargs: Keyword arguments.
            line: File and line of the call.
        """
        ...

    def split(self) -> None:
        """End a segment and begin the next one."""
        ...

    def enter_block(self, line: str) -> None:
        """Reject a ``with`` block, because a replay cannot run its code again.

        Raises:
            CaptureError: A capture in segments is in progress, and the block is not inside a
                function that runs eager.
        """
        ...


class _Current(threading.local):
    breaker: Breaker | None = None


_current = _Current()


@contextmanager
def use_breaker(breaker: Breaker | None) -> Iterator[None]:
    """Let a breaker handle the marks that this thread reaches; with None, they do nothing."""
    before, _current.breaker = _current.breaker, breaker
    try:
        yield
    finally:
        _current.breaker = before


def _breaker() -> Breaker | None:
    return None if torch.compiler.is_compiling() else _current.breaker


def graph_break() -> None:
    """End the current graph here and begin the next one, without an eager call in between.

    In FULL and in eager runs, this function does nothing.
    """
    breaker = _breaker()
    if breaker is None:
        torch.ops.dispatchkit.graph_break()
    else:
        breaker.split()


@overload
def eager_region(fn: _Fn) -> _Fn: ...


@overload
def eager_region(fn: None = None) -> _EagerBlock: ...


def eager_region(fn: Any = None) -> Any:
    """Mark a function or a ``with`` block to run eager between graphs.

    In FULL, marked code is part of the single graph.

    - To mark a function, use the decorator ``@eager_region`` or ``eager_region(fn)(...)``. Each
      replay calls the function with the arguments recorded in the capture. Their tensors then
      contain the values of the current step. The results must have the same structure, shapes,
      dtypes, strides and Python values as in the capture; otherwise the step runs eager.
    - To mark a block, use ``with eager_region():``. ``split_module`` and the ``torch.compile``
      backend support blocks. A capture in segments rejects blocks, because a replay cannot run them
      again.

    Args:
        fn: Function to mark; omitted for a block.

    Raises:
        ConfigError: ``fn`` is not a function.
    """
    if fn is None:
        return _EagerBlock()
    if not callable(fn):
        raise ConfigError(
            "fn", fn, "a function or omitted", "For a block, write `with eager_region():`."
        )

    @functools.wraps(fn)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a tracer records the begin and end operators
            with _EagerBlock():
                return fn(*args, **kwargs)
        breaker = _current.breaker
        if breaker is None:
            return fn(*args, **kwargs)
        return breaker.call(fn, args, kwargs, line_of_call())

    eager.is_eager_region = True  # type: ignore[attr-defined]  # for is_eager_region
    return eager


def is_eager_region(value: Any) -> bool:
    """Return whether a value is a function marked with ``eager_region``."""
    return isinstance(value, types.FunctionType) and hasattr(value, "is_eager_region")


class _EagerBlock:
    """A ``with`` block whose begin and end are recorded by tracers."""

    def __enter__(self) -> None:
        breaker = _breaker()
        if breaker is not None:
            breaker.enter_block(line_of_call())
        torch.ops.dispatchkit.eager_begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        torch.ops.dispatchkit.eager_end()
