"""Plans: run the steps of one cell of the dispatcher's table.

The dispatcher binds each decision to a plan once, and a step then only calls the plan. A plan is
for an exact number of tokens, so it can cache views of static inputs and outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from dispatchkit.backends.optional import LaunchCall
from dispatchkit.execute.capture.captured import CapturedKey, LaunchError
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.io.axes import in_place_error
from dispatchkit.execute.io.outputs import cut
from dispatchkit.execute.io.structure import flatten, leaves_of, own_value
from dispatchkit.execute.io.transports import Transport, transport_of
from dispatchkit.execute.lane import Chain, Lane
from dispatchkit.execute.replay.check import Checker
from dispatchkit.execute.replay.direct import direct_call, in_turn, noting, refused
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.timing import Timer
from dispatchkit.execute.step.guard import Guard, Watched, difference
from dispatchkit.execute.step.reasons import DOWNGRADES
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCount


class _Again:
    """Result of a plan that has not run the step; the caller looks up the decision again."""


AGAIN: Final = _Again()

# Marks a result that must be built in each step.
_NOT_READY: Final = object()

# This query is three times as fast as querying autocast for a single device type.
_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


class EagerPlan:
    """A plan that runs the step eager, at its exact size.

    Args:
        eager: Runner of eager steps.
        lifecycle: Lifecycle of the lane's graphs, used to retry captures that are due.
        lane: Lane whose static inputs hold the rows of in-place steps.
        num_tokens: Number of rows in each batch of the cell.
        reason: Reason to count for each step.
        count: Counter of the plan's steps.
        missed: First key that could have served the step, or None.
        retry: A failed or stale key that may be captured again, or None.
        timer: Timer, if the decision requests measurements.

    Attributes:
        eager: Runner of eager steps.
        count: Counter of the plan's steps.
    """

    def __init__(
        self,
        eager: EagerRunner,
        lifecycle: Lifecycle,
        lane: Lane,
        num_tokens: int,
        reason: str,
        count: StepCount,
        missed: GraphKey | None,
        retry: GraphKey | None,
        timer: Timer | None,
    ) -> None:
        self.eager: EagerRunner = eager
        self._lifecycle, self._lane = lifecycle, lane
        self._num_tokens, self._reason, self.count = num_tokens, reason, count
        self._missed, self._retry, self._timer = missed, retry, timer
        self._is_downgrade = reason in DOWNGRADES

    def run(self, tensors: Sequence[Any] | None, stream: int, readable: bool = False) -> Any:
        """Run a validated call.

        Raises:
            NoGraphError: The runner is strict and the reason is a downgrade.
        """
        eager, num_tokens, timer = self.eager, self._num_tokens, self._timer
        if self._is_downgrade:
            if self._retry is not None and eager.exact is None:
                with inputs_kept(self._lane, tensors, num_tokens) as sample:
                    is_tried = self._lifecycle.retry_if_due(self._retry, sample)
                if is_tried:
                    return AGAIN
            if self._missed is not None:
                self._lifecycle.note_missed(self._missed)
            eager.warn(self._reason, num_tokens, self._missed, tensors)
        if timer is None or not timer.is_due(self._lane.tick):
            result = eager.run(tensors, num_tokens)
        else:
            result = timer.measure(lambda: eager.run(tensors, num_tokens))
        self.count.steps += 1
        self.count.tokens += num_tokens
        return result

    def num_plain(self) -> int:
        """Return the number of upcoming steps that may bypass the plan."""
        if self._timer is not None or not self.eager.is_plain():
            return 0
        if not self._is_downgrade or self._retry is None:
            return sys.maxsize
        return self._lifecycle.steps_until_retry(self._retry)

    def note_plain(self, num_steps: int) -> None:
        """Record steps that bypassed the plan."""
        if self._is_downgrade and self._missed is not None:
            self._lifecycle.note_missed(self._missed, num_steps)
            if self._retry is not None:
                self._lifecycle.note_retry(self._retry, num_steps)


@contextmanager
def inputs_kept(
    lane: Lane, tensors: Sequence[Any] | None, num_tokens: int
) -> Iterator[Sequence[Any] | None]:
    """Yield the inputs of a step, and restore them afterwards if they are in static inputs.

    Yield None for an in-place step that is larger than the buffers.
    """
    buffers = lane.buffers
    if tensors is None and num_tokens <= buffers.num_rows:
        with buffers.preserved(num_tokens):
            yield buffers.copies(num_tokens)
    elif tensors is not None and buffers.are_shared:  # the call's inputs may be in these buffers
        with buffers.preserved(buffers.num_rows):
            yield buffers.copy_overlapping(tensors)
    else:
        yield tensors


class LazyPlan:
    """A plan that captures the missing graph of a key when due, or runs eager.

    Args:
        eager: Runner of eager steps, for steps before the capture.
        lifecycle: Lifecycle of the lane's graphs, used to capture the key.
        lane: Lane whose static inputs hold the rows of in-place steps.
        key: Key to capture.
        num_tokens: Number of rows in each batch of the cell.
    """

    def __init__(
        self,
        eager: EagerRunner,
        lifecycle: Lifecycle,
        lane: Lane,
        key: GraphKey,
        num_tokens: int,
    ) -> None:
        self.eager: EagerRunner = eager
        self._lifecycle, self._lane = lifecycle, lane
        self._key, self._num_tokens = key, num_tokens

    def run(self, tensors: Sequence[Any] | None, stream: int, readable: bool = False) -> Any:
        """Capture the key and return ``AGAIN``, or run eager."""
        self.eager.refuse_if_exact("the key has no graph yet")
        with inputs_kept(self._lane, tensors, self._num_tokens) as sample:
            reason = self._lifecycle.capture_if_due(self._key, sample)
        if not reason:
            return AGAIN
        return self.eager.run_for(reason, tensors, self._num_tokens, self._key)


class OpenPlan:
    """A plan that replays a graph whose row proof is unfinished.

    The proof shows that padding does not change the rows of a batch. At the capture, integer inputs
    contained only the fill value, so the proof continues with the inputs of real calls.

    Args:
        plan: Plan that replays the graph.
        step: Captured key.
        lifecycle: Lifecycle of the lane's graphs, used to run the proof.
        num_tokens: Number of rows in each batch of the cell.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        step: CapturedKey,
        lifecycle: Lifecycle,
        num_tokens: int,
    ) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._step = plan, step
        self._lifecycle, self._num_tokens = lifecycle, num_tokens

    def run(self, tensors: Sequence[Any] | None, stream: int, readable: bool = False) -> Any:
        """Continue the proof with this call; return ``AGAIN`` if the proof ends, else replay."""
        step, lane = self._step, self._step.lane
        if step.released:
            return AGAIN
        # A proof on one rank would run collectives without the other ranks.
        if step.rows.open_calls and self.eager.exact is None:
            with inputs_kept(lane, tensors, self._num_tokens) as sample:
                is_found = sample is not None and self._lifecycle.prove_rows(step, sample)
            if is_found:
                return AGAIN
        return self._plan.run(tensors, stream, readable)


