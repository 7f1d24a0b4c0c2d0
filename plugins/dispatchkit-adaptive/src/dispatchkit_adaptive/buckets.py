"""Buckets of batches that have the same arms, and the choice made for each bucket.

Within a bucket, a graph takes the same time for every batch, and eager takes less for smaller ones.
So a choice consists of a graph and of the number of tokens up to which eager is used instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import attrs

from dispatchkit import Batch, BatchDescriptor, CellUpdate, Decision, GraphKey, RuntimeMode
from dispatchkit.dispatch import Part, format_keys

from dispatchkit_adaptive.arms import Arm
from dispatchkit_adaptive.ledger import Stakes

__all__ = ["ArmId", "Band", "Bucket", "Graphs"]

#: One graph, or several that serve a batch together; all but the last are full.
Graphs = tuple[GraphKey, ...]
#: Eager batches of one kind whose times lie on one curve, up to ``num_tokens``.
Band = BatchDescriptor
ArmId = Graphs | Band

# Most probes withdrawn after one step, which takes a few microseconds.
MOST_DROPPED = 2


def arm_of(decision: Decision) -> Graphs | None:
    """Return the arm of a decision; None for eager, or if a part before the last is not full."""
    if any(part.num_tokens != part.key.num_tokens for part in decision.parts[:-1]):
        return None
    return decision.keys or None


def replay_of(graphs: Graphs, num_tokens: int, reason: str) -> Decision:
    """Return the decision for an arm that replays, marked to be measured."""
    *full, last = graphs
    if not full:
        return Decision.replay(last, reason, timed=True)
    parts = [Part(key, key.num_tokens) for key in full]
    rest = num_tokens - sum(part.num_tokens for part in parts)
    return Decision.split([*parts, Part(last, rest)], reason, timed=True)


def mode_of(arm: ArmId) -> RuntimeMode:
    """Return the mode that an arm runs in."""
    return arm[0].mode if isinstance(arm, tuple) else RuntimeMode.NONE


def size_of(arm: ArmId) -> int:
    """Return the largest number of tokens that an arm computes."""
    return sum(key.num_tokens for key in arm) if isinstance(arm, tuple) else arm.num_tokens


def name_of(arm: ArmId | None) -> str:
    """Return the name of an arm in reports; empty for None."""
    return format_keys(arm) if isinstance(arm, tuple) else "eager" if arm else ""


def bands(low: int, top: int) -> list[tuple[int, int]]:
    """Return the bands of a bucket of ``low`` to ``top`` tokens, largest first.

    Eager time does not follow one power law over a wide range, so a bucket that spans more than
    half of its size is cut.
    """
    cut = []
    while low <= top // 2 and top > 16:
        cut.append((top * 3 // 4 + 1, top))
        top = top * 3 // 4
    return [*cut, (low, top)]


def band_of(batch: Batch, top: int, sizes: Sequence[int]) -> Band:
    """Return the band of a batch.

    Args:
        batch: The batch.
        top: Size of the smallest graph that covers it; 0 if there is none.
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
        axes=batch.axes,  # type: ignore[arg-type]  # within all axes, none is None
    )


