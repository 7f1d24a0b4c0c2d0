"""Timed steps: events around a launch, read later without waiting."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import attrs

from dispatchkit.backends.base import Event, GraphBackend
from dispatchkit.dispatch import Decision, MeasuredTime, Outcome
from dispatchkit.keys.batch import Batch, GraphKey

# Measured steps that wait to be read; older ones are let go of unread.
MAX_PENDING = 256

# Times kept of each graph, and of eager at each size: for explanations, not for policies.
KEPT_TIMES = 64

T = TypeVar("T")


def _ran(decision: Decision, batch: Batch) -> GraphKey | int:
    """Return what names steps that take the same time: the graph, or the size of eager ones."""
    return batch.num_tokens if decision.key is None else decision.key


@attrs.frozen
class _Pending:
    start: Event
    end: Event
    batch: Batch
    decision: Decision
    queued: bool


class Timings:
    """Measured steps of one runner that have not been read yet.

    Args:
        backend: Makes the events; where it has no device timing, times are host times.
        tell: Called with each outcome when it is read.
    """

    def __init__(self, backend: GraphBackend, tell: Callable[[Outcome], None]) -> None:
        self._backend, self._tell = backend, tell
        self._clock = "device" if backend.capabilities.device_timing else "host"
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._read: dict[tuple[GraphKey | int, bool], deque[float]] = {}
        self._lock = threading.Lock()

    def is_queued(self) -> bool:
        """Read what is done, and return whether the current stream has work ahead of a step."""
        self.drain()
        return not self._backend.current_stream().query()

    def measure(self, run: Callable[[], T], batch: Batch, decision: Decision, *, queued: bool) -> T:
        """Run something between two events; a run that raises is told as not completed."""
        stream = self._backend.current_stream()
        start = self._backend.new_event(timing=True)
        end = self._backend.new_event(timing=True)
        start.record(stream)
        try:
            result = run()
        except Exception:
            self._tell(Outcome(batch, decision, clock=self._clock, completed=False))
            raise
        end.record(stream)
        with self._lock:
            self._pending.append(_Pending(start, end, batch, decision, queued))
        return result

    def drain(self, *, wait: bool = False) -> int:
        """Tell the outcomes of measured steps that are done, oldest first.

        Args:
            wait: Block until all are done; otherwise the first that is not ends it.

        Returns:
            How many outcomes were told.
        """
        told = 0
        while True:
            with self._lock:
                if not self._pending:
                    return told
                head = self._pending[0]
                if wait:
                    head.end.synchronize()
                elif not head.end.query():
                    return told
                self._pending.popleft()
            elapsed = head.start.elapsed_us(head.end)
            latest = self._read.setdefault(
                (_ran(head.decision, head.batch), head.queued), deque(maxlen=KEPT_TIMES)
            )
            latest.append(elapsed)
            self._tell(Outcome(head.batch, head.decision, elapsed, self._clock, head.queued))
            told += 1

    def of(self, decision: Decision, batch: Batch) -> tuple[MeasuredTime, ...]:
        """Return what was measured of steps that ran as decided, idle and queued apart."""
        ran = _ran(decision, batch)
        return tuple(
            MeasuredTime(
                steps=len(times),
                median_us=statistics.median(times),
                clock=self._clock,
                queued=queued,
            )
            for queued in (False, True)
            if (times := tuple(self._read.get((ran, queued), ())))
        )

    def clear(self) -> None:
        """Let go of all measurements unread."""
        with self._lock:
            self._pending.clear()


class Timer:
    """Measures the steps of one decision."""

    def __init__(self, timings: Timings, decision: Decision, batch: Batch) -> None:
        self._timings, self._decision, self._batch = timings, decision, batch

    def is_queued(self) -> bool:
        """Return whether there is work ahead; asked before a step's own copies are queued."""
        return self._timings.is_queued()

    def measure(self, run: Callable[[], T], *, queued: bool) -> T:
        """Run something and note how long it takes on the device."""
        return self._timings.measure(run, self._batch, self._decision, queued=queued)
