"""CapturedKey: the graphs of a key, and everything that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.backends.base import CapturedGraph
from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError, ReplayError, counted, format_value
from dispatchkit.execute.capture.eager_call import DifferentResultError, EagerCall
from dispatchkit.execute.capture.fingerprint import Facts
from dispatchkit.execute.io.input_path import InputPath
from dispatchkit.execute.io.outputs import OutputLayout, describe_value
from dispatchkit.execute.io.structure import flatten, is_same_value, leaves_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.step.guard import Fingerprint
from dispatchkit.execute.step.pieces import Piece
from dispatchkit.execute.step.state import Snapshot
from dispatchkit.execute.step.values import ValueWatch
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import SegmentStats


@attrs.frozen
class RowProof:
    """The result of the proof that a graph can serve smaller batches.

    Attributes:
        reason: Reason why smaller batches run eager; empty if they replay.
        finding: Explanation of ``reason``, for messages.
        min_rows: Smallest number of rows for which the graph may be replayed.
        open_calls: Number of further padded calls to examine, because the integer inputs of the
            proof contained only the fill value.
        draws_alike: Whether the step draws the same random numbers for any number of rows.
        coupling: Why the graph cannot serve part of a batch, such as a dependence between rows;
            empty if it can.
        open_parts: Number of further parts of split batches to examine.
    """

    reason: str = ""
    finding: str = ""
    min_rows: int = 1
    open_calls: int = 0
    draws_alike: bool = False
    coupling: str = ""
    open_parts: int = 0


class LaunchError(Exception):
    """A launch failed.

    Attributes:
        cause: Exception that the launch raised.
        has_effect: Whether part of the step may already have taken effect.
    """

    cause: Exception
    has_effect: bool

    def __init__(self, cause: Exception, *, has_effect: bool) -> None:
        super().__init__(str(cause))
        self.cause, self.has_effect = cause, has_effect


@attrs.define(eq=False)
class Link:
    """The transfer of an eager piece's results to the next graph.

    Attributes:
        piece: Name of the eager piece.
        copies: Pairs of a leaf index and the static tensor that the leaf is copied into.
        fixed: Leaf index, address and shape of each tensor that always has the same address.
        constants: Leaf index and value of each Python value that is built into the graph.
    """

    piece: str
    copies: list[tuple[int, torch.Tensor]]
    fixed: list[tuple[int, int, torch.Size]]
    constants: list[tuple[int, Any]]

    def transfer(self, value: Any) -> None:
        """Pass the result of the eager piece to the graph.

        Raises:
            ReplayError: The number of values, a shape, a dtype, an address or a constant differs
                from the capture.
        """
        leaves = leaves_of(value)
        if len(leaves) != len(self.copies) + len(self.fixed) + len(self.constants):
            raise ReplayError(
                f"Eager piece {self.piece!r} returned {counted(len(leaves), 'value')}, but "
                f"{len(self.copies) + len(self.fixed) + len(self.constants)} in the capture. "
                "Return the same structure in each call."
            )
        for index, address, shape in self.fixed:
            leaf = leaves[index]
            if not isinstance(leaf, torch.Tensor) or leaf.shape != shape:
                raise ReplayError(
                    f"Value {index} of eager piece {self.piece!r} must be a tensor of shape "
                    f"{tuple(shape)} as in the capture, got {describe_value(leaf)}."
                )
            if leaf.data_ptr() != address:
                raise ReplayError(
                    f"Value {index} of eager piece {self.piece!r} was at address {address:#x} in "
                    f"the capture and is at {leaf.data_ptr():#x} now. Return the same memory "
                    "in all calls, or newly allocated memory in all calls."
                )
        for index, constant in self.constants:
            if not is_same_value(leaves[index], constant):
                raise ReplayError(
                    f"Value {index} of eager piece {self.piece!r} was {format_value(constant)} in "
                    f"the capture and is {format_value(leaves[index])} now, but the graph "
                    "contains it as a constant. Return a tensor instead."
                )
        for index, static in self.copies:
            leaf = leaves[index]
            if not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (
                static.shape,
                static.dtype,
            ):
                raise ReplayError(
                    f"Value {index} of eager piece {self.piece!r} must be a {static.dtype} tensor "
                    f"of shape {tuple(static.shape)} as in the capture, got {describe_value(leaf)}."
                )
        if self.copies:
            torch._foreach_copy_(
                [static for _, static in self.copies], [leaves[index] for index, _ in self.copies]
            )


@attrs.define(eq=False)
class GraphPart:
    """A captured graph piece or segment.

    Attributes:
        graph: Captured graph.
        link: Transfer of the preceding eager piece's result; None if no transfer is needed.
        outputs: Results of the capture, overwritten by each replay; None for a segment.
        num_operations: Number of kernels, copies and fills that a replay queues; 0 for a piece.
        elapsed_us: Time of the segment's replay during the capture, in microseconds; 0 for a piece.
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
        parts: Parts in the order in which they run.
        ends_eager: Whether the last piece is eager and returns the outputs.
        keep: Function that saves the state before a replay; None if there is nothing to restore.
            The state is restored if the replay fails, for example because an eager call returns a
            different result than in the capture.
    """

    parts: tuple[GraphPart | EagerPart | EagerCall, ...]
    ends_eager: bool
    keep: Callable[[], Snapshot] | None = None

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """The statistics of each segment with operations; empty for a step made of pieces."""
        return tuple(
            SegmentStats(part.num_operations, part.elapsed_us)
            for part in self.parts
            if isinstance(part, GraphPart) and part.num_operations
        )

    def __str__(self) -> str:
        segments, calls = self.segments, sum(isinstance(one, EagerCall) for one in self.parts)
        each = ", ".join(f"{one.operations} ({one.elapsed_us:.0f} µs)" for one in segments)
        around = f"{counted(len(segments), 'segment')} around {counted(calls, 'eager call')}"
        return f"{around}; operations: {each}"

    def launch(self, num_rows: int, *, has_effect: bool) -> Any:
        """Run the parts in order, and return the result of the last part.

        Exceptions raised by an eager piece propagate unchanged.

        Args:
            num_rows: Number of rows in the batch.
            has_effect: Whether a replay of a graph piece changes more than its outputs.

        Raises:
            LaunchError: A graph could not be queued, or an eager piece or eager call returned a
                result that differs from that of the capture.
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
        """Run the parts in order without saving state.

        Raises:
            LaunchError: A graph could not be queued, or an eager piece or eager call returned a
                result that differs from that of the capture.
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
                        part.link.transfer(value)
                    part.graph.replay()
                except Exception as error:
                    raise LaunchError(error, has_effect=has_effect) from error
                value = part.outputs
        finally:
            torch._C._set_grad_enabled(had_grad)
        return value


@attrs.define(eq=False, kw_only=True)
class CapturedKey:
    """A captured key in the registry.

    Attributes:
        key: Key of the graphs.
        lane: Lane that the graphs were captured on.
        input_path: How inputs reach the graphs.
        layout: Layout of the outputs.
        leaves: Padded outputs at fixed addresses; empty if the last piece is eager.
        clones: For each leaf, whether it is copied if the caller owns the results. Tensors of the
            step's state, tensors in objects that the step keeps and returns every time, and values
            other than tensors are not copied.
        graphs: Graphs that are released with the key.
        holds: Other objects that the graphs read, kept alive here.
        guard: Fingerprint of the autocast state and the modules at the capture.
        facts: Addresses and values built into the graphs; None outside check mode.
        has_effect: Whether a replay changes more than its outputs (state or random generators).
        draws: Whether a replay may draw random numbers.
        axis_cuts: Output dimensions that depend on an axis (see ``io.axes``).
        values: Watch for changes to the Python values built into the graphs.
        rows: Result of the proof that smaller batches may replay.
        pieces: Graph pieces or segments, and the eager work between them; None if there is a single
            graph.
        row_values: Python values in the outputs, by number of rows and leaf index.
        own_bytes: Pool memory in bytes that no other graph can use while this graph lives.
        released: Whether the graphs were released and must not be launched.
        last_used: Value of the lane's ``tick`` at the last launch; at the capture if not launched.
        hits: Number of launches since the capture.
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
        """Whether the graph was captured outside the runner and uses no memory of the lane."""
        return self.input_path.is_external

    def check_values(self, values: dict[int, Any]) -> None:
        """Check that Python values in the outputs equal those of the warmup.

        Args:
            values: Python values of the warmup, by leaf index.

        Raises:
            CaptureError: A value differs.
        """
        for index, leaf in enumerate(self.leaves):
            if index in values and not is_same_value(values[index], leaf):
                first = values[index]
                raise CaptureError(
                    f"Output {index} is {format_value(first)} ({type(first).__name__}) in one run "
                    f"of the step and {format_value(leaf)} in the next, on the same rows. A replay "
                    "does not run Python and would always return the value from the capture. "
                    "Return a tensor, a value that is equal in each run, or an object with tensor "
                    "attributes.",
                    key=str(self.key),
                    reason="output_layout",
                )

    def refusal(self, num_tokens: int) -> str:
        """Return the reason why a batch must run eager; empty if it may replay."""
        if num_tokens == self.key.num_tokens:
            return ""
        too_few = num_tokens < self.rows.min_rows
        return self.rows.reason or (Reason.ROWS_NOT_THE_BUCKET if too_few else "")

    def refusal_of_part(self, num_tokens: int) -> str:
        """Return the reason why the graph cannot serve part of a split batch; empty if it can."""
        if self.rows.reason or self.rows.coupling:
            return self.refusal(num_tokens) or Reason.ROWS_NOT_INDEPENDENT
        leaves = zip(self.layout.leaves, self.clones, strict=True)
        is_joined = all(
            one.kind in ("rows", "constant") or (one.batch_dim is not None and is_result)
            for one, is_result in leaves
        )
        return self.refusal(num_tokens) or ("" if is_joined else Reason.OUTPUTS_NOT_JOINED)

    def pads_draws(self, num_tokens: int) -> bool:
        """Return whether a replay draws random numbers for padding rows."""
        return self.draws and num_tokens < self.key.num_tokens and not self.rows.draws_alike

    def launch(self, num_rows: int) -> Sequence[Any]:
        """Launch the graphs on the current stream and return the padded outputs.

        Args:
            num_rows: Number of rows in the batch.

        Raises:
            LaunchError: A graph could not be queued, or an eager piece or eager call returned a
                result that differs from that of the capture.
        """
        if self.pieces is not None:
            return self._launch_pieces(self.pieces, num_rows)
        try:
            self.graphs[0].replay()
        except Exception as error:
            raise LaunchError(error, has_effect=self.has_effect) from error
        return self.leaves

    def release(self) -> None:
        """Release the graphs, which must not be in flight."""
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
        leaves, structure = flatten(value)
        if problem := self.layout.mismatch(leaves, structure, self.key.num_tokens):
            error = ReplayError(
                "The last eager piece must return outputs of the same structure, shapes and dtypes "
                f"as in the capture, but {problem}."
            )
            raise LaunchError(error, has_effect=True)
        return leaves
