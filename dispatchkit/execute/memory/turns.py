"""Turns: a capture in the background and the steps of other threads, under one lock.

Steps run under the lock of their pool's group, and so does a capture: a step that comes meanwhile
waits for all of it. A capture in the background releases the lock between its parts (warmup,
capture, the replays of a proof), for as long as the driver ends and instantiates the graph, and
between two operators where that was asked for. That is right where nothing that the capture runs,
or puts back at its end, is read or written by a step; see ``Capturer.allows_turns``. On the device
they do not overlap: what a part queued is done before a step is let in, and what comes next waits
for that step.

While such a capture is under way nothing else is captured, and nothing is evicted, on its device
by steps: who would wait for the capture, with the lock that it waits for, would wait for good.
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

#: How long a capture stays off the lock where no step is known to wait for it: the time that a
#: waiting thread needs to wake up. One that wakes up too late waits for another part.
GAP_S: float = 100e-6


@attrs.frozen
class LongPause:
    """One time that a capture held steps up for longer than it was to.

    Attributes:
        key: What was captured, as text.
        part: Which part of the capture it was.
        us: How long it was, in microseconds.
        operators: Which of its operators, where steps were let in between them.
        is_free: Steps were free to run, but a driver may hold launches up meanwhile.
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
    """On which devices a capture in the background is under way."""

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
    """Lets steps run while a capture in the background is under way.

    Args:
        lock: Held by each step.
        device: Of its captures.

    Attributes:
        is_under_way: A capture in the background is.
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
        """Be as if no capture were under way: its thread is not in a forked process."""
        self._changed = threading.Condition(self._lock)
        self.is_under_way, self._pacer = False, None

    @property
    def pacer(self) -> Pacer | None:
        """What this thread's capture is paced by; None where it is not in the background."""
        pacer = self._pacer
        return pacer if pacer is not None and pacer.thread == threading.get_ident() else None

    def may_capture(self) -> bool:
        """Return whether a step may capture or evict now."""
        return not _devices.is_busy(self._device) or self.pacer is not None

    def wait(self) -> None:
        """Wait until no capture in the background is under way; the caller holds the lock."""
        while self.is_under_way and self.pacer is None:
            self._changed.wait()

    def run(self, pacer: Pacer, capture: Callable[[], _T]) -> _T:
        """Call what captures, in turns with steps; the caller holds the lock, once."""
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
        """Let waiting steps run; the lock is held again at the end."""
        self._changed.wait(GAP_S)

    def release(self) -> None:
        """Let steps run until ``take_back``; the caller holds the lock."""
        self._saved = self._lock._release_save()

    def take_back(self) -> None:
        """Wait for the step under way, and hold the lock again."""
        self._lock._acquire_restore(self._saved)


class Pacer:
    """Measures how long a capture in the background holds steps up, and lets them in.

    Args:
        turns: Whose lock it holds.
        key: What is captured, as text.
        max_pause_us: How long it may hold the lock at a time.
        allows_turns: It may release the lock between its parts, before its end.
        between_operators: And between the operators of a part.

    Attributes:
        thread: Which thread captures.
        pauses: Times that were too long.
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
        """Note that the lock is released for good."""
        self._note("its end" if self.allows_turns else "warmup and capture, in one piece")

    def end_part(self, part: str) -> None:
        """Let steps run: a part is done, and so is what it has queued."""
        self._note(part)
        self._turns.give_way()
        self.resume()

    def end_operator(self, part: str, operator: Any) -> bool:
        """Let steps run if the lock was held for as long as it may be; return whether they might.

        Args:
            part: Which part is under way.
            operator: What of it has just been done.
        """
        self._operators = [*self._operators[:1], operator]
        if time.perf_counter() - self._since < self._limit_s - GAP_S:  # to wake up takes time, too
            return False
        self.end_part(part)
        self._operators = [operator]
        return True

    def release(self, part: str) -> None:
        """Release the lock until ``take_back``: a part is done, and the driver's is next."""
        self._note(part)
        self._is_released = True
        self._turns.release()
        self.resume()

    def take_back(self, part: str) -> None:
        """Hold the lock again, if it was released.

        Args:
            part: What was done meanwhile; a driver may hold launches up for as long.
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


if hasattr(os, "register_at_fork"):  # not on Windows, which forks nothing
    os.register_at_fork(after_in_child=_begin_child)
