"""vLLM's rules for choosing a CUDA graph, as policies of dispatchkit."""

from __future__ import annotations

from dispatchkit_vllm.dialects import DIALECTS, Dialect, Loras, Padding
from dispatchkit_vllm.ladder import Ladder, PartialRequestError
from dispatchkit_vllm.policy import VllmPolicy

__version__ = "0.1.0"

__all__ = [
    "DIALECTS",
    "Dialect",
    "Ladder",
    "Loras",
    "Padding",
    "PartialRequestError",
    "VllmPolicy",
]
