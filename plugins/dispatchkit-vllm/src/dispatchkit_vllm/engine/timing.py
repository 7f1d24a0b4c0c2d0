"""Measure the times of some steps, without waiting for the device."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import attrs

from dispatchkit import Batch, Decision, Dispatcher, Outcome
from dispatchkit.dispatch import policy_name

from dispatchkit_vllm.engine.core import Answer
from dispatchkit_vllm.engine.log import log

__all__ = ["Clock", "DeviceClock", "HostClock", "StepTimer"]

_T = TypeVar("_T")

#: Number of steps from one measurement to the next, before multiplication by the policy's ``pace``.
#: One-shot decisions are always measured.
SAMPLE_EVERY = 16
# Maximum number of pending measurements; the oldest is dropped to make room.
_MAX_PENDING = 64


class Clock(Protocol):
    """A clock that sets marks on the current stream and measures the time between them."""

    name: str

    def is_busy(self) -> bool:
        """Return whether earlier work on the current stream is unfinished."""
        ...

    def new_mark(self) -> Any:
        """Return a reusable mark."""
        ...

    def set_mark(self, mark: Any) -> None:
        """Set a mark after the work submitted so far."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Return whether the device has reached a mark, without waiting."""
        ...

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Return the time in microseconds between two marks that the device has reached."""
        ...


class DeviceClock:
    """A clock that uses CUDA events on the current stream."""

    name = "device"

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda

    def is_busy(self) -> bool:
        """Return whether the current stream has unfinished work."""
        return not self._cuda.current_stream().query()

    def new_mark(self) -> Any:
        """Return a timing event."""
        return self._cuda.Event(enable_timing=True)

    def set_mark(self, mark: Any) -> None:
        """Record an event on the current stream."""
        mark.record()

    def is_reached(self, mark: Any) -> bool:
        """Return whether an event has completed."""
        return bool(mark.query())

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Return the microseconds between two completed events."""
        return 1e3 * float(start.elapsed_time(end))


class HostClock:
    """A host clock, for steps that run on the CPU."""

    name = "host"

    def is_busy(self) -> bool:
        """Return False, because a CPU step is finished when it returns."""
        return False

    def new_mark(self) -> list[int]:
        """Return a list that stores one time."""
        return [0]

    def set_mark(self, mark: list[int]) -> None:
        """Store the current time in a mark."""
        mark[0] = time.perf_counter_ns()

    def is_reached(self, mark: list[int]) -> bool:
        """Return True: on the CPU, a mark is reached as soon as it is set."""
        return True

    def elapsed_us(self, start: list[int], end: list[int]) -> float:
        """Return the microseconds between two marks."""
        return (end[0] - start[0]) / 1e3


@attrs.define(eq=False)
class _Measurement:
    batch: Batch
    decision: Decision
    step: int
    queued: bool
    start: Any
    end: Any


class StepTimer:
    """Timer that measures some of a policy's steps, and reports the outcomes to the policy.

    A runner measures a forward pass with ``run``, or with ``begin`` and ``end`` around it.

    Args:
        dispatcher: The dispatcher that receives the outcomes. If its policy has a
            ``pace``, the interval between measurements is multiplied by it.
        clock: Clock that measures the steps.

    Attributes:
        num_outcomes: Number of reported outcomes.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._running: _Measurement | None = None
        self._pending: deque[_Measurement] = deque()
        self._spare: list[tuple[Any, Any]] = []
        self._step = 0
        self._due = 1
        self.num_outcomes: int = 0

    def begin(self, answer: Answer | None) -> None:
        """Mark the start of a forward pass if it is due for measurement.

        Args:
            answer: The policy's answer for this step. If vLLM decided, pass None, and the step is
                not measured.
        """
        if answer is None:
            return
        self._step += 1
        decision = answer.decision
        if not decision.one_shot and self._step < self._due:
            return
        with _warnings_logged():
            self._due = self._step + SAMPLE_EVERY * self._dispatcher.pace
        clock = self._clock
        queued = clock.is_busy()
        start, end = self._spare.pop() if self._spare else (clock.new_mark(), clock.new_mark())
        clock.set_mark(start)
        self._running = _Measurement(answer.batch, decision, self._step, queued, start, end)

    def end(self) -> None:
        """Mark the end of a measured forward pass, and report finished measurements."""
        measured, self._running = self._running, None
        if measured is None:
            return
        self._clock.set_mark(measured.end)
        if len(self._pending) == _MAX_PENDING:
            self._pending.popleft()
        self._pending.append(measured)
        self.report()

    def run(self, answer: Answer | None, forward: Callable[[], _T]) -> _T:
        """Run a forward pass, and measure it if it is due for measurement and does not raise.

        Args:
            answer: As for ``begin``.
            forward: Function that runs the forward pass.
        """
        self.begin(answer)
        try:
            result = forward()
        except BaseException:
            self._running = None
            raise
        self.end()
        return result

    def report(self) -> None:
        """Report the outcomes of finished measurements, oldest first."""
        while self._pending and self._clock.is_reached(self._pending[0].end):
            done = self._pending.popleft()
            elapsed = self._clock.elapsed_us(done.start, done.end)
            self._spare.append((done.start, done.end))
            self.num_outcomes += 1
            outcome = Outcome(
                done.batch,
                done.decision,
                elapsed,
                self._clock.name,
                done.queued,
                step=done.step,
            )
            try:
                with _warnings_logged():
                    self._dispatcher.observe(outcome)
            except Exception as error:  # noqa: BLE001 - no error of a policy may stop a step
                log.warning(
                    "Policy %r did not learn from a step, because its observe() raised %s: %s",
                    policy_name(self._dispatcher.policy),
                    type(error).__name__,
                    error,
                )


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """Write warnings to vLLM's log, even if the process turns warnings into errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    for warning in caught:
        log.warning("%s", warning.message)
