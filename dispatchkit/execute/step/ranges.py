"""NVTX ranges around steps, for Nsight Systems and other NVIDIA profilers."""

from __future__ import annotations

import torch

from dispatchkit.dispatch import Decision
from dispatchkit.errors import BackendUnavailableError
from dispatchkit.observe.timeline import span_name


class NvtxRanges:
    """Step watcher that pushes an NVTX range named after each step's graph or eager reason.

    Example: ``runner.taps.watch_steps(NvtxRanges())``, under ``nsys profile``.

    Args:
        prefix: Prefix of the range names.

    Raises:
        BackendUnavailableError: torch was built without NVTX.
    """

    def __init__(self, prefix: str = "dispatchkit ") -> None:
        self._prefix = prefix
        try:
            torch.cuda.nvtx.mark(f"{prefix}ranges begin")
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"NVTX ranges require a CUDA build of torch, but torch {torch.__version__} is "
                "built without NVTX. Install a CUDA build, or watch steps with "
                "dispatchkit.observe.Timeline."
            ) from error

    def enter(self, decision: Decision, lane: int) -> None:
        """Push a range when a step begins on this thread."""
        where = f" lane {lane}" if lane else ""
        torch.cuda.nvtx.range_push(f"{self._prefix}{span_name(decision)}{where}")

    def leave(self, *, failed: bool) -> None:
        """Pop the range after this thread's step was launched, or after it raised."""
        torch.cuda.nvtx.range_pop()
