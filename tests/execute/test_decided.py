"""Steps with decisions made elsewhere run exactly so or not at all; runs requested by a policy."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Axis,
    Batch,
    Decision,
    RunnerOptions,
    StaticInput,
    load_plugins,
)
from dispatchkit.dispatch import CalibrationRun  # noqa: E402
from dispatchkit.errors import (  # noqa: E402
    CaptureError,
    ConfigError,
    InputError,
    PolicyError,
    ReplayError,
)


def plus_one(tokens):
    return tokens + 1


def test_a_decision_is_obeyed(make_runner, keys):
    runner = make_runner(plus_one)
    runner.capture()
    tokens = torch.arange(3)
    for ceiling in (2, 0):
        decision = runner.dispatcher.dispatch(3, ceiling=ceiling)
        assert runner.decisions.run(decision, {"tokens": tokens}).tolist() == [1, 2, 3]
    stats = runner.stats()
    assert stats.steps_by_mode == {"NONE": 1, "PIECEWISE": 0, "FULL": 1}
    assert stats.hits == {str(keys.full(4)): 1}


def test_a_failed_launch_does_not_run_eager_instead(make_runner, backend, keys):
    ran = Mock()
    runner = make_runner(lambda tokens: (ran(), tokens + 1)[1])
    runner.capture()
    decision = runner.dispatcher.dispatch(3)
    ran.reset_mock()
    backend.replay_fault = "before"
    with pytest.raises(ReplayError, match="Several ranks share the decision"):
        runner.decisions.run(decision, {"tokens": torch.arange(3)})
    ran.assert_not_called()
    assert runner.registry.get(keys.full(4)).state.name == "FAILED"
    assert runner.stats().failed_steps == 1
    # An ordinary call still gets its result.
    backend.replay_fault = ""
    with pytest.warns(RuntimeWarning, match="replay_failed"):
        assert runner(torch.arange(3)).tolist() == [1, 2, 3]


def test_a_graph_that_was_given_up_is_not_replaced(make_runner, keys):
    runner = make_runner(plus_one)
    runner.capture()
    decision = runner.dispatcher.dispatch(3)
    runner.evict(keys.full(4))
    with pytest.raises(ReplayError, match="was released"):
        runner.decisions.run(decision, {"tokens": torch.arange(3)})


def test_inside_somebody_elses_capture_it_is_refused(make_runner, backend):
    """Every replay of that graph would write its static inputs, ignoring the lane's order."""
    runner = make_runner(plus_one)
    runner.capture()
    decision, tokens = runner.dispatcher.dispatch(3), torch.arange(3)
    with pytest.raises(CaptureError, match="while other code captures the current stream"):
        backend.capture(
            lambda: runner.decisions.run(decision, {"tokens": tokens}),
            stream=backend.new_stream(),
            pool=backend.new_pool(),
        )
    assert runner.decisions.run(decision, {"tokens": tokens}).tolist() == [1, 2, 3]


def test_another_autocast_is_refused(make_runner):
    runner = make_runner(lambda x: x * 2, {"x": StaticInput((None,), "float32")})
    runner.capture()
    decision = runner.dispatcher.dispatch(3)
    with torch.autocast("cpu"), pytest.raises(ReplayError, match="autocast"):
        runner.decisions.run(decision, {"x": torch.ones(3)})


def test_nothing_is_captured_for_a_decision(make_runner, keys):
    runner = make_runner(plus_one, lazy=True)
    decision = runner.dispatcher.dispatch(3)
    assert decision.key == keys.full(4)
    with pytest.raises(ReplayError, match="no graph yet"):
        runner.decisions.run(decision, {"tokens": torch.arange(3)})
    assert runner.stats().captures == 0


def test_decisions_of_others_and_other_rows_are_refused(make_runner, keys):
    runner, other = make_runner(plus_one), make_runner(plus_one)
    tokens = {"tokens": torch.arange(3)}
    for decision in (Decision.replay(keys.full(4)), other.dispatcher.dispatch(3)):
        with pytest.raises(ConfigError, match="this runner's dispatcher"):
            runner.decisions.run(decision, tokens)
    with pytest.raises(InputError, match="3 rows, but the decision is for 2"):
        runner.decisions.run(runner.dispatcher.dispatch(2), tokens)
    with pytest.raises(InputError):
        runner.decisions.run(runner.dispatcher.dispatch(3), {})


def test_a_decision_of_other_buckets_is_refused(make_runner, policy, keys, quiet):
    """A graph of another length is not run; calibration with axes runs nothing."""
    asking = Asking(policy, keys.full(4))
    runner = make_runner(
        lambda tokens, length: tokens + length, policy=asking, axes=[Axis("length", (16, 32))]
    )
    runner.capture()
    assert not asking.heard
    decision = runner.dispatcher.dispatch(3, loras=runner.config.variant(length=20))
    given = {"tokens": torch.arange(3), "length": 20}
    assert runner.decisions.run(decision, given).tolist() == [32, 33, 34]
    with pytest.raises(
        InputError, match=r"buckets \(16,\), but the decision is for buckets \(32,\)"
    ):
        runner.decisions.run(decision, given | {"length": 16})
    with pytest.raises(InputError, match="no value"):
        runner.decisions.run(decision, {"tokens": torch.arange(3)})
    eager = runner.dispatcher.dispatch(3, loras=runner.config.variant(length=40))
    assert runner.decisions.run(eager, given | {"length": 40}).tolist() == [40, 41, 42]


