"""Prometheus metrics of dispatchkit's runners.

``watch`` reads a runner's counters at each scrape, so it adds no work to steps. ``watch_memory``
reads the account of a ``GraphMemory`` in the same way. ``PrometheusObserver`` records rare events
as they happen: captures and their times, failures, evictions, policy faults and swaps.
``export_engine`` exports an engine's counters on a port or to a text file.
"""

from __future__ import annotations

from dispatchkit_prometheus.collector import RunnerCollector, watch
from dispatchkit_prometheus.dashboard import dashboard
from dispatchkit_prometheus.engine import EngineCollector, EngineExport, export_engine
from dispatchkit_prometheus.memory import MemoryCollector, watch_memory
from dispatchkit_prometheus.observer import PrometheusObserver

__version__ = "0.1.0"

__all__ = [
    "EngineCollector",
    "EngineExport",
    "MemoryCollector",
    "PrometheusObserver",
    "RunnerCollector",
    "dashboard",
    "export_engine",
    "watch",
    "watch_memory",
]
