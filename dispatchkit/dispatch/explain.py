"""Explain in words why a batch is decided as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit.dispatch.cost_model import StepCost
from dispatchkit.dispatch.decision import Decision, Reason
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.errors import ConfigError, DescriptorError, counted
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode


@attrs.frozen
class Candidate:
    """A graph that could compute the batch.

    Attributes:
        key: Its name.
        chosen: Whether it was chosen.
        why_not: Why it cannot run now, or why it is not allowed; None if it could run.
        padding: Padding tokens it would compute.
    """

    key: GraphKey
    chosen: bool
    why_not: str | None
    padding: int


@attrs.frozen(kw_only=True)
class MeasuredTime:
    """Measured times of steps that ran as decided, in a running program.

    Attributes:
        steps: Number of recent steps that were timed.
        median_us: Their median time on the stream, in microseconds.
        clock: ``device`` or ``host``.
        queued: Other work was ahead of them on the stream when they were launched.
    """

    steps: int
    median_us: float
    clock: str
    queued: bool

    def __str__(self) -> str:
        depth = "behind other work" if self.queued else "idle"
        steps = counted(self.steps, "step")
        return f"{self.median_us:,.1f} µs, median of {steps}, {depth} ({self.clock} time)"


@attrs.frozen
class Explanation:
    """A decision, the policy behind it and the nearest graphs.

    Attributes:
        batch: The batch asked about.
        decision: The decision that a step would get now.
        policy: Name and origin of the policy, and the name of its member that decided.
        candidates: Per runtime mode, the smallest graphs that cover the batch.
        largest: Tokens of the largest declared graph; 0 if no graph is declared.
        fault: The policy's fault, if any; it is not counted here.
        problem: Why the smallest graph that covers the batch failed, if that is the reason.
        cost: The cost of the step, if a cost model was given.
        times: Times that a runner measured for equal steps; None if nothing measures.
        axes: The bucket of each axis by name; None for a value outside all of its buckets.
        note: Anything else a runner knows about the step; may be empty.
        error: The error that the step would raise instead of running; empty if it would run.
    """

    batch: Batch
    decision: Decision
    policy: str
    candidates: tuple[Candidate, ...]
    largest: int = 0
    fault: str = ""
    cost: StepCost | None = None
    times: tuple[MeasuredTime, ...] | None = None
    axes: Mapping[str, int | None] = attrs.field(factory=dict, hash=False)
    note: str = ""
    problem: str = ""
    error: str = ""

    @property
    def outcome(self) -> str:
        """What the step would do: replay a graph, run eager, or raise an error."""
        return f"raises {self.error}" if self.error else str(self.decision)

    @property
    def facts(self) -> list[str]:
        """The size and the kind of the batch, in words."""
        batch = self.batch
        facts = [counted(batch.num_tokens, "token")]
        if batch.num_reqs is not None:
            facts.append(counted(batch.num_reqs, "request"))
        facts.append(
            f"uniform decode of {batch.query_len} per request" if batch.uniform else "mixed"
        )
        if batch.num_active_loras:
            facts.append(counted(batch.num_active_loras, "adapter"))
        return facts + self.axes_in_words

    @property
    def axes_in_words(self) -> list[str]:
        """The bucket of each axis, in words."""
        return [
            f"{name} in {'no bucket' if bucket is None else f'bucket {bucket}'}"
            for name, bucket in self.axes.items()
        ]

    @property
    def because(self) -> str:
        """The cause of the decision: a constraint, the configuration, a state or the policy."""
        reason = self.decision.reason
        if self.fault:
            return f"policy: {self.fault}"
        if self.problem:
            return f"state: its graph failed, {self.problem}"
        if reason in _BEHIND:
            return _BEHIND[reason]
        if reason == Reason.ABOVE_LARGEST and self.batch.num_tokens <= self.largest:
            return "constraint: no graph for this kind of batch is large enough"
        if reason == Reason.ABOVE_LARGEST:
            return (
                "constraint: no declared graph is large enough for the batch; the largest has "
                f"{counted(self.largest, 'token')}"
            )
        return f"policy {self.policy}" + ("" if reason == Reason.HIT else f", reason {reason!r}")

    @property
    def nearest(self) -> str:
        """The nearest graph that could serve an eager batch; empty if there is none."""
        if self.decision.key is not None or not self.candidates:
            return ""
        near = min(self.candidates, key=lambda one: (one.why_not is not None, one.padding))
        return f"{near.key}: {near.why_not or 'ready, not preferred'}"

    @property
    def no_candidates(self) -> str:
        """Why no declared graph covers the batch; empty if one does, or ``because`` says it."""
        reasons = (Reason.EMPTY_BATCH, Reason.ABOVE_LARGEST, Reason.NO_KEY)
        if self.candidates or self.decision.reason in reasons:
            return ""
        if self.batch.num_tokens <= self.largest:
            return "no graph is declared for this kind of batch"
        return "no declared graph is large enough for the batch"

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain values for JSON."""
        batch, decision = self.batch, self.decision
        return {
            "batch": {
                "num_tokens": batch.num_tokens,
                "num_reqs": batch.num_reqs,
                "uniform": batch.uniform,
                "query_len": batch.query_len,
                "num_active_loras": batch.num_active_loras,
                "axes": dict(self.axes),
                "allowed_modes": [mode.name for mode in sorted(batch.allowed_modes)],
            },
            "decision": {
                "mode": decision.mode.name,
                "key": None if decision.key is None else str(decision.key),
                "parts": [
                    {"key": str(part.key), "num_tokens": part.num_tokens} for part in decision.parts
                ],
                "reason": decision.reason,
                "padded_num_tokens": decision.padded_num_tokens,
                "padding": decision.padding,
            },
            "because": self.because,
            "nearest": self.nearest or None,
            "policy": self.policy,
            "candidates": [
                {
                    "key": str(each.key),
                    "chosen": each.chosen,
                    "why_not": each.why_not,
                    "padding": each.padding,
                }
                for each in self.candidates
            ],
            "cost": None if self.cost is None else attrs.asdict(self.cost),
            "note": self.note or None,
            "error": self.error or None,
        }

    def __str__(self) -> str:
        names = ", ".join(mode.name for mode in sorted(self.batch.allowed_modes))
        padding = counted(self.decision.padding, "token")
        lines = [
            f"{', '.join(self.facts)}; allowed: {names}",
            f"-> {self.outcome}{', for one step only' if self.decision.one_shot else ''}",
            f"   decided by policy {self.policy}; padding {padding}",
            f"   because: {self.because}",
        ]
        if self.nearest:
            lines.append(f"   nearest graph: {self.nearest}")
        if self.cost is not None:
            lines.append(f"   cost: {self.cost}")
        if self.note:
            lines.append(f"   note: {self.note}")
        if self.times is not None:
            told = "; ".join(map(str, self.times)) or "no such step has been timed yet"
            lines.append(f"   measured here: {told}")
        for each in self.candidates:
            verdict = "chosen" if each.chosen else each.why_not or "ready, not preferred"
            lines.append(f"   {each.key}: {verdict} (padding {each.padding})")
        if self.no_candidates:
            lines.append(f"   {self.no_candidates}")
        return "\n".join(lines)


