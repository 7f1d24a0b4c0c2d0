"""Streams and events of the tape, with immediate or deferred work.

By default, submitted work runs before ``submit`` returns, so the order of work is always correct
and recorded events are always done.

In deferred mode (with a seed), work is queued. Queued work runs when the host or the default stream
waits for it, or when the scheduler advances its stream. The scheduler interleaves work of different
streams as far as waits allow. If a wait is missing, code may therefore read old data or poison
(such as NaN). Equal seeds produce equal interleavings.

Tensor operations are deferred only inside ``use_stream`` (see deferred.py). Outside it, work on the
default stream is not deferred, and a wait of the default stream blocks the host.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from dispatchkit.backends.capture_guard import capturing_device, refuse_in_capture
from dispatchkit.errors import ConfigError, ReplayError


@attrs.define(eq=False)
class Mark:
    """A recorded event in a stream's queue."""

    stream: TapeStream
    done: bool = False
    at_ns: int = 0


@attrs.define(eq=False)
class _Wait:
    """A queue item that blocks later items until a mark is done."""

    mark: Mark


@attrs.define(eq=False)
class _Work:
    """A queue item that runs a function."""

    run: Callable[[], Any]


class Scheduler:
    """Queues the work of a deferred tape's streams, and interleaves it at random.

    Thread safety: all methods may be called from any thread. The lock is re-entrant, because
    running work may submit more work.

    Args:
        seed: Seed of the random choices.
    """

    def __init__(self, seed: int) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._random = random.Random(seed)
        self._queues: dict[TapeStream, deque[_Work | _Wait | Mark]] = {}

    def submit(self, stream: TapeStream, item: _Work | _Wait | Mark) -> None:
        """Queue an item, then run a random number of items of random streams."""
        with self.lock:
            self._queues.setdefault(stream, deque()).append(item)
            while self._random.random() < 0.3:
                ready = [other for other in self._queues if self._is_ready(other)]
                if not ready:
                    return
                self._step(self._random.choice(ready))

    def is_idle(self, stream: TapeStream) -> bool:
        """Return whether a stream's queue is empty."""
        with self.lock:
            return not self._queues.get(stream)

    def drain(self, stream: TapeStream) -> None:
        """Run all work queued on a stream, and the work that the stream waits for."""
        with self.lock:
            while self._queues.get(stream):
                self._advance(stream)

    def drain_to(self, mark: Mark) -> None:
        """Run the work of a stream up to a mark."""
        with self.lock:
            while not mark.done:
                self._advance(mark.stream)

    def drain_all(self) -> None:
        """Run all queued work."""
        with self.lock:
            while busy := [stream for stream, queue in self._queues.items() if queue]:
                self._advance(self._random.choice(busy))

    def _is_ready(self, stream: TapeStream) -> bool:
        queue = self._queues[stream]
        if not queue:
            return False
        head = queue[0]
        return not isinstance(head, _Wait) or head.mark.done

    def _advance(self, stream: TapeStream) -> None:
        """Run the head of a queue, after the work that the head waits for."""
        head = self._queues[stream][0]
        if isinstance(head, _Wait):
            self.drain_to(head.mark)
        self._step(stream)

    def _step(self, stream: TapeStream) -> None:
        queue = self._queues[stream]
        # Remove the item before it runs, so that it does not run again if it raises.
        item = queue.popleft()
        if not queue:
            del self._queues[stream]
        if isinstance(item, Mark):
            item.done, item.at_ns = True, time.perf_counter_ns()
        elif isinstance(item, _Work):
            item.run()


class _Interception(threading.local):
    """The number of this thread's ``use_stream`` blocks that defer operations on a stream."""

    depth = 0


