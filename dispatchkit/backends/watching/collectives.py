"""Collectives of torch.distributed: what they write, which schemas omit, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
_BARRIERS = frozenset({"barrier", "monitored_barrier_"})


def is_collective(func: Any) -> bool:
    """Return whether an operation implements a function of torch.distributed."""
    return bool(func.namespace == "c10d")


def refusal(func: Any) -> str:
    """Return why an operation cannot be recorded; empty if it can."""
    name = func._schema.name
    if func.namespace in _FUNCTIONAL:
        return (
            f"{name} is a functional collective, which the tape does not record; "
            "torch.distributed's own functions it does"
        )
    if is_collective(func) and name.split("::")[1] in _BARRIERS:
        return f"{name} makes the host wait for other ranks, which a graph cannot"
    return ""


def writes_first_argument(func: Any) -> bool:
    """Return whether a collective writes its first argument: one tensor, or lists of them.

    Source: torch's Ops.cpp of c10d, whose operations all take what they write first.
    """
    return func._schema.name.split("::")[1] not in {"send", *_BARRIERS}


def waited(func: Any) -> Callable[..., Any]:
    """Return a call of a collective that has finished when it returns, as if in stream order.

    The operation itself returns an object to wait for.
    """
    from torch.distributed import Work

    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        work = result[-1] if isinstance(result, tuple) else result
        Work.unbox(work).wait()
        return result

    return call
