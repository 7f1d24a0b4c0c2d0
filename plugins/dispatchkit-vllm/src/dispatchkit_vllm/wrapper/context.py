"""The forward context: how a decision reaches graphs deep inside a model.

A runner sets it around one step; wrappers inside the model read the runtime mode and the
descriptor from it and trust them. It is a context variable, so that threads and tasks have
their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs

from dispatchkit.errors import DispatchkitError
from dispatchkit.keys import BatchDescriptor, RuntimeMode

__all__ = [
    "ForwardContext",
    "NoForwardContextError",
    "forward_context_is_available",
    "get_forward_context",
    "set_forward_context",
]


class NoForwardContextError(DispatchkitError, LookupError, AssertionError):
    """The forward context was asked for outside of a step.

    Also an AssertionError, since that is what vLLM raises for it.
    """


def _runtime_mode(value: Any) -> RuntimeMode:
    return RuntimeMode.parse(value)


@attrs.frozen
class ForwardContext:
    """What wrappers may know of the step they run in.

    Attributes:
        runtime_mode: Mode of this step: NONE, PIECEWISE or FULL. A member of any enum of
            those names is taken.
        descriptor: The key of the graph: any hashable value. None where there is none.
        facts: Whatever else the caller hands to code inside the model.

    Raises:
        ModeError: The mode is one for configurations, made of two.
    """

    runtime_mode: RuntimeMode = attrs.field(default=RuntimeMode.NONE, converter=_runtime_mode)
    descriptor: Any = None
    facts: Mapping[str, Any] = attrs.Factory(dict)


_current: ContextVar[ForwardContext | None] = ContextVar("dispatchkit_forward", default=None)


def forward_context_is_available() -> bool:
    """Return whether this thread or task is inside a step."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """Return the context of the step this thread or task is in.

    Raises:
        NoForwardContextError: It is in none.
    """
    context = _current.get()
    if context is None:
        raise NoForwardContextError(
            "No forward context is set. Run the step inside `with set_forward_context(...)`."
        )
    return context


@contextmanager
def set_forward_context(
    runtime_mode: RuntimeMode | str = RuntimeMode.NONE,
    descriptor: Any = None,
    *,
    num_tokens: int | None = None,
    **facts: Any,
) -> Iterator[ForwardContext]:
    """Make a context current for one step; the one before is back afterwards.

    Args:
        runtime_mode: Mode of the step.
        descriptor: The key of the graph.
        num_tokens: Tokens of the batch, from which a plain descriptor is made where none
            is given.
        **facts: What else code inside the model may ask for.

    Raises:
        ModeError: The mode is one for configurations, made of two.
    """
    if descriptor is None and num_tokens:
        descriptor = BatchDescriptor(num_tokens)
    context = ForwardContext(runtime_mode, descriptor, facts)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
