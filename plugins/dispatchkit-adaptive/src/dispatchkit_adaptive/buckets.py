"""Buckets: the batches that have the same arms to choose from, and where eager ends.

In a bucket each graph takes the same time for every batch, and eager less for a smaller one.
So its choice is two things: the graph to use, and up to how many tokens eager is used in its
place. Both move only when there is a reason to: what is gained has to exceed a margin that
covers the error of what is known, and what is lost by staying has to be above nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import attrs

from dispatchkit import Batch, Decision, GraphKey, RuntimeMode
from dispatchkit.dispatch import Part, named_graphs

from dispatchkit_adaptive.arms import Arm, Line
from dispatchkit_adaptive.ledger import DRIFT

__all__ = ["ArmId", "Bucket", "Graphs", "Parts", "Piece", "Stakes"]


@attrs.frozen(cache_hash=True)
class Piece:
    """Eager batches whose times lie on one line: one kind of batch, up to one size.

    Attributes:
        uniform: Uniform decode: every request is past its prompt and brings ``query_len`` tokens.
        query_len: Tokens per request if uniform, else 0.
        max_query_len: Most tokens of a request, where it is known.
        num_active_loras: Adapters in use.
        axes: Bucketed values of the custom axes.
        top: Size of the smallest graph that covers them.
    """

    uniform: bool
    query_len: int
    max_query_len: int | None
    num_active_loras: int
    axes: tuple[int | None, ...]
    top: int

    @classmethod
    def of(cls, batch: Batch, top: int) -> Piece:
        """Return the piece of a batch."""
        return cls(
            batch.uniform,
            batch.query_len,
            batch.max_query_len,
            batch.num_active_loras,
            batch.axes,
            top,
        )

    def __str__(self) -> str:
        kind = f" uniform={self.query_len}" if self.uniform else ""
        loras = f" loras={self.num_active_loras}" if self.num_active_loras else ""
        return f"eager up to {self.top} tokens{kind}{loras}"


@attrs.frozen(cache_hash=True)
class Parts:
    """Several graphs that serve a batch together: all but the last are full.

    Attributes:
        keys: The graphs, in the order of their rows.
    """

    keys: tuple[GraphKey, ...]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Parts | None:
        """Return the graphs of a split batch; None where others than the last are padded."""
        if not parts or any(part.num_tokens != part.key.num_tokens for part in parts[:-1]):
            return None
        return cls(tuple(part.key for part in parts))

    @property
    def mode(self) -> RuntimeMode:
        """The mode of all of them."""
        return self.keys[0].mode

    @property
    def num_tokens(self) -> int:
        """Tokens that they compute."""
        return sum(key.num_tokens for key in self.keys)

    def rows(self, num_tokens: int) -> list[Part]:
        """Return the parts of a batch."""
        *full, last = self.keys
        rest = num_tokens - sum(key.num_tokens for key in full)
        return [*(Part(key, key.num_tokens) for key in full), Part(last, rest)]

    def __str__(self) -> str:
        return named_graphs(self.keys)


#: What takes the same time for every batch that it serves.
Graphs = GraphKey | Parts
ArmId = Graphs | Piece


def graphs_of(decision: Decision) -> Graphs | None:
    """Return the arm of a decision that replays; None for eager."""
    return Parts.of(decision.parts) if decision.parts else decision.key


def replay_of(ident: Graphs, num_tokens: int, reason: str) -> Decision:
    """Return the decision for an arm that replays, to be measured."""
    if isinstance(ident, Parts):
        return Decision.split(ident.rows(num_tokens), reason, timed=True)
    return Decision.replay(ident, reason, timed=True)


def mode_of(ident: ArmId) -> RuntimeMode:
    """Return the mode that an arm runs in."""
    return RuntimeMode.NONE if isinstance(ident, Piece) else ident.mode


def size_of(ident: ArmId) -> int:
    """Return the most tokens of an arm."""
    return ident.top if isinstance(ident, Piece) else ident.num_tokens


def bands(low: int, top: int) -> list[tuple[int, int]]:
    """Return the bands of a bucket of ``low`` to ``top`` tokens, largest first.

    Eager time is no line over a wide range; a bucket is cut where it spans more than half
    of its size.
    """
    cut = []
    while low <= top // 2 and top > 16:
        cut.append((top * 3 // 4 + 1, top))
        top = top * 3 // 4
    return [*cut, (low, top)]


def band_of(num_tokens: int, top: int, sizes: Sequence[int]) -> int:
    """Return the last token of the band that a number of tokens is in.

    Args:
        num_tokens: Tokens.
        top: Size of the smallest graph that covers them; 0 where there is none.
        sizes: All capture sizes, ascending.
    """
    index = bisect_left(sizes, top)
    low = (sizes[index - 1] if index else 0) + 1
    return next((last for first, last in bands(low, top) if num_tokens >= first), top)


@attrs.frozen
class Stakes:
    """What a choice has to clear.

    Attributes:
        margin: Least relative gain for which the base is left.
        account_us: What may be lost from now on.
        lead_us: The part of it that was earned by being faster.
        horizon: Steps until a change is noticed.
    """

    margin: float
    account_us: float
    lead_us: float
    horizon: float

    def worst(self, base_us: float, slack: float = 1.0) -> float:
        """Return the slowest time for which leaving a base of a given time is covered."""
        if self.account_us <= 0.0:
            return -math.inf
        return (base_us + slack * self.account_us / self.horizon) / DRIFT


@attrs.define(eq=False)
class Bucket:
    """Batches with the same arms, and what is chosen for them.

    Attributes:
        base: What the base policy answers for them; of a split one, for some of them.
        keys: Graphs that may serve them, alone or in parts.
        piece: Their eager arm; None where eager is not allowed.
        top: Most tokens of any of them.
        key: The graph in use; None where there is none.
        limit: Eager is used up to so many tokens.
        cells: The batches that were asked for.
        served: Those whose last answer may be in use still.
        waiting: Batches with a probe that has no outcome yet, by the number of the outcome
            after which it was sent.
        follow_ups: Probes in a row that came at once after an odd one.
        last_probe: Step of the last probe that came back, 0 without any.
        unproven_us: What the base would have cost in the steps that differed since its arm
            was measured last; it may have become faster unnoticed.
    """

    base: Decision
    keys: tuple[Graphs, ...]
    piece: Piece | None
    top: int
    key: Graphs | None = attrs.field(init=False)
    limit: float = attrs.field(init=False)
    cells: dict[Batch, None] = attrs.field(factory=dict, repr=False)
    served: dict[Batch, None] = attrs.field(factory=dict, repr=False)
    waiting: dict[Batch, int] = attrs.field(factory=dict, repr=False)
    follow_ups: int = 0
    last_probe: int = 0
    unproven_us: float = 0.0
    # By arm, those of parts by the number of tokens too.
    _answers: dict[tuple[ArmId | None, int], Decision] = attrs.field(factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        self.to_base()

    def to_base(self) -> None:
        """Choose what the base policy chooses."""
        self.key = self.base_key
        self.limit = math.inf if self.base_key is None else -math.inf

    @property
    def base_key(self) -> Graphs | None:
        """What the base policy replays; None where it runs eager."""
        return graphs_of(self.base)

    @property
    def base_arm(self) -> ArmId | None:
        """The arm that the base policy chooses."""
        return self.piece if self.base_key is None else self.base_key

    @property
    def arms(self) -> tuple[ArmId, ...]:
        """All arms."""
        return self.keys if self.piece is None else (*self.keys, self.piece)

    def is_detour(self, ident: ArmId) -> bool:
        """Tell whether an arm is a larger graph of the base's mode: hardly ever faster."""
        key = self.base_key
        return (
            key is not None
            and not isinstance(ident, Piece)
            and ident.mode is key.mode
            and ident.num_tokens > key.num_tokens
        )

    @property
    def at_risk_us(self) -> float:
        """What was lost unnoticed, had the base become faster right after its last sample."""
        return self.unproven_us * (1.0 - 1.0 / DRIFT)

    def choice(self, num_tokens: int) -> ArmId | None:
        """Return the arm in use for a number of tokens."""
        if self.piece is not None and (self.key is None or num_tokens <= self.limit):
            return self.piece
        return self.key

    def answer(self, num_tokens: int) -> Decision:
        """Return the decision for a number of tokens, to be measured."""
        arm = self.choice(num_tokens)
        place = arm, num_tokens if isinstance(arm, Parts) else 0
        decision = self._answers.get(place)
        if decision is None:
            decision = self._answers[place] = _answer(self, arm, num_tokens)
        return decision

    def outdated(self, low: float, high: float) -> list[Batch]:
        """Return the batches served whose tokens are above one number, up to another."""
        found = [batch for batch in self.served if low < batch.num_tokens <= high]
        for batch in found:
            del self.served[batch]
        return found

    def choose(self, known: dict[ArmId, Arm], stakes: Stakes) -> bool:
        """Choose anew from what is known; return whether anything changed."""
        before = (self.key, self.limit)
        base = None if self.base_arm is None else known.get(self.base_arm)
        if base is None or stakes.account_us <= 0.0:
            self.to_base()
        elif self.base_key is None:
            self._leave_eager(known, stakes)
        else:
            self._leave_graph(known, stakes)
        if math.isfinite(self.limit):
            self.limit = float(math.floor(self.limit))
        return (self.key, self.limit) != before

    # -- the base replays a graph -------------------------------------------------------

    def _leave_graph(self, known: dict[ArmId, Arm], stakes: Stakes) -> None:
        base_us = _level(known[self.base_key])  # type: ignore[index]
        self._choose_key(known, stakes, base_us)
        graph = None if self.key is None else known.get(self.key)
        eager = None if self.piece is None else known.get(self.piece)
        if graph is None or eager is None or eager.line is None:
            self.limit = -math.inf
            return
        line, graph_us = eager.line, _level(graph)
        at = self._crossing(line, graph_us)
        enter = graph_us / (1.0 + _margin(stakes, graph, eager, at))
        enter = min(enter, stakes.worst(base_us))
        # What was won already pays for waiting until it is sure that eager is slower.
        leave = graph_us * (1.0 + _patience(stakes, graph, eager, at))
        leave = min(leave, stakes.worst(base_us, slack=2.0))
        self.limit = max(self.limit, line.largest(enter))
        self.limit = min(self.limit, line.largest(leave))

    def _crossing(self, line: Line, graph_us: float) -> float:
        """Return the tokens, among those measured, at which eager takes as long as a graph."""
        return min(max(line.largest(graph_us), line.low), float(self.top))

    def _choose_key(self, known: dict[ArmId, Arm], stakes: Stakes, base_us: float) -> None:
        """Choose among graphs; one other than the base's has to be covered and better."""
        if self.key not in known or _level(known[self.key]) > min(
            base_us, stakes.worst(base_us, slack=2.0)
        ):
            self.key = self.base_key
        for key in self.keys:
            if key == self.key or key not in known or self.key is None:
                continue
            now, other = known[self.key], known[key]
            us = _level(other)
            covered = key == self.base_key or us <= stakes.worst(base_us)
            doubts = 2.5 if self.is_detour(key) else 1.0
            margin = doubts * _margin(stakes, now, other, key.num_tokens)
            if covered and us * (1.0 + margin) < _level(now):
                self.key = key

    # -- the base runs eager ------------------------------------------------------------

    def _leave_eager(self, known: dict[ArmId, Arm], stakes: Stakes) -> None:
        eager = known[self.piece]  # type: ignore[index]
        line = eager.line
        best = min(
            (key for key in self.keys if key in known),
            key=lambda key: (_level(known[key]), key.num_tokens),
            default=None,
        )
        if best is None or line is None:
            self.to_base()
            return
        if (
            self.key is None
            or self.key not in known
            or _level(known[best]) * (1.0 + stakes.margin) < _level(known[self.key])
        ):
            self.key = best
        graph = known[self.key]
        us = _level(graph)
        room = stakes.account_us / stakes.horizon
        at = self._crossing(line, us)
        enter = max(us * (1.0 + _margin(stakes, graph, eager, at)), DRIFT * us - room)
        leave = max(us, DRIFT * us - 2.0 * room)
        self.limit = min(self.limit, line.largest(enter))
        self.limit = max(self.limit, line.largest(leave))


