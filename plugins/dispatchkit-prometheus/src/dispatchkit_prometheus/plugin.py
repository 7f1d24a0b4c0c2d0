"""What this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatchkit.hookspecs import ObserverSpec, hookimpl


def make_observer(**options: Any) -> Any:
    """Return the observer; prometheus-client is loaded now and not before."""
    from dispatchkit_prometheus.observer import PrometheusObserver

    return PrometheusObserver(**options)


@hookimpl
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:
    """Register the one observer."""
    return [
        ObserverSpec(
            "prometheus",
            make_observer,
            summary="Captures, failures, evictions and policy faults as Prometheus metrics",
        )
    ]
