"""vLLM's rule: the keys of a configuration, and the keys to try for a batch.

A ``Ladder`` is a dialect applied to a configuration. It is stateless and uses no registry: the
caller checks which keys exist and can run. Policies and facades use the same ladders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal

import attrs

from dispatchkit.errors import counted
from dispatchkit.keys import (
    BatchDescriptor,
    CUDAGraphMode,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
    padding_table,
    round_sizes_for_query_len,
    rounds_for_query_len,
)

from dispatchkit_vllm.dialects import Dialect, Loras, Padding

__all__ = ["Ladder", "PartialRequestError"]

_FULL, _PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


class PartialRequestError(AssertionError):
    """Raised for a uniform graph whose size is not a multiple of the query length.

    It is also an AssertionError, which vLLM raises in this case. The facades raise a plain
    AssertionError with the same message.
    """

    def __init__(self, num_tokens: int, query_len: int) -> None:
        self.num_tokens, self.query_len = num_tokens, query_len
        super().__init__(
            f"A uniform batch with {query_len} tokens per request cannot be padded to "
            f"{counted(num_tokens, 'token')}. Use capture sizes that are multiples of {query_len}."
        )


@attrs.frozen(kw_only=True)
class Ladder:
    """A dialect applied to a configuration.

    Attributes:
        dialect: The variation of the rule.
        mode: The configured mode.
        sizes: Capture sizes, in the order in which keys are declared.
        uniform_sizes: Sizes of uniform batches with several tokens per request, if the
            dialect has separate sizes for them.
        max_num_seqs: Maximum number of requests of a batch.
        query_lens: Query lengths of uniform batches. With ``Padding.SHARED``, only batches of the
            first length have uniform graphs.
        max_loras: Maximum number of active adapters; 0 without adapters.
        specialize_lora: Whether graphs without adapters are captured as well.
        specialize_active_loras: Whether graphs are captured for several numbers of adapters.
        varlen: Whether decode graphs accept requests of varying length.
        cases: Numbers of adapters that have graphs; None to derive them from the other fields.
        table: The bucket of each number of tokens up to the largest size.
        lora_cases: Numbers of adapters that have graphs, in the order of declaration.
    """

    dialect: Dialect
    mode: CUDAGraphMode
    sizes: tuple[int, ...]
    uniform_sizes: tuple[int, ...] = ()
    max_num_seqs: int
    query_lens: tuple[int, ...] = (1,)
    max_loras: int = 0
    specialize_lora: bool = True
    specialize_active_loras: bool = False
    varlen: bool = False
    cases: tuple[int, ...] | None = None
    table: tuple[int, ...] = attrs.field(init=False)
    lora_cases: tuple[int, ...] = attrs.field(init=False)
    _by_case: dict[tuple[RuntimeMode, int], list[GraphKey]] = attrs.field(
        init=False, eq=False, repr=False, factory=dict
    )

    def __attrs_post_init__(self) -> None:
        fill = object.__setattr__  # the class is frozen
        fill(self, "table", padding_table(self.sizes))
        fill(self, "lora_cases", self._lora_cases())
        if self.dialect.padding is Padding.PER_MODE:
            for key in self.keys():
                case = (key.mode, key.descriptor.num_active_loras)
                self._by_case.setdefault(case, []).append(key)
            for keys in self._by_case.values():
                keys.sort(key=lambda key: key.num_tokens)

    @classmethod
    def of(cls, dialect: Dialect, config: DispatchConfig) -> Ladder:
        """Apply a dialect, including its rounding of sizes, to a configuration."""
        sizes, query_len = config.sizes, config.query_len
        if (
            dialect.rounding
            and rounds_for_query_len(config.mode, query_len, dialect.rounding)
            # A query length above all sizes has no graphs, but the sizes serve other batches.
            and query_len <= config.max_capture_size
        ):
            rounded = round_sizes_for_query_len(sizes, query_len, generation=dialect.rounding)
            sizes = rounded.sizes
        uniform_sizes = config.uniform_sizes
        return cls(
            dialect=dialect,
            mode=config.mode,
            sizes=tuple(sorted(sizes, reverse=dialect.sizes_descending)),
            uniform_sizes=sizes if uniform_sizes is None else uniform_sizes,
            max_num_seqs=config.max_num_seqs,
            query_lens=config.query_lens,
            max_loras=config.max_loras,
            specialize_lora=config.specialize_lora,
            specialize_active_loras=config.specialize_active_loras,
            varlen=config.varlen_decode and dialect.varies_query_len,
        )

    @property
    def query_len(self) -> int:
        """The first query length of uniform batches."""
        return self.query_lens[0]

    @property
    def max_size(self) -> int:
        """The largest capture size; 0 without sizes."""
        return len(self.table) - 1

    @property
    def separate_decode(self) -> bool:
        """Whether uniform decode batches have separate FULL graphs."""
        return self.mode.separate_routine() and self.mode.decode_mode() is CUDAGraphMode.FULL

    # -- adapters -----------------------------------------------------------------------

    def _captured_counts(self) -> tuple[int, ...]:
        """Return the positive numbers of adapters with graphs, for CASES and CASES_CLAMPED."""
        top = self.max_loras
        if self.cases is not None:
            return tuple(sorted(count for count in self.cases if count > 0))
        if not (self.specialize_active_loras and self.specialize_lora):
            return (top,)
        powers = [1 << bit for bit in range(top.bit_length()) if 1 << bit < top]
        return (*powers, top)

    def _lora_cases(self) -> tuple[int, ...]:
        if self.cases is not None:
            return self.cases
        kind, without = self.dialect.loras, (0,) if self.specialize_lora else ()
        if kind is Loras.NONE or self.max_loras == 0:
            return (0,)
        if kind is Loras.FLAG:
            return (self.max_loras, *without)
        if kind is Loras.EVERY_COUNT:
            drafts = self.query_len > 1
            counts = (self.max_loras,) if drafts else tuple(range(1, self.max_loras + 1))
            return (*counts, *without)
        if kind is Loras.CASES_CLAMPED:
            return (0, *self._captured_counts())
        return (*without, *self._captured_counts())

    def lora_case(self, count: int) -> int:
        """Return the number of adapters in the keys to try for a batch.

        A number that no graph supports is returned unchanged, and matches no key.
        """
        kind = self.dialect.loras
        without = self.max_loras == 0 and self.cases is None
        if count == 0 or without or kind is Loras.NONE:
            return count
        if kind is Loras.FLAG:
            return self.max_loras
        if kind is Loras.EVERY_COUNT:
            return self.max_loras if self.query_len > 1 else count
        captured = self._captured_counts()
        if not captured:
            return count
        if count > captured[-1]:
            return captured[-1] if kind is Loras.CASES_CLAMPED else count
        return captured[bisect_left(captured, count)]

    # -- keys ---------------------------------------------------------------------------

    def keys(
        self,
        *,
        window_query_len: int | None = None,
        partial: Literal["skip", "keep", "raise"] = "skip",
    ) -> Iterator[GraphKey]:
        """Yield the keys of the configuration, in the order of declaration.

        Args:
            window_query_len: Query length that limits the sizes of uniform keys to the range from
                this length to ``max_num_seqs`` times this length; by default, the query length of
                each key.
            partial: Whether to skip uniform sizes that are not multiples of the query length, keep
                them, or raise an error.

        Raises:
            PartialRequestError: A uniform size is not a multiple of the query length, and
                ``partial`` is ``"raise"``.
        """
        if self.mode is CUDAGraphMode.NONE:
            return
        if self.dialect.padding is Padding.PER_MODE:
            yield from self._keys_per_mode()
            return
        mixed = self.mode.mixed_mode().runtime_mode
        if mixed is not RuntimeMode.NONE:
            for size in self.sizes:
                for case in self.lora_cases:
                    yield GraphKey(mixed, self._mixed(size, case, mixed))
        if not self.separate_decode:
            return
        for query_len in self._decode_query_lens():
            bound = query_len if window_query_len is None else window_query_len
            for size in self.decode_sizes(query_len):
                if not bound <= size <= bound * self.max_num_seqs:
                    continue
                if size % query_len and partial != "keep":
                    if partial == "raise":
                        raise PartialRequestError(size, query_len)
                    continue
                for case in self.lora_cases:
                    yield GraphKey(_FULL, self.uniform(size, query_len, case))

    def _keys_per_mode(self) -> Iterator[GraphKey]:
        mixed = self.mode.mixed_mode().runtime_mode
        longest, seqs = max(self.query_lens), self.max_num_seqs
        lens = (longest,) if self.varlen else self.query_lens
        seen = set()
        for size in sorted(self.sizes):
            for case in self.lora_cases:
                for query_len in lens if self.separate_decode else ():
                    whole = size if self.varlen else -(-size // query_len) * query_len
                    if whole <= min(seqs * query_len, self.max_size):
                        key = GraphKey(_FULL, self._decode_per_mode(whole, query_len, case))
                        if key not in seen:
                            seen.add(key)
                            yield key
                if mixed is not RuntimeMode.NONE:
                    yield GraphKey(mixed, self._mixed(size, case, mixed))

    def _decode_per_mode(self, size: int, query_len: int, case: int) -> BatchDescriptor:
        if not self.varlen:
            return self.uniform(size, query_len, case)
        return BatchDescriptor(
            size,
            num_reqs=min(size, self.max_num_seqs),
            num_active_loras=case,
            max_query_len=query_len,
        )

    def _decode_query_lens(self) -> tuple[int, ...]:
        several = self.dialect.padding is Padding.PER_QUERY_LEN
        return self.query_lens if several else self.query_lens[:1]

    def decode_sizes(self, query_len: int) -> tuple[int, ...]:
        """Return the capture sizes of uniform batches with this query length."""
        apart = self.dialect.padding is Padding.PER_QUERY_LEN and query_len > 1
        return self.uniform_sizes if apart else self.sizes

    def uniform(self, num_tokens: int, query_len: int, case: int) -> BatchDescriptor:
        """Return the descriptor of a uniform graph."""
        num_reqs = None
        if self.dialect.names_requests:
            num_reqs = num_tokens // query_len
            if self.dialect.caps_uniform_reqs:
                num_reqs = min(num_reqs, self.max_num_seqs)
        return BatchDescriptor(
            num_tokens,
            num_reqs=num_reqs,
            uniform=True,
            num_active_loras=case,
            query_len=query_len,
        )

    def _mixed(self, num_tokens: int, case: int, mode: RuntimeMode) -> BatchDescriptor:
        """Return the descriptor of a mixed graph; PIECEWISE graphs allow any number of requests."""
        relaxed = BatchDescriptor(num_tokens, num_active_loras=case)
        if mode is _PIECEWISE or self.dialect.relaxes_mixed_full:
            return relaxed
        return attrs.evolve(relaxed, num_reqs=min(num_tokens, self.max_num_seqs))

    # -- keys to try for a batch --------------------------------------------------------

    def chain(self, num_tokens: int, query_len: int, case: int) -> Iterator[GraphKey]:
        """Yield the keys to try for a batch, in order; some may not exist.

        Args:
            num_tokens: Number of unpadded tokens, at least 1.
            query_len: Query length of a uniform batch; 0 for other batches.
            case: Number of adapters in the key, from ``lora_case``.
        """
        padding = self.dialect.padding
        if padding is Padding.PER_MODE:
            yield from self._chain_per_mode(num_tokens, case)
            return
        if padding is Padding.PER_QUERY_LEN and query_len > 1 and self.separate_decode:
            bucket = self._aligned_bucket(num_tokens, query_len)
            if bucket:
                yield GraphKey(_FULL, self.uniform(bucket, query_len, case))
            query_len = 0
        if num_tokens > self.max_size:
            return
        bucket = self.table[num_tokens]
        exact = self.exact(bucket, query_len, case)
        relaxed = BatchDescriptor(bucket, num_active_loras=case)
        if exact is not None:
            yield GraphKey(_FULL, exact)
        if self.dialect.relaxes_mixed_full and exact != relaxed:
            yield GraphKey(_FULL, relaxed)
        yield GraphKey(_PIECEWISE, relaxed)

    def exact(self, bucket: int, query_len: int, case: int) -> BatchDescriptor | None:
        """Return the most specific descriptor of a padded batch.

        If the mode has FULL graphs, return None for a uniform batch whose bucket is not a multiple
        of the query length.
        """
        if self.dialect.uniform_needs_separate and not self.mode.separate_routine():
            query_len = 0
        if query_len and self.mode.has_full_cudagraphs():
            return None if bucket % query_len else self.uniform(bucket, query_len, case)
        relaxed = BatchDescriptor(bucket, num_active_loras=case)
        if not self.dialect.names_requests:
            return relaxed
        return attrs.evolve(relaxed, num_reqs=min(bucket, self.max_num_seqs))

    def _aligned_bucket(self, num_tokens: int, query_len: int) -> int:
        """Return the bucket of a uniform batch, a multiple of ``query_len``; 0 if there is none."""
        fitting = (
            size for size in self.uniform_sizes if size >= num_tokens and size % query_len == 0
        )
        return min(fitting, default=0)

    def _chain_per_mode(self, num_tokens: int, case: int) -> Iterator[GraphKey]:
        for mode in (_FULL, _PIECEWISE):
            keys = self._by_case.get((mode, case), ())
            first = bisect_left(keys, num_tokens, key=lambda key: key.num_tokens)
            for key in keys[first:]:
                # Several graphs may have the same size, but different query lengths.
                if key.num_tokens != keys[first].num_tokens:
                    break
                yield key
