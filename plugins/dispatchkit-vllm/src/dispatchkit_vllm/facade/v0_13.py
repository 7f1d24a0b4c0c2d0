"""vLLM 0.13: the dispatcher pads batches, and keys include the number of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dispatchkit.keys import CUDAGraphMode, RuntimeMode

from dispatchkit_vllm.dialects import V0_13
from dispatchkit_vllm.facade._lazy import wrapper_names
from dispatchkit_vllm.facade._padding import PaddingDispatcher

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
    """A padded batch: tokens, requests, and whether it is uniform and uses adapters."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False

    def relax_for_mixed_batch_cudagraphs(self) -> BatchDescriptor:
        """Return the descriptor of a mixed batch with any number of requests."""
        return self._replace(num_reqs=None, uniform=False)


class CudagraphDispatcher(PaddingDispatcher):
    """The dispatcher of vLLM 0.13."""

    dialect = V0_13
    descriptor_type = BatchDescriptor
    _counts_loras = False

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

    def dispatch(
        self, num_tokens: int, uniform_decode: bool, has_lora: bool, disable_full: bool = False
    ) -> tuple[Any, BatchDescriptor]:
        """Return the runtime mode and the padded descriptor.

        Args:
            num_tokens: Number of unpadded tokens.
            uniform_decode: Whether each request has exactly ``uniform_decode_query_len`` tokens.
                vLLM's runner determines this from shapes, so it may be true for the last chunk of
                a prompt.
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
