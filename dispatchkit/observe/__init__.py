"""What happened: counters, events and (with traces) the record of every step."""

from dispatchkit.observe.counters import RunnerStats, StepCount, StepCounters

__all__ = ["RunnerStats", "StepCount", "StepCounters"]
