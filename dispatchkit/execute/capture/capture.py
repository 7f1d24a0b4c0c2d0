"""Capture of one key: its warmup and its graphs.

Everything that a warmup changes is restored, except caches that the step creates in Python objects.
Backends guarantee that the capture itself changes nothing. A capture therefore does not change the
results of the caller's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch.utils._pytree import tree_unflatten

from dispatchkit.backends.base import CapturedGraph
from dispatchkit.backends.optional import WarmupNotes
from dispatchkit.backends.watching.compiled_code import dynamo_is_loaded
from dispatchkit.backends.watching.dispatch_mode import ThreadModes, inference_mode
from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError
from dispatchkit.execute.capture.budget import Admission
from dispatchkit.execute.capture.captured import (
    CapturedKey,
    CapturedPieces,
    EagerPart,
    GraphPart,
    Link,
    RowProof,
)
from dispatchkit.execute.capture.eager_call import EagerCall
from dispatchkit.execute.capture.effects import PythonChangedError, named, write_noise
from dispatchkit.execute.capture.fingerprint import Facts, facts_of
from dispatchkit.execute.capture.graph import GraphMaker, OutputSlot
from dispatchkit.execute.capture.pacing import WARMUP
from dispatchkit.execute.capture.proof import RowProver
from dispatchkit.execute.capture.segments import (
    CallShapes,
    Operators,
    SegmentRecorder,
    ShapeRecorder,
    batch_dims,
)
from dispatchkit.execute.capture.warmup import Family, Warmups, family_of
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.input_path import InputPath, choose_path, copied_path
from dispatchkit.execute.io.outputs import OutputLayout
from dispatchkit.execute.io.structure import flatten, leaves_of
from dispatchkit.execute.io.tree import tree_flatten
from dispatchkit.execute.io.weak_tensor import weak_tensor
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.step.breaks import use_breaker
from dispatchkit.execute.step.guard import Guard, difference
from dispatchkit.execute.step.records import Entry
from dispatchkit.execute.step.state import Snapshot, StorageSet, plain_tensor, restored
from dispatchkit.execute.step.support import breaking_names
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.modes import RuntimeMode

_T = TypeVar("_T")

#: Tags of operators that must not be captured.
_UNSAFE = frozenset({torch.Tag.cudagraph_unsafe})


class Capturer:
    """Captures the keys of one lane.

    Args:
        warmups: Warmups of the step.
        lane: Lane that the graphs are captured on.
        guard: Guard that records the autocast state and the states of modules at each capture.
        share_outputs: Function that returns whether graphs write outputs to memory that they share.
        prove_rows: Whether to prove that padding does not change the rows of a batch.
        rows_independent: Whether rows are declared independent of each other. If so, each capture
            proves their independence.
        keeps_outputs: Whether callers may still read the last results of a graph, so that a proof
            must restore them.
        notes_facts: Whether to store the values built into each graph, for check mode.
        break_on_unsafe: Whether operators tagged as unsafe to capture run eager between segments.
    """

    def __init__(
        self,
        warmups: Warmups,
        lane: Lane,
        guard: Guard,
        *,
        share_outputs: Callable[[], bool],
        prove_rows: bool,
        rows_independent: bool,
        keeps_outputs: bool,
        notes_facts: bool,
        break_on_unsafe: bool = False,
    ) -> None:
        self._break_on_unsafe = break_on_unsafe
        self._dims: dict[Family, list[CallShapes]] = {}
        self._warmups, self._lane, self._guard = warmups, lane, guard
        self._step = warmups.step
        self._share_outputs, self._notes_facts = share_outputs, notes_facts
        self._maker = GraphMaker(lane, warmups.device, warmups.generators)
        self._rows_independent = rows_independent
        self._prover = RowProver(warmups, lane, keeps_outputs=keeps_outputs) if prove_rows else None

    def facts_now(self, buffers: InputBuffers) -> Facts:
        """Return the addresses and values that a capture would build into a graph now."""
        return facts_of(self._step.pieces, self._guard.modules, buffers)

    def allows_turns(self, key: GraphKey) -> bool:
        """Return whether steps may run between the phases of a key's capture.

        This requires that the key's mode is FULL, that the runner has one lane, and that the runs
        of the capture are known not to affect steps: they change no state or scratch, draw no
        random numbers, call no compiled function and replay no other graph. Steps may change the
        data that these runs read, because the results of the runs are discarded.
        """
        return (
            key.mode is RuntimeMode.FULL and not self._lane.has_peers and self._warmups.is_pure(key)
        )

    def is_known(self, key: GraphKey) -> bool:
        """Return whether this key, or a key that differs only in size, has been warmed up."""
        return self._warmups.is_known(key)

    def forget(self) -> None:
        """Discard recorded properties of the step, because its tensors may have been replaced."""
        self._maker.forget()
        self._warmups.forget()
        self._dims.clear()
        if self._prover is not None:
            self._prover.forget()

    def note_gradients(self) -> None:
        """Make eager steps run in the caller's grad mode, because the step needs gradients."""
        self._warmups.needs_gradients = True

    def capture(
        self,
        key: GraphKey,
        other_sizes: Callable[[], Sequence[int]],
        admission: Admission | None = None,
        sample: Sequence[Any] | None = None,
    ) -> CapturedKey:
        """Capture a key without changing state, generators or other keys.

        Args:
            key: Key to capture.
            other_sizes: Function that returns other sizes at which the step's outputs can be
                measured.
            admission: Check of the memory budgets; None if there is no limit.
            sample: Inputs of the call that requests the key, if any.

        Raises:
            CaptureError: The key cannot be captured.
            OverBudgetError: The graph would exceed a memory budget.
        """
        return self._contained(key, partial(self._capture, key, other_sizes, admission, sample))

    def is_current(self, captured: CapturedKey) -> bool:
        """Return whether the conditions of a graph's capture still hold.

        These are the autocast state, the state of the modules, and the values built into the graph.
        If one of them has changed, comparing a replay with an eager run proves nothing about the
        graph. The next replay detects the change.
        """
        if difference(captured.guard, self._guard.now()):
            return False
        if captured.values.changes():
            captured.values.mark()
            return False
        return True

    def prove(
        self,
        captured: CapturedKey,
        sample: Sequence[Any],
    ) -> RowProof:
        """Prove, with the inputs of a padded call, that padding does not change rows.

        Raises:
            CaptureError: The step changes Python state for these inputs.
            Exception: Any exception raised by a replay.
        """
        nothing_shown = attrs.evolve(captured.rows, open_calls=0)
        return self._proven(captured, RowProver.prove_with_call, nothing_shown, sample)

    def prove_independent(self, captured: CapturedKey, sample: Sequence[Any]) -> RowProof:
        """Prove, with the inputs of a part of a split batch, that rows are independent.

        Raises:
            CaptureError: The step changes Python state for these inputs.
            Exception: Any exception raised by a replay.
        """
        nothing_shown = attrs.evolve(captured.rows, open_parts=0)
        return self._proven(captured, RowProver.prove_independent, nothing_shown, sample)

    def _proven(
        self,
        captured: CapturedKey,
        prove: Callable[[RowProver, CapturedKey, Snapshot, RowProof, Sequence[Any]], RowProof],
        nothing_shown: RowProof,
        sample: Sequence[Any],
    ) -> RowProof:
        """Run a proof on the inputs of a call, and undo all changes."""
        prover = self._prover
        if prover is None or not self._warmups.may_restore():
            return nothing_shown

        def run(snapshot: Snapshot) -> RowProof:
            self._warmups.save_scratch(snapshot)
            return prove(prover, captured, snapshot, captured.rows, sample)

        return self._contained(captured.key, run)

    def warm(self, key: GraphKey) -> None:
        """Warm up a key without capturing it, and undo the changes.

        Raises:
            CaptureError: The key is larger than the static inputs, or the step changes Python
                state, other than a cache, in its first call or in each call.
        """
        self._contained(key, partial(self._warm_up, key))

    def expect_bytes(self, key: GraphKey) -> int:
        """Return the bytes that a key's graph and outputs need in a new pool; 0 if unknown.

        Raises:
            CaptureError: The key cannot be warmed up or captured.
        """
        return self._contained(key, partial(self._expect, key))

    def _capture(
        self,
        key: GraphKey,
        other_sizes: Callable[[], Sequence[int]],
        admission: Admission | None,
        sample: Sequence[Any] | None,
        snapshot: Snapshot,
    ) -> CapturedKey:
        with (
            self._lane.measuring("library"),
            self._warmups.contents_watched_once(key, snapshot),
        ):
            outputs, notes = self._warmups.run(key, snapshot)
            self._lane.let_steps_run(WARMUP)
            seen = None
            if self._prover is not None:
                seen = self._prover.run_references(key, snapshot, other_sizes())
            layout = self._warmups.layout(key, outputs, other_sizes, seen)
            del seen
        slots = self._slots(outputs, layout) if layout is not None else []
        values = {} if layout is None else layout.values(outputs, key.num_tokens)
        del outputs  # so that only allocations that the step keeps are still alive
        if key.mode is RuntimeMode.FULL:
            captured = self._capture_full(key, slots, layout, admission, notes)
        elif self._step.in_segments:
            captured = self._capture_segments(key, slots, layout, admission)
        else:
            captured = self._capture_pieces(key, slots, layout, admission)
        try:
            captured.check_values(values)
            captured.rows = self._rows_of(captured, snapshot, other_sizes, sample)
        except BaseException:
            captured.release()
            raise
        return captured

    def _rows_of(
        self,
        captured: CapturedKey,
        snapshot: Snapshot,
        other_sizes: Callable[[], Sequence[int]],
        sample: Sequence[Any] | None,
    ) -> RowProof:
        """Prove that smaller batches may replay a new graph."""
        if (index := captured.layout.open_output) is not None:
            found = f"output {index} has no batch dimension along which padding could be cut off"
            return RowProof(Reason.ROWS_NOT_THE_BUCKET, found)
        if self._prover is None:
            return RowProof()
        rows = self._prover.prove(captured, snapshot, other_sizes())
        if self._rows_independent and not rows.reason:
            rows = self._prover.prove_independent(captured, snapshot, rows)
        if sample is None or not rows.open_calls or not self._warmups.save_scratch(snapshot):
            return rows
        return self._prover.prove_with_call(captured, snapshot, rows, sample)

    def values_at(self, captured: CapturedKey, num_rows: int) -> dict[int, Any]:
        """Return the Python values in a step's outputs for a number of rows, by leaf index.

        Raises:
            CaptureError: The outputs have a different layout than at the key's size, or the step
                changes Python state.
        """
        key = captured.key

        def run(_: Snapshot) -> dict[int, Any]:
            self._lane.set_rows(num_rows)
            return captured.layout.values(self._warmups.run_at(key, num_rows), num_rows)

        return self._contained(key, run)

    def _warm_up(self, key: GraphKey, snapshot: Snapshot) -> tuple[Any, WarmupNotes | None]:
        with (
            self._lane.measuring("library"),
            self._warmups.contents_watched_once(key, snapshot),
        ):
            return self._warmups.run(key, snapshot)

    def _expect(self, key: GraphKey, snapshot: Snapshot) -> int:
        outputs, _ = self._warm_up(key, snapshot)
        slots = self._slots(outputs, None)
        del outputs
        views = self._warmups.views(key, key.num_tokens)
        known = self._maker.expect_bytes(lambda: self._step(views), slots)
        return known if known is not None else self._warmups.forecast_bytes(key) or 0

    def _contained(self, key: GraphKey, run: Callable[[Snapshot], _T]) -> _T:
        """Call a function that runs the step; undo all changes, including those to thread modes.

        If the step creates a cache in Python, the cache is kept and the function is called again.

        Raises:
            CaptureError: The step changes Python state, other than a cache, in its first call or in
                each call.
        """
        modes, had_dynamo = ThreadModes(), dynamo_is_loaded()
        try:
            try:
                if self._warmups.effects.refresh():
                    self._watch_again()
                is_again = False
                while True:
                    made = None
                    try:
                        with self._undone(key) as snapshot:
                            made = run(snapshot)
                        return made
                    except PythonChangedError as error:
                        if isinstance(made, CapturedKey):
                            made.release()
                        if is_again:
                            raise
                        changed: PythonChangedError | None = error
                    except Exception:
                        if is_again or had_dynamo or not dynamo_is_loaded():
                            raise
                        # The step imported Dynamo. The modes of this run were entered before the
                        # import, and were therefore not hidden from Dynamo. This may have caused
                        # the error.
                        changed = None
                    if changed is not None:
                        self._classify_changes(changed, key)
                    is_again = True
            finally:
                modes.put_back()
        finally:  # repeated, because a signal handler may have raised in the first call
            modes.put_back()

    def _classify_changes(self, changed: PythonChangedError, key: GraphKey) -> None:
        """Classify the changes that a run made to Python state; raise if they prevent a capture.

        Raises:
            CaptureError: The step changes Python state, other than a cache, in its first call or in
                each call.
        """
        self._watch_again()
        buffers = self._lane.buffers_of(key)
        with self._set_up(key) as snapshot:

            def on_other_rows() -> None:
                write_noise(buffers.tensors)
                buffers.clean_from = buffers.clean_to = 0  # every row may contain noise
                with self._warmups.contents_watched(key, snapshot):
                    self._warmups.run_once(key)
                buffers.reset()

            def on_rows() -> Any:
                return self._warmups.run_once(key)

            self._warmups.effects.check(changed, snapshot, on_rows, on_other_rows)

    def _watch_again(self) -> None:
        self._warmups.watch_again()
        self._maker.forget()
        if self._prover is not None:
            self._prover.forget()

    @contextmanager
    def _undone(self, key: GraphKey) -> Iterator[Snapshot]:
        """Prepare the lane for a key, and restore state on exit, including Python state.

        Raises:
            PythonChangedError: The step changed Python state.
        """
        in_pieces = key.mode is RuntimeMode.PIECEWISE
        contained = self._warmups.effects.contained(graphs_alone=in_pieces)
        with self._set_up(key) as snapshot, contained:
            yield snapshot

    @contextmanager
    def _set_up(self, key: GraphKey) -> Iterator[Snapshot]:
        """Prepare the lane for a key, and restore state on exit."""
        lane = self._lane
        if key.num_tokens > lane.buffers.num_rows:
            raise CaptureError(
                f"{key} is larger than the static inputs, which have {lane.buffers.num_rows} rows. "
                "Include this size in sizes= when creating the runner.",
                key=str(key),
                reason="too_large",
            )
        with (
            lane.exclusive(),
            inference_mode(self._warmups.needs_inference_mode()),
            torch.no_grad(),
            restored(self._warmups.snapshot()) as snapshot,
        ):
            lane.buffers_of(key).reset()
            lane.set_rows(key.num_tokens)
            yield snapshot

    def note_replaced(self, entries: Iterable[Entry]) -> None:
        """Record that values were replaced after a capture."""
        self._warmups.effects.note_replaced(entries)

    # -- graphs -------------------------------------------------------------------------

    def _slots(self, outputs: Any, layout: OutputLayout | None) -> list[OutputSlot | None]:
        """Return the output slots, with None for each output that stays in the graph's memory."""
        leaves = leaves_of(outputs)
        if not self._share_outputs():
            return [None] * len(leaves)
        return [
            (index, leaf.shape, leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            and not self._warmups.is_state(leaf)
            and not (layout is not None and layout.leaves[index].kind == "kept")
            else None
            for index, leaf in enumerate(leaves)
        ]

    def _capture_full(
        self,
        key: GraphKey,
        slots: list[OutputSlot | None],
        layout: OutputLayout | None,
        admission: Admission | None,
        notes: WarmupNotes | None,
    ) -> CapturedKey:
        views, backend = self._warmups.views(key, key.num_tokens), self._lane.backend
        path = choose_path(backend, self._lane.buffers_of(key), key.num_tokens)

        def step() -> Any:
            path.record(backend.current_stream_handle())
            return self._step(views)

        if path.staging is not None:
            notes = None  # the warmup did not include the copy from pinned memory
        compiled = self._warmups.compiled_code(key)
        name = (family_of(key), 0)
        draws = self._warmups.may_draw(key)
        # Wait for the warmup's stream now. If a step of another thread waited for it during the
        # capture, that step would become part of the capture.
        self._lane.order()
        made = self._maker.capture(step, slots, admission, name, notes, compiled, draws=draws)
        path.attach(made.graph)
        return self._captured(key, path, layout, made.outputs, (made.graph,), draws=made.draws)

    def _captured(
        self,
        key: GraphKey,
        path: InputPath,
        layout: OutputLayout | None,
        outputs: Any,
        graphs: tuple[CapturedGraph, ...],
        pieces: CapturedPieces | None = None,
        *,
        draws: bool,
    ) -> CapturedKey:
        """Return the captured key for the registry.

        Raises:
            CaptureError: The outputs have a different layout than in the warmup.
        """
        lane, warmups = self._lane, self._warmups
        if layout is None:
            layout = warmups.declared(outputs, key.num_tokens)
        elif problem := layout.mismatch(*flatten(outputs), key.num_tokens):
            raise CaptureError(
                f"The outputs of the step differ between warmup and capture: {problem}. Return the "
                "same structure, shapes and dtypes in each call.",
                key=str(key),
                reason="output_layout",
            )
        leaves = tuple(
            plain_tensor(leaf)
            if isinstance(leaf, torch.Tensor) and not warmups.is_state(leaf)
            else leaf
            for leaf in leaves_of(outputs)
        )
        clones = tuple(
            isinstance(leaf, torch.Tensor) and one.kind != "kept" and not warmups.is_state(leaf)
            for one, leaf in zip(layout.leaves, leaves, strict=True)
        )
        own_bytes = sum(
            leaf.untyped_storage().nbytes()
            for leaf, is_result in zip(leaves, clones, strict=True)
            if is_result and leaf not in lane.outputs
        )
        return CapturedKey(
            key=key,
            lane=lane,
            input_path=path,
            layout=layout,
            leaves=() if pieces is not None and pieces.ends_eager else leaves,
            clones=clones,
            graphs=graphs,
            holds=(*warmups.written(), self._step),
            guard=self._guard.now(),
            facts=self.facts_now(path.buffers) if self._notes_facts else None,
            has_effect=draws or warmups.writes(),
            draws=draws,
            axis_cuts=warmups.axis_cuts(key, outputs),
            values=warmups.effects.watch(graphs_alone=key.mode is RuntimeMode.PIECEWISE),
            pieces=pieces,
            own_bytes=own_bytes,
        )

    def _capture_pieces(
        self,
        key: GraphKey,
        slots: list[OutputSlot | None],
        layout: OutputLayout | None,
        admission: Admission | None,
    ) -> CapturedKey:
        """Capture piece by piece, and replay each graph so that eager pieces read real values."""
        views = self._warmups.views(key, key.num_tokens)
        stable = StorageSet(view for view in views.values() if isinstance(view, torch.Tensor))
        compiled = self._warmups.compiled_code(key)
        parts: list[GraphPart | EagerPart] = []
        graphs: list[CapturedGraph] = []
        value: Any = None
        draws, may_draw = False, self._warmups.may_draw(key)
        last = len(self._step.pieces) - 1
        try:
            for index, piece in enumerate(self._step.pieces):
                inputs = piece.pick(views)
                if not piece.is_graph:
                    value = piece.fn(*(() if index == 0 else (value,)), **inputs)
                    parts.append(EagerPart(piece, inputs, is_first=index == 0))
                    continue
                link = None
                args: tuple[Any, ...] = ()
                if index > 0:
                    link, static = self._link(index, value, stable, admission)
                    args = (static,)
                    if isinstance(parts[-1], GraphPart):
                        link = None  # consecutive graphs need no copy
                call, name = _calling(piece.fn, args, inputs), (family_of(key), index)
                own = slots if index == last else []
                made = self._maker.capture(
                    call, own, admission, name, None, compiled, draws=may_draw
                )
                draws = draws or made.draws
                graphs.append(made.graph)
                parts.append(GraphPart(made.graph, link, made.outputs))
                made.graph.replay()
                value = made.outputs
                for leaf in leaves_of(value):
                    if isinstance(leaf, torch.Tensor):
                        stable.add(leaf)
            buffers = self._lane.buffers_of(key)
            path = copied_path(buffers, key.num_tokens, "made of pieces")
            pieces = CapturedPieces(tuple(parts), ends_eager=not self._step.pieces[last].is_graph)
            captured = self._captured(key, path, layout, value, tuple(graphs), pieces, draws=draws)
        except BaseException:
            for graph in graphs:
                graph.release()
            raise
        # Values between pieces are not kept alive, so that graphs of all sizes can reuse their
        # memory. This is safe, because launches of a lane do not overlap.
        for part in parts:
            if isinstance(part, GraphPart):
                leaves, spec = tree_flatten(part.outputs)
                weak = [
                    weak_tensor(one) if isinstance(one, torch.Tensor) else one for one in leaves
                ]
                part.outputs = tree_unflatten(weak, spec)
        return captured

    def _capture_segments(
        self,
        key: GraphKey,
        slots: list[OutputSlot | None],
        layout: OutputLayout | None,
        admission: Admission | None,
    ) -> CapturedKey:
        """Capture a step that is a single function, in segments between its eager calls.

        Raises:
            CaptureError: An eager call may return a different value in a replay. Such a replay must
                be undone, but the state that it changes cannot be saved.
        """
        warmups = self._warmups
        views = warmups.views(key, key.num_tokens)
        stable = StorageSet(view for view in views.values() if isinstance(view, torch.Tensor))
        recorder = SegmentRecorder(
            self._lane,
            key.num_tokens,
            self._call_dims(key),
            lambda tensor: tensor in stable or self._is_fixed(tensor),
            admission,
        )
        draws, compiled = warmups.may_draw(key), warmups.compiled_code(key)
        outputs = self._maker.capture_segments(
            lambda: self._step(views),
            recorder,
            slots,
            admission,
            Operators(breaking_names(), _UNSAFE if self._break_on_unsafe else frozenset()),
            compiled=compiled is not None,
            draws=draws,
        )
        try:
            keep = self._keep(recorder.parts, draws=draws)
            pieces = CapturedPieces(tuple(recorder.parts), ends_eager=False, keep=keep)
            path = copied_path(self._lane.buffers_of(key), key.num_tokens, "made of segments")
            graphs = tuple(recorder.graphs)
            captured = self._captured(key, path, layout, outputs, graphs, pieces, draws=draws)
            if compiled is not None:  # the capture does not observe the kernels of compiled code
                captured.holds = (*captured.holds, *compiled.reads)
            return captured
        except BaseException:
            for graph in recorder.graphs:
                graph.release()
            raise

    def _keep(
        self, parts: Sequence[GraphPart | EagerCall], *, draws: bool
    ) -> Callable[[], Snapshot] | None:
        """Return a function that saves the step's state before a replay, or None.

        The state is restored if the replay fails, for example because an eager call returns a
        different result than in the capture. None means that there is nothing to restore.

        Raises:
            CaptureError: The state is too large to save, or is in Python objects.
        """
        warmups = self._warmups
        calls = [one for one in parts if isinstance(one, EagerCall) and one.may_differ]
        if not calls:
            return None
        changed = warmups.effects.check_run()
        has_state = draws or warmups.may_write_scratch()
        if changed or (has_state and not warmups.may_restore()):
            what = named(changed) if changed else "more state than state_limit_bytes allows"
            alternative = "" if changed else "; or increase state_limit_bytes"
            raise CaptureError(
                f"The eager call at {calls[0].line} returns a value that may differ in a replay. "
                "If the value differs, the step must be undone, which is impossible because the "
                f"step changes {what}. Let the call write its result into a tensor created by the "
                f"step (out=...) and return None{alternative}.",
                reason=Reason.CALL_DIFFERS,
            )
        if not has_state:
            return None

        def keep() -> Snapshot:
            snapshot = warmups.snapshot()
            snapshot.draws = draws
            warmups.save_scratch(snapshot)
            return snapshot

        return keep

    def _call_dims(self, key: GraphKey) -> list[CallShapes]:
        """Return the batch dimensions of arguments and results of the step's eager calls.

        They are measured once for all keys that differ only in size, by running the step at two
        sizes.
        """
        family = family_of(key)
        if family not in self._dims:
            unit = key.descriptor.query_len or 1
            size, count = key.num_tokens, key.num_tokens // unit
            more = (count + 1) * unit
            # Avoid size 1: broadcasting can produce size-1 dimensions that are not the batch.
            fewer = (count // 2) * unit if count > 3 else 0
            other = fewer or (more if more <= self._lane.buffers.num_rows else unit)
            found: list[CallShapes] = []
            if other != size:
                here, there = self._calls_at(key, size), self._calls_at(key, other)
                found = batch_dims(here, there, size, other)
            self._dims[family] = found
        return self._dims[family]

    def _calls_at(self, key: GraphKey, num_rows: int) -> list[CallShapes]:
        recorder = ShapeRecorder()
        self._lane.set_rows(num_rows)
        try:
            with use_breaker(recorder):
                self._warmups.run_at(key, num_rows)
        finally:
            self._lane.set_rows(key.num_tokens)
        return recorder.calls

    def _is_fixed(self, leaf: torch.Tensor) -> bool:
        return self._warmups.is_state(leaf) or self._warmups.is_scratch(leaf)

    def _link(
        self, index: int, value: Any, stable: StorageSet, admission: Admission | None
    ) -> tuple[Link, Any]:
        """Return the link that passes a value to a graph piece, and the value the piece reads."""
        leaves, structure = flatten(value)
        link = Link(self._step.pieces[index - 1].name, [], [], [])
        static: list[Any] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                link.constants.append((number, leaf))
                static.append(leaf)
            elif leaf in stable or self._is_fixed(leaf):
                link.fixed.append((number, leaf.data_ptr(), leaf.shape))
                static.append(leaf)
            else:
                if admission is not None:
                    admission.ensure_fits(
                        self._lane.between.growth((index, number), leaf.shape, leaf.dtype)
                    )
                own = self._lane.between.tensor_at((index, number), leaf.shape, leaf.dtype)
                own.copy_(leaf)
                link.copies.append((number, own))
                static.append(own)
        return link, structure.build(static)


def _calling(
    fn: Callable[..., Any], args: tuple[Any, ...], inputs: Mapping[str, Any]
) -> Callable[[], Any]:
    return lambda: fn(*args, **inputs)
