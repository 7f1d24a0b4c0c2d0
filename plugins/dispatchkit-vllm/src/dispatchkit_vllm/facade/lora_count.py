"""The dispatcher variant with one graph for each number of active adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

from dispatchkit.keys import CUDAGraphMode, RuntimeMode

from dispatchkit_vllm.dialects import LORA_COUNT
from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._padding import PaddingDispatcher

__all__ = ["BatchDescriptor", "CUDAGraphMode", "CudagraphDispatcher"]


class BatchDescriptor(NamedTuple):
    """A padded batch with its number of active adapters."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    def relax_for_mixed_batch_cudagraphs(self) -> BatchDescriptor:
        """Return the descriptor of a mixed batch with any number of requests."""
        return self._replace(num_reqs=None, uniform=False)


class CudagraphDispatcher(PaddingDispatcher):
    """The dispatcher with one graph for each number of active adapters.

    Attributes:
        specialize_lora_count: Whether each number of active adapters has its own graph. False
            with speculative decoding, where one graph serves all numbers above 0.
    """

    dialect = LORA_COUNT
    descriptor_type = BatchDescriptor

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.specialize_lora_count = (
            _config.has_lora(vllm_config) and self.uniform_decode_query_len == 1
        )

    def initialize_cudagraph_keys(self, cudagraph_mode: Any, uniform_decode_query_len: int) -> None:
        """Register the keys of a mode. Keys of earlier calls stay registered, as in vLLM.

        Args:
            cudagraph_mode: The mode, resolved for the attention backend.
            uniform_decode_query_len: Query length that limits the sizes of decode keys to the range
                from this length to ``max_num_seqs`` times this length. The number of requests of a
                key depends on the query length in the configuration instead.

        Raises:
            AssertionError: A decode size is not a multiple of the query length. Keys registered
                before the error remain, and the dispatcher stays uninitialized.
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
            num_tokens: Number of unpadded tokens.
            uniform_decode: Whether each request has exactly ``uniform_decode_query_len`` tokens.
            has_lora: Whether adapters are active.
            disable_full: Whether to exclude FULL graphs.
            num_active_loras: Number of active adapters.

        Raises:
            AssertionError: The bucket of a uniform batch is not a multiple of the query length.
        """
        if self._runs_eager(num_tokens):
            return self._eager(num_tokens)
        config = self.vllm_config
        if has_lora and _config.has_lora(config) and self.uniform_decode_query_len > 1:
            num_active_loras = _config.max_loras(config)
        allowed = RuntimeMode.PIECEWISE if disable_full else RuntimeMode.FULL
        return self._decide(
            num_tokens, bool(uniform_decode), bool(has_lora), num_active_loras, allowed
        )
