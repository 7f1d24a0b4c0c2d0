"""Counters, events, and step traces.

Names for events, timelines and traces are imported on first use.
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
        MAX_COUNT,
        MAX_STEPS,
        TRACE_COLUMNS,
        StepTrace,
        TraceStep,
        parse_trace,
        read_trace,
    )
    from dispatchkit.observe.trace_arguments import trace_config, trace_variants
    from dispatchkit.observe.trace_files import (
        DEFAULT_MAX_BYTES,
        Blocks,
        iter_line_blocks,
        trace_name,
    )
    from dispatchkit.observe.trace_writer import TraceWarning, TraceWriter, write_trace

_LAZY_NAMES = {
    "Blocks": "trace_files",
    "DEFAULT_MAX_BYTES": "trace_files",
    "MAX_COUNT": "trace",
    "MAX_STEPS": "trace",
    "iter_line_blocks": "trace_files",
    "parse_trace": "trace",
    "trace_name": "trace_files",
    "CaptureEvent": "events",
    "CaptureFailedEvent": "events",
    "EvictEvent": "events",
    "PolicyErrorEvent": "events",
    "PolicySwappedEvent": "events",
    "TRACE_COLUMNS": "trace",
    "Timeline": "timeline",
    "StepTrace": "trace",
    "TraceStep": "trace",
    "TraceWarning": "trace_writer",
    "TraceWriter": "trace_writer",
    "read_trace": "trace",
    "trace_config": "trace_arguments",
    "trace_variants": "trace_arguments",
    "write_trace": "trace_writer",
}

__all__ = [
    "DEFAULT_MAX_BYTES",
    "MAX_COUNT",
    "MAX_STEPS",
    "TRACE_COLUMNS",
    "Blocks",
    "CaptureEvent",
    "CaptureFailedEvent",
    "EvictEvent",
    "PolicyErrorEvent",
    "PolicySwappedEvent",
    "RunnerStats",
    "StepCount",
    "StepCounters",
    "StepTrace",
    "Timeline",
    "TraceStep",
    "TraceWarning",
    "TraceWriter",
    "iter_line_blocks",
    "parse_trace",
    "read_trace",
    "trace_config",
    "trace_name",
    "trace_variants",
    "write_trace",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY_NAMES)
