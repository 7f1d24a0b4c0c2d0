"""Lane policies: in turn, by load, by graph key, or by the priority of the step."""

from __future__ import annotations

from dispatchkit_multistream.policies import ByKey, LeastLoaded, Priority, RoundRobin

__version__ = "0.1.0"

__all__ = ["ByKey", "LeastLoaded", "Priority", "RoundRobin"]
