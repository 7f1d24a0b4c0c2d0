"""The memory pools that graphs of the tape share."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.tape.placement import Placement, place
from dispatchkit.backends.tape.recorder import Recorder
from dispatchkit.backends.tape.replay import Materialiser


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
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

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

    def add(self, graph: object) -> None:
        """Count a graph as a user of the pool."""
        with self._lock:
            self._graphs.add(graph)

    def discard(self, graph: object) -> None:
        """Count a graph no longer."""
        with self._lock:
            self._graphs.discard(graph)
