"""The dispatchkit policy ``smallest``."""

from __future__ import annotations

from dispatchkit_smallest.policy import SmallestPolicy

__version__ = "0.1.0"

__all__ = ["SmallestPolicy"]