def _level(arm: Arm) -> float:
    return arm.expect(1.0) or math.inf


def _margin(stakes: Stakes, one: Arm, other: Arm, at: float) -> float:
    """Return the gain to ask for; the larger the lead, the less has to be sure."""
    doubt = 1.5 * math.hypot(one.error(at), other.error(at))
    return max(stakes.margin, doubt) / (1.0 + _comfort(stakes, one))


def _patience(stakes: Stakes, one: Arm, other: Arm, at: float) -> float:
    """Return how much slower an arm in use may look; the more, the larger the lead."""
    comfort = _comfort(stakes, one)
    return math.hypot(one.error(at), other.error(at)) * comfort / (1.0 + comfort)


def _comfort(stakes: Stakes, arm: Arm) -> float:
    """Return how many times the lead would pay for the arm until a change is noticed."""
    return max(0.0, stakes.lead_us) / (stakes.horizon * max(_level(arm), 1e-9))


def _answer(bucket: Bucket, arm: ArmId | None, num_tokens: int) -> Decision:
    """Return the decision for an arm of a bucket, to be measured."""
    base = bucket.base
    if arm is None or arm == bucket.base_arm:
        parts = tuple(arm.rows(num_tokens)) if isinstance(arm, Parts) else ()
        return attrs.evolve(base, parts=parts, timed=True)
    # Where the base's graph has a bound on requests, beyond it the base answers otherwise.
    bound = base.max_num_reqs
    if base.key is not None and not base.parts and base.key.descriptor.num_reqs is not None:
        bound = min(bound, base.key.descriptor.num_reqs)
    if isinstance(arm, Piece):
        decision = Decision.eager("eager_is_faster", timed=True)
    elif isinstance(arm, Parts):
        decision = replay_of(arm, num_tokens, "parts_are_faster")
    else:
        decision = replay_of(arm, num_tokens, "graph_is_faster")
    return attrs.evolve(decision, max_num_reqs=bound)


def allows_eager(batch: Batch) -> bool:
    """Tell whether a batch may run eager."""
    return batch.allows(RuntimeMode.NONE)
