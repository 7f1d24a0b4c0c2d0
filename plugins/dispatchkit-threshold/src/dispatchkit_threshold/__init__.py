"""Graphs between two numbers of tokens and within a padding limit."""

from __future__ import annotations

from dispatchkit_threshold.policy import ThresholdPolicy

__version__ = "0.1.0"

__all__ = ["ThresholdPolicy"]
