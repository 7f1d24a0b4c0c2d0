"""The policy ``smallest``."""

from __future__ import annotations

from collections.abc import Iterable

from dispatchkit import (
    Batch,
    BatchDescriptor,
    Decision,
    DispatchConfig,
    GraphKey,
    GraphView,
    RuntimeMode,
)


class SmallestPolicy:
    """A policy that chooses the smallest graph that fits. Replace ``decide`` with your rule."""

    name = "smallest"
    # The test kit checks these properties. Remove any property that your rule does not have.
    traits = frozenset({"smallest_bucket", "monotone", "order", "stateless"})

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the graphs to capture: one per size, for mixed batches."""
        if not config.mode.mixed_mode():
            return []
        mode = config.mode.mixed_mode().runtime_mode
        keys = []
        for size in config.sizes:
            num_reqs = min(size, config.max_num_seqs) if mode is RuntimeMode.FULL else None
            descriptor = BatchDescriptor(size, num_reqs, num_active_loras=config.max_loras)
            keys.append(GraphKey(mode, descriptor))
        return keys

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the decision for a batch, or None to leave it to another policy."""
        reason = graphs.why_no_key(batch)
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if not batch.allows(mode):
                continue
            for key in graphs.covering(batch, mode):  # smallest first
                why_not = graphs.why_not(key)
                if why_not is None:
                    return Decision.replay(key)
                reason = why_not
        return Decision.eager(reason)
