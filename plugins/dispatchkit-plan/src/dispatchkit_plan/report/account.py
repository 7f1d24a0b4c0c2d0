"""Account of a trace under a policy: every decision, its reason and its cost.

A simulation has totals; an account keeps every distinct decision, so that each can be
explained. No device is needed: the real dispatcher decides, every declared graph counts as
captured, and times come from a cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from dispatchkit.dispatch import (
    Decision,
    Dispatcher,
    Explanation,
    Outcome,
    StepCost,
    explain,
)
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import DispatchConfig, RuntimeMode
from dispatchkit.observe import StepTrace, trace_variants

from dispatchkit_plan.costs import CostModel

__all__ = ["Account", "AccountBin", "AccountedDecision", "account_for"]

MAX_BINS = 96
_TELL_EVERY = 1 << 14

Tell = Callable[[str, int, int], None]


@attrs.frozen(kw_only=True)
class AccountedDecision:
    """One decision, how often it was taken, and the cost of a step under it.

    Attributes:
        num_tokens: Tokens of the batch.
        num_reqs: Requests of the first such batch; 0 where the trace has none.
        uniform: Its ``uniform`` argument; 0 is mixed.
        loras: Adapters; with axes the variant.
        decision: What was decided.
        steps: How often.
        cost: What one step costs.
    """

    num_tokens: int
    num_reqs: int
    uniform: int
    loras: int
    decision: Decision
    steps: int
    cost: StepCost

    @property
    def bucket(self) -> int | None:
        """Tokens of the graph, or of all graphs of a split step; None if eager."""
        return None if self.decision.key is None else self.decision.padded_num_tokens

    @property
    def step_us(self) -> float:
        """Time of one step, by the cost model."""
        return self.cost.step_us

    @property
    def eager_us(self) -> float:
        """Time of the same step eager."""
        return self.cost.eager_us

    @property
    def total_us(self) -> float:
        """Time of all these steps."""
        return self.steps * self.step_us

    @property
    def lost_us(self) -> float:
        """Time that a graph of exactly the right size would have saved; not below 0."""
        return self.steps * self.cost.lost_us


@attrs.define
class AccountBin:
    """Consecutive steps: the number that ran in each mode, and their padding."""

    modes: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(RuntimeMode.__members__, 0))
    real_tokens: int = 0
    padding: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Account:
    """The decisions for a trace under a policy, with their costs.

    Attributes:
        source: Name of the trace.
        policy: Name and origin of the policy.
        config: The configuration in force.
        num_graphs: Keys that the policy declared.
        decisions: Every different decision, the costliest first.
        bins: The steps in order, cut into at most ``MAX_BINS`` equal parts.
        cost_model: Name of the cost model.
        covered_to: Largest size that the cost model was measured at.
        dispatcher: What decided, for further questions.
        has_order: Whether the trace knows the order of its steps; a histogram does not.
    """

    source: str
    policy: str
    config: DispatchConfig
    num_graphs: int
    decisions: tuple[AccountedDecision, ...]
    bins: tuple[AccountBin, ...]
    cost_model: str
    covered_to: int
    dispatcher: Dispatcher
    has_order: bool = True

    @property
    def num_steps(self) -> int:
        """Number of steps, those without tokens left out."""
        return sum(one.steps for one in self.decisions)

    @property
    def time_s(self) -> float:
        """Device time of all steps, by the cost model."""
        return sum(one.total_us for one in self.decisions) / 1e6

    @property
    def eager_time_s(self) -> float:
        """Device time if every step ran eager."""
        return sum(one.steps * one.eager_us for one in self.decisions) / 1e6

    @property
    def real_tokens(self) -> int:
        """Tokens of the steps that replayed a graph, before padding."""
        return sum(one.steps * one.num_tokens for one in self.decisions if one.bucket)

    @property
    def padding(self) -> int:
        """Padding added to those steps."""
        return sum(one.steps * one.decision.padding for one in self.decisions)

    @property
    def waste_pct(self) -> float:
        """Padding in percent of the real tokens, over the steps that replayed a graph."""
        return 100.0 * self.padding / self.real_tokens if self.real_tokens else 0.0

    def by(self, what: Callable[[AccountedDecision], Any]) -> dict[Any, list[AccountedDecision]]:
        """Return the decisions in groups, the group with most steps first."""
        groups: dict[Any, list[AccountedDecision]] = {}
        for one in self.decisions:
            groups.setdefault(what(one), []).append(one)
        return dict(sorted(groups.items(), key=lambda item: -sum(one.steps for one in item[1])))

    def modes(self) -> dict[str, int]:
        """Return the steps by runtime mode."""
        counts = dict.fromkeys(RuntimeMode.__members__, 0)
        for one in self.decisions:
            counts[one.decision.mode.name] += one.steps
        return counts

    def misses(self) -> dict[str, int]:
        """Return the eager steps by reason, the most frequent first."""
        eager = self.by(lambda one: one.decision.reason if one.bucket is None else None)
        return {
            reason: sum(one.steps for one in group)
            for reason, group in eager.items()
            if reason is not None
        }

    def explain(self, one: AccountedDecision) -> Explanation:
        """Return why a decision was taken, with the nearest graph."""
        answer = explain(self.dispatcher, one.num_tokens, one.num_reqs, one.uniform, one.loras)
        # A learning policy may decide otherwise by now; explain the decision that was taken.
        candidates = tuple(
            attrs.evolve(each, chosen=each.key == one.decision.key) for each in answer.candidates
        )
        return attrs.evolve(answer, decision=one.decision, candidates=candidates, cost=one.cost)


def account_for(
    trace: StepTrace,
    dispatcher: Dispatcher,
    model: CostModel,
    *,
    tell: Tell | None = None,
) -> Account:
    """Run a trace through a dispatcher and keep every distinct decision.

    Args:
        trace: Steps; those without tokens are left out.
        dispatcher: Decides; make it with ``lazy=True``, so that declared graphs count as
            captured.
        model: The cost model.
        tell: Called with (activity, done, total) to report progress.

    Raises:
        TraceError: No step has tokens.
        ConfigError: A step is larger than the configuration allows.
        TraceError: An axis of the configuration has no column.
    """
    config = dispatcher.config
    rows = list(_arguments(trace, config))
    if not rows:
        raise TraceError(trace.source, None, "has no step with tokens in it.")
    most = max(row[0] for row in rows)
    if most > config.max_num_tokens:
        raise ConfigError(
            "max_num_tokens",
            config.max_num_tokens,
            f"at least {most}, the largest step of {trace.source}",
        )
    learns = dispatcher.policy_parts.learns
    num_bins = min(MAX_BINS, len(rows))
    bins = [AccountBin() for _ in range(num_bins)]
    # By identity: a bound decision belongs to one cell; the tally keeps it alive.
    tallies: dict[int, list[Any]] = {}
    for index, (tokens, reqs, uniform, loras) in enumerate(rows):
        decision = dispatcher.dispatch(tokens, reqs, uniform, loras)
        tally = tallies.get(id(decision))
        if tally is None:
            cost = StepCost.of(model, decision, tokens)
            tally = tallies[id(decision)] = [decision, 0, (tokens, reqs, uniform, loras), cost]
        tally[1] += 1
        part = bins[index * num_bins // len(rows)]
        part.modes[decision.mode.name] += 1
        if decision.key is not None:
            part.real_tokens += tokens
            part.padding += decision.padding
        if learns and decision.timed:
            batch = dispatcher.batch(tokens, reqs, uniform, loras)
            dispatcher.observe(Outcome(batch, decision, tally[3].step_us, step=index + 1))
        if tell is not None and index % _TELL_EVERY == 0:
            tell("deciding", index, len(rows))
    if tell is not None:
        tell("deciding", len(rows), len(rows))
    decisions = [
        AccountedDecision(
            num_tokens=facts[0],
            num_reqs=facts[1],
            uniform=facts[2],
            loras=facts[3],
            decision=decision,
            steps=steps,
            cost=cost,
        )
        for decision, steps, facts, cost in tallies.values()
    ]
    origin = f" ({dispatcher.policy_origin})" if dispatcher.policy_origin else ""
    return Account(
        source=trace.source,
        policy=dispatcher.policy_name + origin,
        config=config,
        num_graphs=len(dispatcher.registry),
        decisions=tuple(sorted(_merged(decisions), key=lambda one: -one.total_us)),
        bins=tuple(bins),
        cost_model=model.name,
        covered_to=min(model.eager_us.last, model.graph_us.last),
        dispatcher=dispatcher,
        has_order=trace.has_order,
    )


def _merged(decisions: Iterable[AccountedDecision]) -> Iterable[AccountedDecision]:
    """Merge decisions that differ only in the number of their binding."""
    merged: dict[Any, AccountedDecision] = {}
    for one in decisions:
        made = one.decision
        name = (one.num_tokens, one.uniform, one.loras, made.key, made.reason)
        same = merged.get(name)
        merged[name] = one if same is None else attrs.evolve(same, steps=same.steps + one.steps)
    return merged.values()


def _arguments(trace: StepTrace, config: DispatchConfig) -> Iterable[tuple[int, int, int, int]]:
    """Yield the arguments of each step's ``dispatch``."""
    names = trace.columns

    def column(name: str) -> Iterable[int]:
        return trace.column(name) if name in names else [0] * len(trace)

    number: Mapping[int, int] = {
        length: index for index, length in enumerate(config.query_lens, start=1)
    }
    knows_lengths = "max_query_len" in names
    lengths = column("max_query_len") if knows_lengths else column("uniform_decode")
    varlen = config.num_query_classes - 1 if config.varlen_decode and knows_lengths else 0
    for tokens, reqs, uniform, length, loras in zip(
        trace.column("num_tokens"),
        column("num_reqs"),
        column("uniform_decode"),
        lengths,
        trace_variants(trace, config),
        strict=True,
    ):
        if tokens:
            kind = number.get(length, 0) if uniform else 0
            if not kind and 0 < length <= config.query_len:
                kind = varlen
            yield tokens, min(reqs, config.max_num_seqs), kind, loras
