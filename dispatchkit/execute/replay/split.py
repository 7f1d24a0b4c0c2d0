"""Plans of split batches, whose rows are computed by several graphs.

The parts run in order on the caller's stream, each with its own plan, and one ``cat`` per output
joins their results in new memory. The graphs of a lane write to the same memory, so the results of
each part but the last are copied before the next part runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from dispatchkit.dispatch import Reason
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.io.axes import AxisInputs, in_place_error
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.structure import leaves_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.check import Checker
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.plans import AGAIN, ReplayPlan, inputs_kept
from dispatchkit.execute.replay.timing import Timer
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCount, StepCounters
from dispatchkit.registry import GraphRegistry, KeyState


@attrs.frozen(eq=False)
class RowsOfBatch:
    """The rows of a batch that belong to one part.

    Attributes:
        key: Key of the graph that serves the rows.
        start: Index of the first row.
        num_tokens: Number of rows.
    """

    key: GraphKey
    start: int
    num_tokens: int


@attrs.frozen(eq=False)
class PartPlan:
    """The plan of one part of a batch.

    Attributes:
        rows: Rows of the part.
        plan: Plan that replays the graph.
        step: The captured key whose graph the plan replays.
        count: Counter of the plan's replays.
    """

    rows: RowsOfBatch
    plan: ReplayPlan
    step: CapturedKey
    count: StepCount


class SplitPlan:
    """A plan that replays the parts of a batch and joins their results.

    A part whose graph cannot be used runs eager, with the same results.

    Args:
        parts: Parts in order.
        num_tokens: Number of rows in the batch.
        count: Counter of the steps that replay all parts.
        counters: Step counters, which count the parts separately if any part ran eager.
        inputs: Static inputs, or the ``AxisInputs`` of a runner with axes.
        eager: Runner of eager steps, for parts whose graph cannot be used.
        lifecycle: Lifecycle of the lane's graphs, used to prove that rows are independent.
        lane: Lane that the steps run on.
        timer: Timer of the whole step, if the decision requests measurements.
        checker: Checker in check mode, otherwise None.
    """

    def __init__(
        self,
        parts: Sequence[PartPlan],
        num_tokens: int,
        count: StepCount,
        counters: StepCounters,
        inputs: InputSet | AxisInputs,
        eager: EagerRunner,
        lifecycle: Lifecycle,
        lane: Lane,
        timer: Timer | None,
        checker: Checker | None,
    ) -> None:
        self.eager: EagerRunner = eager
        self._parts, self._num_tokens = tuple(parts), num_tokens
        self._count, self._counters = count, counters
        self._inputs, self._lifecycle, self._lane = inputs, lifecycle, lane
        self._timer, self._checker = timer, checker
        self._layout = parts[0].step.layout
        static = inputs.smallest if isinstance(inputs, AxisInputs) else inputs
        # A slice of a contiguous tensor is contiguous only if it is taken along dimension 0.
        self._stays_readable = all(dim == 0 for _, dim in static.batched)

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Run a validated call.

        Args:
            tensors: Inputs of the step; None if the rows are already in the buffers.
            stream: Raw handle of the current stream.
            readable: Second result of ``InputSet.check`` for these inputs.

        Raises:
            InputError: The step is an in-place step, and either the runner has axes or the batch is
                larger than the buffers.
        """
        parts, lane = self._parts, self._lane
        if any(part.step.released for part in parts):
            return AGAIN
        if tensors is None:
            tensors, readable = in_place(self._inputs, lane, self._num_tokens), False
        if self._run_open_proofs(tensors):
            return AGAIN
        readable = readable and self._stays_readable
        timer, checker = self._timer, self._checker
        if timer is not None and timer.is_due(lane.tick):
            return self._run_timed(timer, tensors, stream, readable)
        first = parts[0].step
        if checker is not None and checker.count(first, self._num_tokens):
            return self._run_checked(checker, tensors, stream, readable)
        return self._run(tensors, stream, readable)

    def _run_open_proofs(self, tensors: Any) -> bool:
        """Continue open proofs with the inputs of a call; return whether any proof has ended.

        Proofs run before the first part, because a step that has begun cannot be decided again.
        """
        # A proof on one rank would run collectives without the other ranks.
        if self.eager.exact is not None:
            return False
        found = False
        for part in self._parts:
            step, rows = part.step, part.rows
            is_padded = rows.num_tokens < rows.key.num_tokens
            if not step.rows.open_parts and not (is_padded and step.rows.open_calls):
                continue
            sample = self._inputs.part(tensors, rows.start, rows.num_tokens)
            apart = self._lane.buffers_of(rows.key).copy_overlapping(sample)
            if is_padded and step.rows.open_calls:
                found |= self._lifecycle.prove_rows(step, apart)
            if step.rows.open_parts and not step.released:
                found |= self._lifecycle.prove_independent(step, apart)
        return found

    def _run(self, tensors: Any, stream: int, readable: bool) -> Any:
        lane, eager = self._lane, self.eager
        results: list[Sequence[Any]] = []
        tick, is_whole = lane.tick, True
        for part in self._parts:
            rows = part.rows
            own = self._inputs.part(tensors, rows.start, rows.num_tokens)
            replays = part.count.steps
            result = part.plan.run(own, stream, readable)
            if result is AGAIN:
                if not results:
                    return AGAIN
                result = eager.run_for(Reason.EVICTED, own, rows.num_tokens, rows.key)
            is_whole &= part.count.steps > replays
            results.append(leaves_of(result))
        lane.tick = tick + 1
        if is_whole:
            self._count.steps += 1
            self._count.tokens += self._num_tokens
        else:
            self._count_parts()
        self._forget_counts()
        return self._joined(results)

    def _count_parts(self) -> None:
        """Count each replayed part separately; eager parts are already counted."""
        for part in self._parts:
            count = self._counters.of_keys(part.rows.key)
            count.steps += part.count.steps
            count.tokens += part.count.tokens

    def _forget_counts(self) -> None:
        for part in self._parts:
            part.count.steps = part.count.tokens = 0

    def _joined(self, results: Sequence[Sequence[Any]]) -> Any:
        """Join the outputs of the parts."""
        leaves: list[Any] = []
        for index, one in enumerate(self._layout.leaves):
            if one.kind == "rows":
                leaves.append(self._num_tokens)
            elif one.batch_dim is None:
                leaves.append(results[0][index])
            else:
                leaves.append(torch.cat([own[index] for own in results], one.batch_dim))
        return self._layout.structure.build(leaves)

    def _run_timed(self, timer: Timer, tensors: Any, stream: int, readable: bool) -> Any:
        timings, steps = timer.timings, self._count.steps
        measurement = timer.begin()
        try:
            result = self._run(tensors, stream, readable)
        except Exception:
            timings.fail(measurement)
            raise
        if self._count.steps == steps:
            timings.fail(measurement)  # a part ran eager
        else:
            timings.finish(measurement)
        return result

    def _run_checked(self, checker: Checker, tensors: Any, stream: int, readable: bool) -> Any:
        count, eager, first = self._count, self.eager, self._parts[0].step
        steps, tokens = count.steps, count.tokens
        result, found = checker.compare(
            first,
            self._num_tokens,
            lambda: self._run(tensors, stream, readable),
            lambda: eager.run(tensors, self._num_tokens),
            tensors,
        )
        if found:
            count.steps, count.tokens = steps, tokens  # the caller gets the eager result
            return eager.check_failed(first, found, result, self._num_tokens)
        return result


