"""Account of a trace under a policy: every distinct decision, its reason and its cost.

Unlike a simulation, which keeps only totals, an account keeps every distinct decision, so each can
be explained. An account needs no device: the real dispatcher decides, all declared graphs
count as captured, and a cost model provides the times.
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
_PROGRESS_EVERY = 1 << 14

Progress = Callable[[str, int, int], None]


@attrs.frozen(kw_only=True)
class AccountedDecision:
    """A distinct decision, with the number of its steps and the cost of one step.

    Attributes:
        num_tokens: Number of tokens of the batch.
        num_reqs: Number of requests of the first step with this decision; 0 if not recorded.
        uniform: ``uniform`` argument of ``dispatch``; 0 for mixed batches.
        loras: Number of active adapters; if axes are configured, the index of the combination of
            adapters and axis buckets.
        decision: Decision of the policy for the batch.
        steps: Number of steps with this decision.
        cost: Cost of one step.
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
        """Number of tokens of the graph, or of all graphs of a split step; None if eager."""
        return None if self.decision.key is None else self.decision.padded_num_tokens

    @property
    def step_us(self) -> float:
        """Time of one step according to the cost model, in microseconds."""
        return self.cost.step_us

    @property
    def eager_us(self) -> float:
        """Time of one step if it ran eager, in microseconds."""
        return self.cost.eager_us

    @property
    def total_us(self) -> float:
        """Time of all steps with this decision, in microseconds."""
        return self.steps * self.step_us

    @property
    def lost_us(self) -> float:
        """Microseconds that a graph of the exact size would save on all these steps; at least 0."""
        return self.steps * self.cost.lost_us


@attrs.define
class AccountBin:
    """Totals of consecutive steps: steps by mode, and real tokens and padding of replays."""

    modes: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(RuntimeMode.__members__, 0))
    real_tokens: int = 0
    padding: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Account:
    """Decisions of a policy for all steps of a trace, with their costs.

    Attributes:
        source: Name of the trace.
        policy: Name and origin of the policy.
        config: Configuration of the dispatcher.
        num_graphs: Number of keys that the policy declared.
        decisions: All distinct decisions, sorted by total time in descending order.
        bins: Totals of at most ``MAX_BINS`` equal parts of the trace, in order.
        cost_model: Name of the cost model.
        covered_to: Largest number of tokens for which the cost model was measured, both eager and
            with graphs.
        dispatcher: Dispatcher that made the decisions; ``explain`` uses it.
        has_order: Whether the trace records the order of its steps; a histogram does not.
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
        """Number of steps, excluding steps without tokens."""
        return sum(one.steps for one in self.decisions)

    @property
    def time_s(self) -> float:
        """Device time of all steps according to the cost model, in seconds."""
        return sum(one.total_us for one in self.decisions) / 1e6

    @property
    def eager_time_s(self) -> float:
        """Device time if every step ran eager, in seconds."""
        return sum(one.steps * one.eager_us for one in self.decisions) / 1e6

    @property
    def real_tokens(self) -> int:
        """Number of real tokens of the steps that replayed a graph."""
        return sum(one.steps * one.num_tokens for one in self.decisions if one.bucket)

    @property
    def padding(self) -> int:
        """Number of padding tokens of the steps that replayed a graph."""
        return sum(one.steps * one.decision.padding for one in self.decisions)

    @property
    def waste_pct(self) -> float:
        """Padding as a percentage of the real tokens of replayed steps."""
        return 100.0 * self.padding / self.real_tokens if self.real_tokens else 0.0

    def by(self, what: Callable[[AccountedDecision], Any]) -> dict[Any, list[AccountedDecision]]:
        """Return the decisions, grouped by the result of a function, most frequent group first."""
        groups: dict[Any, list[AccountedDecision]] = {}
        for one in self.decisions:
            groups.setdefault(what(one), []).append(one)
        return dict(sorted(groups.items(), key=lambda item: -sum(one.steps for one in item[1])))

    def modes(self) -> dict[str, int]:
        """Return the number of steps in each runtime mode."""
        counts = dict.fromkeys(RuntimeMode.__members__, 0)
        for one in self.decisions:
            counts[one.decision.mode.name] += one.steps
        return counts

    def misses(self) -> dict[str, int]:
        """Return the number of eager steps by reason, most frequent first."""
        eager = self.by(lambda one: one.decision.reason if one.bucket is None else None)
        return {
            reason: sum(one.steps for one in group)
            for reason, group in eager.items()
            if reason is not None
        }

    def explain(self, one: AccountedDecision) -> Explanation:
        """Return the explanation of a decision, including the nearest graph."""
        answer = explain(self.dispatcher, one.num_tokens, one.num_reqs, one.uniform, one.loras)
        # A learning policy may have changed its decision since, so explain the recorded decision.
        candidates = tuple(
            attrs.evolve(each, chosen=each.key == one.decision.key) for each in answer.candidates
        )
        return attrs.evolve(answer, decision=one.decision, candidates=candidates, cost=one.cost)


def account_for(
    trace: StepTrace,
    dispatcher: Dispatcher,
    model: CostModel,
    *,
    progress: Progress | None = None,
) -> Account:
    """Return the account of a trace whose steps are decided by a dispatcher.

    Args:
        trace: Steps to decide; steps without tokens are skipped.
        dispatcher: Dispatcher whose decisions are recorded. Create it with ``lazy=True``, so that
            declared graphs count as captured.
        model: Cost model that provides the times.
        progress: Function that is called with (activity, done, total) to report progress.

    Raises:
        TraceError: No step has tokens, or an axis of the configuration has no column in the trace.
        ConfigError: A step is larger than the configuration allows.
    """
    config = dispatcher.config
    rows = list(_arguments(trace, config))
    if not rows:
        raise TraceError(
            trace.source, None, "the trace has no step with tokens. Use another trace."
        )
    most = max(row[0] for row in rows)
    if most > config.max_num_tokens:
        raise ConfigError(
            "max_num_tokens",
            config.max_num_tokens,
            f"at least {most}, the number of tokens of the largest step of {trace.source}",
            "Raise max_num_tokens in the configuration.",
        )
    learns = dispatcher.policy_parts.learns
    num_bins = min(MAX_BINS, len(rows))
    bins = [AccountBin() for _ in range(num_bins)]
    # Tallies are keyed by the id of the decision, because each cell of the table has its own
    # decision. The tally keeps the decision alive, so the id is not reused.
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
        if progress is not None and index % _PROGRESS_EVERY == 0:
            progress("deciding", index, len(rows))
    if progress is not None:
        progress("deciding", len(rows), len(rows))
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
    """Merge decisions with the same batch, graph and reason."""
    merged: dict[Any, AccountedDecision] = {}
    for one in decisions:
        made = one.decision
        name = (one.num_tokens, one.uniform, one.loras, made.key, made.reason)
        same = merged.get(name)
        merged[name] = one if same is None else attrs.evolve(same, steps=same.steps + one.steps)
    return merged.values()


def _arguments(trace: StepTrace, config: DispatchConfig) -> Iterable[tuple[int, int, int, int]]:
    """Yield the arguments of ``dispatch`` for each step with tokens."""
    names = trace.columns

    def column(name: str) -> Iterable[int]:
        return trace.column(name) if name in names else [0] * len(trace)

    number: Mapping[int, int] = {
        length: index for index, length in enumerate(config.query_lens, start=1)
    }
    has_lengths = "max_query_len" in names
    lengths = column("max_query_len") if has_lengths else column("uniform_decode")
    varlen = config.num_query_classes - 1 if config.varlen_decode and has_lengths else 0
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
