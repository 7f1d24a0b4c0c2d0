"""The CaptureError for what stopped a capture, the same on every device."""

from __future__ import annotations

import traceback

import torch

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.errors import CaptureError

# In the text of CUDA's errors 900, 901 and 907, after which the capture is void, and of
# torch's own check of copies, which keeps it whole.
_NOT_CAPTURABLE = (
    "when stream is capturing",
    "previous error during capture",
    "last recorded in a capturing stream",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
)
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")


def clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Drop the local variables of the frames an error came through.

    Whoever keeps the error as the reason of a failed key would otherwise keep every tensor
    that the callable held when it failed. The functions of those frames stay, so that the
    traceback still shows where it failed, and with them what they close over; see
    ``clear_traceback``.

    Args:
        error: The error of the capture.
        handled: What the caller was handling when the capture began (``sys.exception()``);
            it is in the error's context, and not the capture's to touch.
    """
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)


def clear_traceback(error: BaseException, handled: BaseException | None) -> None:
    """Drop an error's traceback and all that it holds, for an error that nobody gets to see.

    A cleared frame still holds its function, and that what it closes over (CPython 3.11 on).
    The error itself may live on: a callable may raise one that it keeps.

    Args:
        error: The error of the capture.
        handled: As for ``clear_frames``.
    """
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _chain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """Return an error with its causes, contexts and parts, but for what is not its own."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one is handled or any(one is other for other in found):
            continue
        found.append(one)
        waiting += [one.__context__, one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return found


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
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _NOT_CAPTURABLE):
        return CaptureError(
            f"The function did something that a stream cannot capture: {text.splitlines()[0]}. "
            "Typical are copies to or from ordinary host memory, waits for the device inside "
            "an extension, and work on the default stream. Move it out of the captured "
            "function, or mark that piece eager.",
            reason="host_sync",
        )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
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
