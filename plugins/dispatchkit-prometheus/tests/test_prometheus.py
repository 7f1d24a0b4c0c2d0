"""Metrics as Prometheus receives them: over HTTP, read by the client's own parsers."""

from __future__ import annotations

import gc
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
client = pytest.importorskip("prometheus_client")
pytest.importorskip("dispatchkit_vllm")

from prometheus_client import CollectorRegistry, parser  # noqa: E402
from prometheus_client.openmetrics import parser as openmetrics_parser  # noqa: E402

from dispatchkit import GraphMemory, GraphRunner, Lanes, StaticInput, load_plugins  # noqa: E402
from dispatchkit.errors import ConfigError  # noqa: E402

from dispatchkit_prometheus import (  # noqa: E402
    PrometheusObserver,
    dashboard,
    watch,
    watch_memory,
)
from dispatchkit_prometheus.engine import EngineCollector  # noqa: E402

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def make_runner(**options: Any) -> GraphRunner:
    inputs = {"x": StaticInput((None,), "int64")}
    options = {"sizes": (1, 4, 8), "mode": "FULL", "backend": "tape", **options}
    return GraphRunner(lambda x: x + 1, inputs, **options)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def address(registry: CollectorRegistry) -> Iterator[str]:
    """Return the address that Prometheus would scrape, on loopback."""
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def scrape(address: str, accept: str = "text/plain") -> Samples:
    request = urllib.request.Request(address, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode("utf-8")
    families = (
        openmetrics_parser.text_string_to_metric_families(text)
        if "openmetrics" in accept
        else parser.text_string_to_metric_families(text)
    )
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_a_scrape_tells_what_the_runner_counted(
    registry: CollectorRegistry, address: str, accept: str
) -> None:
    """Numbers equal the statistics in both formats, and change at the next scrape."""
    runner = make_runner()
    runner.capture()
    watch(runner, name="decoder", registry=registry)
    for rows in (3, 4, 7):
        runner(torch.arange(rows))
    runner(torch.arange(2), ceiling=0)
    samples = scrape(address, accept)
    stats = runner.stats()
    for mode, count in stats.steps_by_mode.items():
        assert at(samples, "dispatchkit_steps_total", runner="decoder", mode=mode) == count
    for key, count in stats.hits.items():
        assert at(samples, "dispatchkit_replays_total", runner="decoder", key=key) == count
    eager = at(samples, "dispatchkit_eager_steps_total", runner="decoder", reason="ceiling")
    assert eager == stats.eager_by_reason["ceiling"] == 1
    assert at(samples, "dispatchkit_tokens_total", runner="decoder", kind="real") == 16
    assert at(samples, "dispatchkit_tokens_total", runner="decoder", kind="padding") == 2
    assert at(samples, "dispatchkit_captures_total", runner="decoder") == 3
    assert at(samples, "dispatchkit_graphs", runner="decoder", state="captured") == 3
    facts = {"policy": "vllm", "backend": "tape", "mode": "FULL"}
    assert at(samples, "dispatchkit_runner_info", runner="decoder", **facts) == 1
    runner(torch.arange(8))
    for key in list(runner.registry):
        runner.evict(key)
    samples = scrape(address, accept)
    assert at(samples, "dispatchkit_steps_total", runner="decoder", mode="FULL") == 4
    assert at(samples, "dispatchkit_evictions_total", runner="decoder") == 3
    assert at(samples, "dispatchkit_graphs", runner="decoder", state="evicted") == 3
    assert at(samples, "dispatchkit_graph_memory_bytes", runner="decoder") == 0


def test_several_runners_are_told_apart_and_one_that_is_gone_is_not_reported(
    registry: CollectorRegistry,
) -> None:
    """Watching keeps no runner alive, and a name belongs to one runner at a time."""
    first, second = make_runner(), make_runner()
    collector = watch(first, name="a", registry=registry)
    assert watch(second, name="b", registry=registry) is collector
    assert watch(first, name="a", registry=registry) is collector
    with pytest.raises(ConfigError, match="Another watched runner is named"):
        watch(second, name="a", registry=registry)
    with pytest.raises(ConfigError, match="runner must be a GraphRunner, got 3"):
        watch(3, registry=registry)
    with pytest.raises(ConfigError, match="registry must be a CollectorRegistry, got 3"):
        watch(first, registry=3)

    def names() -> set[str]:
        families = {family.name: family for family in collector.collect()}
        return {sample.labels["runner"] for sample in families["dispatchkit_captures"].samples}

    assert names() == {"a", "b"}
    del first
    gc.collect()
    assert names() == {"b"}


def test_nothing_is_read_between_scrapes(registry: CollectorRegistry, address: str) -> None:
    """Steps have no cost: only scrapes read counters, once per runner."""
    runner = make_runner()
    runner.capture()
    reads = []
    plain = runner.stats
    runner.stats = lambda: (reads.append(1), plain())[1]  # type: ignore[method-assign]
    watch(runner, registry=registry)
    for _ in range(5):
        runner(torch.arange(3))
    assert reads == []
    scrape(address)
    assert reads == [1]


def test_scrapes_while_steps_run_are_whole(registry: CollectorRegistry, address: str) -> None:
    """Counters only grow, and their final values equal the actual counts."""
    runner = make_runner()
    runner.capture()
    watch(runner, registry=registry)

    def work() -> None:
        for index in range(300):
            runner(torch.arange(1 + index % 8))

    thread = threading.Thread(target=work)
    thread.start()
    seen = [
        at(scrape(address), "dispatchkit_steps_total", runner="runner", mode="FULL")
        for _ in range(5)
    ]
    thread.join()
    seen.append(at(scrape(address), "dispatchkit_steps_total", runner="runner", mode="FULL"))
    assert seen == sorted(seen)
    assert seen[-1] == 300


def test_the_observer_counts_rare_events_with_their_reasons(
    registry: CollectorRegistry, address: str
) -> None:
    """Selected by name, it receives events of runners made with the same plugins."""
    plugins = load_plugins(allow=["vllm", "prometheus"], environ={})
    observer = plugins.create_observer("prometheus", registry=registry)
    assert isinstance(observer, PrometheusObserver)
    runner = make_runner(policy=plugins.with_policy())
    runner.capture()
    runner.clear()

    def fails(x: Any) -> Any:
        if x.shape[0] == 8:
            x.sum().item()
        return x + 1

    broken = GraphRunner(
        fails,
        {"x": StaticInput((None,), "int64")},
        sizes=(4, 8),
        mode="FULL",
        backend="tape",
        policy=plugins.with_policy(),
    )
    assert len(broken.capture().failed) == 1
    samples = scrape(address)
    assert at(samples, "dispatchkit_capture_seconds_count", mode="FULL") == 4
    assert at(samples, "dispatchkit_policy_swaps_total", policy="vllm") == 2
    (failed,) = [
        value for (name, _), value in samples.items() if name == "dispatchkit_failed_captures_total"
    ]
    assert failed == 1
    (evicted,) = [
        value for (name, _), value in samples.items() if name == "dispatchkit_evicted_graphs_total"
    ]
    assert evicted == 3
    with pytest.raises(ConfigError, match="registry"):
        PrometheusObserver(registry)


def test_the_dashboard_asks_only_for_metrics_that_there_are(registry: CollectorRegistry) -> None:
    """A panel for a metric that does not exist stays empty."""
    board = json.loads(dashboard())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"dispatchkit_\w+", " ".join(expressions)))
    runner = make_runner()
    collector = watch(runner, registry=registry)
    observer = PrometheusObserver(CollectorRegistry())
    told = {
        name for family in [*collector.collect(), *_families(observer)] for name in _names(family)
    }
    assert len(asked) > 10
    assert asked <= told
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def _families(observer: PrometheusObserver) -> Iterator[Any]:
    for metric in vars(observer).values():
        yield from metric.collect()


