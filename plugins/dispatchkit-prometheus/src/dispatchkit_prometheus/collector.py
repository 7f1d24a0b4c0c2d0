"""Export runners' counters, read at each Prometheus scrape."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_instance

__all__ = ["RunnerCollector", "watch"]

# (metric, help text, field of the statistics)
_COUNTS = (
    ("dispatchkit_captures", "Number of captured graphs.", "captures"),
    ("dispatchkit_capture_failures", "Number of failed captures.", "capture_failures"),
    ("dispatchkit_replay_failures", "Number of failed replays.", "replay_failures"),
    ("dispatchkit_evictions", "Number of evicted graphs.", "evictions"),
    ("dispatchkit_failed_steps", "Number of steps that raised an exception.", "failed_steps"),
)
# (metric, help text, field of the statistics, label for the keys of the field)
_TABLES = (
    (
        "dispatchkit_steps",
        "Number of steps that returned a result, by runtime mode.",
        "steps_by_mode",
        "mode",
    ),
    ("dispatchkit_replays", "Number of steps that replayed a graph, by key.", "hits", "key"),
    ("dispatchkit_eager_steps", "Number of eager steps, by reason.", "eager_by_reason", "reason"),
)


class RunnerCollector(Collector):
    """Collector that reads the statistics of runners at each scrape.

    It holds weak references: a runner that was garbage-collected is no longer reported.

    Thread safety: any thread may add runners and scrape.
    """

    def __init__(self) -> None:
        self._runners: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, name: str, runner: Any) -> None:
        """Add a runner, whose metrics get the label ``runner`` with the given name.

        Raises:
            ConfigError: Another runner has this name.
        """
        with self._lock:
            if self._runners.get(name, runner) is not runner:
                raise ConfigError(
                    "name",
                    name,
                    "a name that no other runner has",
                    "Pass a different name for each watched runner.",
                    message=f"Another watched runner is named {name!r}.",
                )
            self._runners[name] = runner

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that the registry reserves their names."""
        return _metrics(())

    def collect(self) -> Iterable[Metric]:
        """Return the counters of all runners as metrics."""
        with self._lock:
            runners = sorted(self._runners.items())
        return _metrics(runners)


def _metrics(runners: Sequence[tuple[str, Any]]) -> Iterator[Metric]:
    stats = {name: runner.stats() for name, runner in runners}
    for metric, help_text, field in _COUNTS:
        family = CounterMetricFamily(metric, help_text, labels=["runner"])
        for name, one in stats.items():
            family.add_metric([name], getattr(one, field))
        yield family
    for metric, help_text, field, label in _TABLES:
        family = CounterMetricFamily(metric, help_text, labels=["runner", label])
        for name, one in stats.items():
            for value, count in getattr(one, field).items():
                family.add_metric([name, value], count)
        yield family
    tokens = CounterMetricFamily(
        "dispatchkit_tokens",
        "Number of tokens, by kind: real or padding.",
        labels=["runner", "kind"],
    )
    for name, one in stats.items():
        tokens.add_metric([name, "real"], one.real_tokens)
        tokens.add_metric([name, "padding"], one.padded_tokens - one.real_tokens)
    yield tokens
    yield from _graph_metrics(runners)


def _graph_metrics(runners: Iterable[tuple[str, Any]]) -> Iterator[Metric]:
    graphs = GaugeMetricFamily(
        "dispatchkit_graphs",
        "Number of declared keys, by state of their graph.",
        labels=["runner", "state"],
    )
    memory = GaugeMetricFamily(
        "dispatchkit_graph_memory_bytes",
        "Device memory added by the captures of live graphs, in bytes.",
        labels=["runner"],
    )
    info = GaugeMetricFamily(
        "dispatchkit_runner_info",
        "Always 1; the labels name the policy, the backend and the mode.",
        labels=["runner", "policy", "backend", "mode"],
    )
    epoch = GaugeMetricFamily(
        "dispatchkit_policy_epoch",
        "Number of swaps of the policy or the configuration.",
        labels=["runner"],
    )
    for name, runner in runners:
        entries = [entry for key in runner.registry if (entry := runner.registry.get(key))]
        states = Counter(str(entry.state) for entry in entries)
        for state, count in sorted(states.items()):
            graphs.add_metric([name, state], count)
        live = [entry for entry in entries if entry.graph is not None]
        memory.add_metric([name], sum(entry.num_bytes or 0 for entry in live))
        facts = [runner.dispatcher.policy_name, runner.backend.name, str(runner.config.mode)]
        info.add_metric([name, *facts], 1)
        epoch.add_metric([name], runner.dispatcher.epoch)
    yield from (graphs, memory, info, epoch)


_COLLECTORS: WeakKeyDictionary[CollectorRegistry, RunnerCollector] = WeakKeyDictionary()
_COLLECTORS_LOCK = threading.Lock()


def watch(
    runner: Any, *, name: str = "runner", registry: CollectorRegistry = REGISTRY
) -> RunnerCollector:
    """Report a runner's counters at each scrape of a registry.

    Args:
        runner: Runner; it is not kept alive.
        name: Value of the label ``runner``, different for each runner.
        registry: Registry to report to; by default, the global registry of prometheus-client.

    Returns:
        The collector of the registry; all runners watched in this registry share it.

    Raises:
        ConfigError: An argument has the wrong type, or another runner is watched under this name.
        ValueError: Another collector of the registry has metrics with the same names.
    """
    if not hasattr(runner, "stats"):
        raise ConfigError("runner", runner, "a GraphRunner")
    check_instance(registry, CollectorRegistry, "registry")
    with _COLLECTORS_LOCK:
        known = _COLLECTORS.get(registry)
        collector = RunnerCollector() if known is None else known
        try:
            registry.register(collector)  # the collector may have been unregistered
        except ValueError:
            if known is None:  # another collector has these names
                raise
        _COLLECTORS[registry] = collector
    collector.add(name, runner)
    return collector
