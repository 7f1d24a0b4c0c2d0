"""Decisions, outcomes, and the updates that learning policies return."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import attrs

from dispatchkit.errors import DescriptorError, counted
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import whole_number
from dispatchkit.keys.modes import RuntimeMode


class Reason(enum.StrEnum):
    """The reason for a decision; policies may define further reasons.

    Reasons after ``POLICY_ERROR`` come only from the executor, the others mainly from the
    dispatcher and its policy.
    """

    HIT = "hit"
    EMPTY_BATCH = "empty_batch"
    MODE_NONE = "mode_none"
    CEILING = "ceiling"
    ABOVE_LARGEST = "above_largest_size"
    NO_KEY = "no_key"
    NOT_CAPTURED = "not_captured"
    CAPTURE_FAILED = "capture_failed"
    EVICTED = "evicted"
    STALE = "stale"
    DISABLED = "disabled"
    TOO_MANY_REQS = "too_many_reqs"
    OUTSIDE_AXIS = "outside_axis"
    PIECEWISE_UNSUPPORTED = "piecewise_unsupported"
    NO_ANSWER = "no_policy_answered"
    POLICY_ERROR = "policy_error"
    #: The key has not been requested often enough to be captured, or a background capture is
    #: running.
    CAPTURE_PENDING = "capture_pending"
    #: Other code is capturing the stream, and its capture records the step.
    INSIDE_CAPTURE = "inside_capture"
    #: The replay failed before it had any effect.
    REPLAY_FAILED = "replay_failed"
    #: An eager call between two segments returned a different structure, shape, stride, type or
    #: Python value than during the capture.
    CALL_DIFFERS = "call_differs"
    #: In check mode, the replay differed from the eager run, whose result was returned.
    CHECK_FAILED = "check_failed"
    #: The graph was captured under a different autocast state.
    AUTOCAST = "autocast"
    #: The training flag of a module of the step has changed since the capture.
    TRAINING_MODE = "training_mode"
    #: A module of the step has been moved or converted to a different dtype since the capture.
    MOVED_MODULE = "moved_module"
    #: Each call of the step changes Python state, which a replay would not change.
    PYTHON_STATE = "python_state"
    #: The first call of the step changes Python state, and its results or state differ from those
    #: of later calls. The next call runs eager, and the key is captured after it. Graphed calls: a
    #: first call runs eager to show whether its result requires gradients.
    FIRST_CALL = "first_call"
    #: The step writes to a container in its arguments, which a replay would not do.
    CONTAINER_WRITTEN = "container_written"
    #: Real rows of a padded step depend on the padding.
    ROWS_DEPEND = "rows_depend"
    #: The rows of an output are not the rows of the batch, so padding cannot be cut off.
    ROWS_NOT_THE_BUCKET = "rows_not_the_bucket"
    #: The batch was not split because its rows depend on each other, or independence is not proven.
    ROWS_NOT_INDEPENDENT = "rows_not_independent"
    #: The batch was not split because the outputs of its parts cannot be joined.
    OUTPUTS_NOT_JOINED = "outputs_not_joined"
    #: A weight, buffer or submodule has been replaced since the capture.
    WEIGHTS_REPLACED = "weights_replaced"
    #: A value that the step's Python code reads has changed since the capture.
    VALUE_CHANGED = "value_changed"
    #: Graphed calls: no tensor of the call has a batch dimension.
    NO_BATCH = "no_batch"
    #: The step computes gradients, or a graphed call requires them.
    GRADIENTS = "gradients"
    #: Graphed calls: the tensors of the call are on several devices.
    SEVERAL_DEVICES = "several_devices"
    #: Graphed calls: a tensor is nested, sparse, quantized, on the meta device or an instance of a
    #: tensor subclass.
    TENSOR_KIND = "tensor_kind"
    #: Graphed calls: a value cannot be hashed, so it cannot be part of a graph's key.
    UNHASHABLE_VALUE = "unhashable_value"
    #: Graphed calls: no further form of calls may have graphs, because the limit is reached.
    TOO_MANY_FORMS = "too_many_forms"


def _check_reason(reason: Any) -> str:
    if not isinstance(reason, str) or not reason:
        raise DescriptorError("reason", reason, "a non-empty string (steps are counted by reason)")
    return str(reason)


# ``max_num_reqs`` of decisions that hold for any number of requests.
ANY_NUM_REQS = 1 << 62


@attrs.frozen
class Part:
    """Some rows of a split batch, and the graph that serves them.

    Attributes:
        key: Key of the graph that serves the rows.
        num_tokens: Number of rows, at least 1.

    Raises:
        DescriptorError: The key or the number of rows is invalid.
    """

    key: GraphKey
    num_tokens: int

    def __attrs_post_init__(self) -> None:
        key: Any = self.key
        if not isinstance(key, GraphKey):
            raise DescriptorError("key", key, "a GraphKey")
        number = whole_number(self.num_tokens)
        if number is None or number < 1:
            raise DescriptorError("num_tokens", self.num_tokens, "a whole number of at least 1")
        object.__setattr__(self, "num_tokens", number)

    def __str__(self) -> str:
        return f"{counted(self.num_tokens, 'row')} on {self.key}"


def _part(value: Any) -> Part:
    try:
        return value if isinstance(value, Part) else Part(*value)
    except TypeError:
        allowed = "a Part or a (GraphKey, number of rows) pair"
        raise DescriptorError("each part", value, allowed) from None


@attrs.frozen
class Decision:
    """A choice to replay one or several graphs, or to run eager, with the reason.

    Policies create decisions with ``Decision.replay``, ``Decision.split`` or ``Decision.eager``.
    The dispatcher binds each decision to a cell of its table and sets the remaining fields.

    Attributes:
        mode: Runtime mode to run in.
        key: Key of the graph to replay, or of the first graph of a split batch; None for eager.
        reason: Cause of the decision; steps are counted by reason.
        timed: Whether to measure the time of the step.
        num_tokens: Unpadded number of tokens of the decision's cell.
        max_num_reqs: Largest number of requests for which the decision holds.
        policy: Name of the policy that decided.
        revision: Serial number that the dispatcher assigns; later decisions have larger numbers.
        one_shot: Whether the decision holds for one step only.
        plan: The plan that the executor prepared for the decision.
        parts: The parts of a split batch, in the order of their rows; empty otherwise.
    """

    mode: RuntimeMode
    key: GraphKey | None
    reason: str
    timed: bool = False
    num_tokens: int = 0
    max_num_reqs: int = ANY_NUM_REQS
    policy: str = ""
    revision: int = 0
    one_shot: bool = False
    plan: Any = attrs.field(default=None, eq=False, repr=False)
    parts: tuple[Part, ...] = ()

    @classmethod
    def replay(cls, key: GraphKey, reason: str = Reason.HIT, *, timed: bool = False) -> Decision:
        """Return a decision to replay the graph of a key.

        Raises:
            DescriptorError: The key is not a GraphKey, or the reason is empty or not a string.
        """
        if not isinstance(key, GraphKey):
            raise DescriptorError(
                "key", key, "a GraphKey", "graphs.covering(batch, mode) yields suitable keys."
            )
        return cls(key.mode, key, _check_reason(reason), timed)

    @classmethod
    def split(
        cls,
        parts: Iterable[Part | tuple[GraphKey, int]],
        reason: str = Reason.HIT,
        *,
        timed: bool = False,
    ) -> Decision:
        """Return a decision to split a batch of independent rows over several graphs.

        Use a split only if ``GraphView.may_split`` is true. The results are joined in order, and
        all parts count as one step.

        Args:
            parts: At least two graphs of the same mode, larger graphs first, each with the number
                of rows it serves. The numbers must add up to the number of rows of the batch.
            reason: Cause of the decision; steps are counted by reason.
            timed: Whether to measure the time of the whole step.

        Raises:
            DescriptorError: ``parts`` is empty or not iterable, a part is invalid, or the reason is
                empty or not a string.
        """
        allowed = "(GraphKey, number of rows) pairs"
        if not isinstance(parts, Iterable):
            raise DescriptorError("parts", parts, allowed)
        found = tuple(map(_part, parts))
        if not found:
            raise DescriptorError("parts", found, f"at least two {allowed}")
        key = found[0].key
        return cls(key.mode, key, _check_reason(reason), timed, parts=found)

    @classmethod
    def eager(cls, reason: str, *, timed: bool = False) -> Decision:
        """Return a decision to run eager, at the exact size of the batch."""
        return cls(RuntimeMode.NONE, None, _check_reason(reason), timed)

    # These two methods run whenever a cell is filled; `attrs.evolve` would take five times as long.
    def at(
        self, num_tokens: int, max_num_reqs: int, policy: str, revision: int, one_shot: bool
    ) -> Decision:
        """Return the decision bound to a cell, without a plan."""
        return Decision(
            self.mode,
            self.key,
            self.reason,
            self.timed,
            num_tokens,
            max_num_reqs,
            policy,
            revision,
            one_shot,
            None,
            self.parts,
        )

    def with_plan(self, plan: Any) -> Decision:
        """Return the decision with the executor's plan."""
        return Decision(
            self.mode,
            self.key,
            self.reason,
            self.timed,
            self.num_tokens,
            self.max_num_reqs,
            self.policy,
            self.revision,
            self.one_shot,
            plan,
            self.parts,
        )

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The keys of the graphs: empty for eager, several for a split batch."""
        if self.parts:
            return tuple(part.key for part in self.parts)
        return () if self.key is None else (self.key,)

    @property
    def graphs(self) -> str:
        """The keys of the graphs as text; empty for eager."""
        return format_keys(self.keys)

    @property
    def padded_num_tokens(self) -> int:
        """Number of tokens that the device computes, including padding."""
        return sum(key.num_tokens for key in self.keys) or self.num_tokens

    @property
    def padding(self) -> int:
        """Number of padding tokens."""
        return self.padded_num_tokens - self.num_tokens

    def __str__(self) -> str:
        what = "eager" if self.key is None else f"replay {self.key}"
        if self.parts:
            what = f"split into {', '.join(map(str, self.parts))}"
        return f"{what} ({self.reason})"


def format_keys(keys: Iterable[GraphKey]) -> str:
    """Return the keys of a step's graphs as text."""
    return " + ".join(map(str, keys))


