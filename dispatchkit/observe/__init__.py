"""What happened: counters, events, and traces, the record of every step.

Names of traces are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.lazy import lazy_names
from dispatchkit.observe.counters import RunnerStats, StepCount, StepCounters

if TYPE_CHECKING:
    from dispatchkit.observe.events import (
        CaptureEvent,
        CaptureFailedEvent,
        EvictEvent,
        PolicyErrorEvent,
        PolicySwappedEvent,
    )
    from dispatchkit.observe.timeline import Timeline
    from dispatchkit.observe.trace import (
        TRACE_COLUMNS,
        StepTrace,
        TraceStep,
        read_trace,
    )
    from dispatchkit.observe.trace_arguments import trace_config, trace_variants
    from dispatchkit.observe.trace_counts import (
        CudagraphStats,
        SizeHistogram,
        read_cudagraph_stats,
        read_histogram,
    )
    from dispatchkit.observe.trace_writer import TraceWarning, TraceWriter, write_trace
    from dispatchkit.observe.workload_files import read_steps, read_workload

_HOME = {
    "CaptureEvent": "events",
    "CaptureFailedEvent": "events",
    "EvictEvent": "events",
    "PolicyErrorEvent": "events",
    "PolicySwappedEvent": "events",
    "CudagraphStats": "trace_counts",
    "TRACE_COLUMNS": "trace",
    "SizeHistogram": "trace_counts",
    "Timeline": "timeline",
    "StepTrace": "trace",
    "TraceStep": "trace",
    "TraceWarning": "trace_writer",
    "TraceWriter": "trace_writer",
    "read_cudagraph_stats": "trace_counts",
    "read_histogram": "trace_counts",
    "read_trace": "trace",
    "read_steps": "workload_files",
    "read_workload": "workload_files",
    "trace_config": "trace_arguments",
    "trace_variants": "trace_arguments",
    "write_trace": "trace_writer",
}

__all__ = [
    "TRACE_COLUMNS",
    "CaptureEvent",
    "CaptureFailedEvent",
    "CudagraphStats",
    "EvictEvent",
    "PolicyErrorEvent",
    "PolicySwappedEvent",
    "RunnerStats",
    "SizeHistogram",
    "StepCount",
    "StepCounters",
    "StepTrace",
    "Timeline",
    "TraceStep",
    "TraceWarning",
    "TraceWriter",
    "read_cudagraph_stats",
    "read_histogram",
    "read_steps",
    "read_trace",
    "read_workload",
    "trace_config",
    "trace_variants",
    "write_trace",
]


__getattr__, __dir__ = lazy_names(__name__, _HOME)
