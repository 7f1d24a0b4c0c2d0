"""Plans: how a step of one cell of the table runs, ready to be called.

The dispatcher binds each of its decisions to a plan once; a step then only calls it. A plan
is for an exact number of tokens, so that views of static inputs and outputs can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from dispatchkit.backends.optional import LaunchCall
from dispatchkit.dispatch import Decision
from dispatchkit.execute.capture.captured import CapturedStep, FullStep, LaunchError
from dispatchkit.execute.io.loaders import Loader
from dispatchkit.execute.io.node_loaders import NodeLoader, loader_of
from dispatchkit.execute.io.outputs import builder, cut
from dispatchkit.execute.replay.direct import direct_call, refused
from dispatchkit.execute.replay.timing import Timer
from dispatchkit.execute.step.guard import Watched, difference
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCount

if TYPE_CHECKING:
    from dispatchkit.execute.replay.check import Checker
    from dispatchkit.execute.runner import GraphRunner


class _Again:
    """What a plan returns when the table must be asked again; nothing has been run."""


AGAIN: Final = _Again()

# Stands for a result that must be made.
_NOT_READY: Final = object()

# A third of the price of asking for one device type.
_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


class EagerPlan:
    """Run the step plainly, at its exact size.

    Args:
        runner: Whose step.
        num_tokens: Rows of the cell.
        reason: Why, for counters.
        count: What the step is counted in.
        missed: The smallest graph that could have served it, if any.
        retry: A key that failed or is stale and may be captured again, if any.
        timer: Measures it, where the decision asks for that.
    """

    runner: GraphRunner
    num_tokens: int
    reason: str
    count: StepCount
    missed: GraphKey | None
    retry: GraphKey | None
    timer: Timer | None

    def __init__(
        self,
        runner: GraphRunner,
        num_tokens: int,
        reason: str,
        count: StepCount,
        missed: GraphKey | None,
        retry: GraphKey | None,
        timer: Timer | None,
    ) -> None:
        self.runner, self.num_tokens, self.reason = runner, num_tokens, reason
        self.count, self.missed, self.retry, self.timer = count, missed, retry, timer
        self._is_downgrade = reason in runner.downgrades

    def run(self, tensors: Sequence[Any] | None, stream: int) -> Any:
        """Run a checked call.

        Raises:
            NoGraphError: The runner is strict and the reason is a downgrade.
        """
        runner = self.runner
        if self._is_downgrade:
            if self.retry is not None and not runner.is_exact:
                with _rows_kept(runner, tensors, self.num_tokens):
                    is_tried = runner.lifecycle.retry_if_due(self.retry)
                if is_tried:
                    return AGAIN
            if self.missed is not None:
                runner.lifecycle.note_missed(self.missed)
            runner.tell_eager(self.reason, self.num_tokens, self.missed)
        timer = self.timer
        if timer is None or not timer.is_due(runner.num_ticks):
            result = runner.run_eager(tensors, self.num_tokens)
        else:
            result = timer.measure(lambda: runner.run_eager(tensors, self.num_tokens))
        self.count.steps += 1
        self.count.tokens += self.num_tokens
        return result


def _rows_kept(
    runner: GraphRunner, tensors: Sequence[Any] | None, num_tokens: int
) -> AbstractContextManager[None]:
    """Keep what a step in place was given over a capture; a call's tensors are its own."""
    buffers = runner._lane.buffers
    if tensors is not None or num_tokens > buffers.num_rows:
        return nullcontext()
    return buffers.kept(num_tokens)


class LazyPlan:
    """A key that may run but has no graph yet: capture it, or run eager until it is due."""

    runner: GraphRunner
    key: GraphKey
    num_tokens: int

    def __init__(self, runner: GraphRunner, key: GraphKey, num_tokens: int) -> None:
        self.runner, self.key, self.num_tokens = runner, key, num_tokens

    def run(self, tensors: Sequence[Any] | None, stream: int) -> Any:
        """Capture and ask the table again, or run eager."""
        self.runner.refuse_if_exact("it has no graph yet", self.key)
        with _rows_kept(self.runner, tensors, self.num_tokens):
            reason = self.runner.lifecycle.capture_if_due(self.key)
        if not reason:
            return AGAIN
        return self.runner.run_eager_for(reason, tensors, self.num_tokens, self.key)


