"""The policy ``threshold``, which uses graphs only within limits on tokens and padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from dispatchkit import (
    Batch,
    BatchDescriptor,
    Decision,
    DispatchConfig,
    GraphKey,
    GraphView,
    RuntimeMode,
)
from dispatchkit.dispatch import greedy_parts
from dispatchkit.errors import ConfigError
from dispatchkit.keys import CUDAGraphMode, check_count, read_flag

__all__ = ["ABOVE_MAX_TOKENS", "BELOW_MIN_TOKENS", "PADDING_LIMIT", "ThresholdPolicy"]

BELOW_MIN_TOKENS = "below_min_tokens"
ABOVE_MAX_TOKENS = "above_max_tokens"
PADDING_LIMIT = "padding_limit"


class ThresholdPolicy:
    """A policy that replays the smallest graph within fixed limits, and otherwise runs eager.

    Args:
        min_tokens: Minimum number of tokens; smaller batches run eager.
        max_tokens: Maximum number of tokens; larger batches run eager. None for no limit.
        prefer_piecewise: Whether to try PIECEWISE before FULL.
        max_waste: Maximum share of padding in a bucket, or in all buckets of a split batch
            together, from 0 (only exact sizes) to 1 (any padding). A mode is skipped if its
            smallest graph for the batch has more padding.
        split: Whether to split a mixed batch over several graphs if no single graph serves it
            within the limits. All parts but the last fill graphs of one size, the largest that does
            not exceed the batch; the last part uses the smallest graph that covers it. Requires
            steps with independent rows (``rows_independent``).

    Options may be strings, as on a command line.

    Raises:
        ConfigError: An option is invalid.
    """

    name = "threshold"

    def __init__(
        self,
        min_tokens: int = 1,
        max_tokens: int | None = None,
        *,
        prefer_piecewise: bool | str = False,
        max_waste: float = 1.0,
        split: bool | str = False,
    ) -> None:
        self.min_tokens = check_count(min_tokens, "min_tokens", minimum=0)
        self.max_tokens = None if max_tokens is None else check_count(max_tokens, "max_tokens")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ConfigError("max_tokens", max_tokens, f"at least min_tokens ({min_tokens})")
        self.prefer_piecewise = read_flag(prefer_piecewise, "prefer_piecewise")
        self.max_waste = _share(max_waste, "max_waste")
        order = (RuntimeMode.FULL, RuntimeMode.PIECEWISE)
        self.order = order[::-1] if self.prefer_piecewise else order
        self.split = read_flag(split, "split")
        traits = {"smallest_bucket", "stateless"}
        if not self.split:
            traits |= {"monotone"} if self.prefer_piecewise else {"monotone", "order"}
        self.traits = frozenset(traits)

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return a key for each size and kind of batch within the limits."""
        return list(_keys(config, self._useful))

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return a decision: the smallest graph within the limits, a split or eager.

        FULL is tried before PIECEWISE, or after it with ``prefer_piecewise``. If neither mode has a
        graph within the limits, the batch is split, if allowed, or runs eager.
        """
        if batch.num_tokens < self.min_tokens:
            return Decision.eager(BELOW_MIN_TOKENS)
        if self.max_tokens is not None and batch.num_tokens > self.max_tokens:
            return Decision.eager(ABOVE_MAX_TOKENS)
        obstacle: str | None = None
        for mode in self.order:
            if not batch.allows(mode):
                continue
            for key in graphs.covering(batch, mode):
                if key.num_tokens - batch.num_tokens > self.max_waste * key.num_tokens:
                    obstacle = obstacle or PADDING_LIMIT
                    break  # later keys are larger and have more padding
                why = graphs.why_not(key)
                if why is None:
                    return Decision.replay(key)
                obstacle = obstacle or why
        for mode in self.order if self.split else ():
            parts = greedy_parts(batch, graphs, mode)
            padded = sum(part.key.num_tokens for part in parts)
            if parts and padded - batch.num_tokens <= self.max_waste * padded:
                return Decision.split(parts)
        return Decision.eager(obstacle or graphs.why_no_key(batch))

    def __repr__(self) -> str:
        return (
            f"ThresholdPolicy({self.min_tokens}, {self.max_tokens}, "
            f"prefer_piecewise={self.prefer_piecewise}, max_waste={self.max_waste}, "
            f"split={self.split})"
        )

    def _useful(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes, from an ascending list, that batches within the limits can use."""
        return [
            size
            for below, size in itertools.pairwise((0, *sizes))
            if size >= self.min_tokens and (self.max_tokens is None or below < self.max_tokens)
        ]


def _keys(
    config: DispatchConfig, useful: Callable[[Sequence[int]], list[int]]
) -> Iterator[GraphKey]:
    counts = sorted({config.max_loras, *([0] if config.specialize_lora else [])})
    mixed = config.mode.mixed_mode()
    for loras in counts:
        if mixed is not CUDAGraphMode.NONE:
            mode = mixed.runtime_mode
            for size in useful(config.sizes):
                reqs = min(size, config.max_num_seqs) if mode is RuntimeMode.FULL else None
                yield GraphKey(mode, BatchDescriptor(size, reqs, num_active_loras=loras))
        if config.mode.decode_mode() is CUDAGraphMode.FULL and config.mode.separate_routine():
            for query_len in config.query_lens:
                for size in useful(_uniform_sizes(config, query_len)):
                    reqs = size // query_len
                    facts = BatchDescriptor(size, reqs, True, loras, query_len)
                    yield GraphKey(RuntimeMode.FULL, facts)


def _uniform_sizes(config: DispatchConfig, query_len: int) -> list[int]:
    """Return the sizes that are multiples of ``query_len``, up to ``max_num_seqs`` requests."""
    own = config.uniform_sizes if query_len > 1 else None
    sizes = config.sizes if own is None else own
    return [
        size for size in sizes if size % query_len == 0 and size // query_len <= config.max_num_seqs
    ]


def _share(value: float, setting: str) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if isinstance(value, bool) or not 0.0 <= share <= 1.0:
        raise ConfigError(setting, value, "a share from 0 to 1")
    return share