def explain(
    dispatcher: Dispatcher,
    num_tokens: int,
    num_reqs: int = 0,
    uniform: int = 0,
    loras: int = 0,
    ceiling: int = 2,
    *,
    per_mode: int = 2,
) -> Explanation:
    """Explain what would happen to a batch, without changing table or counters.

    Raises:
        DescriptorError: The batch is impossible, other than by more tokens than ``max_num_tokens``.
        ConfigError: ``dispatcher`` is not a Dispatcher.
    """
    if not isinstance(dispatcher, Dispatcher):
        hint = "For a GraphRunner, call runner.explain(num_tokens)."
        raise ConfigError("dispatcher", dispatcher, "a Dispatcher", hint)
    batch = dispatcher.batch(num_tokens, num_reqs, uniform, loras, ceiling, any_size=True)
    error, fault = "", None
    try:
        answer, fault = dispatcher.preview(batch)
    except DescriptorError as refusal:
        answer, error = Decision.eager(Reason.ABOVE_LARGEST), f"DescriptorError: {refusal}"
    if not error and answer.key is None and not batch.allows(RuntimeMode.NONE):
        error = f"NoGraphError: eager is not allowed for this batch ({answer.reason})"
    policy = answer.policy or dispatcher.policy_name
    decision = attrs.evolve(answer, num_tokens=batch.num_tokens, policy=policy, plan=None)
    candidates = []
    # No graph is ever chosen for a batch without tokens.
    for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE) if batch.num_tokens else ():
        for index, key in enumerate(dispatcher.graphs.covering(batch, mode)):
            chosen = key == decision.key
            if index >= per_mode and not chosen:
                continue
            why = None if batch.allows(mode) else "mode not allowed for this batch"
            candidates.append(
                Candidate(
                    key,
                    chosen,
                    why or dispatcher.graphs.why_not(key),
                    key.num_tokens - batch.num_tokens,
                )
            )
    origin = f" ({dispatcher.policy_origin})" if dispatcher.policy_origin else ""
    member = f", member {policy}" if policy != dispatcher.policy_name else ""
    largest = max((key.num_tokens for key in dispatcher.registry), default=0)
    problem = ""
    if decision.reason == Reason.CAPTURE_FAILED and candidates:
        entry = dispatcher.registry.get(candidates[0].key)
        problem = "for an unknown reason" if entry is None else entry.reason
    return Explanation(
        batch,
        decision,
        dispatcher.policy_name + origin + member,
        tuple(candidates),
        largest,
        "" if fault is None else str(fault),
        axes={
            axis.name: bucket
            for axis, bucket in zip(dispatcher.config.axes, batch.axes, strict=True)
        },
        problem=problem,
        error=error,
    )


