"""Calls that run plainly, recognised by their look, so that they cost little more than the model.

What a runner does around an eager step costs more than many a small model. Where nothing of it is
wanted (no state to order, no retry due, nobody who measures or compares), the step is decided and
counted, and that is all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import torch

from dispatchkit.execute.executor import run_again
from dispatchkit.execute.graphed.forms import Form
from dispatchkit.execute.replay.plans import AGAIN, EagerPlan
from dispatchkit.execute.runner import GraphRunner

#: Plain steps in a row; then one goes through the runner, which counts what it has missed.
_MAX_IN_A_ROW: Final = 256


#: Values that say what they are; of others a call is looked at in full.
_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})

_is_grad_enabled: Callable[[], bool] = torch._C.is_grad_enabled
_facts_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device", "requires_grad")


def look_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], is_training: bool) -> Any:
    """Return what a call looks like; None where that says too little.

    It is cheap and no proof: calls of one look may differ, such as in strides. It is good for
    calls that run plainly, which is right for any call.
    """
    try:
        if not kwargs:
            return (_is_grad_enabled(), is_training, *map(_facts_of, args))
        facts = map(_facts_of, (*args, *kwargs.values()))
        return (_is_grad_enabled(), is_training, *kwargs, *facts)
    except AttributeError:
        pass  # not all of them are tensors
    except RuntimeError:  # a nested tensor has no shape
        return None
    look: list[Any] = [_is_grad_enabled(), is_training, *kwargs]
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Tensor):
            look.append(_facts_of(one))
        elif type(one) in _SIMPLE:
            look.append(one)
        else:
            return None
    return tuple(look)


class PlainSteps:
    """Calls of a form and a size, as long as their steps run eager.

    Args:
        form: Which.
        runner: Its runner of now.
        num_tokens: Rows of the calls.
        names: Keywords of the calls, in the order of the form's inputs.
    """

    def __init__(
        self, form: Form, runner: GraphRunner, num_tokens: int, names: tuple[str, ...]
    ) -> None:
        self._form, self._runner, self._names = form, runner, names
        self._executor = executor = runner.lanes[0]
        self._batch = (num_tokens, 0, 0, 0, 2)
        self._registry = executor.registry
        self._num_changes = executor.registry.num_changes
        self._plan: EagerPlan | None = None
        self._given = self._left = _MAX_IN_A_ROW

    def may_go_on(self) -> bool:
        """Return whether the next call may run so; otherwise it needs the runner."""
        if (
            self._left > 0
            and self._registry.num_changes == self._num_changes
            and self._form.runner is self._runner
        ):
            return True
        self._give_back()
        return False

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call as its step is decided.

        Args:
            call: What is graphed.
            args: Of the call.
            kwargs: Of the call.
        """
        executor, had_grad = self._executor, _is_grad_enabled()
        with executor.lock:
            try:
                plan = executor.decide(*self._batch).plan
                if plan is not self._plan and not self._adopt(plan):
                    return self._run_plan(plan, args, kwargs)
                self._left -= 1
                if not had_grad:
                    result = call(*args, **kwargs)
                else:
                    try:
                        torch._C._set_grad_enabled(False)
                        result = call(*args, **kwargs)
                    finally:
                        torch._C._set_grad_enabled(True)
            except Exception:
                executor.counters.failed_steps += 1
                raise
            count = plan.count
            count.steps += 1
            count.tokens += self._batch[0]
            return result

    def _adopt(self, plan: Any) -> bool:
        """Return whether a plan's steps need nothing but the step, and go by it from now on."""
        self._give_back()
        num_plain = plan.num_plain() if isinstance(plan, EagerPlan) else 0
        if num_plain:
            self._plan, self._given = plan, min(num_plain, _MAX_IN_A_ROW)
            self._left = self._given
        return num_plain > 0

    def _give_back(self) -> None:
        """Tell the runner of the steps that it has not seen."""
        with self._executor.lock:
            plan, num_steps = self._plan, self._given - self._left
            self._plan, self._left = None, 0
            if plan is not None:
                plan.note_plain(num_steps)

    def _run_plan(self, plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step as something else was decided of it; the next call needs the runner."""
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
