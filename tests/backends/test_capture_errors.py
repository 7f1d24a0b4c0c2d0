"""Messages of errors that are raised in captures."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.capture_errors import capture_error  # noqa: E402
from dispatchkit.backends.capture_guard import (  # noqa: E402
    pause_capture,
    refuse_nested,
    resume_capture,
    run_as_capture,
)
from dispatchkit.errors import CaptureError  # noqa: E402

PAGEABLE = "Cannot copy between CPU and CUDA tensors during CUDA graph capture. Pin them."


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (MemoryError(), "out_of_memory", "The capture ran out of memory. Capture fewer"),
        (MemoryError("full."), "out_of_memory", "ran out of memory: full. Capture fewer"),
        (AssertionError(), "error", "failed during capture: AssertionError. Call"),
        (ValueError("bad."), "error", "failed during capture: ValueError: bad. Call"),
        (RuntimeError(PAGEABLE), "host_sync", f"cannot be captured: {PAGEABLE} Typical causes"),
    ],
)
def test_texts_of_errors_become_whole_sentences(error, reason, text) -> None:
    """Includes errors without a text, and texts that end with a period."""
    found = capture_error(error)
    assert text in str(found)
    assert found.reason == reason


def test_a_nested_capture_at_a_break_is_not_recorded_by_the_outer_capture() -> None:
    """The next step is the same as in a segment, but its reason is not."""

    def nested() -> list[str]:
        with pytest.raises(CaptureError) as recorded:
            refuse_nested("cpu")
        pause_capture()
        with pytest.raises(CaptureError) as paused:
            refuse_nested("cpu")
        resume_capture()
        return [str(recorded.value), str(paused.value)]

    in_segment, at_break = run_as_capture("cpu", nested)
    assert in_segment.endswith("Call the inner function directly: the outer capture records it.")
    assert at_break.endswith("Call the inner function directly.")
