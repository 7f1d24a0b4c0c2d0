"""CapturedKey: one key's graphs, and everything they read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.backends.base import CapturedGraph
from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError, ReplayError
from dispatchkit.execute.capture.eager_call import DifferentResultError, EagerCall
from dispatchkit.execute.capture.fingerprint import Facts
from dispatchkit.execute.io.input_path import InputPath
from dispatchkit.execute.io.outputs import OutputLayout
from dispatchkit.execute.io.structure import is_same_value, leaves_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.step.guard import Fingerprint
from dispatchkit.execute.step.pieces import Piece
from dispatchkit.execute.step.state import Snapshot
from dispatchkit.execute.step.values import ValueWatch
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import SegmentStats


@attrs.frozen
class RowProof:
    """What is known about padded replays of a graph.

    Attributes:
        reason: Why batches smaller than the graph run eager; empty if they replay.
        finding: What was observed, in words.
        min_rows: Fewest rows with which a batch may replay.
        open_calls: How many more padded calls may be examined, since integer inputs have held only
            fill so far.
        draws_alike: It draws the same number of random numbers for fewer rows.
        coupling: How rows depend on each other, or why else the graph cannot serve part of a batch,
            in words; empty if nothing was observed.
        open_parts: Likewise, how many more parts of split batches may be examined.
    """

    reason: str = ""
    finding: str = ""
    min_rows: int = 1
    open_calls: int = 0
    draws_alike: bool = False
    coupling: str = ""
    open_parts: int = 0


class LaunchError(Exception):
    """A launch failed, with information for the caller on how to proceed.

    Attributes:
        has_effect: Part of the step may already have taken effect.
    """

    cause: Exception
    has_effect: bool

    def __init__(self, cause: Exception, *, has_effect: bool) -> None:
        super().__init__(str(cause))
        self.cause, self.has_effect = cause, has_effect


@attrs.define(eq=False)
class Link:
    """How the results of an eager piece are passed to the next graph.

    Attributes:
        copies: (leaf, static tensor) pairs: fresh memory, copied into tensors that the graph reads.
        fixed: (leaf, address, shape) of tensors that do not move.
        constants: (leaf, value) of Python values built into the graph.
    """

    copies: list[tuple[int, torch.Tensor]]
    fixed: list[tuple[int, int, torch.Size]]
    constants: list[tuple[int, Any]]

    def carry(self, value: Any) -> None:
        """Pass a value to the graph.

        Raises:
            ReplayError: A shape, an address or a constant differs from the capture.
        """
        leaves = leaves_of(value)
        if len(leaves) != len(self.copies) + len(self.fixed) + len(self.constants):
            raise ReplayError(
                f"An eager piece returned {len(leaves)} values, with a different structure than at "
                "capture."
            )
        for index, address, shape in self.fixed:
            leaf = leaves[index]
            if (
                not isinstance(leaf, torch.Tensor)
                or leaf.data_ptr() != address
                or leaf.shape != shape
            ):
                raise ReplayError(
                    f"Value {index} of an eager piece is at another address than at capture. "
                    "Write into the same memory, or return fresh memory every time."
                )
        for index, constant in self.constants:
            if not is_same_value(leaves[index], constant):
                raise ReplayError(
                    f"Value {index} of an eager piece was {constant!r:.40} at capture and is "
                    f"{leaves[index]!r:.40} now, but the graph has it built in. Pass it as a "
                    "tensor."
                )
        for index, static in self.copies:
            leaf = leaves[index]
            if not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (
                static.shape,
                static.dtype,
            ):
                raise ReplayError(
                    f"Value {index} of an eager piece was {static.dtype} of "
                    f"{tuple(static.shape)} at capture and has changed."
                )
        if self.copies:
            torch._foreach_copy_(
                [static for _, static in self.copies], [leaves[index] for index, _ in self.copies]
            )


@attrs.define(eq=False)
class GraphPart:
    """A captured graph piece.

    Attributes:
        graph: Its graph.
        link: How the preceding value is passed in; None if nothing has to be done.
        outputs: Its results at capture, overwritten by each replay; None for a segment.
        num_operations: For a segment: number of kernels, copies and fills that a replay queues.
        elapsed_us: For a segment: microseconds of its replay during the capture.
    """

    graph: CapturedGraph
    link: Link | None
    outputs: Any
    num_operations: int = 0
    elapsed_us: float = 0.0


@attrs.define(eq=False)
class EagerPart:
    """An eager piece with its static inputs."""

    piece: Piece
    inputs: dict[str, torch.Tensor]
    is_first: bool


@attrs.frozen(eq=False)
class CapturedPieces:
    """The graph pieces or segments of a step, and the eager calls between them.

    Attributes:
        parts: The pieces, in order.
        ends_eager: The last piece is eager and produces the outputs.
        keep: Saves the state that a replay changes before a call that may differ from the capture;
            None if nothing has to be restored.
    """

    parts: tuple[GraphPart | EagerPart | EagerCall, ...]
    ends_eager: bool
    keep: Callable[[], Snapshot] | None = None

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """Properties of each segment; empty for pieces split by the user."""
        return tuple(
            SegmentStats(part.num_operations, part.elapsed_us)
            for part in self.parts
            if isinstance(part, GraphPart) and part.num_operations
        )

    def __str__(self) -> str:
        segments, calls = self.segments, sum(isinstance(one, EagerCall) for one in self.parts)
        each = ", ".join(f"{one.operations} ({one.elapsed_us:.0f} us)" for one in segments)
        return f"{len(segments)} segments around {calls} eager calls; operations: {each}"

    def launch(self, num_rows: int, *, has_effect: bool) -> Any:
        """Run the pieces in order; return the last one's result.

        Exceptions raised by an eager piece are the user's errors and are not wrapped.

        Args:
            num_rows: Rows of the batch.
            has_effect: A replay of a graph piece changes more than its outputs.

        Raises:
            LaunchError: A graph could not be queued, or a call between segments differs.
        """
        if self.keep is None:
            return self._launch(num_rows, has_effect=has_effect)
        saved = self.keep()
        try:
            return self._launch(num_rows, has_effect=has_effect)
        except LaunchError as error:
            saved.restore()
            raise LaunchError(error.cause, has_effect=False) from error.cause
        except BaseException:
            saved.restore()
            raise

    def _launch(self, num_rows: int, *, has_effect: bool) -> Any:
        """Run the pieces in order.

        Raises:
            LaunchError: A graph could not be queued.
        """
        value: Any = None
        had_grad = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            for part in self.parts:
                if isinstance(part, EagerCall):
                    try:
                        part.run(num_rows)
                    except DifferentResultError as error:
                        raise LaunchError(error, has_effect=has_effect) from error
                    continue
                if isinstance(part, EagerPart):
                    has_effect = True
                    args = () if part.is_first else (value,)
                    value = part.piece.fn(*args, **part.inputs)
                    continue
                try:
                    if part.link is not None:
                        part.link.carry(value)
                    part.graph.replay()
                except Exception as error:
                    raise LaunchError(error, has_effect=has_effect) from error
                value = part.outputs
        finally:
            torch._C._set_grad_enabled(had_grad)
        return value


@attrs.define(eq=False, kw_only=True)
class CapturedKey:
    """The registry's record of a captured key.

    Attributes:
        key: Its name.
        lane: The lane it was captured on.
        input_path: How inputs are copied into its graphs.
        layout: The structure of its outputs.
        leaves: Padded outputs at fixed addresses; empty if the last piece is eager.
        clones: Per leaf, whether callers of owned results get a copy, which they do for tensors
            other than their own state.
        graphs: Its graphs, to be released.
        holds: Other objects that the graphs read, kept alive.
        guard: The modes it was captured under.
        facts: Addresses and numbers built into it; None outside check mode.
        has_effect: A replay changes more than its outputs: state or random generators.
        draws: It draws random numbers, according to its warmup or capture.
        axis_cuts: Dimensions of its outputs that follow an axis (see ``io.axes``).
        values: Python values built into its graphs, compared while it replays.
        rows: Whether batches smaller than the graph may replay.
        pieces: Its graph pieces and the eager pieces between them; None if there is a single graph.
        row_values: Python values among its outputs at numbers of rows below its size, by leaf.
        own_bytes: Pool memory that no other graph can use during this one's lifetime.
        released: It must no longer be launched.
        last_used: The lane's tick at its last launch.
        hits: Launches since the capture.
    """

    key: GraphKey
    lane: Lane
    input_path: InputPath
    layout: OutputLayout
    leaves: tuple[Any, ...]
    clones: tuple[bool, ...]
    graphs: tuple[CapturedGraph, ...]
    holds: tuple[Any, ...] = ()
    guard: Fingerprint = (None, (), ())
    facts: Facts | None = None
    has_effect: bool = False
    draws: bool = False
    axis_cuts: tuple[tuple[int, int, int, int], ...] = ()
    values: ValueWatch = attrs.field(factory=ValueWatch)
    rows: RowProof = RowProof()
    pieces: CapturedPieces | None = None
    row_values: dict[int, dict[int, Any]] = attrs.field(factory=dict)
    own_bytes: int = 0
    released: bool = False
    last_used: int = 0
    hits: int = 0

    @property
    def is_external(self) -> bool:
        """Whether its graph was captured elsewhere and therefore uses no memory of the lane."""
        return self.input_path.is_external

    def check_values(self, values: dict[int, Any]) -> None:
        """Refuse Python values among the outputs that differ from the warmup's.

        Raises:
            CaptureError: A value differs.
        """
        for index, leaf in enumerate(self.leaves):
            if index in values and not is_same_value(values[index], leaf):
                raise CaptureError(
                    f"Output {index} is {values[index]!r:.60} ({type(leaf).__name__}) in one run "
                    f"of the step and {leaf!r:.60} in the next, on the same rows. A replay runs "
                    "no Python and would always return the value from the capture. Return a "
                    "tensor, a value that compares equal, or an object with tensors in its "
                    "attributes.",
                    key=str(self.key),
                    reason="output_layout",
                )

    def refusal(self, num_tokens: int) -> str:
        """Return why a batch may not replay, as a reason; empty if it may."""
        if num_tokens == self.key.num_tokens:
            return ""
        too_few = num_tokens < self.rows.min_rows
        return self.rows.reason or (Reason.ROWS_NOT_THE_BUCKET if too_few else "")

    def refusal_of_part(self, num_tokens: int) -> str:
        """Return why some rows of a batch may not replay as a part of it; empty if they may."""
        if self.rows.reason or self.rows.coupling:
            return self.refusal(num_tokens) or Reason.ROWS_NOT_INDEPENDENT
        leaves = zip(self.layout.leaves, self.clones, strict=True)
        is_joined = all(
            one.kind in ("rows", "constant") or (one.batch_dim is not None and is_result)
            for one, is_result in leaves
        )
        return self.refusal(num_tokens) or ("" if is_joined else Reason.OUTPUTS_NOT_JOINED)

    def pads_draws(self, num_tokens: int) -> bool:
        """Return whether random numbers are drawn for padding rows."""
        return self.draws and num_tokens < self.key.num_tokens and not self.rows.draws_alike

    def launch(self, num_rows: int) -> Sequence[Any]:
        """Queue the graphs on the current stream; return the padded outputs.

        Args:
            num_rows: Rows of the batch.

        Raises:
            LaunchError: It could not be queued completely.
        """
        if self.pieces is not None:
            return self._launch_pieces(self.pieces, num_rows)
        try:
            self.graphs[0].replay()
        except Exception as error:
            raise LaunchError(error, has_effect=self.has_effect) from error
        return self.leaves

    def release(self) -> None:
        """Release the graphs once they are no longer in flight."""
        self.released = True
        for graph in self.graphs:
            graph.release()
        self.leaves, self.holds = (), ()
        if self.pieces is not None:
            self.pieces = CapturedPieces((), ends_eager=self.pieces.ends_eager)

    def _launch_pieces(self, pieces: CapturedPieces, num_rows: int) -> Sequence[Any]:
        value = pieces.launch(num_rows, has_effect=self.has_effect)
        if not pieces.ends_eager:
            return self.leaves
        if not self.layout.fits(value, self.key.num_tokens):
            problem = ReplayError("The last eager piece returned different shapes than at capture.")
            raise LaunchError(problem, has_effect=True)
        return leaves_of(value)
