"""Explain the decision for a batch in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit.dispatch.cost_model import StepCost
from dispatchkit.dispatch.decision import Decision, Reason
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.errors import DescriptorError, counted
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import check_instance
from dispatchkit.keys.modes import RuntimeMode


@attrs.frozen
class Candidate:
    """A declared graph that covers the explained batch.

    Attributes:
        key: Key of the graph.
        chosen: Whether the graph was chosen.
        why_not: Why the graph cannot run now or is not allowed; None if it can run.
        padding: Number of padding tokens that the graph would compute.
    """

    key: GraphKey
    chosen: bool
    why_not: str | None
    padding: int


@attrs.frozen(kw_only=True)
class MeasuredTime:
    """The measured time of recent steps with the same decision.

    Attributes:
        steps: Number of timed steps.
        median_us: Median time of the steps in microseconds (see ``Outcome.elapsed_us``).
        clock: The clock that measured the times: ``device`` or ``host``.
        queued: Whether the stream had other work to finish when the steps were launched.
    """

    steps: int
    median_us: float
    clock: str
    queued: bool

    def __str__(self) -> str:
        depth = "behind other work" if self.queued else "on an idle stream"
        steps = counted(self.steps, "step")
        return f"{self.median_us:,.1f} µs, median of {steps}, {depth} ({self.clock} time)"


@attrs.frozen
class Explanation:
    """A decision, its policy and cause, and the nearest graphs.

    Attributes:
        batch: The batch whose decision is explained.
        decision: Decision that a step would receive now.
        policy: Name and origin of the policy, and for a composite policy the member that decided.
        candidates: The smallest graphs of each runtime mode that cover the batch.
        largest: Tokens of the largest declared graph; 0 if no graph is declared.
        fault: Fault of the policy, if any, as text. ``explain`` does not count it.
        problem: A cause that is more exact than ``decision.reason``, in three cases: the batch
            exceeds ``max_num_tokens``, the smallest graph that covers the batch is outdated or its
            capture failed, or the configuration has no capture sizes. Otherwise empty.
        cost: Cost of the step, if a cost model is given.
        times: Times that a runner measured for steps with the same decision; None if steps are not
            measured.
        axes: Bucket of each axis by name; None for a value outside all buckets.
        note: Further information, such as a capture that the step would start; may be empty.
        error: Error that the step would raise; empty if the step would run.
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
        """What the step would do: replay, run eager or raise an error."""
        return f"raises {self.error}" if self.error else str(self.decision)

    @property
    def facts(self) -> list[str]:
        """The size and kind of the batch, in words."""
        return self.batch.facts + self.axes_in_words

    @property
    def axes_in_words(self) -> list[str]:
        """The bucket of each axis, in words."""
        return [
            f"{name} {'outside all buckets' if bucket is None else f'in bucket {bucket}'}"
            for name, bucket in self.axes.items()
        ]

    @property
    def because(self) -> str:
        """The cause of the decision, such as ``state: the graph for this batch was evicted``."""
        reason = self.decision.reason
        if self.fault:
            return f"policy: {self.fault}"
        if self.problem and self.decision.key is None:
            return self.problem
        if reason in _CAUSES:
            return _CAUSES[reason]
        if reason == Reason.ABOVE_LARGEST and self.batch.num_tokens <= self.largest:
            return "constraint: no graph for this kind of batch is large enough"
        if reason == Reason.ABOVE_LARGEST and not self.largest:
            return "configuration: no graph is declared"
        if reason == Reason.ABOVE_LARGEST:
            return (
                "constraint: no declared graph is large enough for the batch; the largest has "
                f"{counted(self.largest, 'token')}"
            )
        if self.decision.key is None:
            return f"policy: chose eager, reason {reason!r}"
        parts = len(self.decision.parts)
        chosen = f"policy: chose {f'these {parts} graphs' if parts else 'this graph'}"
        return chosen + ("" if reason == Reason.HIT else f", reason {reason!r}")

    @property
    def nearest(self) -> str:
        """The nearest graph, and why a batch that runs eager does not use it.

        Empty if the batch does not run eager, or no graph covers it.
        """
        if self.decision.key is not None or not self.candidates:
            return ""
        near = min(self.candidates, key=lambda one: (one.why_not is not None, one.padding))
        return f"{near.key}: {near.why_not or 'ready, not preferred'}"

    @property
    def no_candidates(self) -> str:
        """Why no declared graph covers the batch, or an empty string.

        It is also empty if ``because`` contains the same information.
        """
        reasons = (Reason.EMPTY_BATCH, Reason.MODE_NONE, Reason.ABOVE_LARGEST, Reason.NO_KEY)
        if self.candidates or self.decision.reason in reasons:
            return ""
        if not self.largest:
            return "no graph is declared"
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
            f"   policy {self.policy}; padding {padding}",
            f"   because: {self.because}",
        ]
        if self.nearest:
            lines.append(f"   nearest graph: {self.nearest}")
        if self.cost is not None:
            lines.append(f"   cost: {self.cost}")
        if self.note:
            lines.append(f"   note: {self.note}")
        if self.times or (self.times is not None and self.decision.timed):
            measured = (
                "; ".join(map(str, self.times)) or "no step with this decision has been timed yet"
            )
            lines.append(f"   measured here: {measured}")
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
    """Explain the decision for a batch, without changing the table or counters.

    Args:
        dispatcher: Dispatcher that would receive the batch.
        num_tokens: As for ``Dispatcher.dispatch``, but may exceed ``max_num_tokens``.
        num_reqs: As for ``Dispatcher.dispatch``.
        uniform: As for ``Dispatcher.dispatch``.
        loras: As for ``Dispatcher.dispatch``.
        ceiling: As for ``Dispatcher.dispatch``.
        per_mode: Maximum number of candidates per runtime mode. A graph chosen for the whole batch
            is always included, even beyond this limit.

    Raises:
        DescriptorError: The description of the batch is invalid.
        ConfigError: ``dispatcher`` is not a Dispatcher.
    """
    hint = "For a GraphRunner, call runner.explain(num_tokens)."
    check_instance(dispatcher, Dispatcher, "dispatcher", hint)
    batch = dispatcher.batch(num_tokens, num_reqs, uniform, loras, ceiling, any_size=True)
    error, problem, fault = "", "", None
    try:
        answer, fault = dispatcher.preview(batch)
    except DescriptorError as refusal:
        answer, error = Decision.eager(Reason.ABOVE_LARGEST), f"DescriptorError: {refusal}"
        limit = counted(dispatcher.config.max_num_tokens, "token")
        problem = f"constraint: the batch is larger than max_num_tokens, which is {limit}"
    if not error and answer.key is None and not batch.allows(RuntimeMode.NONE):
        error = f"NoGraphError: eager is not allowed for this batch ({answer.reason})"
    policy = answer.policy or dispatcher.policy_name
    decision = attrs.evolve(answer, num_tokens=batch.num_tokens, policy=policy, plan=None)
    candidates = []
    # An empty batch never uses a graph.
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
    if decision.reason in _PROBLEMS and candidates:
        entry = dispatcher.registry.get(candidates[0].key)
        known = (entry and entry.reason) or "unknown reason"
        problem = f"state: {_PROBLEMS[decision.reason]}: {known}"
    elif decision.reason == Reason.MODE_NONE and not dispatcher.config.sizes:
        problem = "configuration: there are no capture sizes"
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


