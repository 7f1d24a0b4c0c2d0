"""Query properties of torch.distributed collectives, and wait for a collective to finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatchkit.backends.capture_guard import HostSyncError

_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
_BARRIERS = frozenset({"barrier", "monitored_barrier_"})


def is_collective(func: Any) -> bool:
    """Return whether an operation implements a function of torch.distributed."""
    return bool(func.namespace == "c10d")


def check_recordable(func: Any) -> None:
    """Raise RuntimeError for a functional collective."""
    if func.namespace in _FUNCTIONAL:
        raise RuntimeError(
            f"{func._schema.name} is a functional collective, which the tape cannot record; use "
            "the functions of torch.distributed, or move the call into an eager piece"
        )


def barrier_error(func: Any) -> HostSyncError | None:
    """Return a HostSyncError if an operation is a barrier; otherwise None."""
    name = func._schema.name.split("::")[1]
    if not is_collective(func) or name not in _BARRIERS:
        return None
    call = f"torch.distributed.{name.removesuffix('_')}"
    return HostSyncError(call, "it makes the host wait for other ranks")


def writes_first_argument(func: Any) -> bool:
    """Return whether a collective writes its first argument (a tensor or lists of tensors).

    The schemas of collectives do not mark written arguments. Source: Ops.cpp of torch's c10d, where
    output arguments come first.
    """
    return func._schema.name.split("::")[1] not in {"send", *_BARRIERS}


def blocking(func: Any) -> Callable[..., Any]:
    """Return a function that runs a collective, and blocks until the collective has finished."""
    from torch.distributed import Work

    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        work = result[-1] if isinstance(result, tuple) else result
        Work.unbox(work).wait()
        return result

    return call
