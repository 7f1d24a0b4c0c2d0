"""Lane policies: round-robin, by load, by graph key, and by priority."""

from __future__ import annotations

from dispatchkit_multistream.policies import ByKey, LeastLoaded, Priority, RoundRobin

__version__ = "0.1.0"

__all__ = ["ByKey", "LeastLoaded", "Priority", "RoundRobin"]
