"""Count an engine's steps and their tokens, by runtime mode and reason."""

from __future__ import annotations

import threading

import attrs

__all__ = ["StepCount", "StepCounts"]


@attrs.frozen
class StepCount:
    """The steps that ran in one mode for one reason.

    Attributes:
        mode: ``FULL``, ``PIECEWISE`` or ``NONE``.
        reason: Reason of the policy's decision, such as ``hit``; ``vllm`` if vLLM's own dispatcher
            decided; ``agreed_by_ranks`` if it decided again after the ranks had agreed on a shape.
        steps: Number of these steps.
        real_tokens: Total tokens before padding.
        padded_tokens: Total tokens after padding.
    """

    mode: str
    reason: str
    steps: int
    real_tokens: int
    padded_tokens: int


class StepCounts:
    """Counters of steps.

    Args:
        policy: Name of the active policy; empty for vLLM's own dispatcher.
        runner: Name of the model runner.

    Thread safety: one thread may add; any thread may read.
    """

    def __init__(self, policy: str = "", runner: str = "") -> None:
        self.policy, self.runner = policy, runner
        self._cells: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.Lock()

    def add(self, mode: str, reason: str, num_tokens: int, padded: int) -> None:
        """Count one step."""
        cell = self._cells.get((mode, reason))
        if cell is None:
            with self._lock:
                cell = self._cells.setdefault((mode, reason), [0, 0, 0])
        cell[0] += 1
        cell[1] += num_tokens
        cell[2] += padded

    def read(self) -> list[StepCount]:
        """Return the counts, sorted by mode and reason."""
        with self._lock:
            cells = sorted((key, tuple(cell)) for key, cell in self._cells.items())
        return [StepCount(*key, *cell) for key, cell in cells]
