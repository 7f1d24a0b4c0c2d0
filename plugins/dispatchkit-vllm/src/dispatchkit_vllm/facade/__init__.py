"""Classes with vLLM's own names and results, over dispatchkit.

One module per release and variant:

- ``v0_11``, ``v0_11_1``, ``v0_13``, ``v0_33``: ``CudagraphDispatcher``, ``BatchDescriptor``,
  ``CUDAGraphWrapper``, ``CUDAGraphOptions``, ``CUDAGraphEntry``, ``CUDAGraphMode``;
- ``v0_33_manager``: ``CudaGraphManager`` of the second model runner;
- ``drafter``: several uniform query lengths; ``lora_count``: a graph for each adapter count;
- ``policies``: the names of a third party's dispatcher, over native policies.

The names imported here are those of 0.11.1, whose dispatcher takes a ready descriptor and
knows cascade attention.
"""

from __future__ import annotations

from dispatchkit_vllm.facade._wrapper import current_device, use_device
from dispatchkit_vllm.facade.v0_11_1 import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphEntry,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
)

__all__ = [
    "BatchDescriptor",
    "CUDAGraphEntry",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CudagraphDispatcher",
    "current_device",
    "use_device",
]
