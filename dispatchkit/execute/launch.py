"""Plans: how a step of one cell of the table runs, ready to be called.

The dispatcher binds each of its decisions to a plan once; a step then only calls it. A plan
is for an exact number of tokens, so that views of static inputs and outputs can be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from dispatchkit.dispatch import Decision
from dispatchkit.execute.captured import CapturedStep, LaunchError
from dispatchkit.execute.guard import difference
from dispatchkit.execute.outputs import builder, cut
from dispatchkit.execute.timing import Timer
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCount

if TYPE_CHECKING:
    from dispatchkit.execute.runner import GraphRunner


class _Again:
    """What a plan returns when the table must be asked again; nothing has been run."""


AGAIN: Final = _Again()


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

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Run a checked call.

        Raises:
            NoGraphError: The runner is strict and the reason is a downgrade.
        """
        runner = self.runner
        if self._is_downgrade:
            if self.retry is not None and runner.lifecycle.retry_if_due(self.retry):
                return AGAIN
            if self.missed is not None:
                runner.lifecycle.note_missed(self.missed)
            runner.tell_eager(self.reason, self.num_tokens, self.missed)
        if self.timer is None:
            result = runner.run_eager(tensors, self.num_tokens)
        else:
            result = self.timer.measure(
                lambda: runner.run_eager(tensors, self.num_tokens), queued=self.timer.is_queued()
            )
        self.count.steps += 1
        self.count.tokens += self.num_tokens
        return result


class LazyPlan:
    """A key that may run but has no graph yet: capture it, or run eager until it is due."""

    def __init__(self, runner: GraphRunner, key: GraphKey, num_tokens: int) -> None:
        self.runner, self.key, self.num_tokens = runner, key, num_tokens

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Capture and ask the table again, or run eager."""
        reason = self.runner.lifecycle.capture_if_due(self.key)
        if not reason:
            return AGAIN
        return self.runner.run_eager_for(reason, tensors, self.num_tokens, self.key)


class GraphPlan:
    """Replay a captured step.

    Args:
        runner: Whose step.
        step: What is replayed.
        num_tokens: Rows of the cell, at most the size of the graph.
        count: What the step is counted in.
        timer: Measures it, where the decision asks for that.

    Attributes:
        views: Views of the inputs at the real size and of the outputs; None until the first
            run, and again when there are too many plans.
    """

    def __init__(
        self,
        runner: GraphRunner,
        step: CapturedStep,
        num_tokens: int,
        count: StepCount,
        timer: Timer | None,
    ) -> None:
        self.runner, self.step, self.num_tokens = runner, step, num_tokens
        self.count, self.timer = count, timer
        self.views: tuple[list[torch.Tensor], list[Any] | None] | None = None
        self._owned = runner.owned_outputs
        self._build = builder(step.layout.spec)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Copy a checked call in, launch, and return its own rows of the outputs."""
        step, runner = self.step, self.runner
        if step.released:
            return AGAIN
        guard = runner.guard.now()
        if guard != step.guard:
            reason = difference(step.guard, guard)
            return runner.run_eager_for(reason, tensors, self.num_tokens, step.key)
        try:
            if runner.checker is not None and runner.checker.is_due(step, self.num_tokens):
                result, difference_found = runner.checker.compare(
                    lambda: self._replay(tensors, owned=True),
                    lambda: runner.run_eager(tensors, self.num_tokens),
                )
                if difference_found:
                    return runner.check_failed(step, difference_found, result, self.num_tokens)
            else:
                result = self._replay(tensors, owned=self._owned)
        except LaunchError as error:
            return runner.replay_failed(step, error, tensors, self.num_tokens)
        self.count.steps += 1
        self.count.tokens += self.num_tokens
        return result

    def _replay(self, tensors: list[torch.Tensor], *, owned: bool) -> Any:
        """Copy in, launch and cut; raises LaunchError where the launch fails."""
        step, runner = self.step, self.runner
        inputs, outputs = self.views or self._prepare()
        lane = step.lane
        lane.order()
        # Asked before the inputs are copied in: those are work of the step itself.
        queued = self.timer is not None and self.timer.is_queued()
        step.buffers.load(inputs, tensors, self.num_tokens)
        if lane.row_count is not None:
            lane.set_rows(self.num_tokens)
        if self.timer is None:
            padded = step.launch()
        else:
            padded = self.timer.measure(step.launch, queued=queued)
        lane.tick += 1
        step.last_used = lane.tick
        step.hits += 1
        if outputs is None:
            outputs = cut(step.layout, padded, self.num_tokens)
        if owned:
            outputs = [
                leaf.clone() if own else leaf
                for leaf, own in zip(outputs, step.clones, strict=True)
            ]
        elif runner.checker is not None:
            outputs = runner.checker.hand_out(outputs)
        return self._build(outputs)

    def _prepare(self) -> tuple[list[torch.Tensor], list[Any] | None]:
        step = self.step
        inputs = step.buffers.views(self.num_tokens)
        outputs = cut(step.layout, step.leaves, self.num_tokens) if step.leaves else None
        self.views = (inputs, outputs)
        step.lane.keep_ready(self)
        return self.views


Plan = EagerPlan | LazyPlan | GraphPlan


def timer_for(runner: GraphRunner, decision: Decision, batch: Any) -> Timer | None:
    """Return what measures a decision's step, None where it asks for nothing."""
    return Timer(runner.timings, decision, batch) if decision.timed else None
