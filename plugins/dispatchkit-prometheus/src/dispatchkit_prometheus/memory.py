"""The account of a GraphMemory, read when Prometheus scrapes and at no other time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from dispatchkit.errors import ConfigError

__all__ = ["MemoryCollector", "watch_memory"]


class MemoryCollector(Collector):
    """Reads the accounts of memories at each scrape.

    They are held weakly: one that is gone is no longer reported.

    Thread safety: memories may be added, and scraped, from any thread.
    """

    def __init__(self) -> None:
        self._memories: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, name: str, memory: Any) -> None:
        """Report a memory under a name, its label ``memory``.

        Raises:
            ConfigError: Another memory has that name.
        """
        with self._lock:
            if self._memories.get(name, memory) is not memory:
                raise ConfigError(
                    "name",
                    name,
                    "one for each memory",
                    "Another memory is watched under this name.",
                )
            self._memories[name] = memory

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that their names are taken."""
        return _metrics(())

    def collect(self) -> Iterable[Metric]:
        """Read every account and return it as metrics."""
        with self._lock:
            memories = sorted(self._memories.items())
        return _metrics([(name, memory.account()) for name, memory in memories])


def _metrics(accounts: Sequence[tuple[str, Any]]) -> Iterator[Metric]:
    labels = ["memory", "device"]
    parts = GaugeMetricFamily(
        "dispatchkit_memory_bytes",
        "Bytes of the device, by purpose.",
        labels=[*labels, "part"],
    )
    pools = GaugeMetricFamily(
        "dispatchkit_memory_pool_bytes",
        "Bytes of each pool.",
        labels=[*labels, "pool"],
    )
    counted = GaugeMetricFamily(
        "dispatchkit_memory_counted_bytes", "Bytes that count towards the budget.", labels=labels
    )
    limits = GaugeMetricFamily(
        "dispatchkit_memory_max_bytes", "The budget, if there is one.", labels=labels
    )
    for name, devices in accounts:
        for account in devices:
            place = [name, account.device]
            for part, num_bytes in account.lines().items():
                parts.add_metric([*place, part], num_bytes)
            sums: dict[str, int] = {}
            for pool in account.pools:  # those that are apart may have one name
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
    """Have the account of a memory read at each scrape of a registry.

    Args:
        memory: A GraphMemory; it is not kept alive.
        name: Value of the label ``memory``, different for each one.
        registry: Where prometheus-client looks; its default one.

    Returns:
        The collector of that registry, one for all memories.

    Raises:
        ConfigError: Another memory is watched under that name.
    """
    with _COLLECTORS_LOCK:
        known = _COLLECTORS.get(registry)
        collector = MemoryCollector() if known is None else known
        try:
            registry.register(collector)  # again too, where somebody has unregistered it
        except ValueError:
            if known is None:  # others have its names; else it is there already
                raise
        _COLLECTORS[registry] = collector
    collector.add(name, memory)
    return collector