@attrs.frozen
class Outcome:
    """The outcome of an executed step, passed to ``LearningPolicy.observe``.

    Attributes:
        batch: The batch of the step.
        decision: The decision of the step, including the fields that the dispatcher sets.
        elapsed_us: Time of the step in microseconds: its time on the stream, or 90% of ``host_us``
            if that is longer. None if not measured.
        clock: ``device`` if measured with timing events, ``host`` if measured with a host clock.
        queued: Whether earlier work was pending on the stream when the step was launched.
        completed: Whether the step completed; policies must not learn from incomplete steps.
        won: False if the policy is a member of a composite policy, and the decision of another
            member ran.
        step: Number of steps so far, measured or not, including this step; 0 if unknown.
        is_first: Whether this is the first known eager run with this number of tokens. A first
            run may take much longer than later runs, because libraries choose kernels during it.
        host_us: Host time of the submission in microseconds, without waiting for the device; None
            if unknown.
        device_us: Device time in microseconds, excluding delays caused by the host. None unless the
            whole step was submitted before the device started it.
    """

    batch: Batch
    decision: Decision
    elapsed_us: float | None = None
    clock: str = "device"
    queued: bool = False
    completed: bool = True
    won: bool = True
    step: int = 0
    is_first: bool = False
    host_us: float | None = None
    device_us: float | None = None


