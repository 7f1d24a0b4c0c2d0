"""The CaptureError for what stopped a capture, the same on every device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

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


def origin_of(error: BaseException) -> str:
    """Return the file, line and function that an error comes from, as ``model.py:12 (forward)``.

    It is the innermost that is of neither torch nor dispatchkit, and inside of what dispatchkit
    called; where there is none, as in a module of torch's own, the innermost of torch's public
    modules: those behind them only pass calls on. Empty for an error without a traceback.
    """
    found = ""
    for module, place in _places(error):
        package, *inside = module.split(".")
        if package == "dispatchkit":
            continue
        if package != "torch":
            return place
        if not any(part.startswith("_") for part in inside):
            found = found or place
    return found


def _places(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the module and the place of each frame of an error, innermost first.

    Those outside of the innermost call by dispatchkit's runners and captures are left out: they
    are of who asked for a step, and not of the step.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    first = max((at for at, (frame, _) in enumerate(frames) if _calls_steps(frame)), default=-1)
    for frame, line in reversed(frames[first + 1 :]):
        code = frame.f_code
        yield _module(frame), f"{code.co_filename}:{line} ({code.co_name})"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _calls_steps(frame: FrameType) -> bool:
    """Return whether a frame is of dispatchkit, and not of what watches operations."""
    package, _, inside = _module(frame).partition(".")
    return package == "dispatchkit" and not inside.startswith("backends.")


def capture_error(error: BaseException) -> CaptureError:
    """Return the error of a capture for what the callable raised."""
    if isinstance(error, CaptureError):
        return CaptureError(str(error), key=error.key, reason=error.reason)
    origin = origin_of(error)
    at = f" at {origin}" if origin else ""
    if isinstance(error, HostSyncError):
        return CaptureError(
            f"The function cannot be captured, since it calls {error}{at}. {error.next_step}",
            reason="host_sync",
        )
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _NOT_CAPTURABLE):
        return CaptureError(
            f"The function did something that a stream cannot capture{at}: "
            f"{text.splitlines()[0]}. "
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
        f"The function failed while it was captured{at}: {type(error).__name__}: {error}. Run it "
        "eagerly to see whether it fails there too.",
        reason="error",
    )
