"""Classes with vLLM's names and results, built on dispatchkit.

There is one module per interface. A version in a module's name is a release that has this
interface. The modules are:

- ``v0_11``, ``v0_11_1``, ``v0_13``, ``v0_33``: ``CudagraphDispatcher``, ``BatchDescriptor``,
  ``CUDAGraphWrapper``, ``CUDAGraphOptions``, ``CUDAGraphEntry``, ``CUDAGraphMode``;
- ``v0_12``, ``v0_15``, ``v0_16``: only ``CudagraphDispatcher``, ``BatchDescriptor`` and
  ``CUDAGraphMode``;
- ``v0_33_manager``: ``CudaGraphManager`` of the second model runner;
- ``drafter``: a dispatcher with several uniform query lengths;
- ``lora_count``: a dispatcher with separate graphs for each number of active adapters;
- ``policies``: classes that follow the documentation of a third-party dispatcher.

``dispatcher_for`` returns the facade for a ``CudagraphDispatcher`` class of vLLM. The package
itself exports the names of ``v0_11_1``, whose dispatcher takes a padded descriptor and supports
cascade attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit_vllm.facade._lazy import wrapper_names
from dispatchkit_vllm.facade._release import dispatcher_for
from dispatchkit_vllm.facade.v0_11_1 import BatchDescriptor, CudagraphDispatcher, CUDAGraphMode

if TYPE_CHECKING:
    from dispatchkit_vllm.facade._wrapper import (
        CUDAGraphEntry,
        CUDAGraphOptions,
        current_device,
        use_device,
    )
    from dispatchkit_vllm.facade._wrapper import OldCUDAGraphWrapper as CUDAGraphWrapper

__all__ = [
    "BatchDescriptor",
    "CUDAGraphEntry",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CudagraphDispatcher",
    "current_device",
    "dispatcher_for",
    "use_device",
]

__getattr__ = wrapper_names(
    __name__,
    CUDAGraphEntry="CUDAGraphEntry",
    CUDAGraphOptions="CUDAGraphOptions",
    CUDAGraphWrapper="OldCUDAGraphWrapper",
    current_device="current_device",
    use_device="use_device",
)