@attrs.frozen
class CellUpdate:
    """A change to table cells, returned by a learning policy.

    Attributes:
        batch: The batch whose cell changes. Batches that differ only in their number of requests
            have the same cell.
        decision: The new decision. None without ``one_shot`` empties the cell, so that ``decide``
            is called again at its next use.
        one_shot: Whether the decision holds for one step only, and leaves the cell's decision for
            later steps unchanged. If ``decision`` is None, True drops the waiting one-shot
            decisions of the cell.
        up_to: If the cell is emptied, also empty the cells of batches that equal ``batch`` but have
            more tokens, up to this number. 0 empties only the cell of ``batch``.

    Raises:
        DescriptorError: A value has the wrong type, ``up_to`` is negative, or ``up_to`` is given
            with a decision or with ``one_shot``.
    """

    batch: Batch = attrs.field()
    decision: Decision | None = attrs.field()
    one_shot: bool = False
    up_to: int = attrs.field(default=0)

    @batch.validator
    def _check_batch(self, attribute: object, value: object) -> None:
        if not isinstance(value, Batch):
            raise DescriptorError("batch", value, "a Batch", "Pass the batch of the outcome.")

    @decision.validator
    def _check_decision(self, attribute: object, value: object) -> None:
        if value is not None and not isinstance(value, Decision):
            hint = "Create one with Decision.replay(key) or Decision.eager(reason)."
            raise DescriptorError("decision", value, "a Decision, or None", hint)

    @up_to.validator
    def _check_up_to(self, attribute: object, value: object) -> None:
        if type(value) is not int or value < 0:
            raise DescriptorError("up_to", value, "a non-negative whole number")
        if value and self.decision is not None:
            hint = "To set the decisions of several cells, return one update for each cell."
            raise DescriptorError("up_to", value, "0 if a decision is given", hint)
        if value and self.one_shot:
            hint = "To drop the one-shot decisions of several cells, return one update for each."
            raise DescriptorError("up_to", value, "0 if one_shot=True", hint)

    def is_about(self, batch: Batch) -> bool:
        """Return whether the update applies to a batch, ignoring its number of requests."""
        first = self.batch.num_tokens
        like = attrs.evolve(self.batch, num_tokens=batch.num_tokens, num_reqs=batch.num_reqs)
        return like == batch and first <= batch.num_tokens <= max(first, self.up_to)


@attrs.frozen
class CalibrationRun:
    """Timed runs of a batch, requested by a learning policy after a capture.

    Attributes:
        batch: The batch to run, on dummy rows.
        decision: The decision for the runs, which are measured even if ``decision.timed`` is False.
        runs: Number of runs, at least 1. The runner makes each run twice: once on an idle stream
            and once behind other work. ``observe`` receives each outcome.
    """

    batch: Batch
    decision: Decision
    runs: int
