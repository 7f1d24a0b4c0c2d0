"""Reports of captures, and errors of failed captures."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from dispatchkit.backends.capture_errors import capture_error, origin_of
from dispatchkit.backends.capture_guard import HostSyncError
from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError, counted
from dispatchkit.keys.batch import GraphKey


@attrs.frozen
class CaptureReport:
    """The report of ``capture`` or of a background capture.

    Attributes:
        num_graphs: Number of captured graphs.
        seconds: Host time of the captures in seconds.
        num_bytes: Memory of the runner's graphs after the captures, in bytes.
        failed: Reason for each key whose capture failed.
        skipped: Reason for each skipped key, such as a budget or too many failures.
    """

    num_graphs: int
    seconds: float
    num_bytes: int
    failed: dict[GraphKey, str]
    skipped: dict[GraphKey, str]

    def __str__(self) -> str:
        """Return a summary with the first failed key and the first skipped key."""
        graphs = counted(self.num_graphs, "graph")
        text = f"{graphs} captured in {self.seconds:.2f} s; all graphs use {self.num_bytes} bytes"
        for what, keys in (("failed", self.failed), ("skipped", self.skipped)):
            for key, reason in list(keys.items())[:1]:
                which = ": " if len(keys) == 1 else ", first "
                text += f"\n{counted(len(keys), 'key')} {what}{which}{key}: {reason}"
        return text

    @classmethod
    def total(cls, parts: Iterable[CaptureReport]) -> CaptureReport:
        """Combine the reports of several lanes."""
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
    """Return a sort key that puts large graphs first, so that smaller graphs reuse their memory."""
    own = key.descriptor
    return (-own.num_tokens, -int(key.mode), -own.num_active_loras)


#: Error text for a step that computes gradients.
GRADIENTS_ERROR = (
    "A runner runs its steps under torch.no_grad(), but this step needs gradients. Compute them "
    "under torch.enable_grad() inside the step, or outside the step."
)


def is_gradient_error(error: BaseException) -> bool:
    """Return whether an error shows that the step needs gradients."""
    return isinstance(error, RuntimeError) and "does not require grad" in str(error)


def as_capture_error(error: Exception, key: GraphKey) -> CaptureError:
    """Convert an exception raised by a warmup, capture or row proof to a CaptureError."""
    if isinstance(error, CaptureError):
        error.key = error.key or str(key)
        return error
    if isinstance(error, HostSyncError):
        refused = capture_error(error)
        refused.key, refused.__cause__ = str(key), error
        return refused
    if is_gradient_error(error):
        found = CaptureError(f"{GRADIENTS_ERROR} ({error})", key=str(key), reason=Reason.GRADIENTS)
        found.__cause__ = error
        return found
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    origin = origin_of(error)
    at = f" at {origin}" if origin else ""
    text = f"A warmup, capture or row proof of {key} raised {type(error).__name__}{at}: {error}"
    if is_memory:
        text = text.removesuffix(".")
        text += ". Capture fewer or smaller sizes, or let runners share a graph pool (GraphMemory)."
    wrapped = CaptureError(
        text,
        key=str(key),
        reason="out_of_memory" if is_memory else "error",
    )
    wrapped.__cause__ = error
    return wrapped
