"""Turns: a background capture alternates with other threads' steps under one lock.

Steps and captures hold the lock of their pool's group, so a step must wait for a whole capture. A
background capture releases the lock between its phases (warmup, capture, the replays of a proof),
while the driver ends and instantiates the graph, and, if requested, between two operators. That is
correct if steps neither read nor write anything that the capture runs on or restores at its end;
see ``Capturer.allows_turns``. On the device they do not overlap: queued work of a phase is done
before a step is let in, and the next phase waits for that step.

During a background capture, steps do not capture or evict anything on its device: they would wait
for the capture while holding the lock that it waits for, a deadlock.
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

#: How long a capture releases the lock if no step is known to wait for it: the time that a waiting
#: thread needs to wake up. A thread that wakes up too late waits for another phase.
GAP_S: float = 100e-6


@attrs.frozen
class LongPause:
    """A pause of steps by a capture that was longer than requested.

    Attributes:
        key: The key being captured, as text.
        part: The phase of the capture.
        us: Its length in microseconds.
        operators: Its operators, if steps were let in between operators.
        is_free: Steps were free to run, but a driver may have delayed launches.
    """

    key: str
    part: str
    us: float
    operators: str = ""
    is_free: bool = False

    def __str__(self) -> str:
        where = f", {self.operators}" if self.operators else ""
        held = "may have held" if self.is_free else "held"
        return f"{self.key} {held} steps up for {self.us:.0f} us: {self.part}{where}"


class _Devices:
    """Devices on which a background capture is in progress."""

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
    """Lets steps run during a background capture.

    Args:
        lock: Held by each step.
        device: The device of its captures.

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
        """Reset in a forked process, which does not have the capture's thread."""
        self._changed = threading.Condition(self._lock)
        self.is_under_way, self._pacer = False, None

    @property
    def pacer(self) -> Pacer | None:
        """The pacer of this thread's capture; None if it is not a background capture."""
        pacer = self._pacer
        return pacer if pacer is not None and pacer.thread == threading.get_ident() else None

    def may_capture(self) -> bool:
        """Return whether a step may capture or evict now."""
        return not _devices.is_busy(self._device) or self.pacer is not None

    def wait(self) -> None:
        """Wait until no background capture is in progress; the caller holds the lock."""
        while self.is_under_way and self.pacer is None:
            self._changed.wait()

    def run(self, pacer: Pacer, capture: Callable[[], _T]) -> _T:
        """Run a capture in turns with steps; the caller holds the lock, once."""
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

    def give_way(self) -> None:
        """Let waiting steps run, then hold the lock again."""
        self._changed.wait(GAP_S)

    def release(self) -> None:
        """Let steps run until ``take_back``; the caller holds the lock."""
        self._saved = self._lock._release_save()

    def take_back(self) -> None:
        """Wait for the step in progress, and hold the lock again."""
        self._lock._acquire_restore(self._saved)


class Pacer:
    """Measures how long a background capture delays steps, and lets them in.

    Args:
        turns: The turns of the lock.
        key: The key being captured, as text.
        max_pause_us: Longest time that it may hold the lock, in microseconds.
        allows_turns: It may release the lock between its phases.
        between_operators: It may also release the lock between operators.

    Attributes:
        thread: The capturing thread.
        pauses: Pauses that were too long.
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
        """Note that the lock is held from now on."""
        self._since = time.perf_counter()

    def finish(self) -> None:
        """Note that the lock is finally released."""
        self._note("its end" if self.allows_turns else "warmup and capture, in one piece")

    def end_part(self, part: str) -> None:
        """Let steps run after a phase and its queued work are done."""
        self._note(part)
        self._turns.give_way()
        self.resume()

    def end_operator(self, part: str, operator: Any) -> bool:
        """Let steps run if the lock was held long enough; return whether any may have run.

        Args:
            part: The phase in progress.
            operator: The operator that has just finished.
        """
        self._operators = [*self._operators[:1], operator]
        if time.perf_counter() - self._since < self._limit_s - GAP_S:  # waking up takes time, too
            return False
        self.end_part(part)
        self._operators = [operator]
        return True

    def release(self, part: str) -> None:
        """Release the lock until ``take_back``: a phase is done, and the driver's is next."""
        self._note(part)
        self._is_released = True
        self._turns.release()
        self.resume()

    def take_back(self, part: str) -> None:
        """Hold the lock again, if it was released.

        Args:
            part: The phase in between, during which a driver may delay launches.
        """
        if self._is_released:
            self._note(part, is_free=True)
            self._turns.take_back()
            self._is_released = False
            self.resume()

    def _note(self, part: str, *, is_free: bool = False) -> None:
        elapsed = time.perf_counter() - self._since
        operators, self._operators = self._operators, []
        if elapsed > self._limit_s:
            between = f"from {operators[0]} to {operators[-1]}" if operators else ""
            self.pauses.append(LongPause(self._key, part, elapsed * 1e6, between, is_free))


def _begin_child() -> None:
    _devices.forget()
    for turns in tuple(_all):
        turns.forget()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_begin_child)
