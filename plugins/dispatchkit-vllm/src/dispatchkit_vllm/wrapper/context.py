"""The forward context, which carries a decision to graphs deep inside a model.

A runner sets it around one step; wrappers inside the model read the runtime mode and the
descriptor from it and trust them. It is a context variable, so threads and tasks have separate
ones.
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
    """The forward context was requested outside of a step.

    Also an AssertionError, since that is what vLLM raises for it.
    """


def _runtime_mode(value: Any) -> RuntimeMode:
    return RuntimeMode.parse(value)


@attrs.frozen
class ForwardContext:
    """Facts about the current step that wrappers can read.

    Attributes:
        runtime_mode: Mode of this step: NONE, PIECEWISE or FULL. Any enum with these names
            is accepted.
        descriptor: The key of the graph: any hashable value, or None.
        facts: Further values for code inside the model.

    Raises:
        ModeError: The mode combines two modes, which only configurations can have.
    """

    runtime_mode: RuntimeMode = attrs.field(default=RuntimeMode.NONE, converter=_runtime_mode)
    descriptor: Any = None
    facts: Mapping[str, Any] = attrs.Factory(dict)


_current: ContextVar[ForwardContext | None] = ContextVar("dispatchkit_forward", default=None)


def forward_context_is_available() -> bool:
    """Return whether this thread or task is inside a step."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """Return the context of the step that this thread or task is in.

    Raises:
        NoForwardContextError: It is not in a step.
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
    """Make a context current for one step, and restore the previous one afterwards.

    Args:
        runtime_mode: Mode of the step.
        descriptor: The key of the graph.
        num_tokens: Tokens of the batch; makes a plain descriptor if ``descriptor`` is not
            given.
        **facts: Further values for code inside the model.

    Raises:
        ModeError: The mode combines two modes, which only configurations can have.
    """
    if descriptor is None and num_tokens:
        descriptor = BatchDescriptor(num_tokens)
    context = ForwardContext(runtime_mode, descriptor, facts)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