class GraphPlan:
    """A plan that replays a captured step: the hot path.

    The first run prepares and caches views of inputs and outputs at the unpadded size, the launch
    function, and the function that builds the result. Each later step compares the guards, copies
    the inputs, launches the graph and updates the counter.

    Args:
        step: Captured key.
        num_tokens: Number of rows in each batch of the cell, at most the size of the graph.
        count: Counter of the plan's steps.
        eager: Runner of eager steps, used if a guard or the launch fails.
        guard: Guard that compares autocast, training flags and weight addresses with those of the
            capture.
        is_owned: Whether each call returns new tensors.

    Attributes:
        transport: Transport of the inputs; None before the first run, and after ``forget``.
    """

    def __init__(
        self,
        step: CapturedKey,
        num_tokens: int,
        count: StepCount,
        eager: EagerRunner,
        guard: Guard,
        *,
        is_owned: bool,
    ) -> None:
        self.eager: EagerRunner = eager
        self.step: CapturedKey = step
        self.num_tokens: int = num_tokens
        self.count: StepCount = count
        self._guard, self._is_owned = guard, is_owned
        self.transport: Transport | None = None
        self._lane, self._values = step.lane, step.values
        self._had_autocast = step.guard[0] is not None
        self._modules: tuple[Watched, ...] = guard.watched(step.guard)
        # None if the graph is launched by its replay(). A bound method of the plan in place of None
        # would create a reference cycle.
        self._launch: LaunchCall | None = None
        self._graph: Any = None
        self._chain: Chain | None = None
        self._may_go_direct = True  # the first replay shows whether the graph draws random numbers
        self._ready: Any = _NOT_READY
        self._make: Callable[[], Any] | None = None
        self._leaves: list[Any] | None = None
        self._padded: Sequence[Any] = ()
        self._build = step.layout.structure.builder()
        self._has_mutable_values = any(one.is_mutable_value for one in step.layout.leaves)

    def run(self, tensors: Sequence[Any] | None, stream: int, readable: bool = False) -> Any:
        """Copy the inputs of a call, launch the graph, and return the results of its rows.

        Args:
            tensors: Inputs of the step; None if the rows are already in the buffers.
            stream: Raw handle of the current stream.
            readable: Second result of ``InputSet.check`` for these inputs.
        """
        step, lane = self.step, self._lane
        if step.released:
            return AGAIN
        # If readable, the check of the inputs has verified that autocast is off.
        may_differ = self._had_autocast or (not readable and _is_any_autocast_enabled())
        for module, training, place_now, place in self._modules:
            if module.training is not training or place_now() != place:
                may_differ = True
        if may_differ:
            reason = self.guard_reason()
            if reason:
                return self.eager.run_for(reason, tensors, self.num_tokens, step.key)
        values = self._values
        if lane.tick >= values.due and not values.is_unchanged(lane.tick):
            reason = self.eager.replaced(step)
            if reason:
                return self.eager.run_for(reason, tensors, self.num_tokens, step.key)
        if stream != lane.handle:
            lane.switch(stream)
        transport = self.transport or self.prepare()
        if tensors is not None:
            buffers = transport.buffers
            if buffers.are_shared and transport.overlapping:
                tensors = buffers.copy_overlapping(tensors, transport.overlapping)
            transport.load(tensors, readable)
        else:
            transport.load_in_place()
        if lane.row_count is not None:
            lane.set_rows(self.num_tokens)
        try:
            launch = self._launch
            if launch is None:
                self._replay()
            elif code := launch(self._graph, lane.stream_argument):
                raise refused(code, step)
        except LaunchError as error:
            return self.eager.replay_failed(step, error, tensors, self.num_tokens)
        lane.tick = step.last_used = lane.tick + 1
        step.hits += 1
        count = self.count
        count.steps += 1
        count.tokens += self.num_tokens
        ready = self._ready
        if ready is not _NOT_READY:
            return ready
        make = self._make
        return self._make_result() if make is None else make()

    def forget(self) -> None:
        """Release cached objects; the next run prepares them again."""
        self.transport = None
        self._ready, self._leaves, self._make = _NOT_READY, None, None
        self._launch, self._graph, self._padded = None, None, ()

    def guard_reason(self) -> str:
        """Return the reason why a guard fails; empty if all guards hold."""
        return difference(self.step.guard, self._guard.now())

    # -- preparation --------------------------------------------------------------------

    def prepare(self) -> Transport:
        """Prepare and cache the launch and the result; return the transport."""
        step = self.step
        self._choose_launch()
        if step.pads_draws(self.num_tokens):
            self.eager.warn_of_padded_draws(step.key, self.num_tokens)
        if step.leaves:
            self._leaves = cut(step.layout, step.leaves, self.num_tokens, self._row_values)
            self._choose_result(self._leaves)
            if not self._is_owned:
                step.input_path.buffers.mark_shared_results(self._leaves)
        transport = self.transport = transport_of(step.input_path, self.num_tokens)
        step.lane.add_caching_plan(self)
        return transport

    def _choose_launch(self) -> None:
        step, lane = self.step, self._lane
        self._may_go_direct = any(graph.has_random_state for graph in step.graphs)
        chain = lane.chain
        if chain is not None and not chain.orders(step.graphs, has_effect=step.has_effect):
            chain = None
        self._chain = chain
        direct = direct_call(lane.backend, step)
        if isinstance(direct, str):
            self._launch, self._graph = None, None
            return
        launch, self._graph = direct
        if step.input_path.staging is not None:
            launch = noting(launch, step.input_path.staging, lane)
        if chain is not None:
            launch = in_turn(launch, chain, lane)
        self._launch = launch

    def _choose_result(self, leaves: list[Any]) -> None:
        """Cache a result that all calls may return, or the function that clones a single output."""
        structure = self.step.layout.structure
        if self._is_owned and any(self.step.clones):
            if structure.is_leaf:
                self._make = leaves[0].clone
        elif not self._has_mutable_values and (structure.is_leaf or structure.is_flat_tuple):
            self._ready = self._build(leaves)

    # -- replay without a direct launch -------------------------------------------------

    def _replay(self) -> None:
        """Launch with the graph's ``replay``; later launches may be direct."""
        step, lane, chain = self.step, self._lane, self._chain
        staging = step.input_path.staging
        stream = None if chain is None else chain.begin(lane)
        try:
            if staging is not None and step.pieces is not None:
                staging.queue_copy(step.key.num_tokens)  # once, before all pieces or segments
            padded = step.launch(self.num_tokens)
            if staging is not None and lane.last_stream is not None:
                staging.record_launch(lane.last_stream)
        finally:  # a failed launch may have queued some of the work
            if chain is not None:
                chain.end(stream)
        # Outputs of a graph are in step.leaves. They are not stored here, because they must not
        # outlive the graph.
        if not step.leaves:  # the last piece is eager
            self._padded = padded
        if self._may_go_direct:
            self._choose_launch()

    def _make_result(self) -> Any:
        leaves = self._leaves
        if leaves is None:
            leaves = cut(self.step.layout, self._padded, self.num_tokens, self._row_values)
        if self._is_owned:
            leaves = [
                leaf.clone() if own else leaf
                for leaf, own in zip(leaves, self.step.clones, strict=True)
            ]
        if self._has_mutable_values:
            leaves = [
                own_value(leaf) if one.is_mutable_value else leaf
                for leaf, one in zip(leaves, self.step.layout.leaves, strict=True)
            ]
        return self._build(list(leaves))

    @property
    def _row_values(self) -> Mapping[int, Any]:
        return self.step.row_values.get(self.num_tokens, {})