# Reasons to which ``explain`` adds the details from the registry.
_PROBLEMS: Mapping[str, str] = {
    Reason.CAPTURE_FAILED: "the capture of the graph for this batch failed",
    Reason.STALE: "the graph for this batch is outdated",
}

# Descriptions of predefined reasons for running eager.
_CAUSES: Mapping[str, str] = {
    Reason.EMPTY_BATCH: "constraint: a batch without tokens needs no graph",
    Reason.MODE_NONE: "configuration: the mode runs this kind of batch eager",
    Reason.CEILING: "constraint: no mode that the caller allows has a graph for this batch",
    Reason.NO_KEY: "configuration: no graph is declared for this kind of batch",
    Reason.NOT_CAPTURED: "state: the graph for this batch is declared but not captured yet",
    Reason.EVICTED: "state: the graph for this batch was evicted",
    Reason.DISABLED: "state: the graph for this batch, or its runtime mode, is disabled",
    Reason.TOO_MANY_REQS: "constraint: the batch has more requests than its graph was captured for",
    Reason.OUTSIDE_AXIS: "constraint: the value of an axis is outside all buckets",
    Reason.ROWS_NOT_INDEPENDENT: "constraint: only batches of independent rows may be split",
    Reason.ROWS_DEPEND: "executor: padding changes the results of the step",
    Reason.ROWS_NOT_THE_BUCKET: "executor: an output does not have one row per row of the batch",
    Reason.OUTPUTS_NOT_JOINED: "executor: the outputs of the parts cannot be joined",
    Reason.CAPTURE_PENDING: (
        "executor: the graph for this batch has not been requested often enough to be captured, or "
        "a background capture is running"
    ),
    Reason.INSIDE_CAPTURE: "executor: other code is capturing the current stream",
    Reason.AUTOCAST: (
        "executor: the graph for this batch was captured under a different autocast state"
    ),
    Reason.TRAINING_MODE: "executor: the training mode of a module was changed",
    Reason.MOVED_MODULE: "executor: a module was moved, or its dtype changed",
    Reason.WEIGHTS_REPLACED: "executor: a weight, buffer or submodule was replaced",
    Reason.VALUE_CHANGED: "executor: a value that Python code reads has changed",
    Reason.PIECEWISE_UNSUPPORTED: (
        "executor: the step is not split into pieces, so PIECEWISE cannot run"
    ),
    Reason.NO_ANSWER: "policy: no policy returned a decision for this batch",
    Reason.POLICY_ERROR: "policy: the policy raised an error or violated a constraint",
}
