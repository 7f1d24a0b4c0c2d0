"""Pools and captured graphs of the tape."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.capture_guard import capturing_device
from dispatchkit.backends.tape.plan import Materialiser, Placement, place, view_of_storage
from dispatchkit.backends.tape.poison import poison
from dispatchkit.backends.tape.recorder import Recorder
from dispatchkit.backends.tape.streams import TapeStream
from dispatchkit.errors import ReplayError


class TapePool:
    """Memory that the graphs of one lane share.

    Intermediates of all its graphs lie in the same segments, so that a replay overwrites
    the intermediates of every other graph of the pool. Outputs, and whatever else outlives
    the callable, have memory of their own and are overwritten by no other graph: as on a
    device, where a later capture reuses only what was free by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[Any] = []
        self._kept: list[tuple[StorageWeakRef, int]] = []
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved now: the segments, and outputs that are still alive."""
        with self._lock:
            if not self._graphs:
                self._segments.clear()
            self._kept = [pair for pair in self._kept if not pair[0].expired()]
            segments: int = sum(segment.nbytes() for segment in self._segments)
            return segments + sum(num_bytes for _, num_bytes in self._kept)

    def allocate(self, recorder: Recorder, kept: set[int]) -> Materialiser:
        """Place the intermediates of a recording in the segments; kept storages stay put."""
        with self._lock:
            sizes, placement = self._place(recorder, kept)
            if placement.new_bytes:
                self._segments.append(torch.UntypedStorage(placement.new_bytes))
            places = {
                identity: (storage, 0)
                for identity, storage in recorder.storages.items()
                if identity not in sizes
            }
            for identity, (number, start) in placement.where.items():
                places[identity] = (self._segments[number], start)
            for identity in kept:
                storage = recorder.storages[identity]
                self._kept.append((StorageWeakRef(storage), storage.nbytes()))
        return Materialiser(places)

    def growth(self, recorder: Recorder, kept: set[int]) -> int:
        """Return by how many bytes a recording would make the pool grow."""
        with self._lock:
            num_bytes = self._place(recorder, kept)[1].new_bytes
        for identity in kept:
            num_bytes += recorder.storages[identity].nbytes()
        return num_bytes

    def _place(self, recorder: Recorder, kept: set[int]) -> tuple[dict[int, int], Placement]:
        """Plan where intermediates go, and return their sizes and places; under the lock."""
        sizes = {identity: recorder.storages[identity].nbytes() for identity in recorder.own - kept}
        if not self._graphs:
            self._segments.clear()
        return sizes, place(recorder.steps, sizes, [segment.nbytes() for segment in self._segments])

    def add(self, graph: TapeGraph) -> None:
        """Count a graph as a user of the pool."""
        with self._lock:
            self._graphs.add(graph)

    def discard(self, graph: TapeGraph) -> None:
        """Count a graph no longer."""
        with self._lock:
            self._graphs.discard(graph)


def _refuse_replay() -> None:
    raise ReplayError(
        "A released graph was asked to replay. Capture it again, or keep it until its last use."
    )


class TapeGraph:
    """One captured graph of the tape."""

    def __init__(
        self,
        current_stream: Callable[[], TapeStream],
        pool: TapePool,
        outputs: Any,
        launches: tuple[Callable[[], None], ...],
        *,
        draws: bool,
    ) -> None:
        self._current_stream = current_stream
        self._pool = pool
        self._outputs = outputs
        self._launches = launches
        self._draws = draws
        self._released = False
        pool.add(self)

    @property
    def outputs(self) -> Any:
        """What the callable returned at capture; overwritten by every replay.

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
        """Run the steps in the order of the current stream, no Python of the callable.

        Deferred, a graph that draws runs at once, after what its stream still holds:
        generators move in the order of submission, as the host's offsets on a device do.

        Raises:
            ReplayError: The graph was released, or this thread is inside a capture.
        """
        if capturing_device():
            raise ReplayError(
                "A replay inside a capture is not recorded by the tape. Call the captured "
                "function itself there."
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
            stream.give(launch)
        if self._draws:
            stream.scheduler.drain(stream)

    def release(self) -> None:
        """Release the memory; replays already queued still run."""
        self._released = True
        self._launches = (_refuse_replay,)
        self._outputs = None
        self._pool.discard(self)


def poison_kept(recorder: Recorder, kept: set[int]) -> None:
    """Fill what outlives the callable, so that a read before the first replay shows."""
    for step in recorder.steps:
        for ref in step.refs():
            if ref.storage in kept:
                poison(view_of_storage(recorder.storages[ref.storage], ref))
