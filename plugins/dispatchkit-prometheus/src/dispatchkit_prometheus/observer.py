"""An observer that counts rare events as they happen."""

from __future__ import annotations

from prometheus_client import Counter, Histogram
from prometheus_client.registry import REGISTRY, CollectorRegistry

from dispatchkit.errors import ConfigError
from dispatchkit.observe import (
    CaptureEvent,
    CaptureFailedEvent,
    EvictEvent,
    PolicyErrorEvent,
    PolicySwappedEvent,
)

__all__ = ["PrometheusObserver"]

# Histogram buckets in seconds. Captures of small models take milliseconds; those of large models
# take seconds.
_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class PrometheusObserver:
    """An observer that exports captures, failures, evictions, policy faults and swaps.

    The observer receives the events of all runners whose policy comes from the plugins that created
    the observer::

        plugins = load_plugins()
        plugins.create_observer("prometheus")
        runner = GraphRunner(step, inputs, policy=plugins.with_policy())

    Args:
        registry: Registry of the metrics; by default, the global registry of prometheus-client.

    Raises:
        ConfigError: The registry already contains a ``PrometheusObserver``.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        try:
            self._captures = Histogram(
                "dispatchkit_capture_seconds",
                "Host time of captures in seconds, including warmup.",
                ["mode"],
                buckets=_BUCKETS,
                registry=registry,
            )
        except ValueError as error:
            raise ConfigError(
                "registry",
                registry,
                "a registry without this observer",
                "Use one observer for all runners.",
                message="The registry already contains the metrics of a PrometheusObserver.",
            ) from error
        self._failed = Counter(
            "dispatchkit_failed_captures",
            "Number of failed captures, by reason.",
            ["mode", "reason"],
            registry=registry,
        )
        self._evicted = Counter(
            "dispatchkit_evicted_graphs",
            "Number of evicted graphs, by reason.",
            ["mode", "reason"],
            registry=registry,
        )
        self._faults = Counter(
            "dispatchkit_policy_errors",
            "Number of policy faults, by policy and method.",
            ["policy", "method"],
            registry=registry,
        )
        self._swaps = Counter(
            "dispatchkit_policy_swaps",
            "Number of installations of each policy, including the first.",
            ["policy"],
            registry=registry,
        )

    def on_capture(self, event: CaptureEvent) -> None:
        """Record the time of a capture."""
        if event.elapsed_us is not None:
            self._captures.labels(event.runtime_mode).observe(event.elapsed_us / 1e6)

    def on_capture_failed(self, event: CaptureFailedEvent) -> None:
        """Count a failed capture."""
        self._failed.labels(event.runtime_mode, event.reason).inc()

    def on_evict(self, event: EvictEvent) -> None:
        """Count an eviction."""
        self._evicted.labels(event.runtime_mode, event.reason or "unknown").inc()

    def on_policy_error(self, event: PolicyErrorEvent) -> None:
        """Count a fault of a policy."""
        self._faults.labels(event.policy, event.method).inc()

    def on_policy_swapped(self, event: PolicySwappedEvent) -> None:
        """Count the installation of a policy."""
        self._swaps.labels(event.policy).inc()
