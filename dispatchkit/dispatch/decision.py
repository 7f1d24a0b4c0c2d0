"""Decisions of policies, their outcomes, and the changes that policies ask for."""

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
    """Why a step replays or runs eager. Policies may define further reasons.

    The first ones come from the dispatcher and its policy, the others from the executor.
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
    NOT_MINE = "no_policy_answered"
    POLICY_ERROR = "policy_error"
    #: The key has not been requested often enough to be captured.
    CAPTURE_PENDING = "capture_pending"
    #: The step runs inside a capture begun by other code, and is recorded there.
    INSIDE_CAPTURE = "inside_capture"
    #: The replay failed before it had any effect.
    REPLAY_FAILED = "replay_failed"
    #: An eager call between two segments returned a different structure than in the capture.
    CALL_DIFFERS = "call_differs"
    #: The replay differed from eager, whose result was returned.
    CHECK_FAILED = "check_failed"
    #: The graph was captured under a different autocast state.
    AUTOCAST = "autocast"
    #: A module of the step was switched to training, or back, since the capture.
    TRAINING_MODE = "training_mode"
    #: A module of the step was moved or converted to another dtype since the capture.
    MOVED_MODULE = "moved_module"
    #: Every call of the step changes Python state, which a replay would not.
    PYTHON_STATE = "python_state"
    #: The one call that runs eager because a first call computes something different.
    FIRST_CALL = "first_call"
    #: The step writes to a container in its arguments, which a replay would not.
    CONTAINER_WRITTEN = "container_written"
    #: Real rows of a padded step were seen to depend on padding.
    ROWS_DEPEND = "rows_depend"
    #: Outputs of a padded step were seen to have rows other than those of the batch.
    ROWS_NOT_THE_BUCKET = "rows_not_the_bucket"
    #: The batch was to be split, but its rows depend on each other or were not proven independent.
    ROWS_NOT_INDEPENDENT = "rows_not_independent"
    #: The batch was to be split, but an output of its parts cannot be joined.
    OUTPUTS_NOT_JOINED = "outputs_not_joined"
    #: A weight, buffer or submodule was replaced.
    WEIGHTS_REPLACED = "weights_replaced"
    #: A value that Python code reads has changed.
    VALUE_CHANGED = "value_changed"
    #: Of a graphed call: no tensor has a batch dimension,
    NO_BATCH = "no_batch"
    #: gradients are asked for,
    GRADIENTS = "gradients"
    #: its tensors are on several devices,
    SEVERAL_DEVICES = "several_devices"
    #: a tensor is of an unsupported kind: nested, sparse, quantized, a subclass,
    TENSOR_KIND = "tensor_kind"
    #: a value cannot be part of a graph's key,
    UNHASHABLE_VALUE = "unhashable_value"
    #: or the limit of call forms with graphs is reached.
    TOO_MANY_FORMS = "too_many_forms"


def _word(reason: Any) -> str:
    if not isinstance(reason, str) or not reason:
        raise DescriptorError("reason", reason, "a short word that steps are counted by")
    return str(reason)


# A bound that no number of requests exceeds, for decisions that do not depend on it.
ANY_NUM_REQS = 1 << 62


@attrs.frozen
class Part:
    """Some rows of a batch that is split over several graphs.

    Attributes:
        key: The graph that serves them.
        num_tokens: How many rows, at least 1.

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
        return f"{counted(self.num_tokens, 'row')} by {self.key}"


def _part(value: Any) -> Part:
    try:
        return value if isinstance(value, Part) else Part(*value)
    except TypeError:
        raise DescriptorError("parts", value, "pairs of a GraphKey and its rows") from None


