"""Dispatchers with their own padding table and capture list, as in vLLM from 0.15 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dispatchkit.errors import counted
from dispatchkit.keys import CUDAGraphMode, RuntimeMode, padding_table

from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._padding import PaddingDispatcher


class TableDispatcher(PaddingDispatcher):
    """A dispatcher with its own padding table and list of graphs to capture."""

    _skips_mode_none: ClassVar[bool] = True

    def _sizes(self) -> list[int] | None:
        return sorted(set(super()._sizes() or ()))

    def _max_loras(self) -> int:
        if not self._counts_loras:
            return super()._max_loras()
        # One more than max_loras, because a batch may also contain requests without an adapter.
        most = _config.max_loras(self.vllm_config)
        return most + 1 if most else 0

    def _padding_table(self, sizes: list[int], mode: CUDAGraphMode) -> Sequence[int]:
        table = padding_table(sizes)
        compile_sizes = getattr(self.compilation_config, "compile_sizes", None) or ()
        for size in compile_sizes:
            if isinstance(size, int) and size < len(table) and table[size] != size:
                raise ValueError(
                    f"compile_sizes contains {size}, but batches of {counted(size, 'token')} are "
                    f"padded to {table[size]}. Add {size} to cudagraph_capture_sizes, or remove it "
                    "from compile_sizes."
                )
        return table

    def initialize_cudagraph_keys(
        self, cudagraph_mode: Any, uniform_decode_query_len: int = 1
    ) -> None:
        """Register the keys of a mode. Keys of earlier calls stay registered, as in vLLM.

        Args:
            cudagraph_mode: The mode, resolved for the attention backend.
            uniform_decode_query_len: Query length that limits the sizes of decode keys to the range
                from this length to ``max_num_seqs`` times this length. The number of requests of a
                key depends on the query length in the configuration instead.

        Raises:
            AssertionError: A decode size is not a multiple of the query length. Keys registered
                before the error remain, and the dispatcher stays uninitialized.
            ValueError: Batches of a compile size would be padded to a different size.
        """
        self._initialize(cudagraph_mode, uniform_decode_query_len)

    def _effective_loras(self, count: int) -> int:
        config = self.vllm_config
        if not _config.has_lora(config):
            raise AssertionError(f"num_active_loras must be 0 without lora_config, got {count}.")
        if _config.specializes_active_lora(config) and self._ladder is not None:
            return self._ladder.lora_case(count)
        return self._max_loras()

    def get_capture_descs(self) -> list[tuple[Any, list[Any]]]:
        """Return the descriptors to capture, by mode: PIECEWISE first, largest sizes first."""
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