class LazySplitPlan:
    """A plan that captures the missing graphs of a split batch when due, or runs eager.

    Args:
        parts: Parts in order.
        num_tokens: Number of rows in the batch.
        inputs: Static inputs, or the ``AxisInputs`` of a runner with axes.
        registry: Registry in which the graphs of the parts are looked up.
        eager: Runner of eager steps, for steps that run before all parts have graphs.
        lifecycle: Lifecycle of the lane's graphs, used to capture the parts.
        lane: Lane that the steps run on.
    """

    def __init__(
        self,
        parts: Sequence[RowsOfBatch],
        num_tokens: int,
        inputs: InputSet | AxisInputs,
        registry: GraphRegistry,
        eager: EagerRunner,
        lifecycle: Lifecycle,
        lane: Lane,
    ) -> None:
        self.eager: EagerRunner = eager
        self._parts, self._num_tokens = tuple(parts), num_tokens
        self._inputs, self._registry = inputs, registry
        self._lifecycle, self._lane = lifecycle, lane

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Capture the parts and return ``AGAIN``, or run eager."""
        eager, num_tokens = self.eager, self._num_tokens
        eager.refuse_if_exact("part of the batch has no graph yet")
        reason, missed = "", self._parts[0].key
        most = self._lifecycle.budget.max_graphs
        if most is not None and most < len({rows.key for rows in self._parts}):
            # Otherwise, each step would capture graphs and evict those of other parts.
            return eager.run_for(Reason.EVICTED, tensors, num_tokens, missed)
        with inputs_kept(self._lane, tensors, num_tokens) as kept:
            given: Any = kept
            for rows in self._without_graph():
                sample = given
                if given is not None:
                    sample = self._inputs.part(given, rows.start, rows.num_tokens)
                found = self._lifecycle.capture_if_due(rows.key, sample)
                if found and not reason:
                    reason, missed = found, rows.key
        if not reason and (left := self._without_graph()):
            # A capture failed, or it evicted the graph of another part. Returning AGAIN could
            # repeat the same captures and evictions forever.
            reason, missed = Reason.EVICTED, left[0].key
        if not reason:
            return AGAIN
        return eager.run_for(reason, tensors, num_tokens, missed)

    def _without_graph(self) -> list[RowsOfBatch]:
        """Return the parts that have no graph; if several have the same key, only the first."""
        found: dict[GraphKey, RowsOfBatch] = {}
        for rows in self._parts:
            entry = self._registry.get(rows.key)
            if entry is None or entry.state is not KeyState.CAPTURED:
                found.setdefault(rows.key, rows)
        return list(found.values())


def in_place(inputs: InputSet | AxisInputs, lane: Lane, num_tokens: int) -> Sequence[Any]:
    """Return copies of the inputs of an in-place step.

    Copies are needed because the parts of a split batch overwrite the buffers.

    Raises:
        InputError: The runner has axes, or the batch is larger than the buffers.
    """
    if isinstance(inputs, AxisInputs):
        raise in_place_error(inputs.names)
    given: list[Any] = lane.buffers.copies(num_tokens)
    for index, rows in lane.buffers.host_rows(num_tokens):
        given[index] = rows.clone()
    return inputs.to_arrays(given) if inputs.host else given
