"""Export the accounts of GraphMemory objects, read at each Prometheus scrape."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_instance

__all__ = ["MemoryCollector", "watch_memory"]


class MemoryCollector(Collector):
    """Collector that reads the accounts of ``GraphMemory`` objects at each scrape.

    It holds weak references: a ``GraphMemory`` that was garbage-collected is no longer reported.

    Thread safety: any thread may add memories and scrape.
    """

    def __init__(self) -> None:
        self._memories: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, name: str, memory: Any) -> None:
        """Add a ``GraphMemory``, whose metrics get the label ``memory`` with the given name.

        Raises:
            ConfigError: Another memory has this name.
        """
        with self._lock:
            if self._memories.get(name, memory) is not memory:
                raise ConfigError(
                    "name",
                    name,
                    "a name that no other memory has",
                    "Pass a different name for each watched memory.",
                    message=f"Another watched memory is named {name!r}.",
                )
            self._memories[name] = memory

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that the registry reserves their names."""
        return _metrics(())

    def collect(self) -> Iterable[Metric]:
        """Return all accounts as metrics."""
        with self._lock:
            memories = sorted(self._memories.items())
        return _metrics([(name, memory.account()) for name, memory in memories])


def _metrics(accounts: Sequence[tuple[str, Any]]) -> Iterator[Metric]:
    labels = ["memory", "device"]
    parts = GaugeMetricFamily(
        "dispatchkit_memory_bytes",
        "Device memory in bytes, by purpose.",
        labels=[*labels, "part"],
    )
    pools = GaugeMetricFamily(
        "dispatchkit_memory_pool_bytes",
        "Memory of each graph pool, in bytes.",
        labels=[*labels, "pool"],
    )
    counted = GaugeMetricFamily(
        "dispatchkit_memory_counted_bytes",
        "Memory that counts toward the budget, in bytes.",
        labels=labels,
    )
    limits = GaugeMetricFamily(
        "dispatchkit_memory_max_bytes",
        "Memory budget in bytes; absent if there is no budget.",
        labels=labels,
    )
    for name, devices in accounts:
        for account in devices:
            place = [name, account.device]
            for part, num_bytes in account.lines().items():
                parts.add_metric([*place, part], num_bytes)
            sums: dict[str, int] = {}
            for pool in account.pools:  # separate pools may share a name
                sums[pool.name] = sums.get(pool.name, 0) + pool.num_bytes
            for pool_name, num_bytes in sums.items():
                pools.add_metric([*place, pool_name], num_bytes)
            counted.add_metric(place, account.num_bytes)
            if account.max_bytes is not None:
                limits.add_metric(place, account.max_bytes)
    yield from (parts, pools, counted, limits)


_COLLECTORS: WeakKeyDictionary[CollectorRegistry, MemoryCollector] = WeakKeyDictionary()
_COLLECTORS_LOCK = threading.Lock()


def watch_memory(
    memory: Any, *, name: str = "memory", registry: CollectorRegistry = REGISTRY
) -> MemoryCollector:
    """Report the account of a ``GraphMemory`` at each scrape of a registry.

    Args:
        memory: ``GraphMemory``; it is not kept alive.
        name: Value of the label ``memory``, different for each memory.
        registry: Registry to report to; by default, the global registry of prometheus-client.

    Returns:
        The collector of the registry; all memories watched in this registry share it.

    Raises:
        ConfigError: An argument has the wrong type, or another memory is watched under this name.
        ValueError: Another collector of the registry has metrics with the same names.
    """
    if not hasattr(memory, "account"):
        raise ConfigError("memory", memory, "a GraphMemory")
    check_instance(registry, CollectorRegistry, "registry")
    with _COLLECTORS_LOCK:
        known = _COLLECTORS.get(registry)
        collector = MemoryCollector() if known is None else known
        try:
            registry.register(collector)  # the collector may have been unregistered
        except ValueError:
            if known is None:  # another collector has these names
                raise
        _COLLECTORS[registry] = collector
    collector.add(name, memory)
    return collector
