"""Statistics of a serving runner, and their report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from dispatchkit.errors import ConfigError
from dispatchkit.observe import RunnerStats

from dispatchkit_plan.report import LiveStatistics, render, report_of_statistics, write_report
from dispatchkit_plan.report.files import read_source
from dispatchkit_plan.report.live import MAX_SAMPLES

torch = pytest.importorskip("torch")


@pytest.fixture
def runner(plugins: Any) -> Any:
    """Return a small runner with two graphs, one of which pads."""
    from dispatchkit import GraphRunner, StaticInput
    from dispatchkit.keys import CaptureSizeWarning

    with pytest.warns(CaptureSizeWarning, match="ends at 8"):
        made = GraphRunner(
            lambda x: x + 1,
            {"x": StaticInput((None, 2), "float32")},
            sizes=[2, 8],
            max_num_tokens=16,
            mode="FULL",
            backend="tape",
            policy=plugins.with_policy("vllm"),
        )
    made.capture()
    return made


@pytest.mark.filterwarnings("ignore")
def test_samples_of_a_runner_become_a_page(runner: Any, tmp_path: Path) -> None:
    """Counts, padding by bucket, modes between samples, reasons; equal after saving."""
    live = LiveStatistics()
    for size in (2, 5, 16):
        runner(torch.zeros(size, 2))
        live.sample(runner)
    stats = runner.stats()
    assert sum(stats.hit_tokens.values()) == 7
    assert set(stats.hit_tokens) == set(stats.hits)
    path = tmp_path / "statistics.json"
    live.save(path)
    saved = json.loads(path.read_text())
    assert saved == json.loads(json.dumps(live.to_json()))
    report = report_of_statistics(read_source(path), source=str(path))
    assert [figure.name for figure in report.figures] == [
        "padding",
        "modes",
        "waste",
        "times",
        "reasons",
    ]
    text = render(report, version="1")
    assert "above_largest_size" in text
    assert "bucket (tokens) 8: padding 60 %" in text
    write_report(live, tmp_path / "live.html")
    assert (tmp_path / "live.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_a_learning_policy_has_measured_is_drawn(statistics: dict[str, Any]) -> None:
    """The fastest graph is compared with eager; arms without a time are omitted."""
    report = report_of_statistics(statistics, source="x")
    (times,) = [figure for figure in report.figures if figure.name == "times"]
    assert times.table is not None
    assert times.table.rows == (
        ("5-8", "FULL tokens=8", "90", "20"),
        ("5-8", "eager", "410", "3"),
    )


def test_arms_of_a_policy_that_explains_itself_are_sampled(runner: Any) -> None:
    """Works for any policy whose explain() returns records."""

    @attrs.frozen
    class Known:
        sizes: tuple[int, int] = (1, 2)
        arms: tuple[Any, ...] = ()
        margin: float = float("inf")

    class Explains:
        dispatcher: Any = None
        spec = SimpleNamespace(memory_group=None)

        def stats(self) -> Any:
            return runner.stats()

    fake = Explains()
    fake.dispatcher = type("D", (), {"policy_name": "p", "policy_parts": type("P", (), {})()})()
    fake.dispatcher.policy_parts.explain = lambda: (Known(), "words")
    live = LiveStatistics()
    live.sample(fake)
    assert live.to_json()["arms"] == [{"sizes": [1, 2], "arms": [], "margin": None}]
    fake.dispatcher.policy_parts.explain = None  # after a swap to a policy without measurements
    live.sample(fake)
    assert live.to_json()["arms"] == []


def test_statistics_before_the_first_step_have_no_share_of_replays(runner: Any) -> None:
    live = LiveStatistics()
    with pytest.raises(ConfigError, match=r"sample\(runner\) at least once"):
        report_of_statistics(live.to_json(), source="x")
    live.sample(runner)
    report = report_of_statistics(live.to_json(), source="x")
    assert report.summary == "No step has run yet."
    assert report.tiles[1].value == "0.0%"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version"),
        ({"samples": []}, "samples"),
        ({"samples": [{"steps": True}]}, "steps"),
        ({"arms": [3]}, "arms"),
    ],
)
def test_a_file_that_is_something_else_is_refused(
    statistics: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    """The error names the wrong field or value."""
    with pytest.raises(ConfigError, match=says):
        report_of_statistics({**statistics, **change}, source="x")


def counters(steps):
    """Return a runner's counters after a number of steps, half of them replayed."""
    counts = dict.fromkeys(RunnerStats.__annotations__, 0)
    tables = {"hits": {}, "hit_tokens": {}, "eager_by_reason": {"x": steps // 2}}
    modes = {"FULL": steps - steps // 2, "PIECEWISE": 0, "NONE": steps // 2}
    return RunnerStats(**{**counts, **tables, "steps": steps, "steps_by_mode": modes})


def test_sampling_for_weeks_keeps_file_and_page_small():
    steps = iter(range(1, 10_000))
    dispatcher = SimpleNamespace(policy_name="vllm", policy_parts=SimpleNamespace(explain=None))
    spec = SimpleNamespace(memory_group=None)
    runner = SimpleNamespace(dispatcher=dispatcher, spec=spec, stats=lambda: counters(next(steps)))
    live = LiveStatistics()
    for _ in range(4001):
        live.sample(runner)
    assert len(live.samples) <= MAX_SAMPLES
    assert [live.samples[0]["steps"], live.samples[-1]["steps"]] == [1, 4001]
    report = report_of_statistics(live.to_json(), source="x")
    modes = next(one for one in report.figures if one.name == "modes")
    assert len(modes.chart.ends) <= 96
    assert modes.chart.ends[-1] == 4001