class ValuesPlan:
    """A plan for padded steps that return Python values.

    A replay runs no Python code, so the values for each number of rows are measured before the
    first replay with this number of rows.

    Args:
        plan: Plan that replays the graph.
        step: Captured key.
        num_tokens: Number of rows in each batch of the cell.
        lifecycle: Lifecycle of the lane's graphs, used to measure the values.
    """

    def __init__(
        self, plan: TimeablePlan, step: CapturedKey, num_tokens: int, lifecycle: Lifecycle
    ) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._step, self._num_tokens = plan, step, num_tokens
        self._lifecycle = lifecycle

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Measure the values if necessary, and replay the graph."""
        step, num_tokens = self._step, self._num_tokens
        if num_tokens not in step.row_values and not step.released:
            with inputs_kept(step.lane, tensors, num_tokens):
                self._lifecycle.measure_values(step, num_tokens)
        return self._plan.run(tensors, stream, readable)


class TimedPlan:
    """A plan that replays a captured step and measures it when due.

    If no measurement is due, a step costs one more call and one more comparison than without a
    timer.

    Args:
        plan: Plan that replays the graph.
        timer: Timer that measures the step when due.
    """

    def __init__(self, plan: GraphPlan, timer: Timer) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._lane = plan, plan.step.lane
        self._timer, self._timings = timer, timer.timings
        self._is_always_due = timer.is_always_due

    def run(self, tensors: Sequence[Any] | None, stream: int, readable: bool = False) -> Any:
        """Replay the graph, and measure the step if due."""
        lane, plan = self._lane, self._plan
        if lane.tick < self._timings.due and not self._is_always_due:
            return plan.run(tensors, stream, readable)
        step = plan.step
        if step.released:
            return AGAIN
        # Do not measure the wait for another stream, or one-time preparation.
        if stream != lane.handle:
            lane.switch(stream)
        if plan.transport is None:
            plan.prepare()
        hits, measurement = step.hits, self._timer.begin()
        try:
            result = plan.run(tensors, stream, readable)
        except Exception:
            self._timings.fail(measurement)
            raise
        if step.hits == hits:
            self._timings.fail(measurement)  # the step ran eager
        else:
            self._timings.finish(measurement)
        return result


class AxisPlan:
    """A plan that cuts the results of a runner with axes to the axis values of the call.

    Args:
        plan: Plan that replays the graph.
        step: Captured key.
        axes: Names of the axes.
        is_owned: Whether each call returns new tensors.
    """

    def __init__(
        self,
        plan: TimeablePlan,
        step: CapturedKey,
        axes: Sequence[str],
        *,
        is_owned: bool,
    ) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._step, self._axes, self._is_owned = plan, step, axes, is_owned

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Replay the graph, and cut the results.

        Raises:
            InputError: The step is an in-place step.
        """
        if tensors is None:
            raise in_place_error(self._axes)
        result = self._plan.run(tensors, stream, readable)
        cuts = self._step.axis_cuts
        buckets = self._step.key.descriptor.axes
        if result is AGAIN or not cuts or tensors.values == buckets:
            return result
        leaves, _ = flatten(result)
        for number, dim, index, more in cuts:
            size = tensors.values[index] + more
            if leaves[number].shape[dim] == buckets[index] + more != size:
                leaf = leaves[number].narrow(dim, 0, max(0, size))
                leaves[number] = leaf.clone() if self._is_owned else leaf
        return self._step.layout.structure.build(leaves)


