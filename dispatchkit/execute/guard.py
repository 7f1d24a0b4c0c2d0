"""What a graph was made under besides its inputs; a call that differs does not get it."""

from __future__ import annotations

from typing import Any

import torch

#: Names of the facts in a fingerprint, in order: reasons to count.
FACTS = ("autocast", "training_mode")

Fingerprint = tuple[Any, Any]


class Guard:
    """Reads the facts of the calling thread that steer what a step computes.

    Args:
        device_type: Whose autocast matters.
        module: The module whose training flag matters, if the step is one.

    Attributes:
        module: That module.
    """

    def __init__(self, device_type: str, module: torch.nn.Module | None) -> None:
        self._device_type = device_type
        self.module = module

    def now(self) -> Fingerprint:
        """Return the facts as they are now: autocast type or None, training flag."""
        autocast = (
            torch.get_autocast_dtype(self._device_type)
            if torch.is_autocast_enabled(self._device_type)
            else None
        )
        return autocast, None if self.module is None else self.module.training


def difference(made_under: Fingerprint, now: Fingerprint) -> str:
    """Return which fact differs, as a reason to count."""
    for name, then, current in zip(FACTS, made_under, now, strict=True):
        if then != current:
            return name
    return ""
