"""The assistant of a runner on the tape."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    CaptureOptions,
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    load_plugins,
)
from dispatchkit.errors import ConfigError  # noqa: E402

from dispatchkit_predictive import Predictive  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "predictive.md"


def make_runner(
    policy: Any = None, *, capture_after: int = 1_000_000, max_graphs: int = 3
) -> GraphRunner:
    return GraphRunner(
        lambda x: x * 2 + 1,
        {"x": StaticInput((None, 4), "float32")},
        sizes=(1, 2, 4, 8, 16),
        mode="FULL",
        backend="tape",
        policy=policy,
        lazy=True,
        options=RunnerOptions(
            capture=CaptureOptions(capture_after=capture_after),
            memory=MemoryOptions(max_graphs=max_graphs),
        ),
    )


def test_steps_find_graphs_captured_in_idle_time() -> None:
    runner, predictive = make_runner(), Predictive()
    predictive.attach(runner, max_graphs=3)
    for rows in (1, 4, 2) * 8:
        x = torch.full((rows, 4), float(rows))
        assert torch.equal(runner(x), x * 2 + 1)
        predictive.idle()
        assert len(runner.lanes[0].lifecycle.live()) <= 3
    stats = predictive.stats()
    assert runner.stats().steps_by_mode["FULL"] > 16
    assert stats.is_on
    assert stats.num_wanted + stats.num_ahead == runner.stats().captures
    assert stats.hit_rate > 0.5
    assert stats.num_uploads == 0  # the tape does not support uploads


def test_an_idle_moment_before_the_first_step_is_no_harm() -> None:
    runner, predictive = make_runner(), Predictive()
    predictive.attach(runner)
    assert predictive.idle(3) == []


def test_a_capture_that_fails_is_left_to_the_runner() -> None:
    def step(x: Any) -> Any:
        return x * float(x.sum().item())  # a host read, which cannot be captured

    runner = GraphRunner(
        step,
        {"x": StaticInput((None, 4), "float32")},
        sizes=(1, 2),
        mode="FULL",
        backend="tape",
        lazy=True,
        options=RunnerOptions(capture=CaptureOptions(capture_after=1_000_000)),
    )
    predictive = Predictive()
    predictive.attach(runner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner(torch.ones(1, 4))
        assert predictive.idle() == []
        assert runner.stats().capture_failures == 1
        assert torch.equal(runner(torch.ones(1, 4)), torch.full((1, 4), 4.0))


def test_the_runner_itself_spares_what_is_expected() -> None:
    predictive = Predictive()
    runner = make_runner(capture_after=1, max_graphs=2)
    runner.controls.set_eviction(predictive.score)
    predictive.attach(runner)
    for rows in (*(1, 2, 1, 4) * 6, 1, 2, 16):
        runner(torch.ones(rows, 4))
    live = {key.num_tokens for key in runner.lanes[0].lifecycle.live()}
    assert live == {1, 16}  # 2 is the most recent, and 1 is twice as frequent


def test_detached_it_hears_nothing_more() -> None:
    runner, predictive = make_runner(), Predictive()
    predictive.attach(runner)
    with pytest.raises(ConfigError, match="Create one Predictive for each runner"):
        predictive.attach(runner)
    predictive.detach()
    runner(torch.ones(1, 4))
    with pytest.raises(ConfigError, match=r"attach\(runner\) first"):
        predictive.idle()


def test_it_is_an_observer_that_hears_of_evictions() -> None:
    plugins = load_plugins()
    predictive = plugins.create_observer("predictive", order="1")
    runner = make_runner(policy=plugins.with_policy())
    predictive.attach(runner, max_graphs=3)
    runner(torch.ones(1, 4))
    predictive.idle(3)
    assert predictive.stats().num_ahead == 2
    runner.clear()
    assert not predictive._planner._ahead


def test_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[2])
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(example, str(PAGE), "exec"), {})  # noqa: S102 - the page's own code
