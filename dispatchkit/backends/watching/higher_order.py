"""Operators that are given functions, such as ``torch.cond``, under a dispatch mode."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from dispatchkit.backends.capture_guard import HostSyncError

# The host reads a tensor to know which function to run, or whether to run it again. torch can
# make nodes of a graph of them from 2.13 on, by private means of torch.compile alone.
_READ_BY_HOST = {
    "cond": "the host reads which function is to run; torch.where of both results is captured",
    "while_loop": "the host reads whether to go on; a loop of a fixed length is captured",
}
_READ_BY_HOST["while_loop_stack_output"] = _READ_BY_HOST["while_loop"]
_PLAIN = torch._C.DispatchKey.CompositeExplicitAutograd


def is_higher_order(func: Any) -> bool:
    """Return whether an operation is such an operator."""
    return isinstance(func, HigherOrderOperator)


def run_higher_order(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run such an operator so that the mode sees the operations of its functions.

    Raises:
        HostSyncError: The host chooses by data what it runs.
    """
    if func._name in _READ_BY_HOST:
        raise HostSyncError(f"torch.{func._name}", _READ_BY_HOST[func._name])
    kernel = func.py_kernels.get(_PLAIN)
    if kernel is None:
        raise NotImplementedError(f"{func._name} has no eager form that can be watched.")
    with mode:
        return kernel(*args, **kwargs)
