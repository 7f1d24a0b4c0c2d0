"""Make torch report that the current stream is capturing during tape captures.

Libraries skip host reads, for example of masks in transformers, if
``torch.cuda.is_current_stream_capturing()`` is true. The tape simulates a CUDA capture, so the
function returns True in the capturing thread, and torch's own result in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dispatchkit.backends.capture_guard import capturing_device

# ``is_current_stream_capturing`` calls this function, wherever it was imported.
_NAME = "_cuda_isCurrentStreamCapturing"
_graphs: Any = torch.cuda.graphs
_torchs_own: Any = getattr(_graphs, _NAME)
_lock = threading.Lock()
_captures: set[object] = set()


def _is_capturing() -> bool:
    if capturing_device() == "cpu":
        return True
    if isinstance(_torchs_own, type):  # without CUDA, torch has a class that cannot be instantiated
        return False
    return bool(_torchs_own())


@contextmanager
def reporting_capture() -> Iterator[None]:
    """Report the calling thread as capturing while it captures on the tape."""
    capture = object()
    try:
        with _lock:
            _captures.add(capture)
            setattr(_graphs, _NAME, _is_capturing)
        yield
    finally:  # also if an interrupt prevented the capture from beginning
        with _lock:
            _captures.discard(capture)
            if not _captures:
                setattr(_graphs, _NAME, _torchs_own)