class GraphPlan:
    """Replay a captured step: the path that nearly every step takes.

    What can be found once is found at the first run and kept: views of inputs and outputs at
    the real size, how the graph is launched, what makes the result. A step then checks what
    may have changed, copies in, launches and counts.

    Args:
        runner: Whose step.
        step: What is replayed.
        num_tokens: Rows of the cell, at most the size of the graph.
        count: What the step is counted in.

    Attributes:
        loader: Brings the inputs in; None until the first run, and again when there are too
            many plans.
    """

    runner: GraphRunner
    step: CapturedStep
    num_tokens: int
    count: StepCount

    def __init__(
        self, runner: GraphRunner, step: CapturedStep, num_tokens: int, count: StepCount
    ) -> None:
        self.runner, self.step, self.num_tokens, self.count = runner, step, num_tokens, count
        self.loader: Loader | NodeLoader | None = None
        self._lane = step.lane
        self._had_autocast = step.guard[0] is not None
        self._modules: tuple[Watched, ...] = runner.guard.watched(step.guard)
        # A step without modules pays for none.
        self._looks = self._had_autocast or bool(self._modules)
        self._launch: LaunchCall = self._launch_step
        self._graph: Any = None
        self._may_settle = True  # whether it draws random numbers is known after its first replay
        self._ready: Any = _NOT_READY
        self._result: Callable[[], Any] = self._make_result
        self._leaves: list[Any] | None = None
        self._padded: Sequence[Any] = ()
        self._build = builder(step.layout.spec)

    def run(self, tensors: Sequence[Any] | None, stream: int) -> Any:
        """Copy a checked call in, launch, and return its own rows of the outputs.

        Args:
            tensors: The inputs; None if the rows are in the buffers already.
            stream: Raw handle of the current stream.
        """
        step, lane = self.step, self._lane
        if step.released:
            return AGAIN
        if _is_any_autocast_enabled() or (self._looks and self._has_changed()):
            reason = self._guard_reason()
            if reason:
                return self.runner.run_eager_for(reason, tensors, self.num_tokens, step.key)
        if stream != lane.handle:
            lane.switch(stream)
        loader = self.loader or self._prepare()
        if tensors is not None:
            loader.load(tensors)
        elif not loader.is_settled():
            loader.settle()
        if lane.row_count is not None:
            lane.set_rows(self.num_tokens)
        try:
            code = self._launch(self._graph, lane.stream_argument)
            if code:
                raise refused(code, step)
        except LaunchError as error:
            return self.runner.replay_failed(step, error, tensors, self.num_tokens)
        lane.tick = step.last_used = lane.tick + 1
        step.hits += 1
        count = self.count
        count.steps += 1
        count.tokens += self.num_tokens
        ready = self._ready
        return self._result() if ready is _NOT_READY else ready

    def forget(self) -> None:
        """Let go of what is kept; the next run finds it again."""
        self.loader = None
        self._ready, self._leaves, self._result = _NOT_READY, None, self._make_result
        self._launch, self._graph, self._padded = self._launch_step, None, ()

    def _has_changed(self) -> bool:
        if self._had_autocast:
            return True
        for module, training, place_now, place in self._modules:
            if module.training is not training or place_now() != place:
                return True
        return False

    def _guard_reason(self) -> str:
        return difference(self.step.guard, self.runner.guard.now())

    # -- what is found once -------------------------------------------------------------

    def _prepare(self) -> Loader | NodeLoader:
        step = self.step
        self._may_settle = any(graph.has_random_state for graph in step.graphs)
        self._launch, self._graph = self._choose_launch()
        if step.leaves:
            self._leaves = cut(step.layout, step.leaves, self.num_tokens)
            self._choose_result(self._leaves)
        loader = self.loader = loader_of(step, self.num_tokens)
        step.lane.keep_ready(self)
        return loader

    def _choose_launch(self) -> tuple[LaunchCall, Any]:
        step, lane = self.step, self._lane
        launch, own = self._choose_call()
        chain = lane.chain
        if chain is None or not chain.orders(step.graphs, has_effect=step.has_effect):
            return launch, own

        def in_turn(graph: Any, stream: Any) -> int | None:
            if lane.last_stream is None:
                return launch(graph, stream)
            chain.before(lane.last_stream)
            try:
                return launch(graph, stream)
            finally:  # what raised may have queued a part
                chain.after(lane.last_stream)

        return in_turn, own

    def _choose_call(self) -> tuple[LaunchCall, Any]:
        direct = direct_call(self.runner.backend, self.step)
        if isinstance(direct, str):
            return self._launch_step, None
        staging = self.step.staging
        if staging is None:
            return direct
        launch, graph = direct
        lane = self._lane

        def launch_and_note(graph: Any, stream: Any) -> int | None:
            code = launch(graph, stream)
            if lane.last_stream is not None:
                staging.note_launch(lane.last_stream)
            return code

        return launch_and_note, graph

    def _choose_result(self, leaves: list[Any]) -> None:
        """Keep the result itself where every call may have the same one, or what makes it."""
        spec = self.step.layout.spec
        if self.runner.owned_outputs and any(self.step.clones):
            if spec.is_leaf():
                self._result = leaves[0].clone
        elif spec.is_leaf() or (spec.type is tuple and spec.num_nodes == 1 + spec.num_leaves):
            self._ready = self._build(leaves)

    # -- the ways that are not direct ---------------------------------------------------

    def _launch_step(self, graph: Any, stream: Any) -> None:
        """Launch by the graph itself; from its first replay on it may turn out to draw nothing."""
        step = self.step
        staging = step.staging
        if staging is not None and not isinstance(step, FullStep):
            staging.queue_copy(step.key.num_tokens)  # before all pieces: it is in no graph
        padded = step.launch()
        if not step.leaves:  # kept no longer than the graph where the graph has them
            self._padded = padded
        if staging is not None and self._lane.last_stream is not None:
            staging.note_launch(self._lane.last_stream)
        if self._may_settle:
            self._may_settle = any(graph.has_random_state for graph in step.graphs)
            self._launch, self._graph = self._choose_launch()

    def _make_result(self) -> Any:
        leaves = self._leaves
        if leaves is None:
            leaves = cut(self.step.layout, self._padded, self.num_tokens)
        return self._build(self._hand_out(leaves))

    def _hand_out(self, leaves: list[Any]) -> list[Any]:
        if not self.runner.owned_outputs:
            return list(leaves)
        return [
            leaf.clone() if own else leaf
            for leaf, own in zip(leaves, self.step.clones, strict=True)
        ]