# -- runs requested by a policy -------------------------------------------------------------


class Asking:
    """Requests two runs per way for 3 tokens, then one more eager run."""

    name = "asking"

    def __init__(self, inner, key):
        self._inner, self._key = inner, key
        self.heard, self._asked = [], 0

    def declare(self, config):
        return self._inner.declare(config)

    def decide(self, batch, graphs):
        return self._inner.decide(batch, graphs)

    def calibration_runs(self, graphs):
        self._asked += 1
        batch = Batch(3)
        eager = CalibrationRun(batch, Decision.eager("calibration", timed=True), 3 - self._asked)
        graph = CalibrationRun(batch, Decision.replay(self._key, "calibration", timed=True), 2)
        return [[graph, eager], [eager], []][self._asked - 1]

    def observe(self, outcome):
        self.heard.append(outcome)
        return ()


def test_a_policy_gets_its_runs_after_a_capture(make_runner, policy, keys):
    """State is put back, and these steps are not counted."""
    asking = Asking(policy, keys.full(4))
    count = torch.zeros(1)

    def step(tokens):
        count.add_(1)
        return tokens + 1

    runner = make_runner(step, policy=asking, state=[count])
    runner.capture()
    ways = [one.decision.key for one in asking.heard]
    assert ways == [keys.full(4)] * 4 + [None] * 4 + [None] * 2
    assert all(one.completed and one.elapsed_us > 0 for one in asking.heard)
    assert all(one.decision.one_shot for one in asking.heard)
    assert count.item() == 0
    assert runner.stats().steps == 0
    assert runner(torch.arange(3)).tolist() == [1, 2, 3]
    assert runner.stats().steps == 1


def test_eager_is_also_timed_behind_the_largest_graph(make_runner, policy, keys):
    """After similar steps the device would wait for the host, and the time would be wrong."""
    runner = make_runner(plus_one, policy=Asking(policy, keys.full(4)))
    runner.capture()
    sizes = sorted(key.num_tokens for key in runner.registry)
    assert sizes[-1] > 4
    assert runner.controls.get(keys.full(sizes[-1])).hits == 3  # requests more eager runs
    assert runner.stats().steps == 0


def test_no_runs_where_nothing_was_captured(make_runner, policy, keys):
    asking = Asking(policy, keys.full(4))
    runner = make_runner(plus_one, policy=asking)
    runner.capture([])
    assert not asking.heard


def test_no_runs_in_check_mode(make_runner, policy, keys):
    asking = Asking(policy, keys.full(4))
    runner = make_runner(plus_one, policy=asking, options=RunnerOptions(check=1))
    runner.capture()
    assert not asking.heard


def test_a_launch_that_fails_in_those_runs_does_not_fail_the_capture(
    make_runner, policy, keys, backend, quiet
):
    """The step changes state, so its replay cannot be repeated; no user's step is lost."""
    asking = Asking(policy, keys.full(4))
    count = torch.zeros(1)
    runner = make_runner(lambda tokens: tokens + count.add_(1).long(), policy=asking, state=[count])
    backend.replay_fault = "before"
    report = runner.capture()
    backend.replay_fault = ""
    assert not report.failed
    assert count.item() == 0
    assert not runner.controls.has(keys.full(4))
    assert runner(torch.arange(3)).tolist() == [1, 2, 3]
    assert runner.stats().steps == 1


def test_those_runs_capture_nothing_themselves(make_runner, policy, keys):
    """A lazy runner captures what is called, within its budget."""
    asking = Asking(policy, keys.full(4))
    runner = make_runner(plus_one, policy=asking, lazy=True)
    runner.capture([keys.full(8)])
    assert [one.decision.key for one in asking.heard] == [None] * 6
    assert not runner.controls.has(keys.full(4))
    assert runner.stats().captures == 1


def test_an_old_plan_of_a_lazy_key_does_not_capture_it_again(make_runner, keys):
    """Otherwise the first graph would be unreachable and never released."""
    runner = make_runner(plus_one, lazy=True)
    plan = runner.dispatcher.dispatch(3).plan
    runner(torch.arange(3))
    graph = runner.controls.get(keys.full(4))
    plan.run([torch.arange(3)], runner.backend.current_stream_handle())
    assert runner.controls.get(keys.full(4)) is graph
    assert runner.stats().captures == 1


def test_a_policy_that_raises_when_asked_for_runs_is_named_and_its_graphs_stay(make_runner):
    class Asking(load_plugins().create_policy("vllm").__class__):
        def calibration_runs(self, graphs):
            raise ZeroDivisionError

    runner = make_runner(plus_one, policy=Asking())
    problem = r"calibration_runs raised ZeroDivisionError \(test_decided\.py:\d+\)\."
    with pytest.raises(PolicyError, match=problem):
        runner.capture()
    assert runner.stats().captures == len(runner.registry)


def test_inputs_can_be_checked_without_running(make_runner):
    ran = []
    runner = make_runner(lambda tokens: (ran.append(1), tokens + 1)[1])
    assert runner.decisions.check_inputs({"tokens": torch.arange(3)}) == 3
    with pytest.raises(InputError):
        runner.decisions.check_inputs({"tokens": torch.ones(3)})
    assert not ran
