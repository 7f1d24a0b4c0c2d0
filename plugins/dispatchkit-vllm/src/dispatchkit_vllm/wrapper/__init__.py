"""Graphs of callables inside a model, selected by a forward context.

Importing this package requires torch.
"""

from dispatchkit_vllm.wrapper.context import (
    ForwardContext,
    NoForwardContextError,
    forward_context_is_available,
    get_forward_context,
    set_forward_context,
)
from dispatchkit_vllm.wrapper.device import BackendDevice, WrapperDevice
from dispatchkit_vllm.wrapper.graph_wrapper import (
    GraphWrapper,
    WrappedEntry,
    WrapperError,
    WrapperOptions,
    WrapperRules,
    capture_counter,
    capturing_is_enabled,
    set_capturing_enabled,
)

__all__ = [
    "BackendDevice",
    "ForwardContext",
    "GraphWrapper",
    "NoForwardContextError",
    "WrappedEntry",
    "WrapperDevice",
    "WrapperError",
    "WrapperOptions",
    "WrapperRules",
    "capture_counter",
    "capturing_is_enabled",
    "forward_context_is_available",
    "get_forward_context",
    "set_capturing_enabled",
    "set_forward_context",
]
