"""During a capture of the tape, libraries that query torch get the same answer as with CUDA."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch.cuda import is_current_stream_capturing as imported_early  # noqa: E402

from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import CaptureError  # noqa: E402


def capture(run):
    backend = TapeBackend()
    return backend.capture(run, stream=backend.new_stream(), pool=backend.new_pool())


def torchs_answer():
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # torch without CUDA
        return False


def test_the_capturing_thread_is_told_yes_and_no_other():
    """Holds for every way to import the function, and in nested and concurrent captures."""
    answers = []

    def ask_elsewhere():
        answers.append(torchs_answer())

    def run():
        answers.extend([torch.cuda.is_current_stream_capturing(), imported_early()])
        thread = threading.Thread(target=ask_elsewhere)
        thread.start()
        thread.join()
        return torch.zeros(2) + 1

    capture(run)
    assert answers == [True, True, False]
    assert not torchs_answer()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
def test_torch_answers_itself_after_a_capture_however_it_ends(error):
    """This holds after interrupts and refused captures too."""
    before = torch.cuda.graphs._cuda_isCurrentStreamCapturing

    def run():
        assert torch.cuda.is_current_stream_capturing()
        if error is None:
            return bool(torch.ones(1))  # refused, as on a device
        raise error

    with pytest.raises(CaptureError if error in (ValueError, None) else error):
        capture(run)
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is before


def test_what_torch_knows_of_other_threads_is_passed_on():
    """With CUDA, another thread may be capturing for real."""
    answers = []
    query = "dispatchkit.backends.tape.stream_query._torchs_own"

    def run():
        thread = threading.Thread(target=lambda: answers.append(imported_early()))
        with mock.patch(query, return_value=True):
            thread.start()
            thread.join()
        return torch.zeros(1) + 1

    capture(run)
    assert answers == [True]


def test_overlapping_captures_of_two_tapes_end_in_any_order():
    """The first capture to end does not change the other's answer."""
    inside, other_is_done = threading.Event(), threading.Event()
    before = torch.cuda.graphs._cuda_isCurrentStreamCapturing
    answers = []

    from dispatchkit.backends.capture_guard import _thread
    from dispatchkit.backends.tape.stream_query import reporting_capture

    def first():
        _thread.device = "cpu"
        with reporting_capture():
            inside.set()
            other_is_done.wait(10)
            answers.append(imported_early())

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with reporting_capture():
        pass
    other_is_done.set()
    thread.join()
    assert answers == [True]
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is before
