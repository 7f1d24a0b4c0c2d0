"""Where a step breaks: marks in a model's plain code, and what acts on them during a capture.

Run eagerly the marks do nothing. A tracer notes them as operators without arguments and results.
A capture in segments ends one at each of them: it is the ``Breaker`` of its thread meanwhile.
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

# Held for the life of the process: an operator goes away with its library.
_LIBRARY = torch.library.Library("dispatchkit", "DEF")
for _name in ("graph_break", "eager_begin", "eager_end"):
    _LIBRARY.define(f"{_name}() -> ()")
    _LIBRARY.impl(_name, lambda: None, "CompositeExplicitAutograd")


class Breaker(Protocol):
    """What acts on the marks that a step comes to."""

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, line: str) -> Any:
        """Call what must run eager, and return what the step is to go on with.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keywords.
            line: Where it is called: file and line.
        """
        ...

    def split(self) -> None:
        """End a segment and begin the next one."""
        ...

    def enter_block(self, line: str) -> None:
        """Refuse a ``with`` block, whose code no replay could run again.

        Raises:
            CaptureError: Always, but where nothing is captured.
        """
        ...


class _Current(threading.local):
    breaker: Breaker | None = None


_current = _Current()


@contextmanager
def acting(breaker: Breaker | None) -> Iterator[None]:
    """Let a breaker act on the marks that this thread comes to; None: nothing does."""
    before, _current.breaker = _current.breaker, breaker
    try:
        yield
    finally:
        _current.breaker = before


def _breaker() -> Breaker | None:
    return None if torch.compiler.is_compiling() else _current.breaker


def graph_break() -> None:
    """End a graph piece here and begin the next one; nothing runs eager for it."""
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
    """Mark a function, or a ``with`` block, that runs eager between graphs.

    In FULL it is part of the one graph, as everything is.

    - A function, as a decorator ``@eager_region`` or ``eager_region(fn)(...)``: at each replay it
      is called again, with the tensors of the capture, which hold the values of the step. Other
      arguments are those of the capture. Results have the shapes, types and strides of the
      capture; a step in which they have not runs eager.
    - A block, ``with eager_region():``, for ``split_module`` and the backend of ``torch.compile``.
      A replay could not run it again, so that a capture without tracing refuses it.

    Args:
        fn: The function; left out for a block.
    """
    if fn is None:
        return _EagerBlock()

    @functools.wraps(fn)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a tracer notes where it begins and ends
            with _EagerBlock():
                return fn(*args, **kwargs)
        breaker = _current.breaker
        if breaker is None:
            return fn(*args, **kwargs)
        return breaker.call(fn, args, kwargs, line_of_call())

    eager.is_eager_region = True  # type: ignore[attr-defined]  # for is_eager_region
    return eager


def is_eager_region(value: Any) -> bool:
    """Return whether a value is a function that was marked to run eager."""
    return isinstance(value, types.FunctionType) and hasattr(value, "is_eager_region")


class _EagerBlock:
    """A ``with`` block that tracers note the beginning and the end of."""

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
