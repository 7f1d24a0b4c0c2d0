"""GraphMaker: captures single graphs, with outputs in shared memory and one watch per step."""

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
from dispatchkit.errors import CaptureError
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

#: A slot of the lane's output memory: its name, and the shape and dtype of its contents.
OutputSlot = tuple[int, torch.Size, torch.dtype]


@attrs.frozen(eq=False)
class MadeGraph:
    """One captured graph.

    Attributes:
        graph: The graph.
        outputs: The results of the capture, in memory of the lane or the graph.
        draws: It may draw random numbers.
    """

    graph: CapturedGraph
    outputs: Any
    draws: bool


class PlainCodeWarning(RuntimeWarning):
    """A function of torch.compile was captured without being compiled."""


@attrs.frozen
class _Watched:
    """What a watched capture, or its warmup, revealed about the operations.

    Attributes:
        holds: Storages they read or write, which their graphs must keep alive.
        draws: They may draw random numbers.
    """

    holds: tuple[Any, ...]
    draws: bool


class GraphMaker:
    """Captures single graphs of one lane.

    Args:
        lane: The lane.
        device: The device of tensors.
        generators: Random generators of the step other than the default ones.
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
        """Look up again what the step reads, since it may have been replaced."""
        self._watched.clear()

    def expect_bytes(
        self, run: Callable[[], Any], slots: Sequence[OutputSlot | None]
    ) -> int | None:
        """Return the memory of a graph in a separate pool, with outputs; None if unknown.

        Raises:
            CaptureError: It cannot be captured.
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
        """Capture a function with its outputs in the lane's memory, within the budget.

        Args:
            run: The function to capture.
            slots: The memory for its outputs.
            admission: Admits memory; None if there is no limit.
            name: Name of the operations; graphs of the same name run the same operations at other
                sizes.
            notes: Notes of the preceding warmup, with the same operations.
            compiled: What is known about functions of torch.compile in it, which a capture on a
                device runs compiled and can hardly observe.
            draws: It may draw random numbers, according to its warmup.
        """
        lane = self._lane
        if admission is not None:
            # In other memory: results of an earlier replay in the lane's memory may still be read.
            others = _targets_in(SharedMemory(self._device), slots)

            def trial() -> Any:
                rehearsed = SharedOutputs(run, others)
                rehearsed()
                return rehearsed.outputs  # referenced only by the rehearsal, which counts them

            more = sum(lane.outputs.growth(*slot) for slot in slots if slot is not None)
            admission.ask_for_graph(trial, self._generators, more)
            lane.let_steps_in(REHEARSAL)
        captured = SharedOutputs(paced_step(lane, run), _targets_in(lane.outputs, slots))
        if self._unwatched is None:  # each is fully watched
            with lane.measuring("driver"), releasing_lock_at_end(lane, captured) as run_and_release:
                own = self._backend.capture(
                    run_and_release, stream=lane.stream, pool=lane.pool, generators=self._generators
                )
            return MadeGraph(own, captured.outputs, own.has_random_state)
        # Keys that differ only in size run the same operations, so only one of them is watched.
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
                "Another thread warmed a step up during a capture, which disables functions of "
                "torch.compile in the whole process, so the graph may contain eager kernels. "
                "Capture one runner after the other, and capture this one again.",
                PlainCodeWarning,
            )
        if known is not None:
            graph.holds.extend(known.holds)
            return MadeGraph(graph, captured.outputs, draws and known.draws)
        drawn = draws
        if compiled is not None:
            _warn_of_plain_code(graph, compiled)
            graph.holds.extend(compiled.reads)
        elif notes is None:
            drawn = draws and graph.has_random_state
        if not graph.host_tensors:
            # The lane owns and releases its memory: referenced here, it would outlive the lane's
            # graphs.
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
        """Capture a function in segments, with outputs in the lane's memory; return the outputs.

        Args:
            run: The function to capture.
            recorder: Splits it and collects the segments.
            slots: As for ``capture``.
            admission: As for ``capture``.
            breaks: Operators to break at.
            compiled: Functions of torch.compile are called.
            draws: As for ``capture``.
        """
        lane, segments = self._lane, features_of(self._backend).segments
        if segments is None:
            raise CaptureError(f"The {self._backend.name} backend does not capture in segments.")
        if admission is not None:
            others, kept = _targets_in(SharedMemory(self._device), slots), ArgumentHolder()

            def trial() -> Any:
                rehearsed = SharedOutputs(run, others)
                with use_breaker(kept):
                    rehearsed()
                return rehearsed.outputs, kept

            more = sum(lane.outputs.growth(*slot) for slot in slots if slot is not None)
            admission.ask_for_graph(trial, self._generators, more)
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
            caller.wait_stream(lane.stream)  # replays during the capture may still run
        return captured.outputs


def _warn_of_plain_code(graph: WatchedGraph, compiled: CompiledCode) -> None:
    ran_plainly = graph.num_plain_operations
    if ran_plainly >= compiled.num_operations:
        warn_at_call(
            f"The step calls functions of torch.compile, but all of their {ran_plainly} "
            "operations ran uncompiled in the capture, so the graph contains eager kernels. "
            "TORCH_LOGS=dynamo,recompiles shows why. Code called under a dispatch mode before, "
            "or beyond torch._dynamo.config.recompile_limit, stays uncompiled until "
            "torch._dynamo.reset().",
            PlainCodeWarning,
        )


def _targets_in(
    memory: SharedMemory, slots: Sequence[OutputSlot | None]
) -> list[torch.Tensor | None]:
    return [None if slot is None else memory.tensor_at(*slot) for slot in slots]


class SharedOutputs:
    """Runs a function in a capture, and copies its outputs to memory that graphs share.

    Args:
        run: The function to capture.
        targets: The memory for each output; None if it stays in the graph's memory.

    Attributes:
        outputs: The results, in their final memory. The call itself returns nothing, since a
            backend would keep the results alive.
    """

    def __init__(self, run: Callable[[], Any], targets: Sequence[torch.Tensor | None]) -> None:
        self._run, self._targets = run, targets
        self.outputs: Any = None

    def __call__(self) -> None:
        """Run the function; called by the backend."""
        leaves, structure = flatten(self._run())
        targets = self._targets or [None] * len(leaves)
        if len(targets) != len(leaves):
            raise CaptureError(
                f"The step returned {len(leaves)} values in the capture and "
                f"{len(targets)} in the warmup. A step must not depend on being captured.",
                reason="output_layout",
            )
        for target, leaf in zip(targets, leaves, strict=True):
            if target is not None:
                target.copy_(leaf)
        # Only results that stay in place may outlive the capture; the others are freed.
        final = [
            leaf if target is None else target for target, leaf in zip(targets, leaves, strict=True)
        ]
        self.outputs = structure.build(final)
