"""StepTaps: call the recorder, listener and watcher of steps, at no cost when unused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.errors import ConfigError
from dispatchkit.execute.executor import Executor, run_again
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.keys.checks import check_instance
from dispatchkit.observe.recorder import DEFAULT_CAPACITY, StepRecorder

Dispatch = Callable[..., Decision]


class StepWatcher(Protocol):
    """An object that is called when a step begins and ends, on the thread that runs the step."""

    def enter(self, decision: Decision, lane: int) -> None:
        """Begin a step; ``lane`` is the index of its lane."""

    def leave(self, *, failed: bool) -> None:
        """End the step after it was launched, or after it raised."""


class StepTaps:
    """The recorder, listener and watcher of a runner's steps.

    Each step calls ``decide`` of its executor. The taps replace this function with wrappers of
    ``Dispatcher.dispatch``.

    Args:
        executors: The executors whose ``decide`` is replaced.
        lock: The lock that every step holds; also held while wrappers are replaced.

    Attributes:
        watcher: The watcher of steps, or None.
    """

    def __init__(self, executors: Sequence[Executor], lock: threading.RLock) -> None:
        self._executors, self._lock = executors, lock
        self._recorder: StepRecorder | None = None
        self._listener: Callable[[Decision], None] | None = None
        self.watcher: StepWatcher | None = None

    def start_recording(self, capacity: int = DEFAULT_CAPACITY) -> StepRecorder:
        """Start recording the batch of each step; this replaces an earlier recording.

        See ``GraphRunner.start_recording``.
        """
        recorder = StepRecorder(self._executors[0].dispatcher.config, capacity)
        with self._lock:
            self._recorder = recorder
            self._connect()
        return recorder

    def stop_recording(self) -> None:
        """Stop recording steps."""
        with self._lock:
            self._recorder = None
            self._connect()

    def on_decision(self, listener: Callable[[Decision], None] | None) -> None:
        """Set a function to call with the decision of each step before the step runs.

        The function is called under the runner's lock and must be fast. Its exceptions propagate to
        the caller of the step. Pass None to remove the function.

        Raises:
            ConfigError: The listener is neither a function nor None.
        """
        if listener is not None and not callable(listener):
            raise ConfigError("listener", listener, "a function that takes a decision, or None")
        with self._lock:
            self._listener = listener
            self._connect()

    def watch_steps(self, watcher: StepWatcher | None) -> None:
        """Set the watcher of each step; None removes the watcher.

        Args:
            watcher: A ``dispatchkit.observe.Timeline``, a ``dispatchkit.execute.NvtxRanges``, or
                any object with the methods ``enter`` and ``leave``. The methods are called under
                the runner's lock and must be fast. Their exceptions propagate to the caller of the
                step.

        Raises:
            ConfigError: The watcher is a class, or lacks the method ``enter`` or ``leave``.
        """
        if watcher is not None:
            allowed = "an object with the methods enter() and leave(), or None"
            check_instance(watcher, StepWatcher, "watcher", allowed=allowed)
        with self._lock:
            self.watcher = watcher
            self._connect()

    @property
    def is_recording(self) -> bool:
        """Whether steps are recorded."""
        return self._recorder is not None

    def dispatch(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        """Return the decision for a step that will run later, and record the step.

        The watcher is not called, because the step has not begun.
        """
        followed = self._with_taps(self._executors[0])
        return followed(num_tokens, num_reqs, uniform, loras, ceiling)

    def _connect(self) -> None:
        for number, executor in enumerate(self._executors):
            dispatch = self._with_taps(executor)
            if self.watcher is not None:
                dispatch = _with_watcher(
                    dispatch, self.watcher, number, executor.dispatcher, executor.eager
                )
            executor.decide = dispatch

    def _with_taps(self, executor: Executor) -> Dispatch:
        dispatch: Dispatch = executor.dispatcher.dispatch
        if self._listener is not None:
            dispatch = _with_listener(dispatch, self._listener)
        if self._recorder is not None:
            dispatch = self._recorder.recording(dispatch)
        return dispatch


def _with_listener(dispatch: Dispatch, listener: Callable[[Decision], None]) -> Dispatch:
    def dispatch_and_notify(
        num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        decision = dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
        listener(decision)
        return decision

    return dispatch_and_notify


class _WatchedPlan:
    """A plan that calls a watcher before and after the step."""

    def __init__(
        self,
        decision: Decision,
        watcher: StepWatcher,
        lane: int,
        dispatcher: Dispatcher,
        eager: EagerRunner,
        batch: tuple[int, int, int, int, int],
    ) -> None:
        self._decision, self._watcher, self._lane = decision, watcher, lane
        self._dispatcher, self._eager, self._batch = dispatcher, eager, batch

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        self._watcher.enter(self._decision, self._lane)
        failed = True
        try:
            result = self._decision.plan.run(tensors, stream, readable)
            if result is AGAIN:  # the step has not run yet
                result = run_again(
                    self._dispatcher, self._eager, tensors, stream, readable, *self._batch
                )
            failed = False
            return result
        finally:
            self._watcher.leave(failed=failed)


def _with_watcher(
    dispatch: Dispatch,
    watcher: StepWatcher,
    lane: int,
    dispatcher: Dispatcher,
    eager: EagerRunner,
) -> Callable[..., Any]:
    # The returned function must not reference the executor, which references the function.
    def dispatch_and_watch(
        num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Any:
        decision = dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
        batch = (num_tokens, num_reqs, uniform, loras, ceiling)
        return SimpleNamespace(plan=_WatchedPlan(decision, watcher, lane, dispatcher, eager, batch))

    return dispatch_and_watch