@attrs.frozen
class Decision:
    """Replay the graph of one or several keys, or run eager, and the reason.

    Policies create it with ``Decision.replay``, ``Decision.split`` or ``Decision.eager``. The
    dispatcher then binds it to one cell of its table and fills in the other fields.

    Attributes:
        mode: Runtime mode to run in.
        key: The graph to replay (of a split batch, that of its first part); None for eager.
        reason: A short word that counters use.
        timed: Measure the device time of this step.
        num_tokens: Unpadded number of tokens of the cell it is bound to.
        max_num_reqs: The decision holds for batches of up to this many requests.
        policy: Name of the policy that decided.
        revision: Number of this binding; it grows with each change of the cell.
        one_shot: It holds for one step; the steady decision is already back in place.
        plan: The plan that the executor prepared for it.
        parts: The parts of a split batch, from the first row to the last; empty otherwise.
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
        """Choose the graph of a key.

        Raises:
            DescriptorError: It is not a GraphKey, or the reason is not a word.
        """
        if not isinstance(key, GraphKey):
            raise DescriptorError("key", key, "a GraphKey", "graphs.covering(batch) yields them.")
        return cls(key.mode, key, _word(reason), timed)

    @classmethod
    def split(
        cls,
        parts: Iterable[Part | tuple[GraphKey, int]],
        reason: str = Reason.HIT,
        *,
        timed: bool = False,
    ) -> Decision:
        """Choose several graphs, each for some rows of a batch whose rows are independent.

        ``GraphView.may_split`` tells whether rows are independent. Results are joined in order; the
        whole counts as one step.

        Args:
            parts: At least two graphs of one mode, larger ones first, each with the number of rows
                it serves; the rows add up to the batch.
            reason: A short word that counters use.
            timed: Measure the device time of the whole step.

        Raises:
            DescriptorError: There are no parts, or a part is invalid.
        """
        found = tuple(map(_part, parts))
        if not found:
            raise DescriptorError("parts", found, "pairs of a GraphKey and its rows")
        key = found[0].key
        return cls(key.mode, key, _word(reason), timed, parts=found)

    @classmethod
    def eager(cls, reason: str, *, timed: bool = False) -> Decision:
        """Choose eager, at the exact size, with the reason to count."""
        return cls(RuntimeMode.NONE, None, _word(reason), timed)

    # Both are called for each cell that is filled: `attrs.evolve` takes five times as long.
    def at(
        self, num_tokens: int, max_num_reqs: int, policy: str, revision: int, one_shot: bool
    ) -> Decision:
        """Return it with the facts of a cell, and without a plan."""
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
        """Return it with what the executor made of it."""
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
        """The graphs that are replayed: empty for eager, several for a split batch."""
        if self.parts:
            return tuple(part.key for part in self.parts)
        return () if self.key is None else (self.key,)

    @property
    def graphs(self) -> str:
        """A description of the graphs; empty for eager."""
        return named_graphs(self.keys)

    @property
    def padded_num_tokens(self) -> int:
        """Tokens that the device computes: the buckets, or the batch itself when eager."""
        return sum(key.num_tokens for key in self.keys) or self.num_tokens

    @property
    def padding(self) -> int:
        """Padded minus unpadded tokens."""
        return self.padded_num_tokens - self.num_tokens

    def __str__(self) -> str:
        what = "eager" if self.key is None else f"replay {self.key}"
        if self.parts:
            what = f"split into {', '.join(map(str, self.parts))}"
        return f"{what} ({self.reason})"


def named_graphs(keys: Iterable[GraphKey]) -> str:
    """Describe the graphs that serve one step together."""
    return " + ".join(map(str, keys))


@attrs.frozen
class Outcome:
    """The outcome of one executed step, passed to ``Policy.observe``.

    Attributes:
        batch: The batch of the step.
        decision: The bound decision it ran under.
        elapsed_us: Microseconds on its stream, or None if not measured.
        clock: ``device`` for timing events, ``host`` for a host clock.
        queued: Other work was ahead of it on the stream when it was launched.
        completed: The step completed; nothing can be learned from one that did not.
        won: False when another policy's decision ran instead (inside a composite).
        step: Number of steps begun so far, measured or not, including this one; 0 if unknown.
        is_first: As far as is known, it was the first eager run of its size. Libraries then choose
            kernels for the size, which happens once and may take as long as many steps.
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


@attrs.frozen
class CellUpdate:
    """A change of a table cell, requested by a learning policy.

    Attributes:
        batch: Identifies the cell: tokens, query class, adapters and allowed modes.
        decision: The new answer; None to ask ``decide`` again at the next use.
        one_shot: The decision holds for one step, after which the steady one applies again. Without
            a decision, one-shot decisions that wait are dropped.
        up_to: Without a decision, ``decide`` is also called again for otherwise equal batches of up
            to this many tokens; 0 for this batch only.

    Raises:
        DescriptorError: ``up_to`` is not the size of a batch, or is given with a decision.
    """

    batch: Batch
    decision: Decision | None
    one_shot: bool = False
    up_to: int = attrs.field(default=0)

    @up_to.validator
    def _check_up_to(self, attribute: object, value: object) -> None:
        if type(value) is not int or value < 0 or (value and self.decision is not None):
            allowed = "a whole number of 0 or more, and 0 with a decision"
            raise DescriptorError("up_to", value, allowed, "Return one update per batch.")

    def is_about(self, batch: Batch) -> bool:
        """Return whether it applies to a batch, ignoring the number of requests."""
        first = self.batch.num_tokens
        like = attrs.evolve(self.batch, num_tokens=batch.num_tokens, num_reqs=batch.num_reqs)
        return like == batch and first <= batch.num_tokens <= max(first, self.up_to)


@attrs.frozen
class CalibrationRun:
    """Timed runs of one batch that a learning policy asks for after a capture.

    Attributes:
        batch: The batch to run; any input of that size will do.
        decision: How to run it; it is measured whether or not it is ``timed``.
        runs: Number of runs, at least 1. Each outcome is passed to ``observe``.
    """

    batch: Batch
    decision: Decision
    runs: int
