"""PlainSteps: runs eager calls of a graphed target with little overhead.

If a model is small, the work of a runner around an eager step can take longer than the step.
PlainSteps therefore only dispatches, runs and counts a step. Steps that must be ordered among
streams, measured or compared go through the runner, as do steps that retry a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from dispatchkit.execute.executor import run_again
from dispatchkit.execute.graphed.forms import Form
from dispatchkit.execute.replay.plans import AGAIN, EagerPlan
from dispatchkit.execute.runner import GraphRunner

#: Maximum number of consecutive steps that bypass the runner; the next step reports them to the
#: runner.
_MAX_IN_A_ROW: Final = 256


_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


class PlainSteps:
    """The calls of one form and size, as long as they run eager.

    Args:
        form: Form of the calls.
        runner: Current runner of the form.
        num_tokens: Number of rows in each call.
        names: Keywords of the calls, in the order of the form's inputs.
        has_grad: Whether the caller has gradients enabled. They are disabled during each call.
    """

    def __init__(
        self,
        form: Form,
        runner: GraphRunner,
        num_tokens: int,
        names: tuple[str, ...],
        has_grad: bool,
    ) -> None:
        self._form, self._runner, self._names, self._has_grad = form, runner, names, has_grad
        self._executor = executor = runner.lanes[0]
        self._lock, self._counters = executor.lock, executor.counters
        self._batch = (num_tokens, 0, 0, 0, 2)
        self._plan: EagerPlan | None = None
        self._given = self._left = _MAX_IN_A_ROW

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, or return AGAIN if the call must go through the runner.

        Args:
            call: Module or function to call.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        with self._lock:
            if self._left <= 0 or self._form.runner is not self._runner:
                self._report_steps()
                return AGAIN
            try:
                plan = self._executor.decide(*self._batch).plan
                if plan is not self._plan and not self._adopt(plan):
                    return self._run_plan(plan, args, kwargs)
                self._left -= 1
                if self._has_grad:
                    _set_grad_enabled(False)
                    try:
                        result = call(*args, **kwargs)
                    finally:
                        _set_grad_enabled(True)
                else:
                    result = call(*args, **kwargs)
            except Exception:
                self._counters.failed_steps += 1
                raise
            count = plan.count
            count.steps += 1
            count.tokens += self._batch[0]
            return result

    def _adopt(self, plan: Any) -> bool:
        """Use a plan if its steps can bypass the runner, and return whether they can."""
        self._report_steps()
        num_plain = plan.num_plain() if isinstance(plan, EagerPlan) else 0
        if num_plain:
            self._plan, self._given = plan, min(num_plain, _MAX_IN_A_ROW)
            self._left = self._given
        return num_plain > 0

    def _report_steps(self) -> None:
        """Report to the runner the steps that bypassed it."""
        plan, num_steps = self._plan, self._given - self._left
        self._plan, self._left = None, 0
        if plan is not None:
            plan.note_plain(num_steps)

    def _run_plan(self, plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a plan whose steps cannot bypass the runner; the next call uses the runner."""
        self._left = 0
        values = (*args, *[kwargs[name] for name in self._names])
        tensors = [one for one in values if isinstance(one, torch.Tensor)]
        executor = self._executor
        stream = executor.lane.backend.current_stream_handle()
        result = plan.run(tensors, stream, False)
        if result is AGAIN:
            dispatcher, eager = executor.dispatcher, executor.eager
            return run_again(dispatcher, eager, tensors, stream, False, *self._batch)
        return result
