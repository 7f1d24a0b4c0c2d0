"""Buckets of batches that have the same arms, and the choice made for each bucket.

Within a bucket, a graph takes the same time for every batch, whereas eager takes less time for
smaller batches. The choice for a bucket is therefore a graph, and the number of tokens up to which
eager is used instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import attrs

from dispatchkit import Batch, CellUpdate, Decision

from dispatchkit_adaptive.arms import Arm, Band, Regime
from dispatchkit_adaptive.estimates import Estimate
from dispatchkit_adaptive.ledger import Stakes

__all__ = ["PROBE", "Bucket", "band_of", "bands"]

#: The reason of probe decisions, which are made only to measure an arm.
PROBE = "probe"


def bands(low: int, top: int) -> list[tuple[int, int]]:
    """Divide a bucket of ``low`` to ``top`` tokens into bands, largest first.

    Eager time does not follow one power law over a wide range. A band therefore starts above
    three quarters of its largest size. The last band contains all remaining sizes: it starts above
    half of its largest size, or its largest size is at most 16.
    """
    cut = []
    while low <= top // 2 and top > 16:
        cut.append((top * 3 // 4 + 1, top))
        top = top * 3 // 4
    return [*cut, (low, top)]


def band_of(batch: Batch, top: int, sizes: Sequence[int]) -> Band:
    """Return the band of sizes that a batch belongs to.

    Args:
        batch: A batch that may run eager.
        top: Number of tokens of the smallest graph that covers the batch. If no single graph covers
            it, the total of the graphs that cover it together; 0 if there are none.
        sizes: All capture sizes, ascending.
    """
    index = bisect_left(sizes, top)
    low = (sizes[index - 1] if index else 0) + 1
    last = next((last for first, last in bands(low, top) if batch.num_tokens >= first), top)
    return Band(
        max(last, 1),
        uniform=batch.uniform,
        num_active_loras=batch.num_active_loras,
        query_len=batch.query_len,
        max_query_len=batch.max_query_len,
        axes=batch.axes,  # type: ignore[arg-type]  # the batch is within all axes, so no bucket is None
    )


@attrs.define(eq=False)
class Bucket:
    """Batches with the same arms, and the choice made for them.

    Attributes:
        base: The base policy's decision, the same for all batches of the bucket. If the base policy
            splits batches, its decision for ``example``.
        base_arm: The arm of the decision ``base``.
        arms: All arms that can run the batches.
        eager: The eager arm; None if eager is not allowed.
        example: One batch of the bucket.
        graph: The arm that replays graphs, for batches above ``limit``; None if all batches run
            eager.
        limit: Number of tokens up to which eager is used; may be infinite.
        sizes: Smallest and largest number of tokens among the batches decided so far.
        stale: Range of tokens whose cells may still hold an earlier decision; None if no cell does.
        waiting: Probes without an outcome yet: the batch and the arm, by number of tokens.
        needless: Numbers of tokens in ``waiting`` whose probe is no longer needed, because another
            probe has measured the arm.
        last_probe: Step of the last probe with an outcome; 0 if there was none.
        unproven_us: Expected time of the base's arm, in microseconds, for all steps that used other
            arms since its last sample. During these steps, a speedup of the base's arm goes
            unnoticed.
    """

    base: Decision
    base_arm: Arm
    arms: tuple[Arm, ...]
    eager: Arm | None
    example: Batch = attrs.field(repr=False)
    graph: Arm | None = attrs.field(init=False)
    limit: float = attrs.field(init=False)
    sizes: tuple[int, int] = (0, 0)
    stale: tuple[int, int] | None = None
    waiting: dict[int, tuple[Batch, Arm]] = attrs.field(factory=dict, repr=False)
    needless: list[int] = attrs.field(factory=list, repr=False)
    last_probe: int = 0
    unproven_us: float = 0.0
    # Decisions by arm and, for split batches, number of tokens (otherwise 0).
    _answers: dict[tuple[Arm, int], Decision] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        self.to_base()

    def to_base(self) -> None:
        """Choose the base policy's arm for all batches."""
        is_eager = self.base_arm is self.eager
        self.graph = None if is_eager else self.base_arm
        self.limit = math.inf if is_eager else -math.inf

    def choice(self, num_tokens: int) -> Arm:
        """Return the arm chosen for batches with this number of tokens."""
        if self.eager is not None and (self.graph is None or num_tokens <= self.limit):
            return self.eager
        return self.graph or self.base_arm

    def known(self, regime: Regime) -> dict[Arm, Estimate]:
        """Return the arms that have enough samples in a regime; empty if they cannot be compared.

        A regime states which clock measured a step, and whether other work was queued before it. A
        comparison requires the base's arm and at least one other arm.
        """
        found = {
            arm: estimate
            for arm in self.arms
            if (estimate := arm.estimates.get(regime)) is not None and estimate.is_known
        }
        return found if len(found) > 1 and self.base_arm in found else {}

    def answer(self, batch: Batch) -> Decision:
        """Return the decision for a batch, marked to be measured."""
        num_tokens = batch.num_tokens
        low, high = self.sizes
        self.sizes = min(low or num_tokens, num_tokens), max(high, num_tokens)
        arm = self.choice(num_tokens)
        # The parts of a split batch depend on the number of tokens.
        place = arm, num_tokens if arm.is_split else 0
        decision = self._answers.get(place)
        if decision is None:
            decision = self._answers[place] = self._decision(arm, num_tokens)
        return decision

    def send_probe(self, batch: Batch, arm: Arm) -> list[CellUpdate]:
        """Return the update that makes the next step of a batch use an arm once."""
        self.waiting[batch.num_tokens] = batch, arm
        return [CellUpdate(batch, arm.decision(batch.num_tokens, PROBE), one_shot=True)]

    def end_probe(self, num_tokens: int) -> None:
        """End the probe of a batch size; mark other probes of the same arm as needless."""
        _, arm = self.waiting.pop(num_tokens, (None, None))
        if arm is not None:
            self.needless = [size for size, (_, other) in self.waiting.items() if other is arm]

    def drop_probes(self) -> list[CellUpdate]:
        """Return an update that withdraws one needless probe; empty if there is none."""
        while self.needless:
            batch, _ = self.waiting.pop(self.needless.pop(), (None, None))
            if batch is not None:
                return [CellUpdate(batch, None, one_shot=True)]
        return []

    def renew(self) -> list[CellUpdate]:
        """Return the update that clears the stale cells, or an empty list if there are none."""
        if self.stale is None:
            return []
        (first, last), self.stale = self.stale, None
        return [CellUpdate(attrs.evolve(self.example, num_tokens=first), None, up_to=last)]

    def choose(self, known: Mapping[Arm, Estimate], stakes: Stakes) -> None:
        """Choose the graph and the eager limit from the known arms."""
        graph, limit = self.graph, self.limit
        base = known.get(self.base_arm)
        if base is None or stakes.room_us <= 0.0:
            self.to_base()
        else:
            self._choose_graph(known, stakes, base)
            self._choose_limit(known, stakes, base)
        if (self.graph is graph and self.limit == limit) or not self.sizes[0]:
            return
        low, high = sorted((limit, self.limit))
        if self.graph is not graph:
            high = math.inf
        first, last = max(self.sizes[0], low + 1), min(self.sizes[1], high)
        if first <= last:
            before, after = self.stale or (first, last)
            self.stale = int(min(first, before)), int(max(last, after))

    def _choose_graph(self, known: Mapping[Arm, Estimate], stakes: Stakes, base: Estimate) -> None:
        """Choose a faster graph if the account covers the risk of using it."""
        base_log = over = math.inf
        if self.base_arm is not self.eager:
            base_log = base.log_us(1)
            over = min(base_log, base_log - stakes.cover(math.exp(base_log), 2.0))
        now = known.get(self.graph) if self.graph else None
        if now is None or (self.graph is not self.base_arm and now.log_us(1) > over):
            self.graph = None if self.base_arm is self.eager else self.base_arm
        for arm, estimate in known.items():
            if arm is self.eager or arm is self.graph:
                continue
            if self.graph is None:
                self.graph = arm
                continue
            now, log_us = known[self.graph], estimate.log_us(1)
            if arm is not self.base_arm and log_us > base_log - stakes.cover(math.exp(base_log)):
                continue
            error = math.hypot(now.error(1), estimate.error(1))
            change, _ = stakes.gains(math.exp(now.log_us(1)), error)
            if log_us + change < now.log_us(1):
                self.graph = arm

    def _choose_limit(self, known: Mapping[Arm, Estimate], stakes: Stakes, base: Estimate) -> None:
        """Choose the number of tokens up to which eager is used instead of the graph."""
        eager = known.get(self.eager) if self.eager else None
        graph = known.get(self.graph) if self.graph else None
        if eager is None or graph is None or self.eager is None:
            self.limit = math.inf if self.base_arm is self.eager else -math.inf
            return
        log_us = graph.log_us(1)
        at = min(max(eager.largest(log_us), self.sizes[0], 1), self.eager.size)
        us = math.exp(log_us)
        change, stay = stakes.gains(us, math.hypot(eager.error(at), graph.error(at)))
        if self.base_arm is self.eager:
            enter = log_us + max(change, stakes.cover(us))
            leave = log_us + max(0.0, stakes.cover(us, 2.0))
            self.limit = max(min(self.limit, eager.largest(enter)), eager.largest(leave))
        else:
            base_log = base.log_us(1)
            base_us = math.exp(base_log)
            enter = min(log_us - change, base_log - stakes.cover(base_us))
            leave = min(log_us - stay, base_log - stakes.cover(base_us, 2.0))
            self.limit = min(max(self.limit, eager.largest(enter)), eager.largest(leave))
        if math.isfinite(self.limit):
            self.limit = float(math.floor(self.limit))

    def _decision(self, arm: Arm, num_tokens: int) -> Decision:
        base = self.base
        if arm is not self.base_arm:
            reason = "parts_are_faster" if arm.is_split else "graph_is_faster"
            decision = arm.decision(num_tokens, "eager_is_faster" if arm.is_eager else reason)
            # If the base's graph limits the number of requests, the base policy may decide
            # differently for batches with more requests.
            bound = base.max_num_reqs
            if len(base.keys) == 1 and base.keys[0].descriptor.num_reqs is not None:
                bound = min(bound, base.keys[0].descriptor.num_reqs)
            return attrs.evolve(decision, max_num_reqs=bound)
        if arm.is_eager:
            return attrs.evolve(base, timed=True)
        # Use the arm's own key objects, so that looking them up needs no comparison.
        own = arm.decision(num_tokens, base.reason)
        return attrs.evolve(base, key=own.key, parts=own.parts, timed=True)
