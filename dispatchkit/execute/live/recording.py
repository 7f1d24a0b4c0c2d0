"""What a runner's owner can learn of its steps: a recording of them, and how they are launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.optional import features_of
from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.errors import ConfigError, RegistryError
from dispatchkit.execute.capture.captured import CapturedStep
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.replay.direct import launch_path
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.recorder import DEFAULT_CAPACITY, StepRecorder

if TYPE_CHECKING:
    from dispatchkit.execute.runner import GraphRunner


def _telling(
    dispatch: Callable[..., Decision], tell: Callable[[Decision], None]
) -> Callable[..., Decision]:
    def dispatch_and_tell(
        num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        decision = dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
        tell(decision)
        return decision

    return dispatch_and_tell


class StepWatcher(Protocol):
    """Is told when each step begins and ends, on the thread that runs it."""

    def enter(self, decision: Decision, lane: int) -> None:
        """A step begins: what was decided for it, and the number of its lane."""

    def leave(self, *, failed: bool) -> None:
        """It has been handed over to the device, or it raised."""


class _WatchedPlan:
    """A plan between the two calls of a watcher."""

    def __init__(
        self, decision: Decision, watcher: StepWatcher, lane: int, again: Callable[[], Decision]
    ) -> None:
        self._decision, self._watcher, self._lane = decision, watcher, lane
        self._again = again

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        self._watcher.enter(self._decision, self._lane)
        failed = True
        try:
            result = self._decision.plan.run(tensors, stream, readable)
            while result is AGAIN:  # what runs then is the same step
                result = self._again().plan.run(tensors, stream, readable)
            failed = False
            return result
        finally:
            self._watcher.leave(failed=failed)


def _watched(
    dispatch: Callable[..., Decision],
    watcher: StepWatcher,
    lane: int,
    anew: Callable[..., Decision],
) -> Callable[..., Any]:
    def dispatch_and_watch(
        num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Any:
        decision = dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
        again = partial(anew, num_tokens, num_reqs, uniform, loras, ceiling)
        return SimpleNamespace(plan=_WatchedPlan(decision, watcher, lane, again))

    return dispatch_and_watch


class Recording:
    """The part of GraphRunner that records steps; those that nobody records pay nothing."""

    dispatcher: Dispatcher
    backend: GraphBackend
    lifecycle: Lifecycle
    lanes: tuple[GraphRunner, ...]
    _lock: threading.RLock
    _decide: Callable[..., Decision]
    _recorder: StepRecorder | None = None
    _tell: Callable[[Decision], None] | None = None
    _watcher: StepWatcher | None = None
    _shadow_dispatch: Callable[..., Decision] | None = None

    def start_recording(self, capacity: int = DEFAULT_CAPACITY) -> StepRecorder:
        """Record what each step is dispatched with, in place of an earlier recording.

        Args:
            capacity: Steps to keep; the oldest are overwritten, and counted.

        Returns:
            What is filled from now on: ``recorder.save(path)`` writes a step trace.

        Raises:
            ConfigError: ``capacity`` is not a whole number of at least 1.
        """
        recorder = StepRecorder(self.dispatcher.config, capacity)
        with self._lock:
            self._recorder = recorder
            self._listen()
        return recorder

    def stop_recording(self) -> None:
        """Record no more steps; those that do not record pay nothing for it."""
        with self._lock:
            self._recorder = None
            self._listen()

    def on_decision(self, tell: Callable[[Decision], None] | None) -> None:
        """Call something with the decision of each step, before it runs; None: nothing more.

        It runs in the step, under the runner's lock: it must be quick, and what it raises is
        raised by the step.
        """
        with self._lock:
            self._tell = tell
            self._listen()

    def watch_steps(self, watcher: StepWatcher | None) -> None:
        """Have each step watched from now on; None: no more. Steps unwatched pay nothing.

        Args:
            watcher: ``dispatchkit.observe.Timeline``, ``NvtxRanges``, or anything else with
                their ``enter`` and ``leave``. It runs in the step, under the runner's lock: it
                must be quick, and what it raises is raised by the step.

        Raises:
            ConfigError: It lacks one of the two.
        """
        if watcher is not None:
            for name in ("enter", "leave"):
                if not callable(getattr(watcher, name, None)):
                    raise ConfigError("watcher", watcher, "None, or an object with enter and leave")
        with self._lock:
            self._watcher = watcher
            self._listen()

    @property
    def is_shadowed(self) -> bool:
        """Whether a shadow follows the steps."""
        return self._shadow_dispatch is not None

    def let_follow(self, dispatch: Callable[..., Decision] | None) -> None:
        """Decide steps through a shadow's function, which asks the dispatcher; None: no more."""
        with self._lock:
            self._shadow_dispatch = dispatch
            self._listen()

    def _listen(self) -> None:
        for number, member in enumerate(self.lanes):
            decide: Callable[..., Decision] = self._shadow_dispatch or member.dispatcher.dispatch
            if self._tell is not None:
                decide = _telling(decide, self._tell)
            if self._recorder is not None:
                decide = self._recorder.listening_to(decide)
            if self._watcher is not None:
                decide = _watched(decide, self._watcher, number, member.dispatcher.dispatch)
            member._decide = decide

    def upload(self, key: GraphKey) -> bool:
        """Bring a key's graphs to the device ahead of their first launch, on their lanes.

        Returns:
            Whether that was queued; False without a graph, or where the backend cannot.
        """
        uploads = features_of(self.backend).uploads
        if uploads is None:
            return False
        with self._lock:
            steps = [one for member in self.lanes if (one := member.lifecycle.live().get(key))]
            done = [
                uploads.upload(graph, step.lane.stream) for step in steps for graph in step.graphs
            ]
        return bool(done) and all(done)

    def launch_path(self, key: GraphKey) -> str:
        """Say how the graph of a key is launched: ``direct``, or by its graph and why.

        Raises:
            RegistryError: The key has no graph.
        """
        return launch_path(self.backend, self._live_step(key))

    def input_path(self, key: GraphKey) -> str:
        """Say how inputs of a key come in: ``node``, or by torch's ``copy`` and why.

        With a node, device inputs that it is not for still go by a copy, step by step. Host
        inputs that it is not for are copied by the graph from pinned memory: ``staging``, and
        why, behind how device inputs come in.

        Raises:
            RegistryError: The key has no graph.
        """
        return str(self._live_step(key).input_path)

    def _live_step(self, key: GraphKey) -> CapturedStep:
        captured = self.lifecycle.live().get(key)
        if captured is None:
            raise RegistryError(f"{key} has no graph that could be launched.")
        return captured
