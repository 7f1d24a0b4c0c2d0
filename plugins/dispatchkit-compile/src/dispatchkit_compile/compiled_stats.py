"""Statistics of one compiled graph."""

from __future__ import annotations

from typing import Any

import attrs

from dispatchkit.observe import RunnerStats

__all__ = ["CompiledStats"]


@attrs.frozen
class CompiledStats:
    """Statistics of one compiled graph.

    Attributes:
        name: Name of the graph.
        plain_steps: Number of steps that bypassed the runner and ran eager, by reason.
        runner: Statistics of the runner; None until the first step that uses it.
    """

    name: str
    plain_steps: dict[str, int]
    runner: RunnerStats | None

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return sum(self.plain_steps.values()) + (self.runner.steps if self.runner else 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a dict of JSON values."""
        runner = None if self.runner is None else self.runner.to_dict()
        return {"name": self.name, "plain_steps": dict(self.plain_steps), "runner": runner}
