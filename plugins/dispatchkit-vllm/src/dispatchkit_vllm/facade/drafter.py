"""The dispatcher variant with several uniform query lengths, for drafters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dispatchkit import BatchDescriptor as NativeDescriptor
from dispatchkit import GraphKey, RuntimeMode
from dispatchkit.keys import CUDAGraphMode, padding_table

from dispatchkit_vllm.dialects import DRAFTER
from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._lookup import LookupDispatcher
from dispatchkit_vllm.ladder import Ladder

__all__ = ["BatchDescriptor", "CUDAGraphMode", "CudagraphDispatcher"]


class BatchDescriptor(NamedTuple):
    """A padded batch: number of tokens, and query length if it is uniform."""

    num_tokens: int
    uniform_decode: bool = False
    uniform_query_len: int = 0

    @property
    def non_uniform(self) -> BatchDescriptor:
        """Return the descriptor of a mixed batch of the same size."""
        return BatchDescriptor(self.num_tokens)


class CudagraphDispatcher(LookupDispatcher):
    """The dispatcher with several uniform query lengths.

    Args:
        vllm_config: vLLM's configuration, or any object with the same attributes. The graphs of
            uniform batches with several tokens per request have the sizes in
            ``compilation_config.uniform_cudagraph_capture_sizes``, or the sizes of mixed batches if
            ``disable_cudagraph_uniform_alignment`` is set.
        is_drafter: Whether the dispatcher serves a drafter, whose eager batches are not padded
            for sequence parallelism.

    Attributes:
        cudagraph_capture_sizes: Capture sizes of mixed batches.
        uniform_cudagraph_capture_sizes: Capture sizes of uniform batches, by query length.
        uniform_query_lens: Query lengths of uniform batches.
    """

    dialect = DRAFTER
    descriptor_type = BatchDescriptor

    def __init__(self, vllm_config: Any, is_drafter: bool = False) -> None:
        super().__init__(vllm_config)
        compilation = self.compilation_config
        self.is_drafter = is_drafter
        self.cudagraph_capture_sizes = _config.capture_sizes(vllm_config)
        self.uniform_cudagraph_capture_sizes: dict[int, list[int]] = {}
        self.uniform_query_lens: list[int] = []
        self._aligned: list[int] = list(
            getattr(compilation, "uniform_cudagraph_capture_sizes", None) or ()
        )
        self._is_aligned = not getattr(compilation, "disable_cudagraph_uniform_alignment", False)
        self._table = padding_table(self.cudagraph_capture_sizes)
        self._aligned_table = padding_table(self._aligned)

    def initialize_cudagraph_keys(
        self, cudagraph_mode: Any, uniform_query_lens: int | Iterable[Any]
    ) -> None:
        """Register the keys of a mode. Keys of earlier calls stay registered.

        Raises:
            AssertionError: There are no query lengths, or one is not a positive integer. Also
                raised if a query length does not divide all sizes in
                ``uniform_cudagraph_capture_sizes``, unless
                ``disable_cudagraph_uniform_alignment`` is set.
        """
        lens = uniform_query_lens
        query_lens = [lens] if isinstance(lens, int) else list(lens)
        if not query_lens or not all(isinstance(each, int) and each > 0 for each in query_lens):
            raise AssertionError(
                f"uniform_query_lens must be one or more positive integers, got {lens!r}."
            )
        if self._is_aligned:
            for query_len in query_lens:
                odd = [size for size in self._aligned if query_len > 1 and size % query_len]
                if odd:
                    raise AssertionError(
                        "uniform_cudagraph_capture_sizes must contain only multiples of the query "
                        f"length {query_len}, but contains {', '.join(map(str, odd))}. Use "
                        "multiples, or set disable_cudagraph_uniform_alignment."
                    )
        mode = CUDAGraphMode.parse(cudagraph_mode)
        self.cudagraph_mode = self.mode_type[mode.name]
        self.uniform_query_lens = query_lens
        ladder = Ladder(
            dialect=self.dialect,
            mode=mode,
            sizes=tuple(self.cudagraph_capture_sizes),
            uniform_sizes=tuple(
                self._aligned if self._is_aligned else self.cudagraph_capture_sizes
            ),
            max_num_seqs=_config.max_num_seqs(self.vllm_config),
            query_lens=tuple(dict.fromkeys(query_lens)),
        )
        if ladder.separate_decode:
            self.uniform_cudagraph_capture_sizes = {
                query_len: [
                    size
                    for size in ladder.decode_sizes(query_len)
                    if query_len <= size <= query_len * ladder.max_num_seqs
                ]
                for query_len in query_lens
            }
        self._declare(ladder, partial="keep")
        self.keys_initialized = True

    def get_capture_cases(
        self, uniform_decode: bool, uniform_query_len: int
    ) -> tuple[list[int], list[BatchDescriptor], Any]:
        """Return the sizes to capture, largest first, their descriptors and the runtime mode.

        Raises:
            AssertionError: There are no uniform graphs of this query length.
        """
        if not uniform_decode:
            mode = self.cudagraph_mode.mixed_mode()
            sizes = (
                [] if mode.name == "NONE" else sorted(self.cudagraph_capture_sizes, reverse=True)
            )
            return sizes, [BatchDescriptor(size) for size in sizes], mode
        known = sorted(self.uniform_cudagraph_capture_sizes)
        if uniform_query_len not in known:
            if not known:
                raise AssertionError(
                    f"No uniform graphs are registered (mode {self.cudagraph_mode.name}). Pass "
                    "uniform_decode=False, or call initialize_cudagraph_keys() with a mode that "
                    "has uniform graphs, such as FULL_AND_PIECEWISE."
                )
            raise AssertionError(
                f"uniform_query_len must be one of {known}, got {uniform_query_len}."
            )
        sizes = sorted(self.uniform_cudagraph_capture_sizes[uniform_query_len], reverse=True)
        descriptors = [BatchDescriptor(size, True, uniform_query_len) for size in sizes]
        return sizes, descriptors, self.cudagraph_mode.decode_mode()

    # -- the step -----------------------------------------------------------------------

    def calculate_uniform_decode(
        self, num_scheduled_tokens: int, num_reqs: int, max_query_len: int
    ) -> tuple[bool, int]:
        """Return whether a batch is uniform, and its query length (0 if mixed)."""
        uniform = (
            max_query_len in self.uniform_query_lens
            and num_scheduled_tokens == num_reqs * max_query_len
        )
        return uniform, max_query_len if uniform else 0

    caculate_uniform_decode = calculate_uniform_decode  # the original misspells this name

    def cudagraph_padded_num_tokens(
        self, num_tokens: int, uniform_decode: bool, uniform_query_len: int
    ) -> tuple[int, bool]:
        """Return the padded number of tokens, and whether it is a capture size.

        Raises:
            AssertionError: The query length is neither 0 nor one of ``uniform_query_lens``.
        """
        if uniform_query_len and uniform_query_len not in self.uniform_query_lens:
            allowed = "0 before initialize_cudagraph_keys() is called"
            if self.uniform_query_lens:
                allowed = f"0 or one of {self.uniform_query_lens}"
            raise AssertionError(f"uniform_query_len must be {allowed}, got {uniform_query_len}.")
        if uniform_query_len <= 1:
            if num_tokens < len(self._table):
                return self._table[num_tokens], True
        elif uniform_decode and num_tokens < len(self._aligned_table):
            return self._aligned_table[num_tokens], True
        return num_tokens, False

    def get_local_batch_description(
        self, num_scheduled_tokens: int, num_reqs: int, max_query_len: int
    ) -> tuple[int, bool, int]:
        """Return a batch's padded number of tokens, whether it is uniform, and its query length."""
        uniform, query_len = self.calculate_uniform_decode(
            num_scheduled_tokens, num_reqs, max_query_len
        )
        num_tokens, padded = num_scheduled_tokens, False
        if not self._mode_is_none():
            num_tokens, padded = self.cudagraph_padded_num_tokens(num_tokens, uniform, query_len)
        ranks = _config.tensor_parallel_size(self.vllm_config)
        if not (padded or self.is_drafter) and ranks > 1:
            if _config.sequence_parallel(self.vllm_config):
                num_tokens = -(-num_tokens // ranks) * ranks
        return num_tokens, uniform, query_len

    def fast_plan(
        self,
        num_scheduled_tokens: int,
        num_reqs: int,
        max_query_len: int,
        use_cascade_attn: bool = False,
    ) -> tuple[Any, BatchDescriptor | None, int]:
        """Return the runtime mode, the descriptor and the number of input tokens of a batch.

        The number of tokens may be padded even if no graph serves the batch.
        """
        num_tokens, uniform, query_len = self.get_local_batch_description(
            num_scheduled_tokens, num_reqs, max_query_len
        )
        mode, descriptor = self.dispatch(
            BatchDescriptor(num_tokens, uniform, query_len), use_cascade_attn
        )
        return mode, descriptor, num_tokens

    # -- descriptors --------------------------------------------------------------------

    def _key(self, mode: RuntimeMode, descriptor: Any) -> GraphKey:
        uniform, query_len = descriptor.uniform_decode, descriptor.uniform_query_len
        consistent = bool(uniform) == (query_len > 0)
        native = NativeDescriptor(
            descriptor.num_tokens,
            uniform=uniform,
            query_len=query_len if consistent else 0,
            # A descriptor whose uniform flag contradicts its query length has a separate key.
            axes=() if consistent else (query_len,),
        )
        return GraphKey(mode, native)

    def _descriptor(self, key: GraphKey) -> BatchDescriptor:
        native = key.descriptor
        query_len = native.axes[0] if native.axes else native.query_len
        return BatchDescriptor(native.num_tokens, native.uniform, query_len)
