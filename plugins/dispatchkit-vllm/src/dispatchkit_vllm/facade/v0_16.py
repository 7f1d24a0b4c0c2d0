"""vLLM 0.16: adapter counts, and mixed FULL graphs for any number of requests."""

from __future__ import annotations

from typing import Any

import attrs

from dispatchkit.keys import CUDAGraphMode, RuntimeMode

from dispatchkit_vllm.dialects import V0_33
from dispatchkit_vllm.facade._table import TableDispatcher
from dispatchkit_vllm.facade.lora_count import BatchDescriptor

__all__ = ["BatchDescriptor", "CUDAGraphMode", "CudagraphDispatcher"]


class CudagraphDispatcher(TableDispatcher):
    """The dispatcher of vLLM 0.16."""

    dialect = attrs.evolve(
        V0_33,
        name="vllm@0.16",
        summary="vLLM 0.16",
        relaxes_mixed_full=True,
        caps_uniform_reqs=False,
        uniform_needs_separate=False,
    )
    descriptor_type = BatchDescriptor

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
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
        if has_lora and num_active_loras > 0:
            num_active_loras = self._effective_loras(num_active_loras)
        allowed = RuntimeMode.PIECEWISE if disable_full else RuntimeMode.FULL
        return self._decide(
            num_tokens, bool(uniform_decode), bool(has_lora), num_active_loras, allowed
        )
