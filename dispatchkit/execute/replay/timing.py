"""Timed steps: events around a whole step, read later without waiting.

The time covers all device work of a step, including copies in and out, since that is what a choice
between a graph and eager affects.
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

# Measured steps that wait to be read; older ones are dropped unread.
MAX_PENDING = 256
#: One in this many of the steps whose steady decision is timed is measured.
SAMPLE_EVERY = 16

#: Share of the host's time that counts if the host is slower than the device: occasionally there
#: is work ahead, and the device does not wait for the host.
HOST_SHARE = 0.9

# Times kept per graph, and per size of eager steps; for explanations, not for policies.
KEPT_TIMES = 64

# Host times kept per graph, and of eager, of steps submitted without waiting.
KEPT_SUBMITS = 16

T = TypeVar("T")


def _ran(decision: Decision, batch: Batch) -> tuple[GraphKey, ...] | int:
    """Return the key of steps that take equal time: the graphs, or the size of eager ones."""
    return decision.keys or batch.num_tokens


@attrs.define(eq=False)
class Measurement:
    """A step that is being measured, or waits to be read.

    Attributes:
        start: Before its first copy.
        end: After its last.
        batch: The cell it ran for.
        decision: The decision it ran under.
        step: Number of steps begun, including this one.
        queued: Other work was ahead of it on its stream.
        is_first: It is the first eager run of its size.
        begun_ns: Host time at which submission began, in nanoseconds.
        submit_us: Host time of the submission, in microseconds.
        was_ahead: The host finished submitting before the device reached it.
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
        backend: Creates the events; without device timing, times are host times.
        dispatcher: Learns each outcome when it is read; its policy may request a slower pace. It is
            referenced weakly, since its table holds the plans, which reference this object.
        lane: Counts the steps.
        sample_every: One in this many of the steps whose steady decision is timed is measured.

    Attributes:
        due: The lane's tick from which on the next such step is measured.
        is_held: Outcomes are not passed on after a step, since learning would slow the next one.
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
            PolicyError: In strict mode, the policy's answer to an earlier outcome was invalid. The
                step has not begun.
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
        """Return the step that first ran eager at the batch's size, or the next one if none has."""
        return self._first_eager.setdefault(batch.num_tokens, self._lane.tick + 1)

    def finish(self, measurement: Measurement) -> None:
        """Mark the end of a step; then pass on earlier outcomes that are done.

        The device has work at that moment, so that learning delays it least.
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
            self._fault = fault  # this step has run: its result belongs to the caller

    def fail(self, measurement: Measurement) -> None:
        """Record that a step did not run as decided or did not complete."""
        batch, decision, step = measurement.batch, measurement.decision, measurement.step
        try:
            self._tell(Outcome(batch, decision, clock=self._clock, completed=False, step=step))
        except PolicyError as fault:
            self._fault = fault  # the step has its own result or error

    def drain(self, *, wait: bool = False) -> int:
        """Pass on the outcomes of finished measured steps, oldest first.

        Args:
            wait: Block until all are done; otherwise stop at the first that is not.

        Returns:
            The number of outcomes passed on.
        """
        told = 0
        while True:
            with self._lock:
                if not self._pending:
                    return told
                head = self._pending[0]
            if wait:
                head.end.synchronize()  # without the lock, which concurrent steps need
            elif not head.end.query():
                return told
            with self._lock:
                if not self._pending or self._pending[0] is not head:
                    continue  # another thread passed it on, or it was dropped
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
        """Return the time of a step: the device's, or the host's if that is longer.

        Behind other work, the events measure the device alone. If all steps ran that way, the
        device would soon catch up with a slower host.
        """
        elapsed = done.start.elapsed_us(done.end)
        if self._clock != "device":
            return elapsed
        return max(elapsed, HOST_SHARE * self._host_us(done))

    def _host_us(self, done: Measurement) -> float:
        """Return the time that the host needed to submit a step.

        A stream holds about a thousand launches. A host that is that far ahead waits inside a
        launch for earlier steps to run, so the time is known only from steps that the device had
        reached meanwhile.
        """
        known = self._submits.setdefault(done.decision.keys, deque(maxlen=KEPT_SUBMITS))
        if not done.was_ahead:
            known.append(done.submit_us)
        elif known:
            return min(done.submit_us, statistics.median(known))
        return done.submit_us

    def _pace(self) -> int:
        """Return the factor by which the policy currently wants fewer steps measured."""
        dispatcher = self._dispatcher()
        return 1 if dispatcher is None else dispatcher.pace

    def _tell(self, outcome: Outcome) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.observe(outcome)

    def of(self, decision: Decision, batch: Batch) -> tuple[MeasuredTime, ...]:
        """Return the times of steps that ran as decided, separately for idle and queued."""
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
        """Drop all unread measurements, and a fault that was not raised yet."""
        with self._lock:
            self._pending.clear()
        self._fault = None

    def _new_event(self) -> Event:
        return self._backend.new_event(timing=True)


class Timer:
    """Measures the steps of one decision when they are due.

    Attributes:
        is_always_due: It measures every step, since the decision is one-shot.
    """

    timings: Timings

    def __init__(self, timings: Timings, decision: Decision, batch: Batch) -> None:
        self.timings, self._decision, self._batch = timings, decision, batch
        self.is_always_due: bool = decision.one_shot
        if not decision.keys and not decision.one_shot:
            timings.first_eager_step(batch)  # the plan is created in the step that runs it

    def is_due(self, tick: int) -> bool:
        """Return whether the step after a number of steps must be measured."""
        return self.is_always_due or tick >= self.timings.due

    def begin(self) -> Measurement:
        """Mark the start of a step."""
        return self.timings.begin(self._batch, self._decision)

    def measure(self, run: Callable[[], T]) -> T:
        """Run and measure a step; one that raises is recorded as not completed."""
        measurement = self.begin()
        try:
            result = run()
        except Exception:
            self.timings.fail(measurement)
            raise
        self.timings.finish(measurement)
        return result
