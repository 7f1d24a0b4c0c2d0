"""Make torch report the current stream as capturing while the tape captures.

Libraries skip reads by the host if ``torch.cuda.is_current_stream_capturing()`` is true, for
example the masks of transformers. A capture of the tape simulates one of CUDA, so it returns True
in the capturing thread, and torch's own answer in every other thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dispatchkit.backends.capture_guard import capturing_device

# Every ``is_current_stream_capturing``, wherever imported, calls this function.
_NAME = "_cuda_isCurrentStreamCapturing"
_graphs: Any = torch.cuda.graphs
_torchs_own: Any = getattr(_graphs, _NAME)
_lock = threading.Lock()
_captures: set[object] = set()


def _is_capturing() -> bool:
    if capturing_device() == "cpu":
        return True
    if isinstance(_torchs_own, type):  # a class that cannot be created, without CUDA
        return False
    return bool(_torchs_own())


@contextmanager
def answering_capture() -> Iterator[None]:
    """Report the calling thread as capturing while it captures on the tape."""
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
