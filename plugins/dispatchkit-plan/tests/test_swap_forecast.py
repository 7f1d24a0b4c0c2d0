"""A swap is forecast from recorded steps, without changes of the runner."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402 - torch
    BufferOptions,
    Decision,
    Dispatcher,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    load_plugins,
)
from dispatchkit.errors import (  # noqa: E402
    ConfigError,
    PolicyError,
    TraceError,
    UnknownNameError,
)
from dispatchkit.keys import CaptureSizeWarning  # noqa: E402
from dispatchkit.observe import StepTrace, read_trace, trace_config  # noqa: E402
from dispatchkit.testing import SmallestPolicy  # noqa: E402

from dispatchkit_plan import CostModel, forecast_swap, load_cost_model  # noqa: E402

TRACES = Path(__file__).parents[3] / "tests" / "data" / "traces"
TRUE = load_cost_model("lm-decode-h100")


def policy(name="vllm", **options):
    return load_plugins().create_policy(name, **options)


# -- compared with the truth, on real traces ------------------------------------------------


def stale_model():
    """Return a cost model of another machine: other times, the same shape."""
    return CostModel(
        name="stale",
        eager_us=[(n, 0.8 * us) for n, us in TRUE.eager_us.points],
        graph_us=[(n, 0.8 * us) for n, us in TRUE.graph_us.points],
    )


def serving(config, change):
    """Return a forecast's inputs for a runner with a real trace's steps."""
    dispatcher = captured(Dispatcher(policy(), config))
    proposal = SimpleNamespace(policy=change[0], config=change[1])
    return SimpleNamespace(
        config=config,
        dispatcher=dispatcher,
        registry=dispatcher.registry,
        swapper=SimpleNamespace(proposed=lambda: proposal),
    )


def captured(dispatcher):
    for key in dispatcher.registry:
        dispatcher.registry.captured(key, object())
    return dispatcher


def true_us(dispatcher, trace):
    """Return the sum of the steps' true times."""
    total = 0.0
    for step in trace:
        uniform = int(step.uniform_decode and step.max_query_len == 1)
        reqs = min(step.num_reqs or 0, dispatcher.config.max_num_seqs)
        decision = dispatcher.dispatch(step.num_tokens, reqs, uniform)
        size = None if decision.key is None else decision.key.num_tokens
        piecewise = decision.mode is RuntimeMode.PIECEWISE
        total += TRUE.step_us(step.num_tokens, size, piecewise=piecewise)
    return total


