"""Memory pools shared by graphs of the tape."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.tape.placement import Placement, place
from dispatchkit.backends.tape.recorder import Recorder
from dispatchkit.backends.tape.replay import TensorFactory
from dispatchkit.backends.tape.steps import LAUNCH_KEYS
from dispatchkit.backends.watching.dispatch_mode import DispatchMode, tensors_in


class TapePool:
    """Memory shared by graphs that never run concurrently.

    The intermediates of all graphs share the same segments, so a replay overwrites the
    intermediates of the other graphs. On a device, tensors that outlive a capture (its outputs, and
    tensors that user code still references) may be in memory that earlier graphs use for
    intermediates. The replay of a graph therefore also overwrites such tensors of later captures,
    but not of earlier captures.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[Any] = []
        # (storage, size in bytes, number of the capture) of tensors that outlive their capture.
        self._kept: list[tuple[StorageWeakRef, int, int]] = []
        self._num_captures = 0
        self._adopted: list[StorageWeakRef] = []
        self.is_asleep = False
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes currently reserved for segments and live outputs."""
        with self._lock:
            return 0 if self.is_asleep else self._graph_bytes()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of segments, live outputs and tensors from ``allocate``, even while asleep."""
        with self._lock:
            return self._graph_bytes() + sum(one.nbytes() for one in _alive(self._adopted))

    def _graph_bytes(self) -> int:
        if not self._graphs:
            self._segments.clear()
        self._kept = [one for one in self._kept if not one[0].expired()]
        segments: int = sum(segment.nbytes() for segment in self._segments)
        return segments + sum(num_bytes for _, num_bytes, _ in self._kept)

    @property
    def held_bytes(self) -> int:
        """Bytes of live outputs and live tensors from ``allocate``."""
        with self._lock:
            adopted = sum(one.nbytes() for one in _alive(self._adopted))
            return adopted + sum(
                num_bytes for storage, num_bytes, _ in self._kept if not storage.expired()
            )

    @property
    def num_steps(self) -> int:
        """Total number of operations of the graphs in the pool."""
        with self._lock:
            return sum(graph.num_steps for graph in self._graphs)

    def allocate(self, recorder: Recorder, kept: set[int]) -> TensorFactory:
        """Place a recording's intermediates in segments, and return a factory for its tensors.

        Storages in ``kept`` are not moved.
        """
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
            self._num_captures += 1
            for identity in kept:
                storage = recorder.storages[identity]
                self._kept.append((StorageWeakRef(storage), storage.nbytes(), self._num_captures))
        return TensorFactory(places)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add to the pool tensors that were created outside captures."""
        with self._lock:
            self._adopted = [one for one in self._adopted if not one.expired()]
            self._adopted += [StorageWeakRef(one.untyped_storage()) for one in tensors]

    def sleep(self) -> int:
        """Put the pool to sleep, and return the bytes that a device would release."""
        num_bytes = 0 if self.is_asleep else self.reserved_bytes
        self.is_asleep = True
        return num_bytes

    def wake(self) -> None:
        """Wake the pool, and overwrite its memory."""
        with self._lock:
            if not self.is_asleep:
                return
            kept = _alive([storage for storage, _, _ in self._kept])
            for storage in (*self._segments, *kept, *_alive(self._adopted)):
                _overwrite(storage)
            self.is_asleep = False

    def overwriting(self, recorder: Recorder, kept: set[int]) -> Callable[[], None] | None:
        """Return a function that overwrites the outputs of later captures.

        Replays of the recording call the function, because on a device, the recording's
        intermediates may share memory with these outputs. Return None if the recording has no
        intermediates.
        """
        if not any(recorder.storages[identity].nbytes() for identity in recorder.own - kept):
            return None
        mine = self._num_captures

        def overwrite() -> None:
            with self._lock:
                later = [storage for storage, _, number in self._kept if number > mine]
            for storage in _alive(later):
                _overwrite(storage)

        return overwrite

    def growth(self, recorder: Recorder, kept: set[int]) -> int:
        """Return the bytes that a recording would add to the pool."""
        with self._lock:
            num_bytes = self._place(recorder, kept)[1].new_bytes
        for identity in kept:
            num_bytes += recorder.storages[identity].nbytes()
        return num_bytes

    def _place(self, recorder: Recorder, kept: set[int]) -> tuple[dict[int, int], Placement]:
        """Return the sizes and locations of intermediates; the caller holds the lock."""
        sizes = {identity: recorder.storages[identity].nbytes() for identity in recorder.own - kept}
        if not self._graphs:
            self._segments.clear()
        return sizes, place(recorder.steps, sizes, [segment.nbytes() for segment in self._segments])

    def add(self, graph: object) -> None:
        """Add a graph that uses the pool."""
        with self._lock:
            self._graphs.add(graph)

    def discard(self, graph: object) -> None:
        """Remove a graph."""
        with self._lock:
            self._graphs.discard(graph)


class NewTensors(DispatchMode):
    """A mode that collects the tensors that operations return.

    Attributes:
        tensors: The tensors returned under the mode, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.tensors: list[torch.Tensor] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions of other threads are not affected."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += tensors_in([result])
        return result


def _alive(references: Iterable[StorageWeakRef]) -> list[torch.UntypedStorage]:
    # torch returns None for a freed storage, although its annotation does not allow None.
    found: list[torch.UntypedStorage | None] = [
        torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in references
    ]
    return [storage for storage in found if storage is not None]


def _overwrite(storage: torch.UntypedStorage) -> None:
    # This function already runs in stream order. Bypass the modes of the deferred tape, which would
    # queue the write again.
    with torch._C._ExcludeDispatchKeyGuard(LAUNCH_KEYS):
        torch.tensor((), dtype=torch.uint8).set_(storage).fill_(255)
