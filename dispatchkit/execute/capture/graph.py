"""GraphMaker: capture graphs and segments with outputs in memory that a lane's graphs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.backends.base import CapturedGraph
from dispatchkit.backends.optional import (
    SegmentedCapture,
    WarmupNotes,
    WatchedGraph,
    features_of,
)
from dispatchkit.backends.watching.compiled_code import FORCE_EAGER
from dispatchkit.errors import CaptureError, counted
from dispatchkit.execute.capture.budget import Admission
from dispatchkit.execute.capture.pacing import REHEARSAL, paced_step, releasing_lock_at_end
from dispatchkit.execute.capture.segments import ArgumentHolder, Operators, SegmentRecorder
from dispatchkit.execute.capture.warmup import Family
from dispatchkit.execute.io.outputs import SharedMemory
from dispatchkit.execute.io.structure import flatten
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.step.breaks import use_breaker
from dispatchkit.execute.step.state import CompiledCode
from dispatchkit.once import warn_at_call

#: A slot in the lane's output memory: index, shape and dtype of the output.
OutputSlot = tuple[int, torch.Size, torch.dtype]


@attrs.frozen(eq=False)
class MadeGraph:
    """One captured graph.

    Attributes:
        graph: Captured graph.
        outputs: Results of the capture, in the memory of the lane or of the graph.
        draws: Whether the graph may draw random numbers.
    """

    graph: CapturedGraph
    outputs: Any
    draws: bool


class UncompiledCodeWarning(RuntimeWarning):
    """A function wrapped in torch.compile ran, or may have run, uncompiled in a capture."""


@attrs.frozen
class _Watched:
    """Properties of operations, recorded in a watched capture or its warmup.

    Attributes:
        holds: Storages that the operations read or write and that graphs must keep alive.
        draws: Whether the operations may draw random numbers.
    """

    holds: tuple[Any, ...]
    draws: bool


class GraphMaker:
    """Captures graphs and segments on one lane.

    Args:
        lane: Lane that the graphs are captured on.
        device: Device of the outputs.
        generators: Random generators of the step besides the default generators.
    """

    def __init__(
        self,
        lane: Lane,
        device: torch.device,
        generators: Iterable[torch.Generator],
    ) -> None:
        self._lane, self._backend, self._device = lane, lane.backend, device
        features = features_of(lane.backend)
        self._rehearsals, self._unwatched = features.rehearsals, features.unwatched_captures
        self._generators = tuple(generators)
        self._watched: dict[tuple[Family, int], _Watched] = {}

    def forget(self) -> None:
        """Discard the recorded properties, because tensors may have been replaced."""
        self._watched.clear()

    def expect_bytes(
        self, run: Callable[[], Any], slots: Sequence[OutputSlot | None]
    ) -> int | None:
        """Return the bytes that a graph and its outputs need in a new pool; None if unknown.

        Raises:
            CaptureError: The function cannot be captured.
        """
        if self._rehearsals is None:
            return None
        memory = SharedMemory(self._device)
        trial = SharedOutputs(run, _targets_in(memory, slots))
        pool = self._backend.new_pool()
        grown = self._rehearsals.rehearse(
            trial, stream=self._lane.stream, pool=pool, generators=self._generators
        )
        return grown + memory.num_bytes

    def capture(
        self,
        run: Callable[[], Any],
        slots: Sequence[OutputSlot | None],
        admission: Admission | None,
        name: tuple[Family, int],
        notes: WarmupNotes | None = None,
        compiled: CompiledCode | None = None,
        *,
        draws: bool = True,
    ) -> MadeGraph:
        """Capture a function within the memory budgets, and copy its outputs to their slots.

        Args:
            run: Function to capture.
            slots: Output slots, with None for each output that stays in the graph's memory. If
                empty, all outputs stay there.
            admission: Check of the memory budgets; None if there is no limit.
            name: Name of the operations. Graphs with the same name run the same operations at
                different sizes.
            notes: Notes of the preceding warmup, which ran the same operations.
            compiled: Properties of the torch.compile functions that the function calls. A capture
                on a device cannot observe these properties, because the functions run compiled.
            draws: Whether the function may draw random numbers; False if its warmup drew none.
        """
        lane = self._lane
        if admission is not None:
            # Not in the lane's memory, because callers may still read results there.
            others = _targets_in(SharedMemory(self._device), slots)

            def trial() -> Any:
                rehearsed = SharedOutputs(run, others)
                rehearsed()
                return rehearsed.outputs  # kept alive, so that the rehearsal counts them

            more = sum(lane.outputs.growth(*slot) for slot in slots if slot is not None)
            admission.ensure_graph_fits(trial, self._generators, more)
            lane.let_steps_run(REHEARSAL)
        captured = SharedOutputs(paced_step(lane, run), _targets_in(lane.outputs, slots))
        if self._unwatched is None:  # the backend watches all captures
            with lane.measuring("driver"), releasing_lock_at_end(lane, captured) as run_and_release:
                own = self._backend.capture(
                    run_and_release, stream=lane.stream, pool=lane.pool, generators=self._generators
                )
            return MadeGraph(own, captured.outputs, own.has_random_state)
        # Keys that differ only in size run the same operations, so only one capture is watched.
        known = self._watched.get(name)
        if known is not None or compiled is not None or (notes is not None and not notes.is_plain):
            notes = None
        begun = None if FORCE_EAGER.is_on else FORCE_EAGER.num_begun
        with lane.measuring("driver"), releasing_lock_at_end(lane, captured) as run_and_release:
            graph = self._unwatched.capture(
                run_and_release,
                stream=lane.stream,
                pool=lane.pool,
                generators=self._generators,
                watched=known is None,
                notes=notes,
                compiled=known is None and compiled is not None,
                draws=draws,
            )
        if compiled is not None and FORCE_EAGER.num_begun != begun:
            warn_at_call(
                "The captured graph may contain eager instead of compiled kernels, because another "
                "thread warmed up a step at the same time, which disables torch.compile in the "
                "whole process. Capture runners one after the other. To replace the graphs of this "
                "runner, call runner.invalidate() and then runner.capture().",
                UncompiledCodeWarning,
            )
        if known is not None:
            graph.holds.extend(known.holds)
            return MadeGraph(graph, captured.outputs, draws and known.draws)
        drawn = draws
        if compiled is not None:
            _warn_of_uncompiled_code(graph, compiled)
            graph.holds.extend(compiled.reads)
        elif notes is None:
            drawn = draws and graph.has_random_state
        if not graph.host_tensors:
            # Memory of the lane is excluded, because it would otherwise outlive the lane's graphs.
            holds = tuple(
                one for one in graph.holds if not (lane.outputs.owns(one) or lane.between.owns(one))
            )
            self._watched[name] = _Watched(holds, drawn)
        return MadeGraph(graph, captured.outputs, drawn)

    def capture_segments(
        self,
        run: Callable[[], Any],
        recorder: SegmentRecorder,
        slots: Sequence[OutputSlot | None],
        admission: Admission | None,
        breaks: Operators,
        *,
        compiled: bool,
        draws: bool,
    ) -> Any:
        """Capture a function in segments; copy its outputs to their slots; return the outputs.

        Args:
            run: Function to capture.
            recorder: Recorder that splits the function and collects the segments.
            slots: Output slots, with None for each output that stays in the graph's memory.
            admission: Check of the memory budgets; None if there is no limit.
            breaks: Operators at which the function is split.
            compiled: Whether the function calls functions wrapped in torch.compile.
            draws: Whether the function may draw random numbers; False if its warmup drew none.
        """
        lane, segments = self._lane, features_of(self._backend).segments
        if segments is None:
            raise CaptureError(
                f"The {self._backend.name} backend cannot capture a step in segments. Use a mode "
                "without PIECEWISE, such as mode='FULL'."
            )
        if admission is not None:
            others, kept = _targets_in(SharedMemory(self._device), slots), ArgumentHolder()

            def trial() -> Any:
                rehearsed = SharedOutputs(run, others)
                with use_breaker(kept):
                    rehearsed()
                return rehearsed.outputs, kept

            more = sum(lane.outputs.growth(*slot) for slot in slots if slot is not None)
            admission.ensure_graph_fits(trial, self._generators, more)
        captured = SharedOutputs(run, _targets_in(lane.outputs, slots))

        def record(capture: SegmentedCapture) -> None:
            with breaks.breaking(recorder), recorder.recording(capture):
                captured()

        caller = self._backend.current_stream()
        lane.stream.wait_stream(caller)
        try:
            with lane.measuring("driver"):
                segments.capture_segments(
                    record,
                    stream=lane.stream,
                    pool=lane.pool,
                    generators=self._generators,
                    compiled=compiled,
                    draws=draws,
                )
        finally:
            caller.wait_stream(lane.stream)  # replays made during the capture may still be running
        return captured.outputs


def _warn_of_uncompiled_code(graph: WatchedGraph, compiled: CompiledCode) -> None:
    ran_plainly = graph.num_plain_operations
    if ran_plainly >= compiled.num_operations:
        warn_at_call(
            "No operation of the step's torch.compile functions ran compiled in the capture "
            f"({ran_plainly} ran uncompiled), so the graph contains eager kernels. "
            "TORCH_LOGS=dynamo,recompiles shows why. Code that was called under a "
            "dispatch mode, or that exceeded torch._dynamo.config.recompile_limit, stays "
            "uncompiled until torch._dynamo.reset() is called.",
            UncompiledCodeWarning,
        )


def _targets_in(
    memory: SharedMemory, slots: Sequence[OutputSlot | None]
) -> list[torch.Tensor | None]:
    return [None if slot is None else memory.tensor_at(*slot) for slot in slots]


class SharedOutputs:
    """A function to capture, with outputs copied to memory that graphs share.

    Args:
        run: Function that returns the outputs.
        targets: Target memory of the outputs, with None for each output that stays in the graph's
            memory. If empty, all outputs stay there.

    Attributes:
        outputs: Outputs in their final memory. Calling the object returns None, because a backend
            would keep returned values alive.
    """

    def __init__(self, run: Callable[[], Any], targets: Sequence[torch.Tensor | None]) -> None:
        self._run, self._targets = run, targets
        self.outputs: Any = None

    def __call__(self) -> None:
        """Run the function and copy its outputs; called by the backend."""
        leaves, structure = flatten(self._run())
        targets = self._targets or [None] * len(leaves)
        if len(targets) != len(leaves):
            raise CaptureError(
                f"The step returned {counted(len(leaves), 'value')} in the capture, but "
                f"{len(targets)} in the warmup. Return the same structure in both.",
                reason="output_layout",
            )
        for target, leaf in zip(targets, leaves, strict=True):
            if target is not None:
                target.copy_(leaf)
        # Only tensors in their final memory are kept; tensors that were copied are freed.
        final = [
            leaf if target is None else target for target, leaf in zip(targets, leaves, strict=True)
        ]
        self.outputs = structure.build(final)
