"""The dispatchers from 0.15 on, which make a padding table and list what to capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dispatchkit.keys import CUDAGraphMode, RuntimeMode, padding_table

from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._padding import PaddingDispatcher


class TableDispatcher(PaddingDispatcher):
    """Pad with a separate table."""

    _ends_early: ClassVar[bool] = True

    def _sizes(self) -> list[int] | None:
        return sorted(set(super()._sizes() or ()))

    def _max_loras(self) -> int:
        if not self._counts_loras:
            return super()._max_loras()
        # The largest count is one more than the adapters loaded: a batch may mix all of them
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
                whole requests and their number follow the configuration's query length.

        Raises:
            AssertionError: A decode size does not consist of whole requests. Keys before it
                stay registered, and the dispatcher stays uninitialised.
            ValueError: A compile size would be padded, and never run at its own size.
        """
        self._initialize(cudagraph_mode, uniform_decode_query_len)

    def _effective_loras(self, count: int) -> int:
        config = self.vllm_config
        if not _config.has_lora(config):
            raise AssertionError(f"{count} active adapters, but none are configured.")
        if _config.specializes_active_lora(config) and self._ladder is not None:
            return self._ladder.lora_case(count)
        return self._max_loras()

    def get_capture_descs(self) -> list[tuple[Any, list[Any]]]:
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
