"""What every capture of the process shares, whatever the device: no torch here.

One capture runs at a time per device, captures do not nest in a thread, and the garbage
collector stays out of them: a collection in mid-capture may destroy an old graph, whose
clean-up calls are not allowed while a stream is capturing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dispatchkit.errors import CaptureError


class HostSyncError(RuntimeError):
    """Something waited for the device in the middle of a capture."""

    def __init__(self, call: str, why: str = "it waits for the device") -> None:
        self.call = call
        super().__init__(f"{call} ({why})")


class _ThreadState(threading.local):
    """Which device this thread is capturing on; empty outside a capture."""

    device = ""


_thread = _ThreadState()
_locks: dict[str, threading.Lock] = {}
_locks_guard = threading.Lock()


def capturing_device() -> str:
    """Return the device this thread is capturing on, or "" outside a capture."""
    return _thread.device


def refuse_in_capture(call: str) -> None:
    """Raise HostSyncError where this thread is inside a capture."""
    if capturing_device():
        raise HostSyncError(call)


def _lock_of(device: str) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(device, threading.Lock())


class _CollectorHold:
    """Keeps the garbage collector off while any capture of the process runs.

    Counted, because captures of two devices may overlap: the first one in remembers the
    setting and the last one out puts it back.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._guard:
            if self._holders == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._holders += 1

    def leave(self) -> None:
        with self._guard:
            self._holders -= 1
            if self._holders == 0:
                if self._was_enabled:
                    gc.enable()
                else:
                    gc.disable()

    @property
    def is_held(self) -> bool:
        """Whether any capture of the process runs."""
        return self._holders > 0


_collector = _CollectorHold()


def is_any_capturing() -> bool:
    """Return whether any thread of the process is inside a capture."""
    return _collector.is_held


def refuse_nested(device: str) -> None:
    """Raise CaptureError where this thread is already inside a capture."""
    if _thread.device:
        raise CaptureError(
            f"A capture on {device!r} was begun inside a capture on {_thread.device!r} of the "
            "same thread; captures do not nest. Call the inner function directly: the outer "
            "capture records it.",
            reason="nested",
        )


@contextmanager
def exclusive_capture(device: str) -> Iterator[None]:
    """Hold what a capture needs for itself: the device's lock and the collector.

    Raises:
        CaptureError: This thread is already capturing (reason ``nested``).
    """
    refuse_nested(device)
    with _lock_of(device):
        _collector.enter()
        _thread.device = device
        try:
            yield
        finally:
            _thread.device = ""
            _collector.leave()
