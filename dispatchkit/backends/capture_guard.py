"""Process-wide state of captures on all devices.

Only one capture per device runs at a time, and captures in a thread cannot be nested. The garbage
collector is disabled during captures, because the driver does not allow it to destroy an old graph
while a stream is capturing.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from dispatchkit.errors import CaptureError

_T = TypeVar("_T")


class HostSyncError(RuntimeError):
    """Raised for a call that a capture does not allow, such as a wait for the device.

    Args:
        call: Name of the refused call, for the message.
        why: Reason for refusing the call, for the message.
        next_step: Sentence that suggests a change to the captured function.
    """

    def __init__(
        self,
        call: str,
        why: str = "it waits for the device",
        next_step: str = "Move this call out of the captured function, or into an eager piece.",
    ) -> None:
        self.call, self.next_step = call, next_step
        super().__init__(f"{call} ({why})")


class _ThreadState(threading.local):
    """The device on which this thread is capturing.

    Attributes:
        device: Device of the active capture; empty outside a capture.
        paused: Device of a capture that has ended a segment and will resume; otherwise empty.
    """

    device = ""
    paused = ""


_thread = _ThreadState()
_locks: dict[str, threading.Lock] = {}
_locks_guard = threading.Lock()


def capturing_device() -> str:
    """Return the device on which this thread is capturing, or "" outside a capture."""
    return _thread.device


def refuse_in_capture(call: str, why: str = "it waits for the device") -> None:
    """Raise HostSyncError if this thread is inside a capture."""
    if capturing_device():
        raise HostSyncError(call, why)


def _lock_of(device: str) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(device, threading.Lock())


class _CollectorHold:
    """The switch that disables the garbage collector during captures.

    Captures on different devices may overlap. The first one to begin saves the collector's setting,
    and the last one to end restores it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders: set[object] = set()
        self._was_enabled = False

    def enter(self, holder: object) -> None:
        """Disable the collector for the capture that ``holder`` identifies."""
        with self._guard:
            if not self._holders:
                self._was_enabled = gc.isenabled()
            self._holders.add(holder)
            gc.disable()

    def leave(self, holder: object) -> None:
        """Remove a holder, if present; removing the last holder restores the setting."""
        with self._guard:
            if holder not in self._holders:
                return
            if len(self._holders) == 1:
                if self._was_enabled:
                    gc.enable()
                else:
                    gc.disable()
            self._holders.discard(holder)

    def forget(self) -> None:
        """Restore the setting in a forked process, which has none of the capturing threads."""
        self._guard = threading.Lock()
        if self._holders and self._was_enabled:
            gc.enable()
        self._holders.clear()

    @property
    def is_held(self) -> bool:
        """Whether a capture is running in the process."""
        return bool(self._holders)


_collector = _CollectorHold()


def is_any_capturing() -> bool:
    """Return whether any thread of the process is inside a capture."""
    return _collector.is_held


def refuse_nested(device: str) -> None:
    """Raise CaptureError if this thread is already inside a capture."""
    if outer := _thread.device or _thread.paused:
        # Between segments, calls are not recorded.
        recorded = ": the outer capture records it" if _thread.device else ""
        raise CaptureError(
            f"A capture on {device!r} was started inside a capture on {outer!r} in the same "
            f"thread; captures cannot be nested. Call the inner function directly{recorded}.",
            reason="nested",
        )


def pause_capture() -> None:
    """Pause this thread's capture, so that calls may wait for the device."""
    _thread.device, _thread.paused = "", _thread.device or _thread.paused


def resume_capture() -> None:
    """Resume this thread's paused capture."""
    _thread.device, _thread.paused = _thread.device or _thread.paused, ""


def run_as_capture(device: str, run: Callable[[], _T]) -> _T:
    """Run a capture under the device's lock, without garbage collection; return its result.

    A signal handler may raise at any instruction, including the first instruction of the cleanup.
    Therefore, the lock has a separate ``with`` statement, and the cleanup is called twice.

    Raises:
        CaptureError: This thread is already capturing (reason ``nested``).
    """
    refuse_nested(device)
    holder = object()
    with _lock_of(device):
        try:
            try:
                _collector.enter(holder)
                _thread.device = device
                return run()
            finally:
                _end_capture(holder)
        finally:
            _end_capture(holder)


def run_between_captures(device: str, run: Callable[[], _T]) -> _T:
    """Run a function while no other thread captures on the device.

    The function may wait for streams. Waiting for a stream that is capturing would break the
    stream's capture.
    """
    if _thread.device or _thread.paused:  # this thread's capture already excludes others
        return run()
    with _lock_of(device):
        return run()


def _end_capture(holder: object) -> None:
    _thread.device = _thread.paused = ""
    _collector.leave(holder)


# Locks of runners. At a fork, they may be held by threads that do not exist in the child.
_free_in_children: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_children(*locks: Any) -> None:
    """Register re-entrant locks to release in forked processes.

    Locks held by the forking thread stay locked.
    """
    _free_in_children.update(locks)


def _begin_child() -> None:
    """Reset the captures and locks of threads that do not exist in this forked process."""
    if not (_thread.device or _thread.paused):
        _locks.clear()
        _collector.forget()
    for lock in tuple(_free_in_children):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_begin_child)
