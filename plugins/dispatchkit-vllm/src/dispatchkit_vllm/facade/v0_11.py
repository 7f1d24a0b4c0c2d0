"""vLLM 0.11.0: a dispatcher without cascade attention or adapters."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.dialects import V0_11
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

_log = logging.getLogger(__name__)


class BatchDescriptor(NamedTuple):
    """A padded batch: number of tokens, and whether it is a uniform decode batch."""

    num_tokens: int
    uniform_decode: bool = False

    @property
    def non_uniform(self) -> BatchDescriptor:
        """Return the descriptor of a mixed batch of the same size."""
        return self._replace(uniform_decode=False)


class CudagraphDispatcher(LookupDispatcher):
    """The dispatcher of vLLM 0.11.0."""

    dialect = V0_11
    descriptor_type = BatchDescriptor

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._warned = False

    # In this release, dispatch takes one argument and warns once if keys are not initialized.
    def dispatch(  # type: ignore[override]
        self, batch_descriptor: BatchDescriptor
    ) -> tuple[Any, BatchDescriptor | None]:
        """Return the runtime mode and the descriptor of a matching key, or (NONE, None)."""
        if not self.keys_initialized and not self._warned:
            self._warned = True
            _log.warning(
                "Keys are not initialized, so all batches run eager. Call "
                "initialize_cudagraph_keys() first."
            )
        return super().dispatch(batch_descriptor)
