"""The metrics and the dashboard on a real Prometheus that scrapes over loopback."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
client = pytest.importorskip("prometheus_client")
pytest.importorskip("dispatchkit_vllm")

from prometheus_client import CollectorRegistry  # noqa: E402

from dispatchkit import GraphRunner, StaticInput, load_plugins  # noqa: E402

from dispatchkit_prometheus import dashboard, watch  # noqa: E402

pytestmark = pytest.mark.slow
PATIENCE_S = 60


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prometheus(registry: CollectorRegistry, tmp_path: Path) -> Iterator[str]:
    """Return the address of a Prometheus that scrapes the registry often."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no program 'prometheus' (Debian: apt-get install prometheus)")
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    scrape = f"127.0.0.1:{server.server_port}"
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms}\n"
        "scrape_configs:\n"
        f"  - {{job_name: dispatchkit, static_configs: [{{targets: ['{scrape}']}}]}}\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address={address}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        server.shutdown()
        server.server_close()
        thread.join()


def ask(address: str, what: str, **parameters: str) -> Any:
    """Return the data of an answer; Prometheus answers a wrong query with an HTTP error."""
    url = f"{address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)["data"]


def until(what: str, answer: Callable[[], Any]) -> Any:
    """Query repeatedly until there is an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if found := answer():
                return found
        except OSError:  # not listening yet
            pass
        time.sleep(0.05)
    raise AssertionError(f"no answer in {PATIENCE_S} s: {what}")


def test_every_query_of_the_dashboard_has_an_answer(
    registry: CollectorRegistry, prometheus: str
) -> None:
    """Includes events between two scrapes, in the shape that the panel draws."""
    plugins = load_plugins(allow=["vllm", "prometheus"], environ={})
    plugins.create_observer("prometheus", registry=registry)
    runner = GraphRunner(
        lambda x: x + 1,
        {"x": StaticInput((None,), "int64")},
        sizes=(1, 4, 8),
        mode="FULL",
        backend="tape",
        policy=plugins.with_policy(),
    )
    watch(runner, name="decoder", registry=registry)

    def counted() -> Any:
        """Cause some of every event again, so that each rate has two different samples."""
        runner.capture()
        for rows in (3, 4, 7):
            runner(torch.arange(rows))
        runner(torch.arange(2), ceiling=0)
        rate = ask(prometheus, "query", query="rate(dispatchkit_captures_total[1m]) > 0")["result"]
        runner.clear()
        return rate

    until("a rate of captures", counted)
    runner.capture()
    board = json.loads(dashboard())
    (names,) = [one for one in board["templating"]["list"] if one["name"] == "runner"]
    match, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", names["query"]["query"]).groups()
    assert ask(prometheus, f"label/{label}/values", **{"match[]": match}) == ["decoder"]
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$runner", "decoder").replace("$__rate_interval", "1m")
            if "policy_errors" in query:  # no such events, so the answer must only be well formed
                assert ask(prometheus, "query", query=query)["result"] == [], query
                continue
            result = until(query, lambda q=query: ask(prometheus, "query", query=q)["result"])
            legend = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            for one in panel.get("transformations", []):  # columns of a table
                legend |= set(one["options"]["indexByName"])
            for series in result:
                assert legend <= set(series["metric"]), query
                value = float(series["value"][1])
                assert value >= 0, query
                if panel["fieldConfig"]["defaults"].get("max") == 1:
                    assert value <= 1, query
