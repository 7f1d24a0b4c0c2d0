"""Raise interrupts at chosen places, for tests.

Python raises a signal's exception where a C call returns or a Python function begins (and at the
end of a loop's body). ``sys.setprofile`` reports these two events.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future


class Interrupt(BaseException):
    """Exception that a signal handler raises."""


KEPT: list[Interrupt] = []


class Interrupter:
    """Profile function that raises at one of the places where a signal's exception can occur.

    Args:
        at: Number of the place, counted from 0; None: count the places only.
        within: Function outside of which places do not count; None: all places count.
    """

    def __init__(self, at=None, within=None):
        self.at, self.num_places, self.is_over = at, 0, False
        self.within = None if within is None else within.__code__

    def __call__(self, frame, event, arg):
        if event not in ("call", "c_return") or self.is_over or not self.counts(frame):
            return
        if self.num_places == self.at:
            self.is_over = True
            raise Interrupt
        self.num_places += 1

    def counts(self, frame):
        """Return whether a frame is a call of ``within``, or was called by one."""
        while self.within is not None and frame is not None and frame.f_code is not self.within:
            frame = frame.f_back
        return frame is not None


def interrupted(run, at=None, within=None):
    """Run ``run`` with an interrupt at a place; return the number of places passed."""
    interrupter = Interrupter(at, within)
    before = sys.getprofile()
    try:
        sys.setprofile(interrupter)
        run()
    except Interrupt as error:
        # as an interactive interpreter keeps the last exception, with its frames
        KEPT.append(error)
    finally:
        sys.setprofile(before)
    return interrupter.num_places


def call_elsewhere(call):
    """Return the result of a call in another thread; fail if it waits for a lock too long."""
    done: Future = Future()

    def run():
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout=20)  # raises the call's exception or TimeoutError
