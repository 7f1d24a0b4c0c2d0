"""Eager calls of one look, with little overhead over calling the model.

A runner's work around an eager step can take longer than a small model. If none of it is needed (no
state to order, no retry due, no measuring or comparing), the step is only decided and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from dispatchkit.execute.executor import run_again
from dispatchkit.execute.graphed.forms import Form
from dispatchkit.execute.replay.plans import AGAIN, EagerPlan
from dispatchkit.execute.runner import GraphRunner

#: Consecutive direct steps before one goes through the runner, which counts the ones it missed.
_MAX_IN_A_ROW: Final = 256


_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


class PlainSteps:
    """Calls of one form and size, as long as their steps run eager.

    Args:
        form: The form.
        runner: Its current runner.
        num_tokens: Rows of the calls.
        names: Keywords of the calls, in the order of the form's inputs.
        has_grad: Gradients are enabled in the calls.
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
        """Run a call as its step is decided; return AGAIN if it needs the runner.

        Args:
            call: The module or function.
            args: The call's arguments.
            kwargs: The call's keyword arguments.
        """
        with self._lock:
            if self._left <= 0 or self._form.runner is not self._runner:
                self._give_back()
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
        """Return whether a plan's steps can run directly, and use the plan from now on."""
        self._give_back()
        num_plain = plan.num_plain() if isinstance(plan, EagerPlan) else 0
        if num_plain:
            self._plan, self._given = plan, min(num_plain, _MAX_IN_A_ROW)
            self._left = self._given
        return num_plain > 0

    def _give_back(self) -> None:
        """Report to the runner the steps that it has not seen."""
        plan, num_steps = self._plan, self._given - self._left
        self._plan, self._left = None, 0
        if plan is not None:
            plan.note_plain(num_steps)

    def _run_plan(self, plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step whose decision has changed; the next call needs the runner."""
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
