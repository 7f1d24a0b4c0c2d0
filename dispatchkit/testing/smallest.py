"""Simple policies for tests; they choose the smallest graph that covers a batch.

This module does not require torch, hypothesis or pytest, so benchmarks can also import it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from dispatchkit.dispatch import Decision, GraphView, Reason
from dispatchkit.keys import (
    Batch,
    BatchDescriptor,
    CUDAGraphMode,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
)

__all__ = ["OneBucketPolicy", "SmallestPolicy"]


class SmallestPolicy:
    """A policy that chooses the smallest ready graph, but prefers any FULL graph to PIECEWISE ones.

    Use this policy in tests of components other than policies. Its decisions depend only on the
    batch, the configuration and the captured graphs. Override ``declare`` to test other keys.
    """

    name = "smallest"
    traits = frozenset({"smallest_bucket", "monotone", "order", "stateless"})

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return one key per capture size, kind of batch and number of adapters to capture for."""
        loras = self.lora_counts(config)
        return [*_mixed_keys(config, loras), *_uniform_keys(config, loras)]

    def lora_counts(self, config: DispatchConfig) -> Sequence[int]:
        """Return the numbers of adapters to capture for: 0 and the maximum."""
        return sorted({0, config.max_loras})

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Choose the smallest ready key, or eager with the first obstacle as the reason."""
        obstacle: str | None = None
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            for key in self.candidates(batch, mode, graphs):
                why_not = graphs.why_not(key) if batch.allows(mode) else Reason.CEILING
                if why_not is None:
                    return Decision.replay(key)
                obstacle = obstacle or why_not
        return Decision.eager(obstacle or graphs.why_no_key(batch))

    def candidates(self, batch: Batch, mode: RuntimeMode, graphs: GraphView) -> Iterable[GraphKey]:
        """Return the keys of a mode that cover the batch, in the order to try them."""
        return graphs.covering(batch, mode)


class OneBucketPolicy(SmallestPolicy):
    """A policy that chooses only the smallest bucket for the batch, never a larger bucket.

    Use this policy in tests of graph states. If the FULL graph of this bucket is missing, failed or
    evicted, the step runs PIECEWISE. If the PIECEWISE graph is not ready either, the step runs
    eager, with the state of the FULL graph as the reason. Each mode has one key per capture size
    and number of adapters, for mixed and uniform batches with any number of requests.
    """

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return one key per mode, capture size and number of adapters to capture for."""
        wanted = {
            RuntimeMode.FULL: config.mode.has_full_cudagraphs(),
            RuntimeMode.PIECEWISE: config.mode.has_piecewise_cudagraphs(),
        }
        return [
            GraphKey(mode, BatchDescriptor(size, num_active_loras=count))
            for mode in wanted
            if wanted[mode]
            for size in config.sizes
            for count in self.lora_counts(config)
        ]

    def candidates(self, batch: Batch, mode: RuntimeMode, graphs: GraphView) -> Iterable[GraphKey]:
        """Return the smallest key of a mode that covers the batch, ready or not."""
        return itertools.islice(graphs.covering(batch, mode), 1)


def _mixed_keys(config: DispatchConfig, loras: Sequence[int]) -> Iterator[GraphKey]:
    mixed = config.mode.mixed_mode()
    if not mixed:
        return
    for size in config.sizes:
        num_reqs = min(size, config.max_num_seqs) if mixed is CUDAGraphMode.FULL else None
        for count in loras:
            facts = BatchDescriptor(size, num_reqs, num_active_loras=count)
            yield GraphKey(mixed.runtime_mode, facts)


def _uniform_keys(config: DispatchConfig, loras: Sequence[int]) -> Iterator[GraphKey]:
    """Yield keys for uniform decode batches, if they have a separate mode."""
    if not config.mode.separate_routine():
        return
    for query_len in config.query_lens:
        for size in config.uniform_sizes or config.sizes:
            num_reqs = size // query_len
            if size % query_len or num_reqs > config.max_num_seqs:
                continue
            for count in loras:
                facts = BatchDescriptor(
                    size, num_reqs, uniform=True, num_active_loras=count, query_len=query_len
                )
                yield GraphKey(RuntimeMode.FULL, facts)