class CheckedPlan:
    """A plan for check mode, which compares replays with eager runs.

    Args:
        plan: Plan that replays the graph and, with axes, cuts the results.
        replay: Plan of the replay alone.
        checker: Checker that compares the results.
        is_owned: Whether each call returns new tensors.
    """

    def __init__(
        self,
        plan: TimeablePlan | AxisPlan,
        replay: GraphPlan,
        checker: Checker,
        *,
        is_owned: bool,
    ) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._replay, self._checker, self._is_owned = plan, replay, checker, is_owned

    def run(self, tensors: Sequence[Any] | None, stream: int, readable: bool = False) -> Any:
        """Replay the graph, and compare the results with an eager run if due."""
        replay, eager, checker = self._replay, self.eager, self._checker
        step, num_tokens, count = replay.step, replay.num_tokens, replay.count
        if step.released:
            return AGAIN
        if replay.guard_reason() or not checker.count(step, num_tokens):
            hits = step.hits
            result = self._plan.run(tensors, stream, readable)
            if (
                self._is_owned or step.hits == hits
            ):  # the results are not views, or the step ran eager
                return result
            return step.layout.structure.build(checker.copy_views(leaves_of(result)))
        steps, tokens = count.steps, count.tokens
        result, found = checker.compare(
            step,
            num_tokens,
            lambda: self._own(self._plan.run(tensors, stream, readable)),
            lambda: eager.run(tensors, num_tokens),
            tensors,
        )
        if found:
            # The caller gets the eager result, so the step counts as eager.
            count.steps, count.tokens = steps, tokens
            return eager.check_failed(step, found, result, num_tokens)
        return result

    def _own(self, result: Any) -> Any:
        """Return a result, copied if it is in the memory of the graphs."""
        step, leaves = self._replay.step, leaves_of(result)
        if self._is_owned or len(leaves) != len(step.clones):
            return result
        own = [leaf.clone() if one else leaf for leaf, one in zip(leaves, step.clones, strict=True)]
        return step.layout.structure.build(own)


#: A plan that replays a captured step and returns its results.
TimeablePlan = GraphPlan | TimedPlan | ValuesPlan
#: A ``TimeablePlan``, or a plan that processes its results.
ReplayPlan = TimeablePlan | AxisPlan | CheckedPlan
Plan = EagerPlan | LazyPlan | OpenPlan | ReplayPlan
