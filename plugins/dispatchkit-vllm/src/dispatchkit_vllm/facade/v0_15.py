"""vLLM 0.15: like 0.13, but the dispatcher has its own padding table and capture list."""

from __future__ import annotations

from typing import Any

from dispatchkit.keys import CUDAGraphMode, RuntimeMode

from dispatchkit_vllm.dialects import V0_13
from dispatchkit_vllm.facade._table import TableDispatcher
from dispatchkit_vllm.facade.v0_13 import BatchDescriptor

__all__ = ["BatchDescriptor", "CUDAGraphMode", "CudagraphDispatcher"]


class CudagraphDispatcher(TableDispatcher):
    """The dispatcher of vLLM 0.15."""

    dialect = V0_13
    descriptor_type = BatchDescriptor
    _counts_loras = False

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        disable_full: bool = False,
    ) -> tuple[Any, BatchDescriptor]:
        """Return the runtime mode and the padded descriptor.

        Args:
            num_tokens: Number of unpadded tokens.
            uniform_decode: Whether each request has exactly ``uniform_decode_query_len`` tokens.
            has_lora: Whether adapters are active.
            disable_full: Whether to exclude FULL graphs.

        Raises:
            AssertionError: The bucket of a uniform batch is not a multiple of the query length.
        """
        if self._runs_eager(num_tokens):
            return self._eager(num_tokens)
        allowed = RuntimeMode.PIECEWISE if disable_full else RuntimeMode.FULL
        flag = bool(has_lora)
        return self._decide(num_tokens, bool(uniform_decode), flag, int(flag), allowed)
