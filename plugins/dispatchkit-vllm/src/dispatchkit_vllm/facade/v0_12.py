"""vLLM 0.12: like 0.13, with ``use_cascade_attn`` instead of ``disable_full``."""

from __future__ import annotations

from typing import Any

from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.facade import v0_13
from dispatchkit_vllm.facade.v0_13 import BatchDescriptor

__all__ = ["BatchDescriptor", "CUDAGraphMode", "CudagraphDispatcher"]


class CudagraphDispatcher(v0_13.CudagraphDispatcher):
    """The dispatcher of vLLM 0.12."""

    def dispatch(
        self, num_tokens: int, uniform_decode: bool, has_lora: bool, use_cascade_attn: bool = False
    ) -> tuple[Any, BatchDescriptor]:
        """Return the runtime mode and the padded descriptor.

        Args:
            num_tokens: Number of unpadded tokens.
            uniform_decode: Whether each request has exactly ``uniform_decode_query_len`` tokens.
            has_lora: Whether adapters are active.
            use_cascade_attn: Whether the batch uses cascade attention, which excludes FULL graphs.

        Raises:
            AssertionError: The bucket of a uniform batch is not a multiple of the query length.
        """
        return super().dispatch(num_tokens, uniform_decode, has_lora, use_cascade_attn)
