"""A policy that uses graphs only within fixed limits on tokens and padding."""

from __future__ import annotations

from dispatchkit_threshold.policy import ThresholdPolicy

__version__ = "0.1.0"

__all__ = ["ThresholdPolicy"]
