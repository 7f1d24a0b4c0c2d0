"""Marks in a model's code at which a step breaks, and the interface that handles them.

In eager runs the marks do nothing. A tracer records them as operators without arguments and
results. A capture in segments ends a segment at each of them, as the ``Breaker`` of its thread.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, overload

import torch

from dispatchkit.once import line_of_call

__all__ = ["eager_region", "graph_break"]

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

# Kept until the process exits, since an operator is removed with its library.
_LIBRARY = torch.library.Library("dispatchkit", "DEF")
for _name in ("graph_break", "eager_begin", "eager_end"):
    _LIBRARY.define(f"{_name}() -> ()")
    _LIBRARY.impl(_name, lambda: None, "CompositeExplicitAutograd")


class Breaker(Protocol):
    """Handles the marks that a step reaches."""

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, line: str) -> Any:
        """Call a function that must run eager, and return the value to continue with.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            line: File and line of the call.
        """
        ...

    def split(self) -> None:
        """End a segment and begin the next one."""
        ...

    def enter_block(self, line: str) -> None:
        """Refuse a ``with`` block, whose code a replay could not run again.

        Raises:
            CaptureError: Always, except if nothing is captured.
        """
        ...


class _Current(threading.local):
    breaker: Breaker | None = None


_current = _Current()


@contextmanager
def acting(breaker: Breaker | None) -> Iterator[None]:
    """Set the breaker for the marks that this thread reaches, or None."""
    before, _current.breaker = _current.breaker, breaker
    try:
        yield
    finally:
        _current.breaker = before


def _breaker() -> Breaker | None:
    return None if torch.compiler.is_compiling() else _current.breaker


def graph_break() -> None:
    """End a graph piece here and begin the next one, without an eager call."""
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
    """Mark a function or a ``with`` block that runs eager between graphs.

    In FULL it is part of the single graph, like everything else.

    - A function, as a decorator ``@eager_region`` or ``eager_region(fn)(...)``: at each replay it
      is called again, with the tensors of the capture, which hold the step's values. Other
      arguments are those of the capture. Results must have the shapes, dtypes and strides of the
      capture; otherwise the step runs eager.
    - A block, ``with eager_region():``, for ``split_module`` and the backend of ``torch.compile``.
      A replay could not run it again, so a capture without tracing refuses it.

    Args:
        fn: The function; omitted for a block.
    """
    if fn is None:
        return _EagerBlock()

    @functools.wraps(fn)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a tracer records where it begins and ends
            with _EagerBlock():
                return fn(*args, **kwargs)
        breaker = _current.breaker
        if breaker is None:
            return fn(*args, **kwargs)
        return breaker.call(fn, args, kwargs, line_of_call())

    eager.is_eager_region = True  # type: ignore[attr-defined]  # for is_eager_region
    return eager


def is_eager_region(value: Any) -> bool:
    """Return whether a value is a function marked to run eager."""
    return isinstance(value, types.FunctionType) and hasattr(value, "is_eager_region")


class _EagerBlock:
    """A ``with`` block whose beginning and end tracers record."""

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