def _names(family: Any) -> set[str]:
    if family.type == "counter":
        return {f"{family.name}_total"}
    if family.type == "histogram":
        return {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
    return {family.name}


def test_the_page_lists_every_metric(registry: CollectorRegistry) -> None:
    """It lists no other metric."""
    from pathlib import Path

    page = Path(__file__).parents[3] / "docs" / "how-to" / "prometheus.md"
    text = page.read_text(encoding="utf-8")
    listed = set(re.findall(r"`(dispatchkit_[a-z_]+)`", text))
    memory = GraphMemory(max_bytes=1 << 30)
    runner = make_runner(lanes=Lanes(memory=memory))
    collector = watch(runner, registry=registry)
    account = watch_memory(memory, registry=CollectorRegistry())
    observer = PrometheusObserver(CollectorRegistry())
    families = [*collector.collect(), *account.collect()]
    told = {name for family in families for name in _names(family)}
    rare = {family.name for family in _families(observer)}
    rare = {name if name.endswith("seconds") else f"{name}_total" for name in rare}
    of_engines = {name for family in EngineCollector().collect() for name in _names(family)}
    assert listed == told | rare | of_engines


def test_names_are_taken_when_the_first_runner_is_watched(registry: CollectorRegistry) -> None:
    """Another metric of the same name would make every scrape invalid."""
    watch(make_runner(), registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        client.Counter("dispatchkit_steps", "Mine.", registry=registry)


def test_a_collector_that_was_unregistered_is_registered_by_the_next_watch(
    registry: CollectorRegistry,
) -> None:
    runner = make_runner()
    collector = watch(runner, registry=registry)
    registry.unregister(collector)
    assert b"dispatchkit_steps" not in client.generate_latest(registry)
    assert watch(runner, registry=registry) is collector
    assert watch(runner, registry=registry) is collector
    assert b"dispatchkit_steps" in client.generate_latest(registry)


def test_the_account_of_a_memory_is_scraped(address: str, registry: CollectorRegistry) -> None:
    memory = GraphMemory(max_bytes=1 << 30)
    runners = [make_runner(lanes=Lanes(memory=memory.group(name))) for name in ("a", "b")]
    for runner in runners:
        runner.capture()
    watch_memory(memory, registry=registry)
    found = scrape(address)
    (account,) = memory.account()
    place = {"memory": "memory", "device": "cpu"}

    def value(metric: str, **labels: str) -> float:
        return found[metric, frozenset({**place, **labels}.items())]

    for part, num_bytes in account.lines().items():
        assert value("dispatchkit_memory_bytes", part=part) == num_bytes
    for pool in account.pools:
        assert value("dispatchkit_memory_pool_bytes", pool=pool.name) == pool.num_bytes > 0
    assert value("dispatchkit_memory_counted_bytes") == account.num_bytes
    assert value("dispatchkit_memory_max_bytes") == 1 << 30
    with pytest.raises(ConfigError, match="Another watched memory is named"):
        watch_memory(GraphMemory(), registry=registry)
    with pytest.raises(ConfigError, match="memory must be a GraphMemory, got 3"):
        watch_memory(3, registry=registry)
    with pytest.raises(ConfigError, match="registry must be a CollectorRegistry, got 3"):
        watch_memory(memory, registry=3)
    del memory, runners, runner
    gc.collect()
    assert not any(name.startswith("dispatchkit_memory") for name, _ in scrape(address))
