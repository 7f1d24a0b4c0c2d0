"""What a policy answers, what the executor obeys, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import attrs

from dispatchkit.errors import DescriptorError
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import whole_number
from dispatchkit.keys.modes import RuntimeMode


class Reason(enum.StrEnum):
    """Why a step replays, or runs eager. Policies may give reasons of their own.

    The first are the dispatcher's and its policy's, the others the executor's.
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
    #: The key has not been asked for often enough to be captured yet.
    CAPTURE_PENDING = "capture_pending"
    #: The step runs inside a capture that somebody else began, and is recorded there.
    INSIDE_CAPTURE = "inside_capture"
    #: The replay failed before it had any effect.
    REPLAY_FAILED = "replay_failed"
    #: What runs eager between two segments returned something else than in the capture.
    CALL_DIFFERS = "call_differs"
    #: The replay gave something else than eager, whose result was taken.
    CHECK_FAILED = "check_failed"
    #: The graph was captured under another autocast.
    AUTOCAST = "autocast"
    #: A module of the step was switched to training, or back, since the capture.
    TRAINING_MODE = "training_mode"
    #: A module of the step was moved, or has another type, since the capture.
    MOVED_MODULE = "moved_module"
    #: Every call of the step changes Python state, which no replay would.
    PYTHON_STATE = "python_state"
    #: The one call that runs eager because a first call computes something else.
    FIRST_CALL = "first_call"
    #: The step writes to a container that it was given, which no replay would.
    CONTAINER_WRITTEN = "container_written"
    #: Real rows of a padded step were seen to depend on padding.
    ROWS_DEPEND = "rows_depend"
    #: Outputs of a padded step were seen to have other rows than those of the batch.
    ROWS_NOT_THE_BUCKET = "rows_not_the_bucket"
    #: The batch was to be split, and rows were seen to depend on each other, or are not proven not
    #: to.
    ROWS_NOT_INDEPENDENT = "rows_not_independent"
    #: The batch was to be split, and an output of its parts cannot be joined.
    OUTPUTS_NOT_JOINED = "outputs_not_joined"
    #: A weight, buffer or submodule was found to be replaced.
    WEIGHTS_REPLACED = "weights_replaced"
    #: A value that Python reads was found to be another.
    VALUE_CHANGED = "value_changed"
    #: Of a graphed call: no tensor has a batch dimension,
    NO_BATCH = "no_batch"
    #: gradients are asked for,
    GRADIENTS = "gradients"
    #: its tensors are on several devices,
    SEVERAL_DEVICES = "several_devices"
    #: a tensor is of a kind that no graph takes: nested, sparse, quantized, a subclass,
    TENSOR_KIND = "tensor_kind"
    #: a value cannot be part of a graph's name,
    UNHASHABLE_VALUE = "unhashable_value"
    #: or as many other forms of calls as there may be have graphs.
    TOO_MANY_FORMS = "too_many_forms"


def _word(reason: Any) -> str:
    if not isinstance(reason, str) or not reason:
        raise DescriptorError("reason", reason, "a short word that steps are counted by")
    return str(reason)


# A bound that no number of requests passes, where a decision does not depend on them.
ANY_NUM_REQS = 1 << 62


@attrs.frozen
class Part:
    """Some rows of a batch that is split over several graphs.

    Attributes:
        key: The graph that serves them.
        num_tokens: How many rows, at least 1.

    Raises:
        DescriptorError: They are none.
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
        return f"{self.num_tokens} rows by {self.key}"


def _part(value: Any) -> Part:
    try:
        return value if isinstance(value, Part) else Part(*value)
    except TypeError:
        raise DescriptorError("parts", value, "pairs of a GraphKey and its rows") from None


@attrs.frozen
class Decision:
    """One answer: replay the graph of a key, or of several, or run eager, and why.

    A policy makes it with ``Decision.replay``, ``Decision.split`` or ``Decision.eager``; the
    dispatcher then binds it to one cell of its table and fills in the rest.

    Attributes:
        mode: Runtime mode to run in.
        key: The graph to replay, of a split batch that of its first part; None for eager.
        reason: Why, a short word for counters.
        timed: Measure the device time of this step.
        num_tokens: Unpadded number of tokens of the cell it is bound to.
        max_num_reqs: It holds for batches of at most so many requests.
        policy: Name of the policy that answered.
        revision: Number of this binding; each change of the cell gives a larger one.
        one_shot: It holds for one step; the steady decision is already back in place.
        plan: What the executor made of it, ready to run.
        parts: Of a split batch, its rows from the first to the last; empty for all others.
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
        """Choose the graph of a key."""
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

        ``GraphView.may_split`` says whether that is so. Results are joined in order, and the
        whole is one step.

        Args:
            parts: Graphs of one mode, larger ones first, and how many rows each serves: at
                least two, which add up to the batch.
            reason: Why, a short word for counters.
            timed: Measure the device time of the whole step.

        Raises:
            DescriptorError: There are no parts, or they are none.
        """
        found = tuple(map(_part, parts))
        if not found:
            raise DescriptorError("parts", found, "pairs of a GraphKey and its rows")
        key = found[0].key
        return cls(key.mode, key, _word(reason), timed, parts=found)

    @classmethod
    def eager(cls, reason: str, *, timed: bool = False) -> Decision:
        """Choose eager, at the exact size, for a reason that is counted."""
        return cls(RuntimeMode.NONE, None, _word(reason), timed)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The graphs that are replayed: none for eager, several for a split batch."""
        if self.parts:
            return tuple(part.key for part in self.parts)
        return () if self.key is None else (self.key,)

    @property
    def graphs(self) -> str:
        """Those graphs in words; empty for eager."""
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
    """Return graphs that serve one step together, in words."""
    return " + ".join(map(str, keys))


@attrs.frozen
class Outcome:
    """What came of one executed step; given to ``Policy.observe``.

    Attributes:
        batch: The facts of the step.
        decision: The bound decision it ran under.
        elapsed_us: Microseconds on its stream, or None where it was not measured.
        clock: ``device`` for timing events, ``host`` for a host clock.
        queued: Other work was ahead of it on the stream when it was launched.
        completed: It ran to its end; an outcome that did not teaches nothing.
        won: False when another policy's decision ran instead (inside a composite).
        step: How many steps had begun, measured or not, this one included; 0: not known.
        is_first: It ran eager at a size that had not before, as far as is known. Libraries choose
            their kernels by size then, which takes as long as many a step and comes once.
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
    """A change that a learning policy asks for: what this batch gets from now on.

    Attributes:
        batch: Names the cell: tokens, query class, adapters and allowed modes.
        decision: The new answer; None to ask ``decide`` again at the next use.
        one_shot: The answer holds for one step, then the steady one is back. Without an answer,
            those that wait to be served are dropped.
        up_to: Without a decision, batches that differ from this one in being larger are asked
            again too, up to so many tokens; 0 for this one alone.

    Raises:
        DescriptorError: ``up_to`` is no size of a batch, or comes with a decision.
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
        """Return whether it names a batch, whatever the number of requests."""
        first = self.batch.num_tokens
        like = attrs.evolve(self.batch, num_tokens=batch.num_tokens, num_reqs=batch.num_reqs)
        return like == batch and first <= batch.num_tokens <= max(first, self.up_to)


@attrs.frozen
class CalibrationRun:
    """Timed runs of one batch that a learning policy asks for after a capture.

    Attributes:
        batch: What to run; any input of that size serves.
        decision: How to run it; ``timed`` or not, it is measured.
        runs: How often, at least once. Each outcome goes to ``observe``.
    """

    batch: Batch
    decision: Decision
    runs: int
