"""Names of vLLM 0.33, first model runner: counts of adapters, sets of allowed modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from dispatchkit import Policy
from dispatchkit.keys import CUDAGraphMode, RuntimeMode, allowed_modes_code, padding_table

from dispatchkit_vllm.dialects import V0_33
from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._lazy import wrapper_names
from dispatchkit_vllm.facade._padding import PaddingDispatcher

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
    """A padded batch, with the number of its active adapters."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


class CudagraphDispatcher(PaddingDispatcher):
    """The dispatcher of vLLM 0.33."""

    dialect = V0_33
    descriptor_type = BatchDescriptor
    _ends_early = True

    def __init__(self, vllm_config: Any, policy: Policy | None = None) -> None:
        super().__init__(vllm_config, policy)
        self._all_modes = frozenset(self._modes.values())
        self._codes: dict[frozenset[Any], int] = {}

    def _sizes(self) -> list[int] | None:
        return sorted(set(super()._sizes() or ()))

    def _max_loras(self) -> int:
        # The largest count is one more than the adapters loaded: a batch may mix them all
        # with requests that use none.
        most = _config.max_loras(self.vllm_config)
        return most + 1 if most else 0

    def _padding_table(self, sizes: list[int], mode: CUDAGraphMode) -> Sequence[int]:
        table = padding_table(sizes)
        compile_sizes = getattr(self.compilation_config, "compile_sizes", None) or ()
        for size in compile_sizes:
            if isinstance(size, int) and size < len(table) and table[size] != size:
                raise ValueError(
                    f"compile_sizes holds {size}, which would be padded to {table[size]} and "
                    f"never run at its own size. Add {size} to the capture sizes, or leave it "
                    f"out of compile_sizes."
                )
        return table

    def initialize_cudagraph_keys(
        self, cudagraph_mode: Any, uniform_decode_query_len: int = 1
    ) -> None:
        """Register the keys of a mode. Keys of an earlier call stay, as in vLLM.

        Args:
            cudagraph_mode: The mode resolved from what the attention backend supports.
            uniform_decode_query_len: Query length that bounds the sizes of decode keys;
                whole requests and their number follow the one of the configuration.

        Raises:
            AssertionError: A decode size is not made of whole requests. Keys before it
                stay registered, and the dispatcher uninitialised.
            ValueError: A compile size would be padded, and never run at its own size.
        """
        self._initialize(cudagraph_mode, uniform_decode_query_len)

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
            num_tokens: Unpadded tokens.
            uniform_decode: Every request has as many tokens as a decode step takes.
            has_lora: Adapters are active.
            num_active_loras: How many adapters are active.
            valid_modes: Modes to choose from; empty or None means all. As in vLLM, a
                mutable set loses the invalid modes.
            invalid_modes: Modes to leave out.

        Raises:
            AssertionError: No mode is left, no graph serves the batch and eager is left
                out, or the bucket of a uniform batch is not made of whole requests.
        """
        allowed: int = RuntimeMode.FULL
        if valid_modes or invalid_modes:
            allowed = self._allowed(valid_modes, invalid_modes)
        if allowed == RuntimeMode.NONE or self._is_off(num_tokens):
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
            modes -= invalid_modes  # in place where the caller's set is mutable, as in vLLM
        if not modes:
            raise AssertionError("valid_modes less invalid_modes leaves no mode to choose from.")
        frozen = frozenset(modes)  # the same object where it is one already
        code = self._codes.get(frozen)
        if code is None:
            code = self._codes[frozen] = allowed_modes_code(frozen)
        return code

    def _effective_loras(self, count: int) -> int:
        config = self.vllm_config
        if not _config.has_lora(config):
            raise AssertionError(f"{count} active adapters, but none are configured.")
        if _config.specializes_active_lora(config) and self._ladder is not None:
            return self._ladder.lora_case(count)
        return self._max_loras()

    def get_capture_descs(self) -> list[tuple[Any, list[BatchDescriptor]]]:
        """Return what to capture, by mode: PIECEWISE first, largest first in each."""
        if not self.keys_initialized or self._mode_is_none():
            return []
        groups = []
        for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL):
            descriptors = sorted(
                self.cudagraph_keys[self._modes[mode]],
                key=lambda each: (each.num_tokens, each.num_active_loras),
                reverse=True,
            )
            if descriptors:
                groups.append((self._modes[mode], descriptors))
        return groups
