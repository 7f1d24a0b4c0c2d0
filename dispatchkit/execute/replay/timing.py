"""Measure steps with events that are read later, without waiting.

The time covers all device work of a step, including copies of inputs and outputs, because the
choice between a graph and eager affects all of it.
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

# Maximum number of unread measurements; if there are more, the oldest are dropped.
MAX_PENDING = 256
#: Number of steps from one measurement to the next, for timed decisions that are not one-shot.
SAMPLE_EVERY = 16

#: Fraction of the host time that counts as the time of a step if the host is slower than the
#: device. It is below 1 because the device does not always wait for the host.
HOST_SHARE = 0.9

# Number of measured times kept for each graph and each size of eager steps, separately for idle and
# busy streams. They are used in explanations.
KEPT_TIMES = 64

# Number of submission times kept for each graph and for eager steps. Submissions that may have
# waited for the device are excluded.
KEPT_SUBMITS = 16

T = TypeVar("T")


def _times_key(decision: Decision, batch: Batch) -> tuple[GraphKey, ...] | int:
    """Return the key under which the times of a decision are stored."""
    return decision.keys or batch.num_tokens


@attrs.define(eq=False)
class Measurement:
    """The measurement of a step.

    Attributes:
        start: Event before the first copy.
        end: Event after the last copy.
        batch: Batch of the step's cell.
        decision: Decision of the step.
        step: Number of steps so far, including this step.
        queued: Whether earlier work was pending on the stream.
        is_first: Whether the step is the first eager run of its size.
        begun_ns: Host time at the start of the submission, in nanoseconds.
        submit_us: Duration of the submission on the host, in microseconds.
        was_ahead: Whether the submission finished before the device reached the step.
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
    """The measurements of a lane's steps, and the times read from them.

    Args:
        backend: Backend that creates the events. Without device timing, times are host times.
        dispatcher: Dispatcher that receives each outcome, and whose policy may request fewer
            measurements. The reference is weak, because the dispatcher's table holds the plans,
            which reference this object.
        lane: Lane that counts the steps.
        sample_every: Number of steps from one measurement to the next, for timed decisions that are
            not one-shot.

    Attributes:
        due: Value of ``Lane.tick``. Once the lane has reached it, the next step with a timed
            decision is measured.
        is_held: Whether outcomes are held back after a step, because learning would delay the next
            step.
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
        self._held_step = 0
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
            PolicyError: In strict mode: the policy raised or returned an invalid update for an
                earlier outcome, or the policy's ``pace`` is invalid. The step has not run.
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

    def hold_in_this_step(self) -> None:
        """Hold outcomes back after this step, because creating its plan already delays it."""
        self._held_step = self._lane.tick + 1

    def first_eager_step(self, batch: Batch) -> int:
        """Return the tick of the first eager step of the batch's size.

        If no eager step of this size has run, the next step is recorded as the first.
        """
        return self._first_eager.setdefault(batch.num_tokens, self._lane.tick + 1)

    def finish(self, measurement: Measurement) -> None:
        """Mark the end of a step, and pass the outcomes of finished steps to the dispatcher.

        The device usually still has work when a step has just been submitted, so learning is
        unlikely to leave the device idle.
        """
        measurement.submit_us = (time.perf_counter_ns() - measurement.begun_ns) / 1e3
        measurement.was_ahead = measurement.queued and not measurement.start.query()
        measurement.end.record(self._backend.current_stream())
        with self._lock:
            self._pending.append(measurement)
        if self.is_held or measurement.step == self._held_step:
            return
        try:
            self.drain()
        except PolicyError as fault:
            self._fault = fault  # raised by the next measured step; this step must return

    def fail(self, measurement: Measurement) -> None:
        """Report to the dispatcher that a step failed or did not run as decided."""
        batch, decision, step = measurement.batch, measurement.decision, measurement.step
        try:
            self._pass_on(Outcome(batch, decision, clock=self._clock, completed=False, step=step))
        except PolicyError as fault:
            self._fault = fault  # raised by the next measured step; this step has ended

    def drain(self, *, wait: bool = False) -> int:
        """Pass the outcomes of finished steps to the dispatcher, oldest first.

        Args:
            wait: Whether to block until all steps are finished; otherwise stop at the first
                unfinished step.

        Returns:
            The number of outcomes passed on.
        """
        num_read = 0
        while True:
            with self._lock:
                if not self._pending:
                    return num_read
                head = self._pending[0]
            if wait:
                head.end.synchronize()  # without the lock, so that other steps can begin
            elif not head.end.query():
                return num_read
            with self._lock:
                if not self._pending or self._pending[0] is not head:
                    continue  # passed on by another thread, or dropped
                self._pending.popleft()
            on_device = head.start.elapsed_us(head.end)
            host_us = self._host_us(head) if self._clock == "device" else None
            # If earlier work is pending, the events measure only the device. A device that is
            # faster than the host soon waits for it, so a step takes at least a share of the host
            # time.
            elapsed = max(on_device, HOST_SHARE * (host_us or 0.0))
            latest = self._read.setdefault(
                (_times_key(head.decision, head.batch), head.queued), deque(maxlen=KEPT_TIMES)
            )
            latest.append(elapsed)
            with self._lock:
                self._spare.append((head.start, head.end))
            self._pass_on(
                Outcome(
                    head.batch,
                    head.decision,
                    elapsed,
                    self._clock,
                    head.queued,
                    step=head.step,
                    is_first=head.is_first,
                    host_us=host_us,
                    device_us=on_device if head.was_ahead and host_us is not None else None,
                )
            )
            num_read += 1

    def _host_us(self, done: Measurement) -> float:
        """Return the time that the host took to submit a step, excluding waits for the device.

        A stream can queue about a thousand launches. When the queue is full, the host waits inside
        a launch until earlier steps have run. The time of a submission is reliable only if the
        device reached the step during the submission.
        """
        known = self._submits.setdefault(done.decision.keys, deque(maxlen=KEPT_SUBMITS))
        if not done.was_ahead:
            known.append(done.submit_us)
        elif known:
            return min(done.submit_us, statistics.median(known))
        return done.submit_us

    def _pace(self) -> int:
        """Return the policy's divisor for the number of measured steps."""
        dispatcher = self._dispatcher()
        return 1 if dispatcher is None else dispatcher.pace

    def _pass_on(self, outcome: Outcome) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.observe(outcome)

    def of(self, decision: Decision, batch: Batch) -> tuple[MeasuredTime, ...]:
        """Return the times of a decision, separately for idle and busy streams."""
        ran = _times_key(decision, batch)
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
        """Drop unread measurements, and a fault that has not been raised yet."""
        with self._lock:
            self._pending.clear()
        self._fault = None

    def _new_event(self) -> Event:
        return self._backend.new_event(timing=True)


class Timer:
    """A timer that measures the steps of a decision when they are due.

    Attributes:
        is_always_due: Whether a step is always due; True for a one-shot decision.
    """

    timings: Timings

    def __init__(self, timings: Timings, decision: Decision, batch: Batch) -> None:
        self.timings, self._decision, self._batch = timings, decision, batch
        self.is_always_due: bool = decision.one_shot
        if not decision.one_shot:
            timings.hold_in_this_step()
            if not decision.keys:
                timings.first_eager_step(batch)  # the step that creates the plan also runs it

    def is_due(self, tick: int) -> bool:
        """Return whether the next step must be measured, given the lane's current tick."""
        return self.is_always_due or tick >= self.timings.due

    def begin(self) -> Measurement:
        """Mark the start of a step."""
        return self.timings.begin(self._batch, self._decision)

    def measure(self, run: Callable[[], T]) -> T:
        """Run and measure a step; if it raises, record it as not completed."""
        measurement = self.begin()
        try:
            result = run()
        except Exception:
            self.timings.fail(measurement)
            raise
        self.timings.finish(measurement)
        return result