@pytest.mark.slow_except("policy-azure_code_low", "sizes-azure_conv_high")
@pytest.mark.parametrize("name", ["azure_conv_high", "azure_code_low"])
@pytest.mark.parametrize("change", ["sizes", "policy"])
def test_a_swap_then_gives_what_the_first_half_of_the_traffic_foretold(name, change):
    """With a cost model of another level, the forecast is within 3%."""
    trace = read_trace(TRACES / f"step_{name}.csv.gz")
    steps = [step for step in trace if step.num_tokens]
    first, second = (
        StepTrace.from_steps(half, source=name)
        for half in (steps[: len(steps) // 2], steps[len(steps) // 2 :])
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        in_force, fewer = trace_config(trace), trace_config(trace, sizes=(1, 8, 64, 256, 512))
    swap = {"sizes": (policy(), fewer), "policy": (policy("threshold", max_tokens=128), in_force)}
    runner = serving(in_force, swap[change])
    forecast = forecast_swap(runner, first, cost_model=stale_model())
    assert forecast.num_steps == len(first)
    after = captured(Dispatcher(*copy.deepcopy(swap[change])))
    real = true_us(after, second) / true_us(runner.dispatcher, second)
    assert forecast.ratio == pytest.approx(real, rel=0.03)
    assert 0 < forecast.same_steps < forecast.num_steps


# -- with a runner --------------------------------------------------------------------------


@pytest.fixture
def runner():
    made = GraphRunner(
        lambda tokens: tokens * 2,
        {"tokens": StaticInput((None,), "int64")},
        sizes=(1, 2, 4, 8),
        policy="vllm",
        backend="tape",
        mode="FULL",
    )
    made.capture()
    return made


def recorded(runner, rows=(3, 3, 7, 1)):
    recorder = runner.start_recording()
    for number in rows:
        assert torch.equal(runner(torch.arange(number)), torch.arange(number) * 2)
    runner.stop_recording()
    return recorder.trace()


def test_where_the_two_differ_is_counted_and_priced_and_nothing_changes(runner):
    trace = recorded(runner)
    epoch, keys = runner.dispatcher.epoch, set(runner.registry)
    forecast = forecast_swap(
        runner, trace, cost_model=TRUE, policy="threshold", policy_options={"max_tokens": 2}
    )
    assert (forecast.active, forecast.candidate) == ("vllm", "threshold")
    assert (forecast.num_steps, forecast.same_steps) == (4, 1)
    first, second = forecast.differences
    assert (first.num_steps, first.min_tokens, first.max_tokens) == (2, 3, 3)
    assert (second.num_steps, second.min_tokens, second.max_tokens) == (1, 7, 7)
    assert "FULL tokens=4" in first.active
    assert first.candidate.startswith("eager")
    eager, graph = TRUE.step_us(3, None), TRUE.step_us(3, 4)
    assert first.gain_us == pytest.approx(2 * (graph - eager))
    assert forecast.ratio > 1
    assert "costs" in str(forecast)
    assert forecast.to_dict()["differences"][0]["num_steps"] == 2
    assert (runner.dispatcher.epoch, set(runner.registry)) == (epoch, keys)
    runner.swap(policy="threshold", policy_options={"max_tokens": 2})
    assert torch.equal(runner(torch.arange(3)), torch.arange(3) * 2)


def test_graphs_that_only_the_candidate_has_count_as_captured(runner):
    forecast = forecast_swap(runner, recorded(runner), cost_model=TRUE, sizes=(3, 8))
    graphs = [
        (one.active.count("FULL"), one.candidate.count("FULL")) for one in forecast.differences
    ]
    assert graphs == [(1, 1), (1, 1)]  # of 4 and 1 now, of 3 later


def test_what_failed_or_is_switched_off_in_the_runner_stays_so_on_both_sides(runner):
    trace = recorded(runner, (7, 7))
    key = runner.dispatcher.dispatch(7).key
    runner.registry.failed(key, "capture_failed")
    forecast = forecast_swap(runner, trace, cost_model=TRUE, policy="threshold")
    assert forecast.same_steps == 2
    assert forecast.active_us == pytest.approx(2 * TRUE.step_us(7, None))
    runner.registry.captured(key, object())
    for disabled in ({"key": key}, {"mode": RuntimeMode.FULL}):
        runner.registry.set_enabled(False, **disabled)
        forecast = forecast_swap(runner, trace, cost_model=TRUE, policy="threshold")
        eager_us = 2 * TRUE.step_us(7, None)
        assert forecast.active_us == forecast.candidate_us == pytest.approx(eager_us)
        runner.registry.set_enabled(True, **disabled)


def test_steps_above_the_candidates_limit_are_counted_and_left_out(runner):
    config = attrs.evolve(runner.config, sizes=(4,), max_num_tokens=4)
    forecast = forecast_swap(runner, recorded(runner), cost_model=TRUE, config=config)
    assert (forecast.refused_steps, forecast.num_steps) == (1, 3)
    assert any("1 step above max_num_tokens (4)" in note for note in forecast.notes)
    assert "vllm with the new settings, over 3 steps" in str(forecast)
    with pytest.raises(TraceError, match="no step of 1 to 4 tokens"):
        forecast_swap(runner, recorded(runner, (7,)), cost_model=TRUE, config=config)


@pytest.mark.filterwarnings("ignore:Steps run eager")
def test_steps_above_all_graphs_are_compared_if_the_runner_runs_them_eager():
    made = GraphRunner(
        lambda tokens: tokens * 2,
        {"tokens": StaticInput((None,), "int64")},
        sizes=(2, 4),
        backend="tape",
        options=RunnerOptions(buffers=BufferOptions(buffer_rows=8)),
    )
    made.capture()
    forecast = forecast_swap(made, recorded(made, (3, 7, 7, 9)), cost_model=TRUE, sizes=(4, 8))
    assert (forecast.refused_steps, forecast.num_steps, forecast.same_steps) == (0, 4, 2)
    (changed,) = forecast.differences
    assert changed.active == "eager (above_largest_size)"
    assert (changed.num_steps, changed.min_tokens, changed.max_tokens) == (2, 7, 7)


class Faulty(SmallestPolicy):
    name = "faulty"

    def decide(self, batch, graphs):
        if batch.num_tokens == 6:  # not a capture size, so it is not tried in advance
            raise ValueError("no idea")
        return super().decide(batch, graphs)


def test_a_candidate_at_fault_is_counted(runner):
    trace = recorded(runner, (6, 6, 1))
    with pytest.warns(RuntimeWarning, match="no idea"):
        forecast = forecast_swap(runner, trace, cost_model=TRUE, policy=Faulty())
    assert any("violated a hard constraint, 2 steps would run" in note for note in forecast.notes)


def test_a_candidate_that_is_refused_says_so(runner):
    class Wrong:
        def declare(self, config):
            return [3]

        def decide(self, batch, graphs):
            return None

    with pytest.raises(PolicyError, match="list of GraphKeys"):
        forecast_swap(runner, recorded(runner), cost_model=TRUE, policy=Wrong())


def test_learning_policies_are_copied_and_named(runner):
    heard = []

    class Learner(SmallestPolicy):
        name = "learner"

        def observe(self, outcome):
            heard.append(outcome)

        def decide(self, batch, graphs):
            return Decision.eager("none")

    trace = recorded(runner)
    forecast = forecast_swap(runner, trace, cost_model=TRUE, policy=Learner())
    assert any("learns" in note for note in forecast.notes)
    assert heard == []
    runner.swap(policy=Learner())
    forecast = forecast_swap(runner, trace, cost_model=TRUE, policy="vllm")
    assert forecast.active == "learner"
    assert forecast.ratio < 1


def test_no_change_and_no_such_policy_or_model_are_refused(runner):
    trace = recorded(runner)
    with pytest.raises(ConfigError, match="changes nothing"):
        forecast_swap(runner, trace, cost_model=TRUE)
    with pytest.raises(ConfigError, match="policy"):
        forecast_swap(runner, trace, cost_model=TRUE, policy="nobody")
    with pytest.raises(UnknownNameError, match=r"swap has no setting .* Did you mean 'sizes'"):
        forecast_swap(runner, trace, cost_model=TRUE, sizs=[4])
    with pytest.raises(ConfigError, match="runner must be a GraphRunner, got 3"):
        forecast_swap(3, trace, cost_model=TRUE, policy="threshold")
    with pytest.raises(ConfigError, match=r"trace must be a StepTrace, got 'a\.csv'"):
        forecast_swap(runner, "a.csv", cost_model=TRUE, policy="threshold")
    with pytest.raises(UnknownNameError, match="cost model"):
        forecast_swap(runner, trace, cost_model="nobody", policy="threshold")
