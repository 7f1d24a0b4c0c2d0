"""What a capture session reports, and what is made of its failures."""

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
    """What a capture session did.

    Attributes:
        num_graphs: Graphs captured.
        seconds: Time it took, on the host.
        num_bytes: Memory that the graphs of the runner take afterwards.
        failed: Keys that could not be captured, with the reason.
        skipped: Keys that were left out, with the reason (a budget, too many failures).
    """

    num_graphs: int
    seconds: float
    num_bytes: int
    failed: dict[GraphKey, str]
    skipped: dict[GraphKey, str]

    def __str__(self) -> str:
        """Return what was captured, and of what was not the first with its reason."""
        text = f"{self.num_graphs} graphs captured in {self.seconds:.2f} s; {self.num_bytes} bytes"
        for what, keys in (("failed", self.failed), ("skipped", self.skipped)):
            for key, reason in list(keys.items())[:1]:
                text += f"\n{len(keys)} {what}, {key} first: {reason}"
        return text

    @classmethod
    def total(cls, parts: Iterable[CaptureReport]) -> CaptureReport:
        """Return what the sessions of several lanes did together."""
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
    """Return what keys are sorted by for a session: the largest takes the memory first."""
    own = key.descriptor
    return (-own.num_tokens, -int(key.mode), -own.num_active_loras)


#: What to do about a step that differentiates.
ABOUT_GRADIENTS = (
    "A runner runs its steps under torch.no_grad(), and this one differentiates: put that under "
    "torch.enable_grad() inside the step, or outside of it."
)


def is_about_gradients(error: BaseException) -> bool:
    """Return whether a step has raised an error since no gradients were recorded."""
    return isinstance(error, RuntimeError) and "does not require grad" in str(error)


def as_capture_error(error: Exception, key: GraphKey) -> CaptureError:
    """Return the error of a capture for what went wrong in a warmup or the capture itself."""
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
