"""Correct policies that the kit must accept; faulty policies derive from them."""

from __future__ import annotations

from collections import Counter

from dispatchkit.dispatch import CellUpdate, Decision, Reason, greedy_parts
from dispatchkit.keys import BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.testing import SmallestPolicy

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


class PiecewiseOnlyPolicy(SmallestPolicy):
    """Uses PIECEWISE only, and claims that every declared key can be reached."""

    name = "piecewise-only"
    traits = ("smallest_bucket", "monotone", "stateless", "all_keys_reachable")

    def declare(self, config):
        if not config.mode.has_piecewise_cudagraphs():
            return []
        return [
            GraphKey(PIECEWISE, BatchDescriptor(size, num_active_loras=loras))
            for size in config.sizes
            for loras in range(config.max_loras + 1)
        ]

    def decide(self, batch, graphs):
        if not batch.allows(PIECEWISE):
            return Decision.eager(Reason.CEILING)
        return super().decide(batch, graphs)


class LargestPolicy(SmallestPolicy):
    """Chooses the largest bucket, which is wasteful but allowed."""

    name = "largest"
    traits = ("stateless",)

    def decide(self, batch, graphs):
        ready = [
            key
            for mode in (PIECEWISE, FULL)
            if batch.allows(mode)
            for key in graphs.covering(batch, mode)
            if graphs.is_ready(key)
        ]
        return Decision.replay(ready[-1]) if ready else None


class ThresholdPolicy(SmallestPolicy):
    """Declines large batches."""

    name = "threshold"
    traits = ("stateless",)

    def decide(self, batch, graphs):
        return super().decide(batch, graphs) if batch.num_tokens <= 16 else None


class SplitsPolicy(SmallestPolicy):
    """Splits a batch that no single graph covers, where rows are independent."""

    name = "splits"
    traits = ("stateless",)

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        for mode in (FULL, PIECEWISE) if answer.key is None else ():
            if parts := self.parts(batch, graphs, mode):
                return Decision.split(parts)
        return answer

    def parts(self, batch, graphs, mode):
        return greedy_parts(batch, graphs, mode)


class CountingPolicy(SmallestPolicy):
    """Learns: after three slow steps of a cell, its batches run eager."""

    name = "counting"
    traits = ()

    def __init__(self, slow_us=500.0):
        self.slow_us = slow_us
        self.slow = Counter()
        self.given_up = set()

    def decide(self, batch, graphs):
        if self._cell(batch) in self.given_up and batch.allows(RuntimeMode.NONE):
            return Decision.eager("slower_than_eager")
        return super().decide(batch, graphs)

    def observe(self, outcome):
        key, batch = outcome.decision.key, outcome.batch
        if not outcome.completed or outcome.elapsed_us is None or key is None:
            return None
        cell = self._cell(batch)
        if outcome.elapsed_us > self.slow_us:
            self.slow[cell] += 1
        if self.slow[cell] < 3 or cell in self.given_up or not batch.allows(RuntimeMode.NONE):
            return None
        self.given_up.add(cell)
        return [CellUpdate(batch, Decision.eager("slower_than_eager"))]

    @staticmethod
    def _cell(batch):
        return (
            batch.num_tokens,
            batch.uniform,
            batch.query_len,
            batch.max_query_len,
            batch.num_active_loras,
            batch.allowed,
        )


CORRECT = (
    SmallestPolicy,
    PiecewiseOnlyPolicy,
    LargestPolicy,
    ThresholdPolicy,
    SplitsPolicy,
    CountingPolicy,
)
