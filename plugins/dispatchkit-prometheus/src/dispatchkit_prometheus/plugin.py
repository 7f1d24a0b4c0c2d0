"""Register the Prometheus observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatchkit.hookspecs import ObserverSpec, hookimpl


def make_observer(**options: Any) -> Any:
    """Return the observer; prometheus-client is imported on the first call."""
    from dispatchkit_prometheus.observer import PrometheusObserver

    return PrometheusObserver(**options)


def make_engine_export(**options: Any) -> Any:
    """Export an engine's counters, as ``export_engine`` does."""
    from dispatchkit_prometheus.engine import export_engine

    return export_engine(**options)


@hookimpl
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:
    """Return the observers of runners and of engines."""
    return [
        ObserverSpec(
            "prometheus",
            make_observer,
            summary="Captures, failures, evictions and policy faults as Prometheus metrics",
        ),
        ObserverSpec(
            "prometheus-engine",
            make_engine_export,
            summary="Modes, padding and reasons of an engine's steps, on a port or in a text file",
        ),
    ]