class TimedPlan(GraphPlan):
    """Replay a captured step that is measured when its turn comes.

    Other steps of it cost one comparison more than those that nobody wants timed.
    """

    def __init__(
        self,
        runner: GraphRunner,
        step: CapturedStep,
        num_tokens: int,
        count: StepCount,
        timer: Timer,
    ) -> None:
        super().__init__(runner, step, num_tokens, count)
        self._timer, self._timings = timer, timer.timings
        self._is_always_due = timer.is_always_due

    def run(self, tensors: Sequence[Any] | None, stream: int) -> Any:
        """Replay as any other step does, and perhaps measure it."""
        lane = self._lane
        if lane.tick < self._timings.due and not self._is_always_due:
            return GraphPlan.run(self, tensors, stream)
        step = self.step
        if step.released:
            return AGAIN
        # Neither a wait for another stream nor what is found once is part of the step.
        if stream != lane.handle:
            lane.switch(stream)
        if self.loader is None:
            self._prepare()
        hits, measurement = step.hits, self._timer.begin()
        try:
            result = GraphPlan.run(self, tensors, stream)
        except Exception:
            self._timings.fail(measurement)
            raise
        if step.hits == hits:
            self._timings.fail(measurement)  # it ran another way
        else:
            self._timings.finish(measurement)
        return result


class WatchedPlan(GraphPlan):
    """Replay a captured step that check mode may look at."""

    def __init__(
        self,
        runner: GraphRunner,
        step: CapturedStep,
        num_tokens: int,
        count: StepCount,
        checker: Checker,
    ) -> None:
        super().__init__(runner, step, num_tokens, count)
        self._checker = checker
        self._owns = runner.owned_outputs

    def run(self, tensors: Sequence[Any] | None, stream: int) -> Any:
        """Replay as any other step does, and perhaps compare it."""
        step, runner, checker = self.step, self.runner, self._checker
        if step.released:
            return AGAIN
        if self._guard_reason() or not checker.is_due(step, self.num_tokens):
            return super().run(tensors, stream)
        steps, tokens = self.count.steps, self.count.tokens
        self._owns = True
        try:
            result, found = checker.compare(
                step,
                self.num_tokens,
                lambda: super(WatchedPlan, self).run(tensors, stream),
                lambda: runner.run_eager(tensors, self.num_tokens),
            )
        finally:
            self._owns = runner.owned_outputs
        if found:
            # The caller gets eager's result: that is what is counted.
            self.count.steps, self.count.tokens = steps, tokens
            return runner.check_failed(step, found, result, self.num_tokens)
        return result

    def _choose_result(self, leaves: list[Any]) -> None:
        """Nothing is ready: who reads a result too late is to be found out."""

    def _hand_out(self, leaves: list[Any]) -> list[Any]:
        if not self._owns:
            return self._checker.hand_out(leaves)
        return [
            leaf.clone() if own else leaf
            for leaf, own in zip(leaves, self.step.clones, strict=True)
        ]


Plan = EagerPlan | LazyPlan | GraphPlan


def graph_plan(
    runner: GraphRunner,
    step: CapturedStep,
    num_tokens: int,
    count: StepCount,
    timer: Timer | None,
    *,
    plain: type[GraphPlan] = GraphPlan,
    timed: type[TimedPlan] = TimedPlan,
    watched: type[WatchedPlan] = WatchedPlan,
) -> GraphPlan:
    """Return the plan of a step: measured or compared only where somebody asks for that."""
    if runner.checker is not None:
        return watched(runner, step, num_tokens, count, runner.checker)
    if timer is not None:
        return timed(runner, step, num_tokens, count, timer)
    return plain(runner, step, num_tokens, count)


def timer_for(runner: GraphRunner, decision: Decision, batch: Any) -> Timer | None:
    """Return what measures a decision's step, None where it asks for nothing.

    In check mode none is measured, since some steps run twice.
    """
    if not decision.timed or runner.checker is not None:
        return None
    return Timer(runner.timings, decision, batch)
