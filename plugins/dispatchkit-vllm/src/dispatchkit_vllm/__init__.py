"""vLLM's rules for choosing a CUDA graph, as dispatchkit policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.lazy import lazy_names

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


# Imported on first use, because ``wrapper`` requires torch and policies do not.
__getattr__, __dir__ = lazy_names(
    __name__, {"GraphWrapper": "wrapper", "set_forward_context": "wrapper"}
)
