"""Reports of capture sessions, and errors for failures."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from dispatchkit.backends.capture_errors import capture_error, origin_of
from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError
from dispatchkit.keys.batch import GraphKey


@attrs.frozen
class CaptureReport:
    """The report of a capture session.

    Attributes:
        num_graphs: Graphs captured.
        seconds: Host time in seconds.
        num_bytes: Memory of the runner's graphs afterwards.
        failed: Keys that could not be captured, with the reason.
        skipped: Keys that were skipped, with the reason (a budget, too many failures).
    """

    num_graphs: int
    seconds: float
    num_bytes: int
    failed: dict[GraphKey, str]
    skipped: dict[GraphKey, str]

    def __str__(self) -> str:
        """Summarize what was captured, with the first failed and skipped key and its reason."""
        text = f"{self.num_graphs} graphs captured in {self.seconds:.2f} s; {self.num_bytes} bytes"
        for what, keys in (("failed", self.failed), ("skipped", self.skipped)):
            for key, reason in list(keys.items())[:1]:
                text += f"\n{len(keys)} {what}, {key} first: {reason}"
        return text

    @classmethod
    def total(cls, parts: Iterable[CaptureReport]) -> CaptureReport:
        """Return the combined report of several lanes' sessions."""
        first, *others = parts
        for one in others:
            first = cls(
                first.num_graphs + one.num_graphs,
                first.seconds + one.seconds,
                first.num_bytes + one.num_bytes,
                first.failed | one.failed,
                first.skipped | one.skipped,
            )
        return first


def largest_first(key: GraphKey) -> tuple[int, int, int]:
    """Return the sort key of a session: the largest graph takes the memory first."""
    own = key.descriptor
    return (-own.num_tokens, -int(key.mode), -own.num_active_loras)


#: Advice for a step that differentiates.
ABOUT_GRADIENTS = (
    "A runner runs its steps under torch.no_grad(), but this step needs gradients. Compute them "
    "under torch.enable_grad() inside the step, or outside the step."
)


def is_about_gradients(error: BaseException) -> bool:
    """Return whether a step raised because no gradients were recorded."""
    return isinstance(error, RuntimeError) and "does not require grad" in str(error)


def as_capture_error(error: Exception, key: GraphKey) -> CaptureError:
    """Return the CaptureError for an exception in a warmup or the capture itself."""
    if isinstance(error, CaptureError):
        error.key = error.key or str(key)
        return error
    if isinstance(error, HostSyncError):
        refused = capture_error(error)
        refused.key, refused.__cause__ = str(key), error
        return refused
    if is_about_gradients(error):
        found = CaptureError(f"{ABOUT_GRADIENTS} ({error})", key=str(key), reason=Reason.GRADIENTS)
        found.__cause__ = error
        return found
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    origin = origin_of(error)
    at = f" at {origin}" if origin else ""
    wrapped = CaptureError(
        f"Warmup or capture of {key} raised{at} {type(error).__name__}: {error}",
        key=str(key),
        reason="out_of_memory" if is_memory else "error",
    )
    wrapped.__cause__ = error
    return wrapped
