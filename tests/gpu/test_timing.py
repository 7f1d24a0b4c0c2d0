"""Measured steps on a device: selection, outcomes, and runs after a capture."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    CellUpdate,
    Decision,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    load_plugins,
)

pytestmark = pytest.mark.gpu

WIDTH = 256


class Learning:
    """The default policy, with every step timed."""

    name = "learning"

    def __init__(self):
        self._inner = load_plugins().create_policy("vllm")
        self.heard = []

    def declare(self, config):
        return self._inner.declare(config)

    def decide(self, batch, graphs):
        return attrs.evolve(self._inner.decide(batch, graphs), timed=True)

    def observe(self, outcome):
        self.heard.append(outcome)
        return ()


def make_runner(policy, **settings):
    weight = torch.randn(WIDTH, WIDTH, device="cuda") / 16
    runner = GraphRunner(
        lambda x: torch.relu(x @ weight),
        {"x": StaticInput((None, WIDTH), "float32")},
        sizes=(16, 64),
        mode="FULL",
        policy=policy,
        **settings,
    )
    runner.capture()
    return runner, torch.randn(64, WIDTH, device="cuda"), weight


def test_steady_steps_are_measured_seldom_and_one_shot_ones_always():
    learning = Learning()
    runner, rows, weight = make_runner(learning, options=RunnerOptions(sample_every=8))
    probe = Decision.eager("probe", timed=True)
    for index in range(40):
        if index in (11, 12):
            batch = runner.dispatcher.batch(13)
            runner.dispatcher.update(CellUpdate(batch, probe, one_shot=True))
        found = runner(rows[:13])
        torch.testing.assert_close(found, torch.relu(rows[:13] @ weight), rtol=1e-3, atol=1e-3)
    runner.drain(wait=True)
    steps = [(one.step, one.decision.one_shot) for one in learning.heard]
    # One-shot steps start the count of 8 again.
    assert steps == [(1, False), (9, False), (12, True), (13, True), (21, False), (29, False),
                     (37, False)]  # fmt: skip
    for one in learning.heard:
        assert one.clock == "device"
        assert one.completed
        assert 0 < one.elapsed_us < 1e6


def test_a_step_behind_other_work_is_told_as_queued():
    learning = Learning()
    runner, rows, _ = make_runner(learning, options=RunnerOptions(sample_every=1))
    torch.cuda.synchronize()
    runner(rows[:13])
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    runner(rows[:13])
    runner.drain(wait=True)
    assert [one.queued for one in learning.heard] == [False, True]


def test_the_whole_step_is_measured():
    """Includes copies of a large input and result, not only the launch."""
    learning = Learning()
    runner = GraphRunner(
        lambda x: x + 1,
        {"x": StaticInput((None, 4096), "float32")},
        sizes=(8192,),
        mode="FULL",
        policy=learning,
        options=RunnerOptions(sample_every=1),
    )
    runner.capture()
    rows = torch.randn(8192, 4096, device="cuda")
    for _ in range(20):
        torch.cuda.synchronize()
        runner(rows)
    runner.drain(wait=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph_only = runner.controls.get(learning.heard[-1].decision.key)
    torch.cuda.synchronize()
    start.record()
    graph_only.launch(len(rows))
    end.record()
    torch.cuda.synchronize()
    # Copies in, the graph, and copies out: about three times the graph's memory traffic.
    took = sorted(one.elapsed_us for one in learning.heard)[10]
    assert took > 1.5 * start.elapsed_time(end) * 1e3


def test_the_adaptive_policy_gets_its_runs_and_nothing_is_counted():
    adaptive = pytest.importorskip("dispatchkit_adaptive").AdaptivePolicy()
    heard = []
    observe = adaptive.observe
    adaptive.observe = lambda outcome: (heard.append(outcome), observe(outcome))[1]
    runner, rows, weight = make_runner(adaptive)
    assert len(heard) >= 8 * 4
    assert all(one.decision.reason == "calibration" and one.completed for one in heard)
    assert runner.stats().steps == 0
    for size in (1, 13, 16, 40, 64):
        found = runner(rows[:size])
        torch.testing.assert_close(found, torch.relu(rows[:size] @ weight), rtol=1e-3, atol=1e-3)


def test_a_decision_is_obeyed():
    runner, rows, weight = make_runner("vllm")
    for ceiling in (2, 0):
        decision = runner.dispatcher.dispatch(13, ceiling=ceiling)
        found = runner.decisions.run(decision, {"x": rows[:13]})
        torch.testing.assert_close(found, torch.relu(rows[:13] @ weight), rtol=1e-3, atol=1e-3)
    assert runner.stats().steps_by_mode == {"NONE": 1, "PIECEWISE": 0, "FULL": 1}
