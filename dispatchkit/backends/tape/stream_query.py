"""Whether the current stream is being captured, as torch answers it while the tape captures.

Libraries skip reads by the host where ``torch.cuda.is_current_stream_capturing()`` says yes, as
the masks of transformers do. A capture of the tape stands for one of CUDA, so the thread it runs
in is told yes, and every other thread what torch would tell it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dispatchkit.backends.capture_guard import capturing_device

# Every ``is_current_stream_capturing``, whoever has imported it, asks this function.
_NAME = "_cuda_isCurrentStreamCapturing"
_graphs: Any = torch.cuda.graphs
_torchs_own: Any = getattr(_graphs, _NAME)
_lock = threading.Lock()
_captures: set[object] = set()


def _is_capturing() -> bool:
    if capturing_device() == "cpu":
        return True
    if isinstance(_torchs_own, type):  # torch without CUDA has a class there that cannot be made
        return False
    return bool(_torchs_own())


@contextmanager
def answering_capture() -> Iterator[None]:
    """Answer yes to the calling thread while it captures on the tape."""
    capture = object()
    try:
        with _lock:
            _captures.add(capture)
            setattr(_graphs, _NAME, _is_capturing)
        yield
    finally:  # of a capture that an interrupt kept from beginning, too
        with _lock:
            _captures.discard(capture)
            if not _captures:
                setattr(_graphs, _NAME, _torchs_own)
