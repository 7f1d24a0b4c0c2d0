"""vLLM 0.33, first model runner: adapter counts, and sets of allowed modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from dispatchkit import Policy
from dispatchkit.keys import CUDAGraphMode, RuntimeMode, allowed_modes_code

from dispatchkit_vllm.dialects import V0_33
from dispatchkit_vllm.facade._lazy import wrapper_names
from dispatchkit_vllm.facade._table import TableDispatcher

if TYPE_CHECKING:
    from dispatchkit_vllm.facade._wrapper import (
        CUDAGraphEntry,
        CUDAGraphOptions,
        CUDAGraphWrapper,
    )

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
    CUDAGraphWrapper="CUDAGraphWrapper",
)


@dataclasses.dataclass(frozen=True)
class BatchDescriptor:
    """A padded batch with its number of active adapters."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


class CudagraphDispatcher(TableDispatcher):
    """The dispatcher of vLLM 0.33."""

    dialect = V0_33
    descriptor_type = BatchDescriptor

    def __init__(self, vllm_config: Any, policy: Policy | None = None) -> None:
        super().__init__(vllm_config, policy)
        self._all_modes = frozenset(self._modes.values())
        self._codes: dict[frozenset[Any], int] = {}

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: AbstractSet[Any] | None = None,
        invalid_modes: AbstractSet[Any] | None = None,
    ) -> tuple[Any, BatchDescriptor]:
        """Return the runtime mode and the padded descriptor.

        Args:
            num_tokens: Number of unpadded tokens.
            uniform_decode: Whether each request has exactly ``uniform_decode_query_len`` tokens.
            has_lora: Whether adapters are active.
            num_active_loras: Number of active adapters.
            valid_modes: Modes to choose from; empty or None for all. If this is a mutable set,
                invalid modes are removed from it, as in vLLM.
            invalid_modes: Modes to exclude.

        Raises:
            AssertionError: All modes are excluded, or the bucket of a uniform batch is not a
                multiple of the query length. Also raised if no graph serves the batch and eager
                is excluded.
        """
        allowed: int = RuntimeMode.FULL
        if valid_modes or invalid_modes:
            allowed = self._allowed(valid_modes, invalid_modes)
        if allowed == RuntimeMode.NONE or self._runs_eager(num_tokens):
            return self._eager(num_tokens)
        if has_lora and num_active_loras > 0:
            num_active_loras = self._effective_loras(num_active_loras)
        uniform = bool(uniform_decode) and self._separate
        return self._decide(num_tokens, uniform, bool(has_lora), num_active_loras, allowed)

    def _allowed(
        self, valid_modes: AbstractSet[Any] | None, invalid_modes: AbstractSet[Any] | None
    ) -> int:
        modes = valid_modes or self._all_modes
        if invalid_modes:
            modes -= invalid_modes  # in place if the caller's set is mutable, as in vLLM
        if not modes:
            excluded = ", ".join(sorted(mode.name for mode in invalid_modes or ()))
            raise AssertionError(
                f"invalid_modes ({excluded}) excludes all valid modes. Remove a mode from it, or "
                "add another mode to valid_modes."
            )
        frozen = frozenset(modes)  # returns a frozenset unchanged
        code = self._codes.get(frozen)
        if code is None:
            code = self._codes[frozen] = allowed_modes_code(frozen)
        return code
