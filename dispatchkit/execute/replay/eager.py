"""What a runner does when no graph serves a step, or one that did must not any more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.errors import InputError, NoGraphError, ReplayError
from dispatchkit.execute.capture.captured import CapturedStep, LaunchError
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.check import Checker, CheckWarning
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.reasons import (
    CHECK_FAILED,
    DOWNGRADES,
    INSIDE_CAPTURE,
    NEXT_STEPS,
    REPLAY_FAILED,
    EagerStepWarning,
)
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters

_ABOUT_PADDING = (
    " Or its rows depend on each other, so that padding counts: then declare fill values, use "
    "row_count, or capture the exact sizes."
)


class Fallbacks:
    """The part of GraphRunner that runs steps plainly, and says why."""

    strict: bool
    lifecycle: Lifecycle
    counters: StepCounters
    backend: GraphBackend
    downgrades = DOWNGRADES
    _axes: AxisInputs | None
    _inputs: InputSet
    _lane: Lane
    _step: Step
    _writes: Callable[[], bool]
    _may_write: Callable[[], bool]
    _is_capturing: Callable[[], bool]
    _current_stream_handle: Callable[[], int]
    _row_count: str | None
    checker: Checker | None
    _told: set[str]
    refuse_if_exact: Callable[[str, object], None]

    @property
    def num_ticks(self) -> int:
        """How often the step has been run, by a replay or eager."""
        return self._lane.tick

    def run_eager(self, tensors: Sequence[Any] | None, num_tokens: int) -> Any:
        """Run the step plainly on a checked call, uncounted; None: on what the buffers hold."""
        self._lane.tick += 1
        self._inputs.plain = None
        if self._axes is not None:
            given = self._axes.plain(tensors)  # type: ignore[arg-type]  # a call made by it
        else:
            if tensors is None:
                tensors = self._lane.buffers.copies(num_tokens)
            else:
                tensors = self._inputs.to_tensors(tensors)
            given = dict(zip(self._inputs.names, tensors, strict=True))
        checker = self.checker
        if checker is None or not checker.notes_eager or self._is_capturing():
            return self._run_plainly(given, num_tokens)
        self._lane.order()
        return checker.note_eager(lambda: self._run_plainly(given, num_tokens))

    def _run_plainly(self, given: dict[str, Any], num_tokens: int) -> Any:
        if self._row_count is not None:
            given[self._row_count] = torch.full(
                (), num_tokens, dtype=torch.int64, device=self._inputs.device
            )
        lane, handle = self._lane, self._current_stream_handle()
        chain = lane.chain
        with torch.no_grad():
            if chain is None and (handle == lane.handle or not self._writes()):
                return self._step(given)
            # Inside a capture nothing outside can be waited for, and whoever captures orders it.
            if not self._may_write() or (handle and self._is_capturing()):
                return self._step(given)
            if handle != lane.handle:
                lane.switch(handle)  # replays change the same state, and a capture restores it
            if chain is None or chain.disjoint_state:
                return self._step(given)
            stream = self.backend.current_stream()
            chain.before(stream)
            try:
                return self._step(given)
            finally:
                chain.after(stream)

    def run_eager_for(
        self, reason: str, tensors: Sequence[Any] | None, num_tokens: int, missed: GraphKey | None
    ) -> Any:
        """Run the step plainly, counted and told with a reason.

        Raises:
            NoGraphError: The runner is strict and the reason is a downgrade.
            ReplayError: The step may only run as it was decided.
        """
        self.refuse_if_exact(reason, missed)
        if reason in DOWNGRADES:
            self.tell_eager(reason, num_tokens, missed)
        result = self.run_eager(tensors, num_tokens)
        count = self.counters.of_eager(str(reason), missed)
        count.steps += 1
        count.tokens += num_tokens
        return result

    def run_inside_capture(self, tensors: Sequence[Any] | None, num_tokens: int) -> Any:
        """Run the step plainly inside a capture that the caller began, which records it.

        Raises:
            InputError: There are host inputs: their values would be those of the capture in
                every replay of the caller's graph.
        """
        if self._inputs.host:
            name = self._inputs.names[self._inputs.host[0]]
            raise InputError(
                name,
                f"Host input {name!r} was given inside a capture that is not the runner's own: "
                "every replay of that graph would use the value of now. Declare it without "
                "host=True and give a tensor of the device, or call the runner outside.",
            )
        return self.run_eager_for(INSIDE_CAPTURE, tensors, num_tokens, None)

    def tell_eager(self, reason: str, num_tokens: int, missed: GraphKey | None) -> None:
        """Warn once of a downgrade; in a strict runner refuse it.

        Raises:
            NoGraphError: The runner is strict.
        """
        if not self.strict and reason in self._told:
            return
        near = sorted(self.lifecycle.live(), key=lambda key: abs(key.num_tokens - num_tokens))
        nearest = tuple(str(key) for key in near[:3])
        what = f"{num_tokens} tokens" + (f" (graph {missed})" if missed else "")
        have = f"Nearest captured: {', '.join(nearest) or 'none'}. {NEXT_STEPS[reason]}"
        if self.strict:
            raise NoGraphError(
                f"A step of {what} has no graph to run: {reason}. {have} "
                "With strict=False such steps run eager.",
                reason=reason,
                nearest=nearest,
            )
        self._told.add(reason)
        warnings.warn(
            f"Steps run eager, reason {reason}; the first had {what}. {have} "
            "Told once; runner.stats() counts them, runner.explain() says why.",
            EagerStepWarning,
            stacklevel=2,
        )

    def replay_failed(
        self, step: CapturedStep, error: LaunchError, tensors: Sequence[Any] | None, num_tokens: int
    ) -> Any:
        """Mark the keys of a step whose launch failed; run eager if that is still once.

        Raises:
            ReplayError: Something of the step may have taken effect.
        """
        self.counters.replay_failures += 1
        problem = f"replay: {type(error.cause).__name__}: {error.cause}"
        for key, one in self.lifecycle.live().items():
            if one is step:
                self.lifecycle.fail(key, problem)
        if error.has_effect:
            raise ReplayError(
                f"Replay of {step.key} failed: {error.cause}. The step changes state and may "
                "have done so in part, so that it was not run again; its graph is not used any "
                "more. Restore the state before the next step."
            ) from error.cause
        return self.run_eager_for(REPLAY_FAILED, tensors, num_tokens, step.key)

    def check_failed(
        self, step: CapturedStep, difference: str, result: Any, num_tokens: int
    ) -> Any:
        """Put a graph that gave something else than eager out of use; return eager's result."""
        for key, one in self.lifecycle.live().items():
            if one is step:
                self.lifecycle.fail(key, f"check: {difference}")
        count = self.counters.of_eager(CHECK_FAILED, step.key)
        count.steps += 1
        count.tokens += num_tokens
        warnings.warn(
            f"Replay of {step.key} gave something else than eager for {num_tokens} tokens, and "
            f"is not used any more: {difference} A graph has Python values built in, and reads "
            "the memory of its capture; call invalidate() after replacing what it reads."
            + _ABOUT_PADDING
            * (num_tokens < step.key.num_tokens),
            CheckWarning,
            stacklevel=2,
        )
        return result
