"""vLLM 0.11.1: like 0.11.0, with cascade attention and an adapter flag."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.dialects import V0_11_1
from dispatchkit_vllm.facade._lazy import wrapper_names
from dispatchkit_vllm.facade._lookup import LookupDispatcher

if TYPE_CHECKING:
    from dispatchkit_vllm.facade._wrapper import CUDAGraphEntry, CUDAGraphOptions
    from dispatchkit_vllm.facade._wrapper import OldCUDAGraphWrapper as CUDAGraphWrapper

__all__ = [
    "BatchDescriptor",
    "CUDAGraphEntry",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CudagraphDispatcher",
]

__getattr__ = wrapper_names(
    __name__,
    CUDAGraphEntry="CUDAGraphEntry",
    CUDAGraphOptions="CUDAGraphOptions",
    CUDAGraphWrapper="OldCUDAGraphWrapper",
)


class BatchDescriptor(NamedTuple):
    """A padded batch: number of tokens, and whether it is uniform and uses adapters."""

    num_tokens: int
    uniform_decode: bool = False
    has_lora: bool = False

    @property
    def non_uniform(self) -> BatchDescriptor:
        """Return the descriptor of a mixed batch of the same size."""
        return self._replace(uniform_decode=False)


class CudagraphDispatcher(LookupDispatcher):
    """The dispatcher of vLLM 0.11.1."""

    dialect = V0_11_1
    descriptor_type = BatchDescriptor
    _has_lora_flag = True