class TapeStream:
    """An in-order queue of work; handle 0 is the default stream.

    Attributes:
        lock: Lock that serializes the work of several threads on the stream.
        was_captured: Whether a capture has run on the stream.
        capturing_thread: ID of the thread that is capturing on the stream, or None.
    """

    def __init__(self, handle: int, scheduler: Scheduler | None) -> None:
        self._handle = handle
        self.scheduler = scheduler
        self.lock: threading.Lock = threading.Lock()
        self.interception: _Interception = _Interception()
        self.was_captured = False
        self.capturing_thread: int | None = None

    @property
    def handle(self) -> int:
        """The raw handle, which is cheap to compare."""
        return self._handle

    @property
    def is_deferred(self) -> bool:
        """Whether submitted work is queued instead of run immediately."""
        return self.scheduler is not None and (self._handle != 0 or self.interception.depth > 0)

    def submit(self, run: Callable[[], Any]) -> None:
        """Queue work, or run it immediately if the stream is not deferred."""
        if self.scheduler is not None and self.is_deferred:
            self.scheduler.submit(self, _Work(run))
            return
        if self.scheduler is not None:
            self.scheduler.drain(self)
        with self.lock:
            run()

    def mark(self) -> Mark:
        """Add a mark to the end of the queue, and return the mark.

        Raises:
            ReplayError: Another thread is capturing on the stream. On a device, the mark and all
                work that waits for it would become part of the capture.
        """
        if self.capturing_thread not in (None, threading.get_ident()):
            raise ReplayError(
                f"Another thread is capturing on {self!r}, so no event can be recorded on it, and "
                "no other stream can wait for it. Record the event, or wait for the stream, before "
                "or after the capture."
            )
        mark = Mark(self)
        if self.scheduler is not None and self.is_deferred and not capturing_device():
            self.scheduler.submit(self, mark)
        else:
            # In a capture, no work is queued, because the graph determines the order.
            if self.scheduler is not None and not capturing_device():
                self.scheduler.drain(self)
            mark.done, mark.at_ns = True, time.perf_counter_ns()
        return mark

    def wait_mark(self, mark: Mark) -> None:
        """Make later work wait for a mark."""
        if self.scheduler is None or mark.done or mark.stream is self or capturing_device():
            return
        if self.is_deferred:
            self.scheduler.submit(self, _Wait(mark))
        else:
            self.scheduler.drain_to(mark)

    def wait_event(self, event: Any) -> None:
        """Make later work of this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for all work queued on another stream."""
        self.wait_mark(stream.mark())

    def query(self) -> bool:
        """Return whether all queued work is done, without blocking."""
        refuse_in_capture("Stream.query()", "it queries the device")
        return self.scheduler is None or self.scheduler.is_idle(self)

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        refuse_in_capture("Stream.synchronize()")
        if self.scheduler is not None:
            self.scheduler.drain(self)

    def __repr__(self) -> str:
        return f"<TapeStream {self._handle}>"


class TapeEvent:
    """An event of the tape; timing events measure host time.

    Args:
        current: Function that returns the current stream of the calling thread.
        timing: Whether the event measures time.
    """

    def __init__(self, current: Callable[[], TapeStream], *, timing: bool) -> None:
        self._current = current
        self._timing = timing
        self._mark: Mark | None = None

    def record(self, stream: Any = None) -> None:
        """Record the event after all work queued on a stream (default: the current stream)."""
        self._mark = (stream or self._current()).mark()

    def wait(self, stream: Any = None) -> None:
        """Make later work of a stream wait for this event; no effect if it was not recorded."""
        if self._mark is not None:
            (stream or self._current()).wait_mark(self._mark)

    def query(self) -> bool:
        """Return whether all work before the event is done, without blocking."""
        refuse_in_capture("Event.query()", "it queries the device")
        return self._mark is None or self._mark.done

    def synchronize(self) -> None:
        """Block the host until all work before the event is done."""
        refuse_in_capture("Event.synchronize()")
        mark = self._mark
        if mark is not None and not mark.done and mark.stream.scheduler is not None:
            mark.stream.scheduler.drain_to(mark)

    def elapsed_us(self, end: Any) -> float:
        """Return the microseconds of host time between this event and a later event.

        Raises:
            ConfigError: An event was created without ``timing=True``.
            ReplayError: An event was not recorded, or the work before it is not done.
        """
        if not (self._timing and end._timing):
            raise ConfigError(
                "timing", False, "True for both events", "Create them with new_event(timing=True)."
            )
        first, last = self._mark, end._mark
        if first is None or last is None or not (first.done and last.done):
            raise ReplayError(
                "The time between two events was read before both had been recorded and had "
                "completed. Record both, then call synchronize() on the second."
            )
        elapsed_ns: int = last.at_ns - first.at_ns
        return elapsed_ns / 1000.0
