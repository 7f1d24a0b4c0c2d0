"""An engine's counters are served to Prometheus on a separate port, or in a text file."""

from __future__ import annotations

import socket
import time
import urllib.request
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import parser

from dispatchkit import load_plugins
from dispatchkit.errors import ConfigError

from dispatchkit_prometheus import engine


class Counts:
    """Counters of an engine."""

    policy, runner = "threshold", "vLLM's first model runner"

    def __init__(self):
        self.rows = [("FULL", "hit", 10, 70, 80), ("NONE", "above_max_tokens", 2, 200, 200)]

    def read(self):
        names = ("mode", "reason", "steps", "real_tokens", "padded_tokens")
        return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in self.rows]


@pytest.fixture(autouse=True)
def exports():
    yield
    for export in engine._exports.values():
        export.close()
    engine._exports.clear()


def named(name: str, *labels: str) -> tuple[str, ...]:
    return name, *sorted(labels)


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        named(sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def expected(rank: str) -> dict[tuple[str, ...], float]:
    full = (rank, Counts.runner, "FULL", "hit")
    none = (rank, Counts.runner, "NONE", "above_max_tokens")
    steps, tokens = "dispatchkit_engine_steps_total", "dispatchkit_engine_tokens_total"
    return {
        named(steps, *full): 10,
        named(steps, *none): 2,
        named(tokens, *full, "real"): 70,
        named(tokens, *full, "padding"): 10,
        named(tokens, *none, "real"): 200,
        named(tokens, *none, "padding"): 0,
        named("dispatchkit_engine_info", rank, Counts.runner, "threshold"): 1,
    }


def test_on_a_port_made_by_the_name_that_engines_ask_for():
    export = load_plugins().create_observer("prometheus-engine", counts=Counts(), where="0")
    url = f"http://127.0.0.1:{export.port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    assert samples(text) == expected("0")


def test_in_a_text_file_that_is_written_again(tmp_path):
    path = tmp_path / "engine.prom"
    counts = Counts()
    export = engine.EngineExport(str(path), rank=1, world_size=2, period_s=0.01)
    export.collector.add(counts)
    assert export.path == tmp_path / "engine-rank1.prom"
    deadline = time.monotonic() + 30
    while samples(export.path.read_text()) != expected("1"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    counts.rows[0] = ("FULL", "hit", 11, 77, 88)
    export.close()
    found = samples(export.path.read_text())
    assert found[named("dispatchkit_engine_steps_total", "1", Counts.runner, "FULL", "hit")] == 11


def test_engines_of_one_process_share_a_port_and_add_up():
    export = engine.export_engine(Counts(), "0")
    assert engine.export_engine(Counts(), "0") is export
    text = urllib.request.urlopen(f"http://127.0.0.1:{export.port}/metrics", timeout=10).read()
    found = samples(text.decode())
    assert found[named("dispatchkit_engine_steps_total", "0", Counts.runner, "FULL", "hit")] == 20


def test_an_engine_after_a_closed_export_gets_a_new_one(tmp_path):
    """A closed file would never be written again."""
    where = str(tmp_path / "engine.prom")
    first = engine.export_engine(Counts(), where)
    first.close()
    second = engine.export_engine(Counts(), where)
    try:
        assert second is not first
        assert not second.is_closed
        assert engine.export_engine(Counts(), where) is second
    finally:
        second.close()
    found = samples((tmp_path / "engine.prom").read_text())
    assert found[named("dispatchkit_engine_steps_total", "0", Counts.runner, "FULL", "hit")] == 20


def test_what_cannot_be_shown_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for rank, shown in (
            (0, f"port {port}:"),
            (1, rf"port {port} \({port - 1} plus the rank\):"),
        ):
            with pytest.raises(ConfigError, match=f"{shown} .* Pass a free port"):
                engine.EngineExport(str(port - rank), rank=rank)
    for where in (str(tmp_path / "missing" / "engine.prom"), "", "70000", 9000):
        with pytest.raises(ConfigError, match=r"Cannot export metrics to .*[^.]\. Pass a"):
            engine.EngineExport(where)
