"""The names of the variant with one graph for each count of active adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

from dispatchkit.keys import CUDAGraphMode, RuntimeMode

from dispatchkit_vllm.dialects import LORA_COUNT
from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._padding import PaddingDispatcher

__all__ = ["BatchDescriptor", "CUDAGraphMode", "CudagraphDispatcher"]


class BatchDescriptor(NamedTuple):
    """A padded batch, with the number of its active adapters."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    def relax_for_mixed_batch_cudagraphs(self) -> BatchDescriptor:
        """Return the same batch as a mixed one with any number of requests."""
        return self._replace(num_reqs=None, uniform=False)


class CudagraphDispatcher(PaddingDispatcher):
    """The dispatcher with one graph for each count of active adapters.

    Attributes:
        specialize_lora_count: Whether every count has a graph; with speculative decoding one
            graph serves all counts.
    """

    dialect = LORA_COUNT
    descriptor_type = BatchDescriptor

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.specialize_lora_count = (
            _config.has_lora(vllm_config) and self.uniform_decode_query_len == 1
        )

    def initialize_cudagraph_keys(self, cudagraph_mode: Any, uniform_decode_query_len: int) -> None:
        """Register the keys of a mode. Keys of an earlier call stay, as in vLLM.

        Args:
            cudagraph_mode: The mode resolved from what the attention backend supports.
            uniform_decode_query_len: Query length that bounds the sizes of decode keys;
                whole requests and their number follow the configuration's query length.

        Raises:
            AssertionError: A decode size does not consist of whole requests. Keys before it
                stay registered, and the dispatcher stays uninitialised.
        """
        self._initialize(cudagraph_mode, uniform_decode_query_len)

    def _max_loras(self) -> int:
        return _config.max_loras(self.vllm_config)

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool,
        has_lora: bool,
        disable_full: bool = False,
        num_active_loras: int = 0,
    ) -> tuple[Any, BatchDescriptor]:
        """Return the runtime mode and the padded descriptor.

        Args:
            num_tokens: Unpadded tokens.
            uniform_decode: Whether every request has as many tokens as a decode step takes.
            has_lora: Whether adapters are active.
            disable_full: Whether FULL graphs cannot serve this batch.
            num_active_loras: Number of active adapters.

        Raises:
            AssertionError: The bucket of a uniform batch does not consist of whole requests.
        """
        if self._is_off(num_tokens):
            return self._eager(num_tokens)
        config = self.vllm_config
        if has_lora and _config.has_lora(config) and self.uniform_decode_query_len > 1:
            num_active_loras = _config.max_loras(config)
        allowed = RuntimeMode.PIECEWISE if disable_full else RuntimeMode.FULL
        return self._decide(
            num_tokens, bool(uniform_decode), bool(has_lora), num_active_loras, allowed
        )
