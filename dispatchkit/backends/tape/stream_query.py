"""Make torch report tape captures as captures of the current stream.

If ``torch.cuda.is_current_stream_capturing()`` is True, libraries skip host reads; for example,
transformers does not read attention masks. During a tape capture, the function therefore returns
True in the capturing thread, and torch's own result in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dispatchkit.backends.capture_guard import capturing_device

# ``is_current_stream_capturing`` looks up this function in its module at every call, so replacing
# it there also affects code that has already imported ``is_current_stream_capturing``.
_NAME = "_cuda_isCurrentStreamCapturing"
_graphs: Any = torch.cuda.graphs
_torchs_own: Any = getattr(_graphs, _NAME)
_lock = threading.Lock()
_captures: set[object] = set()


def _is_capturing() -> bool:
    if capturing_device() == "cpu":
        return True
    if isinstance(_torchs_own, type):  # in builds without CUDA, a stub class that raises
        return False
    return bool(_torchs_own())


@contextmanager
def reporting_capture() -> Iterator[None]:
    """Make torch report the calling thread as capturing while it captures on the tape."""
    capture = object()
    try:
        with _lock:
            _captures.add(capture)
            setattr(_graphs, _NAME, _is_capturing)
        yield
    finally:  # even if an interrupt prevented the capture from beginning
        with _lock:
            _captures.discard(capture)
            if not _captures:
                setattr(_graphs, _NAME, _torchs_own)
