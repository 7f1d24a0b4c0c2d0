"""Captured graphs of the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatchkit.backends.capture_guard import capturing_device
from dispatchkit.backends.tape.poison import poison
from dispatchkit.backends.tape.pool import TapePool
from dispatchkit.backends.tape.recorder import Recorder
from dispatchkit.backends.tape.steps import view_of_storage
from dispatchkit.backends.tape.streams import TapeStream
from dispatchkit.errors import ReplayError


def _refuse_replay() -> None:
    raise ReplayError(
        "The graph was released. Capture the function again, or release the graph only after its "
        "last use."
    )


class TapeGraph:
    """One captured graph of the tape.

    Attributes:
        num_steps: Number of operations that a replay runs.
    """

    def __init__(
        self,
        current_stream: Callable[[], TapeStream],
        pool: TapePool,
        outputs: Any,
        launches: tuple[Callable[[], None], ...],
        *,
        draws: bool,
        num_steps: int = 0,
    ) -> None:
        self.num_steps: int = num_steps
        self._current_stream = current_stream
        self._pool = pool
        self._outputs = outputs
        self._launches = launches
        self._draws = draws
        self._released = False
        pool.add(self)

    @property
    def num_operations(self) -> int:
        """Number of operations that a replay runs."""
        return self.num_steps

    @property
    def outputs(self) -> Any:
        """The callable's result during the capture; overwritten by every replay.

        Raises:
            ReplayError: The graph was released.
        """
        if self._released:
            _refuse_replay()
        return self._outputs

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws from a random generator."""
        return self._draws

    def replay(self) -> None:
        """Queue the graph once on the current stream.

        On a deferred tape, a graph that draws random numbers runs before this method returns, after
        the queued work of its stream. Generators therefore advance in submission order, as on a
        device.

        Raises:
            ReplayError: The graph was released, its memory sleeps, or this thread is inside a
                capture.
        """
        if self._pool.is_asleep:
            raise ReplayError(
                "A graph cannot be replayed while the memory of its pool is asleep. Call "
                "backend.wake([pool]) first."
            )
        if capturing_device():
            raise ReplayError(
                "A graph was replayed inside a capture, but the tape cannot record replays. Call "
                "the captured function instead of replaying its graph."
            )
        stream = self._current_stream()
        if stream.scheduler is None:
            with stream.lock:
                for launch in self._launches:
                    launch()
            return
        if self._released:
            _refuse_replay()
        for launch in self._launches:
            stream.submit(launch)
        if self._draws:
            stream.scheduler.drain(stream)

    def release(self) -> None:
        """Release the graph and its memory; replays already queued still run."""
        self._released = True
        self._launches = (_refuse_replay,)
        self._outputs = None
        self._pool.discard(self)


def poison_kept(recorder: Recorder, kept: set[int]) -> None:
    """Poison storages that outlive the capture, to expose reads before the first replay."""
    for step in recorder.steps:
        for ref in step.refs():
            if ref.storage in kept:
                poison(view_of_storage(recorder.storages[ref.storage], ref))
