"""Run or refuse higher-order operators under a dispatch mode."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from dispatchkit.backends.capture_guard import HostSyncError

# Operators for which the host reads a tensor to choose or repeat a function. torch 2.13 and later
# can capture them as graph nodes, but only through private APIs of torch.compile.
_READ_BY_HOST = {
    "cond": (
        "the host reads the condition",
        "Use torch.where on the results of both functions",
    ),
    "while_loop": ("the host reads the condition", "Use a loop of fixed length"),
}
_READ_BY_HOST["while_loop_stack_output"] = _READ_BY_HOST["while_loop"]
_PLAIN = torch._C.DispatchKey.CompositeExplicitAutograd


def is_higher_order(func: Any) -> bool:
    """Return whether an operation is a higher-order operator."""
    return isinstance(func, HigherOrderOperator)


def run_higher_order(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a higher-order operator so that the mode receives its plain operations.

    Raises:
        HostSyncError: The host must read data to run the operator.
    """
    if func._name in _READ_BY_HOST:
        why, instead = _READ_BY_HOST[func._name]
        next_step = (
            f"{instead}, or move the call out of the captured function or into an eager piece."
        )
        raise HostSyncError(f"torch.{func._name}", why, next_step)
    kernel = func.py_kernels.get(_PLAIN)
    if kernel is None:
        raise NotImplementedError(
            f"the operator {func._name!r} cannot be captured, because it has no eager kernel; "
            "move it out of the captured function, or into an eager piece"
        )
    with mode:
        return kernel(*args, **kwargs)
