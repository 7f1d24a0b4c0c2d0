"""The names of vLLM 0.12: as 0.13, with cascade attention instead of ``disable_full``."""

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
            num_tokens: Unpadded tokens.
            uniform_decode: Whether every request has as many tokens as a decode step takes.
            has_lora: Whether adapters are active.
            use_cascade_attn: Whether FULL graphs cannot serve this batch.

        Raises:
            AssertionError: The bucket of a uniform batch does not consist of whole requests.
        """
        return super().dispatch(num_tokens, uniform_decode, has_lora, use_cascade_attn)
