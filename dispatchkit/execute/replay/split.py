"""Plans of split batches: several graphs compute rows of one batch, joined in order.

The parts run one after the other on the caller's stream, each with its own plan. Their results are
joined by one ``cat`` per output, into the caller's own memory: the graphs of a lane write to the
same memory, so that all parts but the last are copied out before the next one runs.
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
    """The rows of one part of a batch.

    Attributes:
        key: The graph that serves them.
        start: Index of the first row.
        num_tokens: Number of rows.
    """

    key: GraphKey
    start: int
    num_tokens: int


@attrs.frozen(eq=False)
class PartPlan:
    """One part, ready to run.

    Attributes:
        rows: Its rows.
        plan: Replays them.
        step: The captured key.
        count: The plan's own counter of replays.
    """

    rows: RowsOfBatch
    plan: ReplayPlan
    step: CapturedKey
    count: StepCount


class SplitPlan:
    """Replays the parts of a batch and joins their results.

    A part whose graph turns out to be unusable runs eager, with equal results.

    Args:
        parts: The parts in their order.
        num_tokens: Rows of the batch.
        count: The counter of steps of these graphs.
        counters: Counters of its parts if one of them ran eager.
        inputs: The static inputs, or those with axes.
        eager: Runs rows that no graph serves.
        lifecycle: Determines with a call's integers whether rows are independent.
        lane: The lane.
        timer: Measures the whole step if the decision requests it.
        checker: The checker, if check mode is on.
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
        # Rows of contiguous memory are contiguous only along the first dimension.
        self._stays_readable = all(dim == 0 for _, dim in static.batched)

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Run a checked call.

        Args:
            tensors: The inputs; None if the rows are in the buffers already.
            stream: Raw handle of the current stream.
            readable: As the check of the inputs returned it.

        Raises:
            InputError: A step in place is larger than the buffers, or there are axes.
        """
        parts, lane = self._parts, self._lane
        if any(part.step.released for part in parts):
            return AGAIN
        if tensors is None:
            tensors, readable = in_place(self._inputs, lane, self._num_tokens), False
        if self._is_found_out(tensors):
            return AGAIN
        readable = readable and self._stays_readable
        timer, checker = self._timer, self._checker
        if timer is not None and timer.is_due(lane.tick):
            return self._run_timed(timer, tensors, stream, readable)
        first = parts[0].step
        if checker is not None and checker.is_due(first, self._num_tokens):
            return self._run_checked(checker, tensors, stream, readable)
        return self._run(tensors, stream, readable)

    def _is_found_out(self, tensors: Any) -> bool:
        """Run open proofs with the integers of a call; return whether anything was found.

        Before the first part runs, since a graph refused in between would end the step.
        """
        if self.eager.exact is not None:  # no single rank may run a trial alone
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
        """Count parts that replayed separately; the others are counted as eager."""
        for part in self._parts:
            count = self._counters.of_keys(part.rows.key)
            count.steps += part.count.steps
            count.tokens += part.count.tokens

    def _forget_counts(self) -> None:
        for part in self._parts:
            part.count.steps = part.count.tokens = 0

    def _joined(self, results: Sequence[Sequence[Any]]) -> Any:
        """Return the outputs of the whole batch."""
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
            timings.fail(measurement)  # a part did not run as planned
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
            count.steps, count.tokens = steps, tokens  # the caller gets eager's result
            return eager.check_failed(first, found, result, self._num_tokens)
        return result


class LazySplitPlan:
    """A batch with parts without a graph: captures them, or runs eager until they are due.

    Args:
        parts: All parts.
        num_tokens: Rows of the batch.
        inputs: The static inputs, or those with axes.
        registry: The registry of their graphs.
        eager: Runs the step until then.
        lifecycle: Captures.
        lane: The lane.
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
        """Capture and consult the table again, or run eager."""
        eager, num_tokens = self.eager, self._num_tokens
        eager.refuse_if_exact("a part of it has no graph yet")
        reason, missed = "", self._parts[0].key
        most = self._lifecycle.budget.max_graphs
        if most is not None and most < len({rows.key for rows in self._parts}):
            # Each capture would evict another part's graph, at every step.
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
            # Its capture failed or evicted another part, which would repeat at every step.
            reason, missed = Reason.EVICTED, left[0].key
        if not reason:
            return AGAIN
        return eager.run_for(reason, tensors, num_tokens, missed)

    def _without_graph(self) -> list[RowsOfBatch]:
        """Return the parts without a graph, one per graph."""
        found: dict[GraphKey, RowsOfBatch] = {}
        for rows in self._parts:
            entry = self._registry.get(rows.key)
            if entry is None or entry.state is not KeyState.CAPTURED:
                found.setdefault(rows.key, rows)
        return list(found.values())


def in_place(inputs: InputSet | AxisInputs, lane: Lane, num_tokens: int) -> Sequence[Any]:
    """Return a step in place as a call, since its parts overwrite the buffers.

    Raises:
        InputError: It is larger than the buffers, or there are axes.
    """
    if isinstance(inputs, AxisInputs):
        raise in_place_error(inputs.names)
    given: list[Any] = lane.buffers.copies(num_tokens)
    for index, rows in lane.buffers.host_rows(num_tokens):
        given[index] = rows.clone()
    return inputs.to_arrays(given) if inputs.host else given
