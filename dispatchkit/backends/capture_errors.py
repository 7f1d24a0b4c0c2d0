"""Convert exceptions raised in a capture to CaptureError, on any device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

import torch

from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.errors import CaptureError

# Messages of CUDA errors 900, 901 and 907, which invalidate the capture, and of a torch error that
# does not.
_NOT_CAPTURABLE = (
    "when stream is capturing",
    "previous error during capture",
    "last recorded in a capturing stream",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
)
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")


def clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Clear the local variables of the frames in an error's traceback.

    A runner stores the error of a failed capture. Without this call, the stored error would keep
    all tensors in these variables alive. The traceback still shows where the error occurred. Its
    frames still reference their functions and closures; see ``clear_traceback``.

    Args:
        error: Error that the capture raised.
        handled: The exception that the caller was handling when the capture began
            (``sys.exception()``). This exception is in the error's context and must not change.
    """
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)


def clear_traceback(error: BaseException, handled: BaseException | None) -> None:
    """Remove an error's traceback, to free the objects that the traceback references.

    Clearing the frames is not enough: a cleared frame still references its function and closure
    (CPython 3.11 and later), which may in turn reference the error.

    Args:
        error: Error that the capture raised.
        handled: As for ``clear_frames``.
    """
    for one in _chain(error, handled):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _chain(error: BaseException, handled: BaseException | None) -> list[BaseException]:
    """Return an error with its causes, contexts and group members, without ``handled``."""
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
    """Return the location of an error, such as ``model.py:12 (forward)``.

    The location is that of the innermost frame outside torch and dispatchkit. Without such a frame,
    it is that of the innermost frame in a public module of torch, because private modules only
    forward calls. If there is neither, the result is empty.
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
    """Yield the module and location of each frame of an error, innermost first.

    Only frames of the step and of the backends are included, not outer frames (the runner and its
    callers).
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    first = max((at for at, (frame, _) in enumerate(frames) if _calls_steps(frame)), default=-1)
    for frame, line in reversed(frames[first + 1 :]):
        code = frame.f_code
        yield _module(frame), f"{code.co_filename}:{line} ({code.co_name})"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _calls_steps(frame: FrameType) -> bool:
    """Return whether a frame runs code of dispatchkit other than its backends."""
    package, _, inside = _module(frame).partition(".")
    return package == "dispatchkit" and not inside.startswith("backends.")


def capture_error(error: BaseException) -> CaptureError:
    """Return the CaptureError for an exception raised in a capture."""
    if isinstance(error, CaptureError):
        return CaptureError(str(error), key=error.key, reason=error.reason)
    origin = origin_of(error)
    at = f" at {origin}" if origin else ""
    if isinstance(error, HostSyncError):
        return CaptureError(
            f"The function cannot be captured because it uses {error}{at}. {error.next_step}",
            reason="host_sync",
        )
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _NOT_CAPTURABLE):
        return CaptureError(
            f"The function used an operation that cannot be captured{at}: "
            f"{text.splitlines()[0].rstrip('.')}. Typical causes are copies to or from pageable "
            "host memory, synchronization inside an extension, and work on the default stream. "
            "Move the operation out of the captured function, or into an eager piece.",
            reason="host_sync",
        )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
    ):
        return CaptureError(
            f"The capture ran out of memory: {error}".rstrip(": .")
            + ". Capture fewer or smaller sizes, or let runners share "
            "a GraphMemory.",
            reason="out_of_memory",
        )
    return CaptureError(
        f"The function failed during capture{at}: {type(error).__name__}: {error}".rstrip(": .")
        + ". Call the function directly to check whether it also fails outside a capture.",
        reason="error",
    )