# The causes of reasons that are not a policy's own choice.
_BEHIND: Mapping[str, str] = {
    Reason.EMPTY_BATCH: "constraint: a batch without tokens needs no graph",
    Reason.MODE_NONE: "configuration: the mode runs this kind of batch eager",
    Reason.CEILING: "constraint: the caller allows no mode that has a graph for it",
    Reason.NO_KEY: "configuration: no graph is declared for this kind of batch",
    Reason.NOT_CAPTURED: "state: its graph is declared and not captured yet",
    Reason.EVICTED: "state: its graph was evicted to stay within the budget",
    Reason.STALE: "state: its graph reads memory that was replaced after its capture",
    Reason.DISABLED: "state: its graph or its mode is switched off",
    Reason.TOO_MANY_REQS: "constraint: a graph serves no more requests than it was captured for",
    Reason.OUTSIDE_AXIS: "constraint: a value lies outside all buckets of its axis",
    Reason.ROWS_NOT_INDEPENDENT: "constraint: only batches of independent rows may be split",
    Reason.ROWS_DEPEND: "executor: padding changes what the step computes",
    Reason.ROWS_NOT_THE_BUCKET: "executor: an output has other rows than the batch",
    Reason.OUTPUTS_NOT_JOINED: "executor: the outputs of the parts cannot be joined",
    Reason.CAPTURE_PENDING: "executor: its graph was not requested often enough to be captured",
    Reason.INSIDE_CAPTURE: "executor: other code is capturing the current stream",
    Reason.AUTOCAST: "executor: its graph was captured under another autocast",
    Reason.TRAINING_MODE: "executor: a module was switched to or from training mode",
    Reason.MOVED_MODULE: "executor: a module was moved, or its dtype changed",
    Reason.WEIGHTS_REPLACED: "executor: a weight, buffer or submodule was replaced",
    Reason.VALUE_CHANGED: "executor: a value that Python code reads has changed",
    Reason.PIECEWISE_UNSUPPORTED: "executor: the step is not split, so PIECEWISE cannot run",
    Reason.NO_ANSWER: "policy: no policy decided this batch",
    Reason.POLICY_ERROR: "policy: it raised, or its answer broke a constraint",
}
