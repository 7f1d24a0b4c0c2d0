"""What dispatchkit's runners do, as Prometheus metrics.

``watch`` has a runner's counters read whenever Prometheus scrapes; a step pays nothing for it.
``watch_memory`` has the account of a ``GraphMemory`` read likewise.
``PrometheusObserver`` counts rare events as they happen: captures with their time, failures,
evictions, faults of policies. ``export_engine`` shows what an engine counts, on a port or in a
text file.
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
