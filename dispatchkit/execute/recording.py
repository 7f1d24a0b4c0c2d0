"""What a runner's owner can learn of its steps: a recording of them, and how they are launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.errors import RegistryError
from dispatchkit.execute.direct import launch_path
from dispatchkit.execute.lifecycle import Lifecycle
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

    def _listen(self) -> None:
        for member in self.lanes:
            decide: Callable[..., Decision] = member.dispatcher.dispatch
            if self._tell is not None:
                decide = _telling(decide, self._tell)
            if self._recorder is not None:
                decide = self._recorder.listening_to(decide)
            member._decide = decide

    def launch_path(self, key: GraphKey) -> str:
        """Say how the graph of a key is launched: ``direct``, or by its graph and why.

        Raises:
            RegistryError: The key has no graph.
        """
        captured = self.lifecycle.live().get(key)
        if captured is None:
            raise RegistryError(f"{key} has no graph that could be launched.")
        return launch_path(self.backend, captured)
