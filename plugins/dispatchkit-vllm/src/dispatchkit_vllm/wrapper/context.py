"""The forward context, which passes a decision to wrappers inside a model.

A runner sets the forward context around each step. Wrappers read the runtime mode and the
descriptor without further checks. The forward context is a context variable, so each thread and
task has its own.
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
    """Raised if the forward context is requested outside of a step.

    It is also an AssertionError, which vLLM raises in this case.
    """


def _runtime_mode(value: Any) -> RuntimeMode:
    return RuntimeMode.parse(value)


@attrs.frozen
class ForwardContext:
    """Properties of the current step that wrappers can read.

    Attributes:
        runtime_mode: Runtime mode of the step: NONE, PIECEWISE or FULL. Names, values (0, 1, 2) and
            members of other enums with these names are also accepted.
        descriptor: The key of the graph: any hashable value, or None.
        facts: Further values for code inside the model.

    Raises:
        ModeError: The mode is a combination of two modes.
        UnknownNameError: No runtime mode has this name.
    """

    runtime_mode: RuntimeMode = attrs.field(default=RuntimeMode.NONE, converter=_runtime_mode)
    descriptor: Any = None
    facts: Mapping[str, Any] = attrs.Factory(dict)


_current: ContextVar[ForwardContext | None] = ContextVar("dispatchkit_forward", default=None)


def forward_context_is_available() -> bool:
    """Return whether this thread or task is inside a step."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """Return the forward context of the current thread or task.

    Raises:
        NoForwardContextError: The caller is not inside a step.
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
    """Set the forward context for one step, and restore the previous context afterwards.

    Args:
        runtime_mode: Runtime mode of the step, or its name.
        descriptor: The key of the graph: any hashable value, or None.
        num_tokens: Number of tokens, from which a descriptor is created if ``descriptor`` is
            omitted.
        **facts: Further values for code inside the model.

    Raises:
        ModeError: The mode is a combination of two modes.
        UnknownNameError: No runtime mode has this name.
    """
    if descriptor is None and num_tokens:
        descriptor = BatchDescriptor(num_tokens)
    context = ForwardContext(runtime_mode, descriptor, facts)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
