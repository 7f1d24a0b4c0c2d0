"""What a runner's owner can learn of its steps: a recording of them, and how they are launched."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.errors import RegistryError
from dispatchkit.execute.direct import launch_path
from dispatchkit.execute.lifecycle import Lifecycle
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.recorder import DEFAULT_CAPACITY, StepRecorder


class Recording:
    """The part of GraphRunner that records steps; those that nobody records pay nothing."""

    dispatcher: Dispatcher
    backend: GraphBackend
    lifecycle: Lifecycle
    _lock: threading.RLock
    _decide: Callable[..., Decision]

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
            self._decide = recorder.listening_to(self.dispatcher.dispatch)
        return recorder

    def stop_recording(self) -> None:
        """Record no more steps; those that do not record pay nothing for it."""
        with self._lock:
            self._decide = self.dispatcher.dispatch

    def launch_path(self, key: GraphKey) -> str:
        """Say how the graph of a key is launched: ``direct``, or by its graph and why.

        Raises:
            RegistryError: The key has no graph.
        """
        captured = self.lifecycle.live().get(key)
        if captured is None:
            raise RegistryError(f"{key} has no graph that could be launched.")
        return launch_path(self.backend, captured)
