"""Create the CaptureError for an exception raised in a capture, on any device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

import torch

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.errors import CaptureError

# Texts of CUDA's errors 900, 901 and 907, which invalidate the capture, and of torch's own check of
# copies, which does not.
_NOT_CAPTURABLE = (
    "when stream is capturing",
    "previous error during capture",
    "last recorded in a capturing stream",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
)
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")


def clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Clear the local variables of the frames in an error's traceback.

    An error stored as the reason of a failed key would otherwise keep alive every tensor that the
    callable held when it failed. The frames' functions are kept, so that the traceback still shows
    where it failed, and with them what they close over; see ``clear_traceback``.

    Args:
        error: The error of the capture.
        handled: The exception the caller was handling when the capture began (``sys.exception()``);
            it is in the error's context and must not be changed.
    """
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)


def clear_traceback(error: BaseException, handled: BaseException | None) -> None:
    """Drop the traceback of an error that nobody will see, with everything it holds.

    A cleared frame still references its function and the function's closure (CPython 3.11 and
    later). The error itself may stay alive: a callable may keep the exception it raises.

    Args:
        error: The error of the capture.
        handled: As for ``clear_frames``.
    """
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _chain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """Return an error with its causes, contexts and parts, except for the caller's own."""
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
    """Return the origin of an error as ``model.py:12 (forward)``.

    It is the innermost frame inside the callable that belongs to neither torch nor dispatchkit. If
    there is none, as in one of torch's own modules, it is the innermost frame of torch's public
    modules, since private ones only pass calls on. Empty for an error without a traceback.
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

    Frames outside the innermost call by dispatchkit's runners and captures are left out: they
    belong to the caller of the step, not to the step.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    first = max((at for at, (frame, _) in enumerate(frames) if _calls_steps(frame)), default=-1)
    for frame, line in reversed(frames[first + 1 :]):
        code = frame.f_code
        yield _module(frame), f"{code.co_filename}:{line} ({code.co_name})"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _calls_steps(frame: FrameType) -> bool:
    """Return whether a frame belongs to dispatchkit, other than to its watch of operations."""
    package, _, inside = _module(frame).partition(".")
    return package == "dispatchkit" and not inside.startswith("backends.")


def capture_error(error: BaseException) -> CaptureError:
    """Return the CaptureError for an exception raised by the callable."""
    if isinstance(error, CaptureError):
        return CaptureError(str(error), key=error.key, reason=error.reason)
    origin = origin_of(error)
    at = f" at {origin}" if origin else ""
    if isinstance(error, HostSyncError):
        return CaptureError(
            f"The function cannot be captured because it calls {error}{at}. {error.next_step}",
            reason="host_sync",
        )
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _NOT_CAPTURABLE):
        return CaptureError(
            f"The function did something that a stream cannot capture{at}: "
            f"{text.splitlines()[0]}. Typical causes are copies to or from pageable host memory, "
            "synchronization inside an extension, and work on the default stream. Move it out of "
            "the captured function, or mark that piece eager.",
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
        f"The function failed during capture{at}: {type(error).__name__}: {error}. Run it eagerly "
        "to see whether it fails there, too.",
        reason="error",
    )
