"""Background captures: a thread captures keys while other threads run steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from dispatchkit.errors import CaptureError, counted
from dispatchkit.execute.capture.report import CaptureReport
from dispatchkit.execute.memory import GAP_S, LongPause
from dispatchkit.keys.batch import GraphKey

_logger = logging.getLogger(__name__)

#: Function that captures one key. It returns a problem and the pauses longer than
#: ``max_pause_us``. The problem is the error of a failed capture, the reason for skipping the key,
#: or None. If the runner has been freed, the function returns None instead of this pair.
CaptureOne = Callable[[GraphKey], "tuple[CaptureError | str | None, Sequence[LongPause]] | None"]


class BackgroundCapture:
    """A background capture, returned by ``capture_in_background``.

    The capture ends when all keys have been tried, ``stop`` is called, the runner is freed or the
    interpreter exits.

    Args:
        keys: Keys to capture, in order.
        capture: Function that captures one key.
        num_bytes: Function that returns the memory of the runner's graphs in bytes.

    Attributes:
        keys: Keys to capture, in order.
        pauses: Pauses longer than ``max_pause_us``, in which the capture may have delayed steps.
    """

    def __init__(
        self, keys: Sequence[GraphKey], capture: CaptureOne, num_bytes: Callable[[], int]
    ) -> None:
        self.keys: tuple[GraphKey, ...] = tuple(keys)
        self.pauses: list[LongPause] = []
        self._capture, self._num_bytes = capture, num_bytes
        self._is_stopped = threading.Event()
        self._captured = 0
        self._failed: dict[GraphKey, str] = {}
        self._skipped: dict[GraphKey, str] = {}
        self._start = time.perf_counter()
        self._seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name="dispatchkit-capture")
        self._thread.start()

    def is_done(self) -> bool:
        """Return whether the capture has ended."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> CaptureReport:
        """Wait until the capture ends, and return its report.

        Args:
            timeout: Maximum time to wait in seconds, after which the report so far is returned. By
                default, the time is not limited.
        """
        self._thread.join(timeout)
        return self.report()

    def stop(self) -> CaptureReport:
        """Stop the capture after the key in progress, and return its report."""
        self._is_stopped.set()
        return self.wait()

    def report(self) -> CaptureReport:
        """Return the report so far."""
        elapsed = time.perf_counter() - self._start
        seconds = elapsed if self._seconds is None else self._seconds
        return CaptureReport(
            self._captured, seconds, self._num_bytes(), dict(self._failed), dict(self._skipped)
        )

    def _run(self) -> None:
        main = threading.main_thread()
        try:
            for key in self.keys:
                if self._is_stopped.is_set() or not main.is_alive():
                    return
                done = self._capture(key)
                if done is None:
                    return
                self._note(key, *done)
                time.sleep(GAP_S)  # let waiting steps take the lock
        finally:
            self._seconds = time.perf_counter() - self._start

    def _note(
        self, key: GraphKey, problem: CaptureError | str | None, pauses: Sequence[LongPause]
    ) -> None:
        self.pauses += pauses
        for pause in pauses:
            _logger.info("Background capture: %s", pause)
        if problem is None:
            self._captured += 1
        elif isinstance(problem, str):
            self._skipped[key] = problem
        elif problem.reason == "over_budget":
            self._skipped[key] = str(problem)
        else:
            self._failed[key] = f"{problem.reason}: {problem}"

    def __repr__(self) -> str:
        done = self._captured + len(self._failed) + len(self._skipped)
        return f"<BackgroundCapture: {done} of {counted(len(self.keys), 'key')} tried>"
