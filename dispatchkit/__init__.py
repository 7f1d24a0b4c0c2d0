"""Decide, for every batch of a PyTorch model, which captured CUDA graph to replay.

Names are loaded on first use: importing the package loads neither torch nor a plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dispatchkit._version import __version__ as __version__

if TYPE_CHECKING:
    from dispatchkit.dispatch import (
        CellUpdate,
        Decision,
        Dispatcher,
        GraphView,
        Lanes,
        LearningPolicy,
        Outcome,
        Policy,
        Reason,
        explain,
    )
    from dispatchkit.errors import DispatchkitError
    from dispatchkit.execute import (
        GraphMemory,
        GraphRunner,
        SlotState,
        StaticInput,
        StepState,
        declare_support,
        eager_piece,
        eager_region,
        graph_break,
        graph_piece,
    )
    from dispatchkit.execute.graphed import graphed
    from dispatchkit.hookspecs import hookimpl
    from dispatchkit.keys import (
        Axis,
        Batch,
        BatchDescriptor,
        CUDAGraphMode,
        DispatchConfig,
        GraphKey,
        RuntimeMode,
        allowed_modes_code,
    )
    from dispatchkit.options import (
        BufferOptions,
        CaptureOptions,
        LaneOptions,
        MemoryOptions,
        RunnerOptions,
    )
    from dispatchkit.plugins import PolicySpec, load_plugins
    from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState

_LAZY_NAMES = {
    "Axis": "keys",
    "Batch": "keys",
    "BatchDescriptor": "keys",
    "BufferOptions": "options",
    "CUDAGraphMode": "keys",
    "CaptureOptions": "options",
    "CellUpdate": "dispatch",
    "Decision": "dispatch",
    "DispatchConfig": "keys",
    "Dispatcher": "dispatch",
    "DispatchkitError": "errors",
    "GraphEntry": "registry",
    "GraphKey": "keys",
    "GraphMemory": "execute",
    "GraphRegistry": "registry",
    "GraphRunner": "execute",
    "GraphView": "dispatch",
    "KeyState": "registry",
    "LaneOptions": "options",
    "Lanes": "dispatch",
    "LearningPolicy": "dispatch",
    "MemoryOptions": "options",
    "Outcome": "dispatch",
    "Policy": "dispatch",
    "PolicySpec": "plugins",
    "Reason": "dispatch",
    "RunnerOptions": "options",
    "RuntimeMode": "keys",
    "SlotState": "execute",
    "StaticInput": "execute",
    "StepState": "execute",
    "allowed_modes_code": "keys",
    "declare_support": "execute",
    "eager_piece": "execute",
    "eager_region": "execute",
    "explain": "dispatch",
    "graph_break": "execute",
    "graph_piece": "execute",
    "graphed": "execute.graphed",
    "hookimpl": "hookspecs",
    "load_plugins": "plugins",
}

# Listed explicitly because type checkers and linters do not run the module.
__all__ = [
    "Axis",
    "Batch",
    "BatchDescriptor",
    "BufferOptions",
    "CUDAGraphMode",
    "CaptureOptions",
    "CellUpdate",
    "Decision",
    "DispatchConfig",
    "Dispatcher",
    "DispatchkitError",
    "GraphEntry",
    "GraphKey",
    "GraphMemory",
    "GraphRegistry",
    "GraphRunner",
    "GraphView",
    "KeyState",
    "LaneOptions",
    "Lanes",
    "LearningPolicy",
    "MemoryOptions",
    "Outcome",
    "Policy",
    "PolicySpec",
    "Reason",
    "RunnerOptions",
    "RuntimeMode",
    "SlotState",
    "StaticInput",
    "StepState",
    "allowed_modes_code",
    "declare_support",
    "eager_piece",
    "eager_region",
    "explain",
    "graph_break",
    "graph_piece",
    "graphed",
    "hookimpl",
    "load_plugins",
]


def __getattr__(name: str) -> Any:
    module = _LAZY_NAMES.get(name)
    if module is None:
        from dispatchkit.distributions import distribution_of, load_attribute

        if distribution_of("attribute", name) is not None:
            # If the distribution is missing, this raises ImportError, because `from dispatchkit
            # import` would replace the message of an AttributeError.
            return load_attribute(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
