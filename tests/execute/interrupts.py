"""Interrupts at a chosen place, for tests.

Python raises a signal's exception where a call of C code returns, or a function of Python begins
(and at the end of a loop's body). ``sys.setprofile`` reports just these places.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future


class Interrupt(BaseException):
    """What a handler of a signal raises."""


KEPT: list[Interrupt] = []


class Interrupter:
    """Raises at one of the places where a signal's exception can come, counted from 0.

    Args:
        at: Which; None: only count them.
    """

    def __init__(self, at=None):
        self.at, self.num_places, self.is_over = at, 0, False

    def __call__(self, frame, event, arg):
        if event not in ("call", "c_return") or self.is_over:
            return
        if self.num_places == self.at:
            self.is_over = True
            raise Interrupt
        self.num_places += 1


def interrupted(run, at=None):
    """Run something with an interrupt at a place; return how many places it passed."""
    interrupter = Interrupter(at)
    before = sys.getprofile()
    try:
        sys.setprofile(interrupter)
        run()
    except Interrupt as error:
        KEPT.append(error)  # as an interactive interpreter keeps the last one, with its frames
    finally:
        sys.setprofile(before)
    return interrupter.num_places


def call_elsewhere(call):
    """Return what a call returns in another thread; it must not wait for a lock for good."""
    done: Future = Future()

    def run():
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout=20)  # raises what the call raised, or TimeoutError
