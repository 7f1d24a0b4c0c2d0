"""Counters of rare events, updated as the events happen."""

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

# Seconds: a graph of a small model takes milliseconds, one of a large model seconds.
_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class PrometheusObserver:
    """Records capture times, and counts failures and evictions by reason, and policy faults.

    It receives the events of runners created with the plugins it is attached to::

        plugins = load_plugins()
        plugins.create_observer("prometheus")
        runner = GraphRunner(step, inputs, policy=plugins.with_policy())

    Args:
        registry: The registry of the metrics; prometheus-client's default one if not given.

    Raises:
        ConfigError: The registry already has such an observer.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        try:
            self._captures = Histogram(
                "dispatchkit_capture_seconds",
                "Time of a capture on the host, warmup included.",
                ["mode"],
                buckets=_BUCKETS,
                registry=registry,
            )
        except ValueError as error:
            raise ConfigError(
                "registry",
                registry,
                "one without this observer",
                "One observer receives the events of all runners.",
            ) from error
        self._failed = Counter(
            "dispatchkit_failed_captures",
            "Captures that failed, by reason.",
            ["mode", "reason"],
            registry=registry,
        )
        self._evicted = Counter(
            "dispatchkit_evicted_graphs",
            "Evicted graphs, by reason.",
            ["mode", "reason"],
            registry=registry,
        )
        self._faults = Counter(
            "dispatchkit_policy_errors",
            "Faults of policies, by policy and method.",
            ["policy", "method"],
            registry=registry,
        )
        self._swaps = Counter(
            "dispatchkit_policy_swaps",
            "Policies that came into force, including the first.",
            ["policy"],
            registry=registry,
        )

    def on_capture(self, event: CaptureEvent) -> None:
        """A graph was captured."""
        if event.elapsed_us is not None:
            self._captures.labels(event.runtime_mode).observe(event.elapsed_us / 1e6)

    def on_capture_failed(self, event: CaptureFailedEvent) -> None:
        """A capture failed."""
        self._failed.labels(event.runtime_mode, event.reason).inc()

    def on_evict(self, event: EvictEvent) -> None:
        """A graph was evicted."""
        self._evicted.labels(event.runtime_mode, event.reason or "unknown").inc()

    def on_policy_error(self, event: PolicyErrorEvent) -> None:
        """A policy raised or broke a constraint."""
        self._faults.labels(event.policy, event.method).inc()

    def on_policy_swapped(self, event: PolicySwappedEvent) -> None:
        """Another policy was installed."""
        self._swaps.labels(event.policy).inc()
