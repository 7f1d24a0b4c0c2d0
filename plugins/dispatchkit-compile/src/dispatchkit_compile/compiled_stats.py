"""What one compiled graph has done."""

from __future__ import annotations

from typing import Any

import attrs

from dispatchkit.observe import RunnerStats

__all__ = ["CompiledStats"]


@attrs.frozen
class CompiledStats:
    """What one compiled graph has done.

    Attributes:
        name: Which.
        plain_steps: Steps that went by the runner, by reason.
        runner: What the runner did; None if no step has reached it.
    """

    name: str
    plain_steps: dict[str, int]
    runner: RunnerStats | None

    @property
    def steps(self) -> int:
        """All steps."""
        return sum(self.plain_steps.values()) + (self.runner.steps if self.runner else 0)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        runner = None if self.runner is None else self.runner.to_dict()
        return {"name": self.name, "plain_steps": dict(self.plain_steps), "runner": runner}
