"""Planner: creates the plans of table cells."""

from __future__ import annotations

import weakref

import attrs

from dispatchkit.dispatch import Decision, Dispatcher, Reason
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.check import Checker
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.plans import (
    AxisPlan,
    CheckedPlan,
    EagerPlan,
    GraphPlan,
    LazyPlan,
    OpenPlan,
    Plan,
    ReplayPlan,
    TimeablePlan,
    TimedPlan,
    ValuesPlan,
)
from dispatchkit.execute.replay.split import LazySplitPlan, PartPlan, RowsOfBatch, SplitPlan
from dispatchkit.execute.replay.step_slots import SlotPlan, StepSlots
from dispatchkit.execute.replay.timing import Timer, Timings
from dispatchkit.execute.step.guard import Guard, difference
from dispatchkit.execute.step.reasons import FAILED_KEY_REASONS
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import CUDAGraphMode, RuntimeMode
from dispatchkit.observe.counters import StepCount, StepCounters
from dispatchkit.registry import KeyState


class Planner:
    """Creates plans for the decisions in the dispatcher's table.

    Args:
        dispatcher: Dispatcher. The reference is weak, because the dispatcher calls ``plan`` and
            therefore holds the planner.
        lifecycle: Lifecycle of the lane's graphs, passed on to the plans.
        lane: Lane that the steps run on.
        eager: Runner of eager steps.
        guard: Guard that reads autocast, training flags and weight addresses.
        counters: Counters in which the plans count steps.
        timings: Timings that collect the measurements of steps.
        checker: Checker in check mode, otherwise None. Check mode measures nothing, because steps
            run twice.
        inputs: Static inputs, or the ``AxisInputs`` of a runner with axes.
        axes: Names of the axes.
        slots: Reader of the slots that steps use; None without slots.
        requested_mode: Requested mode; the mode in use may be lower.
        is_owned: Whether each call returns new tensors.

    Attributes:
        requested_mode: Requested mode, which a swap may change.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        lifecycle: Lifecycle,
        lane: Lane,
        eager: EagerRunner,
        guard: Guard,
        counters: StepCounters,
        timings: Timings,
        checker: Checker | None,
        *,
        inputs: InputSet | AxisInputs,
        axes: tuple[str, ...],
        slots: StepSlots | None,
        requested_mode: CUDAGraphMode,
        is_owned: bool,
    ) -> None:
        self._dispatcher = weakref.ref(dispatcher)
        self._registry = dispatcher.registry
        self._lifecycle, self._lane, self._eager, self._guard = lifecycle, lane, eager, guard
        self._counters, self._timings, self._checker = counters, timings, checker
        self._inputs, self._axes, self._is_owned = inputs, axes, is_owned
        self._slots = slots
        self.requested_mode = requested_mode

    def plan(self, decision: Decision, batch: Batch) -> Plan | SplitPlan | LazySplitPlan | SlotPlan:
        """Return the plan of a decision; called under the dispatcher's lock."""
        plan = self._plan(decision, batch)
        return plan if self._slots is None else SlotPlan(plan, self._slots, batch.num_tokens)

    def _plan(self, decision: Decision, batch: Batch) -> Plan | SplitPlan | LazySplitPlan:
        num_tokens = batch.num_tokens
        timer = None
        if decision.timed and self._checker is None:
            timer = Timer(self._timings, decision, batch)
        if (key := decision.key) is not None:
            if refused := self.refusal(decision, num_tokens):
                count = self._counters.of_eager(refused, key)
                return self._run_eager(num_tokens, refused, count, key, None, timer)
            if decision.parts:
                return self._split(decision, num_tokens, timer)
            entry = self._registry.get(key)
            if entry is None or entry.state is not KeyState.CAPTURED:
                return LazyPlan(self._eager, self._lifecycle, self._lane, key, num_tokens)
            plan, step = self.replay(key, entry.graph, num_tokens, timer), entry.graph
            if num_tokens < key.num_tokens and step.rows.open_calls:
                return OpenPlan(plan, step, self._lifecycle, num_tokens)
            return plan
        missed = self._missed(batch) if num_tokens else []
        first = missed[0] if missed else None
        reason = self.specific_reason(decision.reason, first)
        count = self._counters.of_eager(reason, first)
        retry = self._lifecycle.retry_key(reason, missed)
        return self._run_eager(num_tokens, reason, count, first, retry, timer)

    def refusal(self, decision: Decision, num_tokens: int) -> str:
        """Return why a batch must run eager although a graph was chosen.

        The result is empty if the graph may run. A graph must not run if padding could change the
        results.
        """
        if decision.parts:
            return self._refusal_of_parts(decision)
        entry = None if decision.key is None else self._registry.get(decision.key)
        if decision.key is None or entry is None:
            return ""
        if entry.state is not KeyState.CAPTURED:
            return str(self._lifecycle.expected_refusal(decision.key, num_tokens))
        step: CapturedKey = entry.graph
        return str(step.refusal(num_tokens))

    def obstacle(self, decision: Decision, num_tokens: int) -> str:
        """Return why a step would run eager despite a chosen graph; empty if the graph would run.

        The answer is based on this thread's autocast state, on the training flags and weight
        addresses of modules, and on the values that the step's Python code would read now. The
        step does not run.
        """
        if refused := self.refusal(decision, num_tokens):
            return refused
        for key in decision.keys:
            entry = self._registry.get(key)
            if entry is None or entry.state is not KeyState.CAPTURED:
                reason = self._lifecycle.expected_wait(key)
            else:
                step: CapturedKey = entry.graph
                reason = difference(step.guard, self._guard.now())
                reason = reason or self._lifecycle.expected_replacement(step)
            if reason:
                return str(reason)
        return ""

    def effective_decision(
        self, decision: Decision, num_tokens: int, missed: GraphKey | None = None
    ) -> Decision:
        """Return the decision that a batch would run under now, with the reason to count.

        Args:
            decision: Decision of the dispatcher.
            num_tokens: Number of tokens in the batch.
            missed: First key that could have served the batch, or None.
        """
        if reason := self.obstacle(decision, num_tokens):
            return attrs.evolve(decision, mode=RuntimeMode.NONE, key=None, reason=reason, parts=())
        return attrs.evolve(decision, reason=self.specific_reason(decision.reason, missed))

    def replay(
        self, key: GraphKey, step: CapturedKey, num_tokens: int, timer: Timer | None = None
    ) -> ReplayPlan:
        """Return the plan that replays a captured step."""
        count, is_owned = self._counters.of_keys(key), self._is_owned
        replay = GraphPlan(step, num_tokens, count, self._eager, self._guard, is_owned=is_owned)
        timed: TimeablePlan = replay if timer is None else TimedPlan(replay, timer)
        if step.layout.has_values and num_tokens < key.num_tokens:
            timed = ValuesPlan(timed, step, num_tokens, self._lifecycle)
        if not self._axes and self._checker is None:
            return timed
        # Results are cut before they are compared; timings exclude the cut.
        plan = AxisPlan(timed, step, self._axes, is_owned=is_owned) if self._axes else timed
        if self._checker is None:
            return plan
        return CheckedPlan(plan, replay, self._checker, is_owned=is_owned)

    def _split(
        self, decision: Decision, num_tokens: int, timer: Timer | None
    ) -> SplitPlan | LazySplitPlan:
        """Return the plan of a batch that is split."""
        rows, start = [], 0
        for part in decision.parts:
            rows.append(RowsOfBatch(part.key, start, part.num_tokens))
            start += part.num_tokens
        parts = []
        for one in rows:
            entry = self._registry.get(one.key)
            if entry is None or entry.state is not KeyState.CAPTURED:
                return LazySplitPlan(
                    rows,
                    num_tokens,
                    self._inputs,
                    self._registry,
                    self._eager,
                    self._lifecycle,
                    self._lane,
                )
            parts.append(self._part(one, entry.graph, is_last=one is rows[-1]))
        return SplitPlan(
            parts,
            num_tokens,
            self._counters.of_keys(*decision.keys),
            self._counters,
            self._inputs,
            self._eager,
            self._lifecycle,
            self._lane,
            timer,
            self._checker,
        )

    def _part(self, rows: RowsOfBatch, step: CapturedKey, *, is_last: bool) -> PartPlan:
        """Return the plan of a part; results of the last part are not copied."""
        count, num_tokens = StepCount(), rows.num_tokens
        is_owned = not is_last
        replay = GraphPlan(step, num_tokens, count, self._eager, self._guard, is_owned=is_owned)
        plan: ReplayPlan = replay
        if self._axes:
            plan = AxisPlan(replay, step, self._axes, is_owned=is_owned)
        return PartPlan(rows, plan, step, count)

    def _refusal_of_parts(self, decision: Decision) -> str:
        """Return why a batch must not be split; empty if it may be."""
        layouts = []
        for part in decision.parts:
            entry = self._registry.get(part.key)
            if entry is None or entry.state is not KeyState.CAPTURED:
                refused = self._lifecycle.expected_refusal(part.key, part.num_tokens)
            else:
                refused = entry.graph.refusal_of_part(part.num_tokens)
                layouts.append(entry.graph.layout)
            if refused:
                return str(refused)
        is_alike = all(layout == layouts[0] for layout in layouts)
        return "" if is_alike else str(Reason.OUTPUTS_NOT_JOINED)

    def specific_reason(self, reason: str, missed: GraphKey | None = None) -> str:
        """Return the reason of a decision, or a more specific reason if one is known.

        Args:
            reason: Reason of a decision.
            missed: First key that could have served the batch, or None.
        """
        dispatcher = self._dispatcher()
        is_less = dispatcher is not None and dispatcher.config.mode is not self.requested_mode
        if reason == Reason.MODE_NONE and is_less:
            return str(Reason.PIECEWISE_UNSUPPORTED)
        entry = None if missed is None else self._registry.get(missed)
        if reason == Reason.CAPTURE_FAILED and entry is not None:
            own = entry.reason.partition(":")[0]
            return own if own in FAILED_KEY_REASONS else str(reason)
        return str(reason)

    def _run_eager(
        self,
        num_tokens: int,
        reason: str,
        count: StepCount,
        missed: GraphKey | None,
        retry: GraphKey | None,
        timer: Timer | None,
    ) -> EagerPlan:
        lifecycle, lane = self._lifecycle, self._lane
        return EagerPlan(
            self._eager, lifecycle, lane, num_tokens, reason, count, missed, retry, timer
        )

    def _missed(self, batch: Batch) -> list[GraphKey]:
        """Return the keys that could have served a batch: FULL first, then PIECEWISE, by size."""
        dispatcher = self._dispatcher()
        if dispatcher is None:
            return []
        return [
            key
            for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE)
            if batch.allows(mode)
            for key in dispatcher.graphs.covering(batch, mode)
        ]
