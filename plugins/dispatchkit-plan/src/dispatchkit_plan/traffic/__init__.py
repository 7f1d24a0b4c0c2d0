"""Read traffic from step traces, histograms and server logs."""

from dispatchkit_plan.traffic.counts import (
    CudagraphStats,
    SizeHistogram,
    StepKind,
    read_cudagraph_stats,
    read_histogram,
)
from dispatchkit_plan.traffic.files import read_steps, read_workload

__all__ = [
    "CudagraphStats",
    "SizeHistogram",
    "StepKind",
    "read_cudagraph_stats",
    "read_histogram",
    "read_steps",
    "read_workload",
]
