"""Counters are incremented by steps and read concurrently."""

from __future__ import annotations

import sys
import threading

import pytest

from dispatchkit.observe import StepCounters


@pytest.fixture
def restless():
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_counts_can_be_read_while_steps_meet_new_reasons():
    """A scrape comes from another thread, and no step waits for it."""
    counters, is_over = StepCounters(), threading.Event()
    for number in range(3000):
        counters.of_eager(f"reason {number}", None).steps = 1

    def meet_new_ones():
        for number in range(100_000):
            if is_over.is_set():
                return
            counters.of_eager(f"new reason {number}", None)

    thread = threading.Thread(target=meet_new_ones)
    thread.start()
    try:
        assert {counters.read().steps for _ in range(5)} == {3000}
    finally:
        is_over.set()
        thread.join()
