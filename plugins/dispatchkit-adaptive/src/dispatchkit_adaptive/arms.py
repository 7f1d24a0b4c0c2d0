"""Arms: the ways to run a batch, each with estimates of the time it takes."""

from __future__ import annotations

import attrs

from dispatchkit import BatchDescriptor, Decision, GraphKey
from dispatchkit.dispatch import Part, format_keys

from dispatchkit_adaptive.estimates import Estimate

__all__ = ["Arm", "ArmId", "Band", "Graphs", "Regime"]

#: The clock that measured a step, and whether earlier work was still running on the stream.
Regime = tuple[str, bool]
#: One graph, or several that serve a batch together. The batch fills all of them, except possibly
#: the last.
Graphs = tuple[GraphKey, ...]
#: Eager batches of one kind, within a range of sizes whose step times follow one curve.
#: ``num_tokens`` is the largest size.
Band = BatchDescriptor
ArmId = Graphs | Band


@attrs.define(eq=False)
class Arm:
    """One way to run a batch.

    Attributes:
        ident: The graphs that are replayed, or the band of sizes that run eager.
        memory: Approximate number of recent samples that determine an estimate.
        size: Largest number of tokens that the arm can compute in one step.
        is_eager: Whether the arm runs eager.
        is_split: Whether the arm replays several graphs.
        estimates: Estimated step time in each regime that has samples.
    """

    ident: ArmId
    memory: int
    size: int = attrs.field(init=False)
    is_eager: bool = attrs.field(init=False)
    is_split: bool = attrs.field(init=False)
    estimates: dict[Regime, Estimate] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        self.size = size_of(self.ident)
        self.is_eager = not isinstance(self.ident, tuple)
        self.is_split = isinstance(self.ident, tuple) and len(self.ident) > 1

    @property
    def name(self) -> str:
        """The arm's name in reports."""
        return format_keys(self.ident) if isinstance(self.ident, tuple) else "eager"

    def estimate(self, regime: Regime) -> Estimate:
        """Return the estimate for a regime, creating an empty estimate if necessary."""
        found = self.estimates.get(regime)
        if found is None:
            found = Estimate(self.size, self.memory, over_tokens=self.is_eager)
            self.estimates[regime] = found
        return found

    def decision(self, num_tokens: int, reason: str) -> Decision:
        """Return the decision to run a batch with this arm and to measure the step."""
        if not isinstance(self.ident, tuple):
            return Decision.eager(reason, timed=True)
        *full, last = self.ident
        if not full:
            return Decision.replay(last, reason, timed=True)
        rest = num_tokens - sum(key.num_tokens for key in full)
        parts = [*(Part(key, key.num_tokens) for key in full), Part(last, rest)]
        return Decision.split(parts, reason, timed=True)


def size_of(ident: ArmId) -> int:
    """Return the largest number of tokens that an arm can compute in one step."""
    if isinstance(ident, tuple):
        return sum(key.num_tokens for key in ident)
    return ident.num_tokens


def graphs_of(decision: Decision) -> Graphs:
    """Return a decision's graphs; empty for eager, or if a graph before the last is padded."""
    if any(part.num_tokens != part.key.num_tokens for part in decision.parts[:-1]):
        return ()
    return decision.keys
