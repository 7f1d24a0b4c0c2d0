"""vLLM's rules for choosing a CUDA graph, as policies of dispatchkit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatchkit_vllm.dialects import DIALECTS, Dialect, Loras, Padding
from dispatchkit_vllm.ladder import Ladder, PartialRequestError
from dispatchkit_vllm.policy import VllmPolicy

if TYPE_CHECKING:
    from dispatchkit_vllm.wrapper import GraphWrapper, set_forward_context

__version__ = "0.1.0"

__all__ = [
    "DIALECTS",
    "Dialect",
    "GraphWrapper",
    "Ladder",
    "Loras",
    "Padding",
    "PartialRequestError",
    "VllmPolicy",
    "set_forward_context",
]


def __getattr__(name: str) -> Any:
    if name not in ("GraphWrapper", "set_forward_context"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dispatchkit_vllm import wrapper  # it needs torch, which policies do not

    return getattr(wrapper, name)
