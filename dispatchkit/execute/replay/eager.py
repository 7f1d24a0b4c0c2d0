"""EagerRunner: runs steps eager and disables failed graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatchkit.dispatch import Decision, Reason
from dispatchkit.errors import InputError, NoGraphError, ReplayError, counted
from dispatchkit.execute.capture.captured import CapturedKey, LaunchError
from dispatchkit.execute.capture.eager_call import DifferentResultError
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.capture.report import GRADIENTS_ERROR, is_gradient_error
from dispatchkit.execute.capture.warmup import Warmups
from dispatchkit.execute.io.axes import AxisCall, AxisInputs
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.check import Checker, CheckWarning
from dispatchkit.execute.step.reasons import (
    DOWNGRADES,
    NEXT_STEPS,
    PADDED_DRAWS,
    REFUSED_CAPTURES,
    REPLACED,
    EagerStepWarning,
    PaddedDrawsWarning,
)
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.once import Once, warn_at_call

_MAKE_CALLS_ALIKE = (
    "In every call, return the same structure, types, shapes, strides and Python values as in the "
    "capture; where the capture returned an argument, an input or state, return that tensor again. "
    "If this is not possible, move more of the step into the eager call."
)
_ABOUT_PADDING = (
    " If rows depend on each other, padding changes the result: declare fill values, use "
    "row_count, or capture the exact sizes."
)


class EagerRunner:
    """Runs steps eager, and counts the reason for each.

    Plans call it for steps without a graph, and to disable graphs whose replay failed or differed
    from an eager run.

    Args:
        warmups: Warmups, which record the state that the step changes.
        inputs: Static inputs, at the smallest bucket of each axis.
        axes: Inputs of a runner with axes, otherwise None.
        row_count: Name of the input that receives the number of real rows, if any.
        lane: Lane that orders eager steps and replays.
        lifecycle: Lifecycle of the lane's graphs, used to disable failed graphs.
        counters: Counters in which eager steps are counted.
        checker: Checker in check mode, otherwise None.
        strict: Whether a downgrade to eager raises.

    Attributes:
        strict: Whether a downgrade to eager raises; may be changed while serving.
        exact: The only decision that the current step may run under; None allows any.
        num_runs: Number of eager runs, including those of check mode.
    """

    def __init__(
        self,
        warmups: Warmups,
        inputs: InputSet,
        axes: AxisInputs | None,
        row_count: str | None,
        lane: Lane,
        lifecycle: Lifecycle,
        counters: StepCounters,
        checker: Checker | None,
        *,
        strict: bool,
    ) -> None:
        self._warmups, self._step, self._lane = warmups, warmups.step, lane
        self._inputs, self._axes, self._row_count = inputs, axes, row_count
        self._lifecycle, self._counters, self._checker = lifecycle, counters, checker
        self._backend = lane.backend
        self._once = Once()
        self.strict = strict
        self.exact: Decision | None = None
        self.num_runs: int = 0

    def is_plain(self) -> bool:
        """Return whether an eager run only calls the step under ``torch.no_grad()``.

        This is not the case for a strict runner, in check mode, or if the call needs other work:
        copying host inputs, cutting inputs along axes, filling ``row_count``, waiting for
        earlier steps that change the same state, or enabling gradients.
        """
        return (
            self._axes is None
            and self._row_count is None
            and not self._inputs.host
            and self._checker is None
            and not self.strict
            and self._lane.chain is None
            and not self._warmups.writes()
            and not self._warmups.needs_gradients
        )

    def run(self, tensors: Sequence[Any] | None, num_tokens: int) -> Any:
        """Run a validated call without counting it.

        ``tensors`` is None for an in-place step, which reads the static inputs.
        """
        self._lane.tick += 1
        self.num_runs += 1
        if self._axes is not None:
            given = self._axes.eager_arguments(tensors)  # type: ignore[arg-type]  # an AxisCall
        else:
            if tensors is None:
                self._lane.group.check_awake()
                tensors = self._lane.buffers.copies(num_tokens)
            else:
                tensors = self._inputs.to_tensors(tensors)
            given = dict(zip(self._inputs.names, tensors, strict=True))
        checker = self._checker
        if checker is None or not checker.notes_eager or self._backend.is_capturing():
            return self._run_in_order(given, num_tokens)
        self._lane.order(is_eager=True)
        return checker.note_eager(lambda: self._run_in_order(given, num_tokens))

    def run_for(
        self, reason: str, tensors: Sequence[Any] | None, num_tokens: int, missed: GraphKey | None
    ) -> Any:
        """Run a validated call; count the reason, and warn about a downgrade.

        Args:
            reason: Reason why no graph runs.
            tensors: Inputs of the step; None for an in-place step.
            num_tokens: Number of rows.
            missed: Key of the graph that would have run, if any.

        Raises:
            NoGraphError: The runner is strict and the reason is a downgrade.
            ReplayError: The step may only run as decided (see ``exact``).
        """
        self.refuse_if_exact(reason)
        if reason in DOWNGRADES:
            self.warn(reason, num_tokens, missed, tensors)
        result = self.run(tensors, num_tokens)
        count = self._counters.of_eager(str(reason), missed)
        count.steps += 1
        count.tokens += num_tokens
        return result

    def run_inside_capture(self, tensors: Sequence[Any] | None, num_tokens: int) -> Any:
        """Run a validated call inside a capture that the caller has begun.

        Raises:
            InputError: There are host inputs, whose current values would be built into the caller's
                graph.
        """
        if self._inputs.host:
            name = self._inputs.names[self._inputs.host[0]]
            raise InputError(
                name,
                f"Host input {name!r} cannot be used inside another capture, because every replay "
                "would use its value at the capture. Declare it without host=True and pass a "
                "device tensor, or call the runner outside the capture.",
            )
        return self.run_for(Reason.INSIDE_CAPTURE, tensors, num_tokens, None)

    def warn(
        self,
        reason: str,
        num_tokens: int,
        missed: GraphKey | None,
        tensors: Sequence[Any] | None,
    ) -> None:
        """Warn about a downgrade, once per reason; raise in a strict runner.

        Raises:
            NoGraphError: The runner is strict.
        """
        if not self.strict and (self._is_under_way(reason, missed) or not self._once.first(reason)):
            return
        near = sorted(self._lifecycle.live(), key=lambda key: abs(key.num_tokens - num_tokens))
        nearest = tuple(str(key) for key in near[:3])
        what = counted(num_tokens, "token") + (f" (key {missed})" if missed else "")
        then = self._next_step(reason, missed, tensors)
        # An error message may lack the final period.
        then = then if then.endswith((".", "!", "?")) else f"{then}."
        have = f"Nearest captured keys: {', '.join(nearest) or 'none'}. {then}"
        if self.strict:
            is_frozen = self._lifecycle.is_frozen
            relax = "call freeze(strict=False)" if is_frozen else "set RunnerOptions(strict=False)"
            raise NoGraphError(
                f"A step of {what} has no graph to run: {reason}. {have} To run such steps eager, "
                f"{relax}.",
                reason=reason,
                nearest=nearest,
            )
        warn_at_call(
            f"Steps run eager (reason: {reason}); the first had {what}. {have} "
            "This warning is issued once per reason; runner.stats() counts these steps, and "
            "print(runner) shows the counts for each graph.",
            EagerStepWarning,
        )

    def _is_under_way(self, reason: str, missed: GraphKey | None) -> bool:
        """Return whether a background capture will capture the step's graph."""
        if reason != Reason.NOT_CAPTURED or missed is None:
            return False
        return self._lifecycle.is_under_way(missed)

    def _next_step(
        self, reason: str, missed: GraphKey | None, tensors: Sequence[Any] | None
    ) -> str:
        """Return advice for a reason; after a refused or failed capture, return the error."""
        if reason == Reason.OUTSIDE_AXIS and isinstance(tensors, AxisCall) and self._axes:
            return self._axes.describe_outside(tensors)
        found = "" if missed is None else self._lifecycle.problem_of(missed)
        what, _, found = found.partition(": ")
        if (what == reason and reason in REFUSED_CAPTURES) or (
            found and reason == Reason.CAPTURE_FAILED
        ):
            return found
        if what == REPLACED and reason in (Reason.WEIGHTS_REPLACED, Reason.VALUE_CHANGED):
            return f"Replaced since the capture: {found}. {NEXT_STEPS[reason]}"
        return self._lifecycle.next_step(reason)

    def warn_of_padded_draws(self, key: GraphKey, num_tokens: int) -> None:
        """Warn once that a step that draws random numbers is padded."""
        if self._once.first(PADDED_DRAWS):
            warn_at_call(
                f"{PADDED_DRAWS} The first such step had {counted(num_tokens, 'token')} and was "
                f"padded to {counted(key.num_tokens, 'token')}. If different numbers matter, "
                "capture the exact sizes, or draw the numbers outside the step. This warning is "
                "issued once; runner.explain(n) shows whether a batch of n tokens is affected.",
                PaddedDrawsWarning,
            )

    def refuse_if_exact(self, why: str) -> None:
        """Raise if the step may only run as decided.

        Raises:
            ReplayError: The step may only run as decided (see ``exact``).
        """
        if self.exact is not None:
            raise ReplayError(
                f"A step cannot run as decided ({self.exact.key or 'eager'}): {why}. Several ranks "
                "share the decision, so this rank must not run the step in a different way. Fix "
                "the cause, capture missing graphs on all ranks, and decide the step again."
            )

    def replaced(self, step: CapturedKey) -> str:
        """Invalidate all graphs if a value built into the graph of a step was replaced.

        Returns:
            The reason to run eager; empty if nothing was replaced.
        """
        return self._lifecycle.replaced(step)

    def replay_failed(
        self, step: CapturedKey, error: LaunchError, tensors: Sequence[Any] | None, num_tokens: int
    ) -> Any:
        """Disable a graph whose launch failed; run eager if that is safe.

        Raises:
            ReplayError: The step may have changed state, so it cannot run again.
        """
        if isinstance(error.cause, DifferentResultError):
            return self._call_differs(step, error.cause, error.has_effect, tensors, num_tokens)
        self._counters.replay_failures += 1
        problem = f"{Reason.REPLAY_FAILED}: {type(error.cause).__name__}: {error.cause}"
        self._lifecycle.graphs.fail_step(step, problem)
        if error.has_effect:
            raise ReplayError(
                f"The replay of {step.key} failed, and its graph is no longer used. The step may "
                "have changed part of its state, so it was not run again. Restore the state before "
                f"the next step. Cause: {error.cause}"
            ) from error.cause
        return self.run_for(Reason.REPLAY_FAILED, tensors, num_tokens, step.key)

    def _call_differs(
        self,
        step: CapturedKey,
        different: DifferentResultError,
        has_effect: bool,
        tensors: Sequence[Any] | None,
        num_tokens: int,
    ) -> Any:
        """Run a step eager, because an eager call returned a different result than in the capture.

        Raises:
            ReplayError: The step has changed state, so it cannot run again.
        """
        self._counters.differing_calls[different.line] += 1
        if has_effect:
            raise ReplayError(
                f"A replay of {step.key} stopped at {different.line}: {different.problem}. The "
                "step has changed part of its state, so it was not run again. Restore the state "
                f"before the next step. {_MAKE_CALLS_ALIKE}"
            ) from different
        if self._once.first(different.line):
            warn_at_call(
                f"The eager call at {different.line} returned a different result than in the "
                f"capture ({different.problem}), so no graph can run this step of "
                f"{counted(num_tokens, 'token')}. {_MAKE_CALLS_ALIKE} This warning is "
                "issued once per line; runner.stats().differing_calls counts these calls.",
                EagerStepWarning,
            )
        return self.run_for(Reason.CALL_DIFFERS, tensors, num_tokens, step.key)

    def check_failed(self, step: CapturedKey, difference: str, result: Any, num_tokens: int) -> Any:
        """Disable a graph that failed its check; return the eager result."""
        self._lifecycle.graphs.fail_step(step, f"{Reason.CHECK_FAILED}: {difference}")
        count = self._counters.of_eager(Reason.CHECK_FAILED, step.key)
        count.steps += 1
        count.tokens += num_tokens
        found = difference if difference.endswith(".") else f"{difference}."
        warn_at_call(
            f"A check of a step of {counted(num_tokens, 'token')} failed, and the graph of "
            f"{step.key} is no longer used: {found} A graph keeps the Python values and addresses "
            "of its capture; call invalidate() after you replace a value or tensor."
            + _ABOUT_PADDING
            * (num_tokens < step.key.num_tokens),
            CheckWarning,
        )
        return result

    def _run_in_order(self, given: dict[str, Any], num_tokens: int) -> Any:
        """Run the step after earlier steps that change the same state."""
        if self._row_count is not None:
            given[self._row_count] = torch.full(
                (), num_tokens, dtype=torch.int64, device=self._inputs.device
            )
        had_grad = torch.is_grad_enabled()
        try:  # C calls, because a signal could interrupt a Python context manager
            torch._C._set_grad_enabled(had_grad and self._warmups.needs_gradients)
            return self._run_on_lane(given)
        except RuntimeError as error:
            if had_grad and is_gradient_error(error):
                error.add_note(GRADIENTS_ERROR)
            raise
        finally:
            torch._C._set_grad_enabled(had_grad)

    def _run_on_lane(self, given: dict[str, Any]) -> Any:
        lane, handle = self._lane, self._backend.current_stream_handle()
        chain = lane.chain
        if chain is None and (handle == lane.handle or not self._warmups.writes()):
            return self._step(given)
        # A capture cannot wait for work outside it. The code that captures must order the work.
        if not self._warmups.may_write() or (handle and self._backend.is_capturing()):
            return self._step(given)
        if handle != lane.handle:
            # Replays change the same state, and captures save and restore it.
            lane.switch(handle, is_eager=True)
        if chain is None or chain.disjoint_state:
            return self._step(given)
        stream = chain.begin(lane)
        try:
            return self._step(given)
        finally:
            chain.end(stream)
