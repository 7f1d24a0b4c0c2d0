"""NVTX ranges around steps, for Nsight Systems and other NVIDIA profilers."""

from __future__ import annotations

import torch

from dispatchkit.dispatch import Decision
from dispatchkit.errors import BackendUnavailableError
from dispatchkit.observe.timeline import span_name


class NvtxRanges:
    """Marks each step as an NVTX range named by its graph, or by the reason for eager.

    Example: ``runner.taps.watch_steps(NvtxRanges())``, under ``nsys profile``.

    Args:
        prefix: Prefix of the names of ranges.

    Raises:
        BackendUnavailableError: This torch was built without NVTX.
    """

    def __init__(self, prefix: str = "dispatchkit ") -> None:
        self._prefix = prefix
        try:
            torch.cuda.nvtx.mark(f"{prefix}ranges begin")
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"NVTX ranges need a CUDA build of torch, and {torch.__version__} has no NVTX. "
                "Next: watch steps with dispatchkit.observe.Timeline, or install a CUDA build."
            ) from error

    def enter(self, decision: Decision, lane: int) -> None:
        """Begin a step on this thread."""
        where = f" lane {lane}" if lane else ""
        torch.cuda.nvtx.range_push(f"{self._prefix}{span_name(decision)}{where}")

    def leave(self, *, failed: bool) -> None:
        """End this thread's step, which was launched or raised."""
        torch.cuda.nvtx.range_pop()
