"""From what stopped a capture to the error that says so, the same on every device."""

from __future__ import annotations

import torch

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.errors import CaptureError


def capture_error(error: BaseException) -> CaptureError:
    """Return the error of a capture for what the callable raised."""
    if isinstance(error, CaptureError):
        return CaptureError(str(error), key=error.key, reason=error.reason)
    if isinstance(error, HostSyncError):
        return CaptureError(
            f"The function cannot be captured, since it calls {error}. Move that call out of "
            "the captured function, or mark that piece eager.",
            reason="host_sync",
        )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    ):
        return CaptureError(
            f"The capture ran out of memory: {error}. Capture fewer or smaller sizes, or "
            "share one pool.",
            reason="out_of_memory",
        )
    return CaptureError(
        f"The function failed while it was captured: {type(error).__name__}: {error}. Run it "
        "eagerly to see whether it fails there too.",
        reason="error",
    )
