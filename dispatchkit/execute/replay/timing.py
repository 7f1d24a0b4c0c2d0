"""Timed steps: events around a whole step, read later without waiting.

What is measured is all that a step has the device do: its copies in and out too, since a choice
between a graph and eager is one between these wholes.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import attrs

from dispatchkit.backends.base import Event, GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher, MeasuredTime, Outcome
from dispatchkit.errors import PolicyError
from dispatchkit.execute.lane import Lane
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import check_count

# Measured steps that wait to be read; older ones are let go of unread.
MAX_PENDING = 256
#: Of the steps whose steady decision is timed, one in so many is measured.
SAMPLE_EVERY = 16

#: What a host that is slower than the device counts for: now and then there is work ahead, and
#: it is not waited for.
HOST_SHARE = 0.9

# Times kept of each graph, and of eager at each size: for explanations, not for policies.
KEPT_TIMES = 64

# Of each graph, and of eager, how long the host took for so many steps without waiting.
KEPT_SUBMITS = 16

T = TypeVar("T")


def _ran(decision: Decision, batch: Batch) -> tuple[GraphKey, ...] | int:
    """Return what names steps that take the same time: the graphs, or the size of eager ones."""
    return decision.keys or batch.num_tokens


@attrs.define(eq=False)
class Measurement:
    """A step that is being measured, or waits to be read.

    Attributes:
        start: Before its first copy.
        end: After its last.
        batch: The cell it ran for.
        decision: The decision it ran under.
        step: How many steps had begun, this one included.
        queued: Other work was ahead of it on its stream.
        is_first: It runs eager, and no batch of its size has before.
        begun_ns: When the host began to submit it, nanoseconds.
        submit_us: How long the host took for that, microseconds.
        was_ahead: The host was done before the device came to it.
    """

    start: Event
    end: Event
    batch: Batch
    decision: Decision
    step: int
    queued: bool
    is_first: bool = False
    begun_ns: int = 0
    submit_us: float = 0.0
    was_ahead: bool = False


class Timings:
    """Measured steps of one runner that have not been read yet.

    Args:
        backend: Makes the events; where it has no device timing, times are host times.
        dispatcher: Learns each outcome when it is read; its policy may ask for a slower pace. It
            is held weakly: its table holds the plans, which hold this.
        lane: Counts the steps.
        sample_every: Of the steps whose steady decision is timed, one in so many is measured.

    Attributes:
        due: The lane's tick from which on the next such step is measured.
        is_held: Nothing is told after a step: learning in between would slow the next one.
    """

    def __init__(
        self,
        backend: GraphBackend,
        dispatcher: Dispatcher,
        lane: Lane,
        sample_every: int = SAMPLE_EVERY,
    ) -> None:
        self._backend, self._lane = backend, lane
        self._dispatcher = weakref.ref(dispatcher)
        self.sample_every: int = check_count(sample_every, "sample_every")
        self.due: int = 0
        self.is_held: bool = False
        self._clock = "device" if backend.capabilities.device_timing else "host"
        self._pending: deque[Measurement] = deque(maxlen=MAX_PENDING)
        self._spare: list[tuple[Event, Event]] = []
        self._fault: PolicyError | None = None
        self._read: dict[tuple[tuple[GraphKey, ...] | int, bool], deque[float]] = {}
        self._submits: dict[tuple[GraphKey, ...], deque[float]] = {}
        self._first_eager: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin(self, batch: Batch, decision: Decision) -> Measurement:
        """Mark the start of a step on the current stream.

        Raises:
            PolicyError: In strict mode, what the policy answered to an earlier outcome was
                no answer. The step has not begun.
        """
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        stream = self._backend.current_stream()
        queued = not stream.query()
        with self._lock:
            events = self._spare.pop() if self._spare else None
        start, end = events or (self._new_event(), self._new_event())
        step = self._lane.tick + 1
        self.due = step + self.sample_every * self._pace() - 1
        is_first = not decision.keys and self.first_eager_step(batch) >= step
        start.record(stream)
        begun_ns = time.perf_counter_ns()
        return Measurement(start, end, batch, decision, step, queued, is_first, begun_ns)

    def first_eager_step(self, batch: Batch) -> int:
        """Return the step that first ran eager at the batch's size: the next one if none has."""
        return self._first_eager.setdefault(batch.num_tokens, self._lane.tick + 1)

    def finish(self, measurement: Measurement) -> None:
        """Mark the end of a step; then tell what has been measured before and is done.

        The device has work at that moment, so that learning holds it up least.
        """
        measurement.submit_us = (time.perf_counter_ns() - measurement.begun_ns) / 1e3
        measurement.was_ahead = measurement.queued and not measurement.start.query()
        measurement.end.record(self._backend.current_stream())
        with self._lock:
            self._pending.append(measurement)
        if self.is_held:
            return
        try:
            self.drain()
        except PolicyError as fault:
            self._fault = fault  # this step has run: its result is its caller's

    def fail(self, measurement: Measurement) -> None:
        """Tell that a step did not run as decided, or not to its end."""
        batch, decision, step = measurement.batch, measurement.decision, measurement.step
        try:
            self._tell(Outcome(batch, decision, clock=self._clock, completed=False, step=step))
        except PolicyError as fault:
            self._fault = fault  # the step has a result, or an error, of its own

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
                head.end.synchronize()  # without the lock, which the steps need that run meanwhile
            elif not head.end.query():
                return told
            with self._lock:
                if not self._pending or self._pending[0] is not head:
                    continue  # another thread told it, or it was let go of
                self._pending.popleft()
            elapsed = self._elapsed_us(head)
            latest = self._read.setdefault(
                (_ran(head.decision, head.batch), head.queued), deque(maxlen=KEPT_TIMES)
            )
            latest.append(elapsed)
            with self._lock:
                self._spare.append((head.start, head.end))
            self._tell(
                Outcome(
                    head.batch,
                    head.decision,
                    elapsed,
                    self._clock,
                    head.queued,
                    step=head.step,
                    is_first=head.is_first,
                )
            )
            told += 1

    def _elapsed_us(self, done: Measurement) -> float:
        """Return what a step took: of the device, or of the host where that is slower.

        Behind other work the events show what the device needs. If all steps ran that way, the
        device would soon have caught up with a host that needs longer.
        """
        elapsed = done.start.elapsed_us(done.end)
        if self._clock != "device":
            return elapsed
        return max(elapsed, HOST_SHARE * self._host_us(done))

    def _host_us(self, done: Measurement) -> float:
        """Return how long the host needed to submit a step.

        A stream takes about a thousand launches. A host that is so far ahead waits inside of a
        launch for earlier steps to run: what a step needs is known from those that the device
        had come to meanwhile.
        """
        known = self._submits.setdefault(done.decision.keys, deque(maxlen=KEPT_SUBMITS))
        if not done.was_ahead:
            known.append(done.submit_us)
        elif known:
            return min(done.submit_us, statistics.median(known))
        return done.submit_us

    def _pace(self) -> int:
        """Return how many times as seldom the policy wants steps measured just now."""
        dispatcher = self._dispatcher()
        return 1 if dispatcher is None else dispatcher.pace

    def _tell(self, outcome: Outcome) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.observe(outcome)

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
        """Let go of all measurements unread, and of a fault that no step was told of yet."""
        with self._lock:
            self._pending.clear()
        self._fault = None

    def _new_event(self) -> Event:
        return self._backend.new_event(timing=True)


class Timer:
    """Measures the steps of one decision when their turn comes.

    Attributes:
        is_always_due: It measures every step: the decision holds for one only.
    """

    timings: Timings

    def __init__(self, timings: Timings, decision: Decision, batch: Batch) -> None:
        self.timings, self._decision, self._batch = timings, decision, batch
        self.is_always_due: bool = decision.one_shot
        if not decision.keys and not decision.one_shot:
            timings.first_eager_step(batch)  # the plan is made in the step that runs it

    def is_due(self, tick: int) -> bool:
        """Return whether the step after so many is to be measured."""
        return self.is_always_due or tick >= self.timings.due

    def begin(self) -> Measurement:
        """Mark the start of a step."""
        return self.timings.begin(self._batch, self._decision)

    def measure(self, run: Callable[[], T]) -> T:
        """Run a step and note how long it takes; one that raises is told as not completed."""
        measurement = self.begin()
        try:
            result = run()
        except Exception:
            self.timings.fail(measurement)
            raise
        self.timings.finish(measurement)
        return result