@attrs.define(eq=False)
class Bucket:
    """Batches with the same arms, and the choice made for them.

    Attributes:
        base: The base policy's decision for them; if it splits, that for one of them.
        base_arm: The arm of that decision.
        graphs: Graphs that may serve them, alone or in parts.
        band: Their eager arm; None if eager is not allowed.
        example: One of the batches.
        graph: The graph or graphs in use; None if there are none.
        limit: Number of tokens up to which eager is used.
        sizes: Smallest and largest number of tokens of the batches asked for.
        measured: The arms with samples in the current regime; None if that may have changed.
        waiting: Batches with a probe that has no outcome yet, and the arm to probe.
        needless: Batches in ``waiting`` whose arm was probed in the meantime.
        last_step: Step of the last outcome.
        last_probe: Step of the last probe with an outcome; 0 if there was none.
        unproven_us: Expected microseconds of the base's arm in the steps that did not use it
            since it was measured last; it may have become faster unnoticed.
    """

    base: Decision
    base_arm: ArmId
    graphs: tuple[Graphs, ...]
    band: Band | None
    example: Batch = attrs.field(repr=False)
    graph: Graphs | None = attrs.field(init=False)
    limit: float = attrs.field(init=False)
    sizes: tuple[int, int] = (0, 0)
    measured: dict[ArmId, Arm] | None = attrs.field(default=None, repr=False)
    waiting: dict[Batch, ArmId] = attrs.field(factory=dict, repr=False)
    needless: list[Batch] = attrs.field(factory=list, repr=False)
    last_step: int = 0
    last_probe: int = 0
    unproven_us: float = 0.0
    # By arm; decisions with parts also by the number of tokens.
    _answers: dict[tuple[ArmId, int], Decision] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        self.to_base()

    def to_base(self) -> None:
        """Use the arm of the base policy."""
        is_eager = self.base_arm is self.band
        self.graph = None if is_eager else self.base_arm  # type: ignore[assignment]
        self.limit = math.inf if is_eager else -math.inf

    @property
    def arms(self) -> tuple[ArmId, ...]:
        """All arms, eager last."""
        return self.graphs if self.band is None else (*self.graphs, self.band)

    def choice(self, num_tokens: int) -> ArmId:
        """Return the arm in use for a number of tokens."""
        if self.band is not None and (self.graph is None or num_tokens <= self.limit):
            return self.band
        return self.graph or self.base_arm

    def answer(self, batch: Batch) -> Decision:
        """Return the decision for a batch, marked to be measured."""
        num_tokens = batch.num_tokens
        low, high = self.sizes
        self.sizes = min(low or num_tokens, num_tokens), max(high, num_tokens)
        arm = self.choice(num_tokens)
        place = arm, num_tokens if isinstance(arm, tuple) and len(arm) > 1 else 0
        decision = self._answers.get(place)
        if decision is None:
            decision = self._answers[place] = self._decision(arm, num_tokens)
        return decision

    def end_probe(self, batch: Batch) -> None:
        """End a batch's probe; others of the same arm are no longer needed."""
        arm = self.waiting.pop(batch, None)
        if arm is not None:
            self.needless = [one for one, other in self.waiting.items() if other == arm]

    def drop_probes(self) -> list[CellUpdate]:
        """Return updates that withdraw a few of the probes that are no longer needed."""
        dropped, self.needless = self.needless[:MOST_DROPPED], self.needless[MOST_DROPPED:]
        for batch in dropped:
            self.waiting.pop(batch, None)
        return [CellUpdate(batch, None, one_shot=True) for batch in dropped]

    def choose(self, known: Mapping[ArmId, Arm], stakes: Stakes) -> list[CellUpdate]:
        """Choose again from the known arms; return the cells whose answer changes."""
        before = self.graph, self.limit
        base = known.get(self.base_arm)
        if base is None or stakes.room_us <= 0.0:
            self.to_base()
        else:
            self._choose_graph(known, stakes, base)
            self._choose_limit(known, stakes, base)
        if (self.graph, self.limit) == before or not self.sizes[0]:
            return []
        low, high = sorted((before[1], self.limit))
        if self.graph != before[0]:
            high = math.inf
        first, last = max(self.sizes[0], low + 1), min(self.sizes[1], high)
        if first > last:
            return []
        batch = attrs.evolve(self.example, num_tokens=int(first))
        return [CellUpdate(batch, None, up_to=int(last))]

    def _choose_graph(self, known: Mapping[ArmId, Arm], stakes: Stakes, base: Arm) -> None:
        """Choose a graph; one other than the base's must be covered and faster."""
        if self.base_arm is self.band:
            base_log, over = math.inf, math.inf
        else:
            base_log = base.log_us(1)
            over = base_log - stakes.cover(math.exp(base_log), 2.0)
            over = min(over, base_log)
        now = known.get(self.graph) if self.graph else None
        if now is None or (self.graph != self.base_arm and now.log_us(1) > over):
            self.graph = None if self.base_arm is self.band else self.base_arm  # type: ignore[assignment]
        for graph in self.graphs:
            other = known.get(graph)
            if other is None or graph == self.graph:
                continue
            log_us = other.log_us(1)
            if self.graph is None:
                self.graph = graph
                continue
            now = known[self.graph]
            if graph != self.base_arm and log_us > base_log - stakes.cover(math.exp(base_log)):
                continue
            error = math.hypot(now.error(1), other.error(1))
            change, _ = stakes.gains(math.exp(now.log_us(1)), error)
            if log_us + change < now.log_us(1):
                self.graph = graph

    def _choose_limit(self, known: Mapping[ArmId, Arm], stakes: Stakes, base: Arm) -> None:
        """Choose the number of tokens up to which eager is used instead of the graph."""
        eager = known.get(self.band) if self.band else None
        graph = known.get(self.graph) if self.graph else None
        if eager is None or graph is None or self.band is None:
            self.limit = math.inf if self.base_arm is self.band else -math.inf
            return
        log_us = graph.log_us(1)
        at = min(max(eager.largest(log_us), self.sizes[0], 1), size_of(self.band))
        us = math.exp(log_us)
        change, stay = stakes.gains(us, math.hypot(eager.error(at), graph.error(at)))
        if self.base_arm is self.band:
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

    def _decision(self, arm: ArmId, num_tokens: int) -> Decision:
        base = self.base
        if arm == self.base_arm and len(base.keys) < 2:
            # Use the arm's own key object, so that looking it up needs no comparison.
            key = arm[0] if isinstance(arm, tuple) else None
            return attrs.evolve(base, key=key, timed=True)
        if arm == self.base_arm and isinstance(arm, tuple):
            parts = replay_of(arm, num_tokens, base.reason).parts
            return attrs.evolve(base, parts=parts, timed=True)
        # If the base's graph limits requests, the base answers differently beyond that limit.
        bound = base.max_num_reqs
        if len(base.keys) == 1 and base.keys[0].descriptor.num_reqs is not None:
            bound = min(bound, base.keys[0].descriptor.num_reqs)
        if not isinstance(arm, tuple):
            decision = Decision.eager("eager_is_faster", timed=True)
        else:
            reason = "graph_is_faster" if len(arm) == 1 else "parts_are_faster"
            decision = replay_of(arm, num_tokens, reason)
        return attrs.evolve(decision, max_num_reqs=bound)
