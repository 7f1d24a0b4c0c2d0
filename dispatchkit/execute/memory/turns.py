"""Turns: let steps of other threads run during a background capture.

Steps and captures that share a pool hold the same lock, so a step usually waits for a whole
capture. A background capture releases the lock between its phases (warmup, memory measurement,
capture, and each run of the row proof). It also releases the lock while the driver instantiates the
graph and, if requested, between operators. This is safe if the runs of the capture do not affect
steps; see ``Capturer.allows_turns``. Steps and captures do not overlap on the device: the work of a
phase finishes before a step may run, and the next phase waits for that step.

During a background capture, steps on the same device neither capture nor evict. A step that did so
would cause a deadlock: it would wait for the capture while holding the lock that the capture needs.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

_T = TypeVar("_T")

#: Time in seconds for which a capture releases the lock, so that a waiting thread can wake up. A
#: thread that wakes up later waits until the next release.
GAP_S: float = 100e-6


@attrs.frozen
class LongPause:
    """A pause of steps, longer than ``max_pause_us``, during a background capture.

    Attributes:
        key: Name of the captured key.
        part: Phase of the capture.
        us: Length of the pause in microseconds.
        operators: First and last operator in the pause, if steps may run between operators.
        is_free: Whether the lock was free during the pause. If so, steps could run, but the driver
            may have delayed their launches.
    """

    key: str
    part: str
    us: float
    operators: str = ""
    is_free: bool = False

    def __str__(self) -> str:
        where = f", {self.operators}" if self.operators else ""
        delayed = "may have delayed" if self.is_free else "delayed"
        return (
            f"The capture of {self.key} {delayed} steps by {self.us:.0f} us, in phase "
            f"{self.part!r}{where}"
        )


class _Devices:
    """The number of background captures in progress on each device."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()

    def change(self, device: str, by: int) -> None:
        with self._guard:
            self._counts[device] += by

    def is_busy(self, device: str) -> bool:
        return self._counts[device] > 0

    def forget(self) -> None:
        self._guard = threading.Lock()
        self._counts.clear()


_devices = _Devices()
_all: weakref.WeakSet[Turns] = weakref.WeakSet()


class Turns:
    """Lock that steps share with background captures, which release it between phases.

    Args:
        lock: Lock that each step holds.
        device: Name of the device that captures run on.

    Attributes:
        is_under_way: Whether a background capture is in progress.
    """

    def __init__(self, lock: threading.RLock, device: str) -> None:
        self._changed = threading.Condition(lock)
        self._lock: Any = lock
        self._device = device
        self.is_under_way = False
        self._pacer: Pacer | None = None
        self._saved: Any = None
        _all.add(self)

    def forget(self) -> None:
        """Reset the state in a forked process, where the capturing thread does not exist."""
        self._changed = threading.Condition(self._lock)
        self.is_under_way, self._pacer = False, None

    @property
    def pacer(self) -> Pacer | None:
        """The pacer of this thread's background capture, or None."""
        pacer = self._pacer
        return pacer if pacer is not None and pacer.thread == threading.get_ident() else None

    def may_capture(self) -> bool:
        """Return whether a step may capture or evict now."""
        return not _devices.is_busy(self._device) or self.pacer is not None

    def wait(self) -> None:
        """Wait until no background capture is in progress; requires the lock."""
        while self.is_under_way and self.pacer is None:
            self._changed.wait()

    def run(self, pacer: Pacer, capture: Callable[[], _T]) -> _T:
        """Run a background capture, and return its result.

        The caller must have acquired the lock exactly once.
        """
        self.wait()
        self.is_under_way, self._pacer = True, pacer
        _devices.change(self._device, 1)
        try:
            pacer.resume()
            return capture()
        finally:
            pacer.finish()
            _devices.change(self._device, -1)
            self.is_under_way, self._pacer = False, None
            self._changed.notify_all()

    def yield_lock(self) -> None:
        """Let waiting steps run, then reacquire the lock."""
        self._changed.wait(GAP_S)

    def release(self) -> None:
        """Release the lock until ``reacquire`` is called; requires the lock."""
        self._saved = self._lock._release_save()

    def reacquire(self) -> None:
        """Acquire the lock again, after any step in progress has ended."""
        self._lock._acquire_restore(self._saved)


class Pacer:
    """Timer that lets steps run during a background capture, and measures their delays.

    Args:
        turns: Lock shared with steps.
        key: Name of the captured key.
        max_pause_us: Limit in microseconds for the time that the capture holds the lock. Longer
            pauses are recorded.
        allows_turns: Whether the capture may release the lock between phases.
        between_operators: Whether the capture may also release the lock between operators.

    Attributes:
        thread: Identifier of the capturing thread.
        pauses: Pauses that exceeded ``max_pause_us``.
    """

    def __init__(
        self,
        turns: Turns,
        key: str,
        max_pause_us: float,
        *,
        allows_turns: bool,
        between_operators: bool = False,
    ) -> None:
        self._turns, self._key = turns, key
        self._limit_s = max_pause_us * 1e-6
        self.allows_turns = allows_turns
        self.between_operators: bool = allows_turns and between_operators
        self.thread: int = threading.get_ident()
        self.pauses: list[LongPause] = []
        self._since = 0.0
        self._operators: list[Any] = []
        self._is_released = False

    def resume(self) -> None:
        """Start measuring the next pause."""
        self._since = time.perf_counter()

    def finish(self) -> None:
        """Record the last pause of the capture."""
        self._note("end of the capture" if self.allows_turns else "warmup and capture")

    def end_part(self, part: str) -> None:
        """Let steps run; called after a phase and its queued work have finished."""
        self._note(part)
        self._turns.yield_lock()
        self.resume()

    def end_operator(self, part: str, operator: Any) -> bool:
        """Let steps run if the pause limit is nearly reached; return whether the lock was released.

        Args:
            part: Phase in progress.
            operator: Operator that has just finished.
        """
        self._operators = [*self._operators[:1], operator]
        if time.perf_counter() - self._since < self._limit_s - GAP_S:  # waking a thread takes GAP_S
            return False
        self.end_part(part)
        self._operators = [operator]
        return True

    def release(self, part: str) -> None:
        """Release the lock after a phase, while the driver works; ``reacquire`` takes it again."""
        self._note(part)
        self._is_released = True
        self._turns.release()
        self.resume()

    def reacquire(self, part: str) -> None:
        """Acquire the lock again if it was released.

        Args:
            part: Phase since the release, during which the driver may have delayed launches.
        """
        if self._is_released:
            self._note(part, is_free=True)
            self._turns.reacquire()
            self._is_released = False
            self.resume()

    def _note(self, part: str, *, is_free: bool = False) -> None:
        elapsed = time.perf_counter() - self._since
        operators, self._operators = self._operators, []
        if elapsed > self._limit_s:
            between = f"operators {operators[0]} to {operators[-1]}" if operators else ""
            self.pauses.append(LongPause(self._key, part, elapsed * 1e6, between, is_free))


def _begin_child() -> None:
    _devices.forget()
    for turns in tuple(_all):
        turns.forget()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_begin_child)
