"""Warmup of a key: run the step eager on dummy rows and record its properties.

The warmup records which existing memory the step writes, how much memory it uses, and the batch
dimension of its outputs. The caller's snapshot restores everything that the run changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.backends.capture_guard import run_between_captures
from dispatchkit.backends.optional import WarmupNotes, features_of
from dispatchkit.backends.watching.compiled_code import every_size_compiled, force_eager
from dispatchkit.errors import CaptureError, counted
from dispatchkit.execute.capture.effects import PythonChangedError, PythonEffects
from dispatchkit.execute.capture.pacing import paced_warmup
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.outputs import (
    OutputLayout,
    check_batch_dims,
    declared_layout,
    measure_layout,
)
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.state import (
    CompiledCode,
    ContentWatch,
    Snapshot,
    StepState,
    StorageSet,
    WriteWatch,
    is_dense,
)
from dispatchkit.keys.batch import GraphKey
from dispatchkit.options import DERIVED

if TYPE_CHECKING:
    from dispatchkit.execute.io.axes import AxisCut, AxisInputs

# An identifier shared by keys that differ only in size. The keys of a family share one watched
# warmup and the measured output layouts.
Family = tuple[Any, ...]


#: The warmups of all runners, to find runners that change the same state.
_all: weakref.WeakSet[Warmups] = weakref.WeakSet()


def family_of(key: GraphKey) -> Family:
    """Return the family of a key, which is the same for all keys that differ only in size."""
    own = key.descriptor
    return (key.mode, own.uniform, own.query_len, own.max_query_len, own.num_active_loras, own.axes)


class Warmups:
    """The warmups of a step on one lane, and the properties that they recorded.

    Args:
        step: Step to warm up.
        inputs: Declared inputs of the step.
        lane: Lane to run on.
        row_count: Name of the input that contains the number of real rows, or None.
        axes: Inputs of a runner with axes, otherwise None.
        state: Declared state of the step. Its tensors are saved before warmups and restored
            afterward.
        slots: State of sessions, or None. Dummy rows do not change this state.
        state_limit_bytes: Limit in bytes. During warmups, at most this much undeclared state is
            saved. Before runs on real rows, at most this much state and scratch is saved in total.
        output_batch_dims: Declared batch dimensions of the outputs; ``DERIVED`` to measure them.
        warmups: Number of eager runs before each capture. The first run of each family is watched,
            and runs functions wrapped in torch.compile uncompiled. If the step calls compiled
            functions, at least one more run follows, unless the backend watches all captures.

    Attributes:
        step: Step to warm up.
        generators: Random generators of the step besides the default generators.
        slots: State of sessions, or None.
        effects: Effects of the step on Python state.
        needs_gradients: Whether the step needs gradients. If so, eager steps run in the caller's
            grad mode.

    Raises:
        ConfigError: ``output_batch_dims`` is neither ``DERIVED`` nor composed of indices and None.
    """

    step: Step
    slots: SlotState | None

    def __init__(
        self,
        step: Step,
        inputs: InputSet,
        lane: Lane,
        *,
        row_count: str | None = None,
        axes: AxisInputs | None = None,
        state: StepState,
        slots: SlotState | None = None,
        state_limit_bytes: int,
        output_batch_dims: Any,
        warmups: int,
    ) -> None:
        check_batch_dims(output_batch_dims, may_derive=True)
        self.step, self._inputs, self._lane = step, inputs, lane
        self._backend = lane.backend
        self._features = features_of(lane.backend)
        self._row_count, self._axes = row_count, axes
        self._state = StorageSet(state.tensors)
        self._declared = (*state.tensors, *state.scratch)
        self.slots, self._banks = slots, StorageSet(() if slots is None else slots.tensors)
        # The checked Python state, and whether it contains a tensor created in inference mode.
        self._has_inference: tuple[object, bool] | None = None
        self._written = StorageSet()  # storages with undeclared writes
        self._scratch = StorageSet(state.scratch)
        self._state_limit = state_limit_bytes
        self._batch_dims = output_batch_dims
        self._warmups = warmups
        self.generators: tuple[torch.Generator, ...] = state.generators
        self._layouts: dict[Family, list[OutputLayout]] = {}
        self._cuts: dict[Family, tuple[AxisCut, ...]] = {}
        self._peaks: dict[Family, tuple[int, int]] = {}
        self._compiled: dict[Family, CompiledCode] = {}
        self._draws: dict[Family, bool] = {}
        # Families whose writes are all known, and whether the inputs were the integers of a call
        # (True) or fill values (False).
        self._watched: set[tuple[Family, bool]] = set()
        self.needs_gradients: bool = False
        self._rounding: dict[Family, float] = {}
        self._takes_any: dict[Family, bool] = {}
        self.effects: PythonEffects = PythonEffects(
            step.pieces, calls_eager=step.in_segments, generators=state.generators
        )
        _all.add(self)

    @property
    def device(self) -> torch.device:
        """The device of the static inputs."""
        return self._inputs.device

    def forecast_bytes(self, key: GraphKey) -> int | None:
        """Return the expected memory of a key's graph in bytes; None if unknown.

        The peak memory of the family's watched warmup is scaled in proportion to the size.
        """
        known = self._peaks.get(family_of(key))
        return None if known is None else known[0] * key.num_tokens // known[1]

    def forget(self) -> None:
        """Discard the recorded Python state and the properties of compiled functions."""
        self.effects.forget()
        for family in self._compiled:
            self._peaks.pop(family, None)
        self._compiled.clear()

    def watch_again(self) -> None:
        """Watch the next warmup of each family again, because tensors of the step were replaced."""
        self._peaks.clear()
        self._watched.clear()

    def compiled_code(self, key: GraphKey) -> CompiledCode | None:
        """Return the properties of compiled functions that the step of a key calls, if any."""
        return self._compiled.get(family_of(key))

    def written(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storages that the step is known to change."""
        yield from self._state
        yield from self._written

    def writes(self) -> bool:
        """Return whether the step is known to change state."""
        return len(self._banks) > 0 or any(True for _ in self.written())

    def save_scratch(self, snapshot: Snapshot) -> bool:
        """Save scratch before a run on real rows; return False if it is too large to save."""
        num_bytes: int = sum(storage.nbytes() for storage in self._scratch)
        if num_bytes > self._state_limit:
            return False
        for storage in self._scratch:
            snapshot.save(storage)
        return True

    def may_restore(self) -> bool:
        """Return whether the state and scratch of the step are small enough to save."""
        changed = (*self.written(), *self._scratch)
        num_bytes: int = sum(storage.nbytes() for storage in changed)
        return num_bytes <= self._state_limit

    def may_write(self) -> bool:
        """Return whether the step may change state; True until a warmup has been watched."""
        return not self._peaks or self.writes()

    def may_draw(self, key: GraphKey) -> bool:
        """Return whether a key's step may draw random numbers; True until a warmup was watched."""
        return self._draws.get(family_of(key), True)

    def is_known(self, key: GraphKey) -> bool:
        """Return whether a warmup of the key's family was watched."""
        return family_of(key) in self._peaks

    def is_pure(self, key: GraphKey) -> bool:
        """Return whether the step of a key is known to have no effects besides its outputs."""
        return (
            self.is_known(key)
            and not self.may_write()
            and not len(self._scratch)
            and not self.may_draw(key)
            and self.compiled_code(key) is None
        )

    def may_write_scratch(self) -> bool:
        """Return whether a run on dummy rows may change state or scratch."""
        has_written = any(True for _ in self.written())
        return not self._peaks or has_written or len(self._scratch) > 0

    def is_state(self, leaf: torch.Tensor) -> bool:
        """Return whether a tensor belongs to state that the step changes."""
        return leaf in self._state or leaf in self._written

    def is_scratch(self, leaf: torch.Tensor) -> bool:
        """Return whether a tensor belongs to declared scratch."""
        return leaf in self._scratch

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all state that the step is known to change."""
        snapshot = Snapshot(
            self._inputs.device,
            self.generators,
            wait=self._wait_for_others,
            end=lambda: self._backend.current_stream().synchronize(),
        )
        for storage in self.written():
            snapshot.save(storage)
        return snapshot

    def _wait_for_others(self, storage: torch.UntypedStorage) -> bool:
        """Wait for lanes of other pools whose steps change a storage; return whether there are any.

        Without this wait, restoring the storage would undo changes by steps in flight on other
        streams. Steps of the same pool are always in order.
        """
        others = [
            one._lane
            for one in tuple(_all)
            if one._lane.group is not self._lane.group
            and any(known.holds(storage) for known in (one._state, one._written, one._scratch))
        ]

        def wait() -> None:
            for lane in others:
                lane.synchronize()

        if others:
            run_between_captures(self._backend.torch_device, wait)
        return bool(others)

    def state(self) -> dict[str, tuple[torch.UntypedStorage, torch.dtype]]:
        """Return, by name, the storage and dtype of state that the step may change."""
        scratch = {storage._cdata for storage in self._scratch}
        return {
            f"{what} {number}": (storage, dtype)
            for what, known in (("state", self._state), ("undeclared state", self._written))
            for number, (storage, dtype) in enumerate(known.typed())
            if storage._cdata not in scratch
        }

    def views(self, key: GraphKey, num_rows: int) -> dict[str, Any]:
        """Return the step's arguments by name: rows of static inputs, row count, axis buckets."""
        lane = self._lane
        tensors, axes = lane.buffers_of(key).views(num_rows), key.descriptor.axes
        views: dict[str, Any]
        if self._axes is None:
            views = dict(zip(self._inputs.names, tensors, strict=True))
        else:
            views = self._axes.graph_arguments(tensors, axes)
        if self._row_count is not None and lane.row_count is not None:
            views[self._row_count] = lane.row_count
        return views

    def axis_cuts(self, key: GraphKey, outputs: Any) -> tuple[AxisCut, ...]:
        """Return the output dimensions that depend on an axis, measured once per family."""
        if self._axes is None:
            return ()
        family = family_of(key)
        if family not in self._cuts:

            def run(inputs: dict[str, Any]) -> Any:
                if self._row_count is not None:
                    inputs[self._row_count] = self._lane.row_count
                return self._shapes(inputs)

            self._cuts[family] = self._axes.measure_cuts(key, outputs, run)
        return self._cuts[family]

    def known_axis_cuts(
        self, values: Sequence[int], key: GraphKey | None = None
    ) -> tuple[AxisCut, ...] | None:
        """Return the output dimensions that depend on an axis, if captures have measured them.

        Args:
            values: Values of all axes.
            key: Key that the step uses; None for an eager step.

        Returns:
            An ``AxisCut`` for each such dimension of the key's outputs. An eager step uses the cuts
            of captured keys whose exact axes have the values of the step. None if the dimensions
            were not measured, or if the cuts of these keys differ.
        """
        if self._axes is None:
            return ()
        if key is not None:
            return self._cuts.get(family_of(key))
        found = {
            cuts
            for family, cuts in self._cuts.items()
            if self._axes.same_exact_values(values, family[-1])
        }
        return found.pop() if len(found) == 1 else None

    def run(self, key: GraphKey, snapshot: Snapshot) -> tuple[Any, WarmupNotes | None]:
        """Run all warmups at the key's size; the first run in each family is watched.

        Returns:
            The outputs of the last run, and the ``WarmupNotes`` of the watched run. The notes are
            None if no run was watched or the backend does not use notes.
        """
        lane, views = self._lane, self.views(key, key.num_tokens)
        outputs: Any = None
        notes = None
        family = family_of(key)
        if self._warmups and family not in self._peaks:
            own = StorageSet(lane.buffers_of(key).tensors)
            if lane.row_count is not None:
                own.add(lane.row_count)
            if (unwatched := self._features.unwatched_captures) is not None:
                notes = unwatched.new_notes()
            rows = None if self.slots is None else self.slots.watch_rows()
            watch = WriteWatch(
                inputs=own,
                ignore=(self._scratch, self._state, self._banks),
                check_write=None if rows is None else rows.check_write,
                snapshot=snapshot,
                limit=self._state_limit,
                meter=self._features.rehearsals is None,
                notes=notes,
            )

            def watched() -> Any:
                with watch, nullcontext() if rows is None else rows:
                    return self.step(views)

            try:
                outputs = self._backend.warmup(watched, stream=lane.stream)
            finally:
                snapshot.draws = self._draws[family] = watch.draws
                self._rounding[family] = watch.rounding()
                self._takes_any[family] = watch.accepts_any_number
            for tensor in watch.written:
                self._written.add(tensor)
            self.effects.check_run()
            if watch.draws:
                self.effects.check_draws()
            self._peaks[family] = (watch.peak_bytes, key.num_tokens)
            left = self._warmups - 1
            compiled = watch.compiled_code()
            if compiled is not None:
                self._compiled[family] = compiled
                if unwatched is not None:
                    # Kernels must be compiled and tuned in a warmup, not in the capture.
                    left = max(left, 1)
        else:
            snapshot.draws = self.may_draw(key)
            left = self._warmups
        if left:
            outputs = self._run(views, left)
        if not self._warmups and self._batch_dims == DERIVED and family not in self._layouts:
            raise CaptureError(
                "The batch dimension of the outputs cannot be measured with warmups=0. Declare "
                "output_batch_dims, or set warmups to at least 1.",
                key=str(key),
                reason="output_layout",
            )
        return outputs, notes

    def layout(
        self,
        key: GraphKey,
        outputs: Any,
        other_sizes: Callable[[], Sequence[int]],
        seen: tuple[int, Any] | None = None,
    ) -> OutputLayout | None:
        """Return the output layout of a key, reused within its family; None without warmups.

        Args:
            key: Key to capture.
            outputs: Outputs of the step at the key's size.
            other_sizes: Function that returns further sizes that the step can run at.
            seen: A different number of rows, and the outputs of the step with that many rows, if
                available.
        """
        if not self._warmups:
            return None
        size = key.num_tokens
        known = self._layouts.setdefault(family_of(key), [])
        for layout in known:
            if layout.fits(outputs, size):
                return layout
        if self._batch_dims == DERIVED:
            found = None if seen is None else _layout_by(outputs, size, seen)
            if found is None:
                other, second = self._at_another_size(key, other_sizes())
                found = measure_layout(outputs, size, second, other)
            layout = found
        else:
            layout = declared_layout(outputs, size, self._batch_dims)
        known.append(layout)
        return layout

    def declared(self, outputs: Any, size: int) -> OutputLayout:
        """Return the output layout that follows from the declared ``output_batch_dims``."""
        return declared_layout(outputs, size, self._batch_dims)

    def rounding(self, key: GraphKey) -> float | None:
        """Return the largest ``eps`` of the dtypes that the step computes with.

        Return 0 if the step computes only integers, and None if no warmup was watched.
        """
        return self._rounding.get(family_of(key))

    def accepts_any_number(self, key: GraphKey) -> bool:
        """Return whether the step of a key is known to accept any floating-point values.

        On a GPU, an invalid index or a probability above 1 triggers a device-side assert, after
        which the process can no longer use the GPU.
        """
        return self._takes_any.get(family_of(key), False)

    def run_once(self, key: GraphKey) -> Any:
        """Run the step once at the key's size on the current static inputs, without watching."""
        return self._run(self.views(key, key.num_tokens))

    def run_at(self, key: GraphKey, num_rows: int) -> Any:
        """Run the step once on the first rows of a key's static inputs."""
        views, buffers = self.views(key, num_rows), self._lane.buffers_of(key)
        for index, rows in buffers.host_rows(num_rows):
            views[buffers.inputs.names[index]] = rows.to(self.device)
        with self.effects.undone(), force_eager():
            # Not paced, because steps that run in between would write to the same inputs.
            return self._backend.warmup(lambda: self.step(views), stream=self._lane.stream)

    def needs_inference_mode(self) -> bool:
        """Return whether to capture in inference mode.

        Inference mode is needed if the caller uses it, or if the step reaches an inference tensor,
        for example in an engine's cache. Inference tensors cannot be written outside inference
        mode.
        """
        if torch.is_inference_mode_enabled() or any(one.is_inference() for one in self._declared):
            return True
        state = self.effects.state()
        if self._has_inference is None or self._has_inference[0] is not state:
            values = (entry.before for entry in state.values_read())
            found = any(isinstance(one, torch.Tensor) and one.is_inference() for one in values)
            self._has_inference = (state, found)
        return self._has_inference[1]

    @contextmanager
    def contents_watched_once(
        self, key: GraphKey, snapshot: Snapshot, *, is_varied: bool = False
    ) -> Iterator[None]:
        """Watch contents like ``contents_watched``, once per family and value of ``is_varied``.

        Args:
            key: Key whose step runs in the block.
            snapshot: Snapshot in which the old contents of written storages are saved.
            is_varied: Whether the step runs on the integers of a call. They may cause writes that
                fill values do not cause.

        Raises:
            CaptureError: The step wrote to a tensor that is too large to be restored.
        """
        name = family_of(key), is_varied
        if name in self._watched:
            yield
            return
        with self.contents_watched(key, snapshot):
            yield
        self._watched.add(name)

    @contextmanager
    def contents_watched(self, key: GraphKey, snapshot: Snapshot) -> Iterator[None]:
        """Detect writes that operator schemas do not declare, and save the old contents.

        Args:
            key: Key whose step runs in the block.
            snapshot: Snapshot in which the old contents of written storages are saved.

        Raises:
            CaptureError: The step wrote to a tensor that is too large to be restored.
        """
        own = StorageSet(self._lane.buffers_of(key).tensors)
        if self._lane.row_count is not None:
            own.add(self._lane.row_count)
        contents = ContentWatch(self._reached(own), self._state_limit)
        try:
            yield
        except PythonChangedError:  # classifying the change needs the recorded writes
            self._note_written(contents, snapshot)
            raise
        self._note_written(contents, snapshot)
        lost = [one for one in contents.changed_beyond_limit() if one not in snapshot]
        if lost:
            raise CaptureError(
                f"The step writes to an undeclared {lost[0].dtype} tensor of shape "
                f"{tuple(lost[0].shape)} ({lost[0].untyped_storage().nbytes()} bytes), and the "
                "schema of the operation does not declare the write. The tensor cannot be restored "
                f"after warmups, because at most {self._state_limit} bytes of the tensors that the "
                "step reaches are copied. Declare the tensor with state=[tensor], or increase "
                "state_limit_bytes.",
                reason="undeclared_state",
            )

    def _note_written(self, contents: ContentWatch, snapshot: Snapshot) -> None:
        for tensor, saved in contents.changed():
            if tensor not in snapshot:
                snapshot.save_as(tensor.untyped_storage(), saved)
                self._written.add(tensor)

    def _reached(self, inputs: StorageSet) -> Iterator[torch.Tensor]:
        """Yield the tensors that the step reaches, except inputs, known state and scratch."""
        for entry in self.effects.state().values_read():
            value = entry.before
            if isinstance(value, torch.Tensor) and is_dense(value):
                known = (inputs, self._state, self._written, self._scratch, self._banks)
                if not any(value in one for one in known):
                    yield value

    def _run(self, views: dict[str, Any], iterations: int = 1) -> Any:
        """Run the step without disabling torch.compile."""
        with every_size_compiled():
            run = paced_warmup(self._lane, lambda: self.step(views))
            return self._backend.warmup(run, stream=self._lane.stream, iterations=iterations)

    def _shapes(self, views: dict[str, Any]) -> Any:
        """Return the outputs of the step for inputs of any size, to inspect their shapes.

        Functions wrapped in torch.compile run uncompiled, and changes to Python state are undone.
        """
        with self.effects.undone(), force_eager():
            run = paced_warmup(self._lane, lambda: self.step(views))
            return self._backend.warmup(run, stream=self._lane.stream)

    def _at_another_size(self, key: GraphKey, other_sizes: Sequence[int]) -> tuple[int, Any]:
        lane, size = self._lane, key.num_tokens
        below = [one for one in other_sizes if one < size]
        above = [one for one in other_sizes if one > size]
        # Avoid size 1: broadcasting can produce size-1 dimensions that are not the batch.
        other = max(below, default=0)
        if other <= 1:
            other = min(above, default=other or 2 * size)
        if other <= lane.buffers.num_rows:
            views = self.views(key, other)
        else:
            views = self.views(key, size)
            for name, spec in lane.buffers_of(key).inputs.specs.items():
                if spec.batch_dim is not None:
                    views[name] = spec.full(other, self._inputs.device)
        lane.set_rows(other)
        try:
            outputs = self._shapes(views)
        except Exception as error:
            raise CaptureError(
                f"The step raised an error when it was run with {counted(other, 'row')} to measure "
                "its outputs. Fix the step, or declare output_batch_dims to skip this run. Cause: "
                f"{type(error).__name__}: {error}",
                key=str(key),
                reason="output_layout",
            ) from error
        finally:
            lane.set_rows(size)
        return other, outputs


def _layout_by(outputs: Any, size: int, seen: tuple[int, Any]) -> OutputLayout | None:
    """Derive the layout from outputs at two sizes; None if the result would be uncertain."""
    other, second = seen
    if other == 1:  # broadcasting can produce size-1 dimensions that are not the batch
        return None
    try:
        layout = measure_layout(outputs, size, second, other)
    except CaptureError:
        return None  # the step may take a different branch for few rows
    return layout if layout.open_output is None else None
