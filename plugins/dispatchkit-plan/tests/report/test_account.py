"""Accounts of a trace under a policy, decision by decision."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from dispatchkit.dispatch import CellUpdate, Decision, Dispatcher
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import BatchDescriptor, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.observe.trace import StepTrace

from dispatchkit_plan import load_cost_model, simulate
from dispatchkit_plan.report import account_for

MODEL = load_cost_model("lm-decode-h100")


def test_it_adds_up_to_what_a_simulation_says(trace: Any, plugins: Any, account: Any) -> None:
    """Both use the same dispatcher."""
    expected = simulate(trace, plugins=plugins)
    assert account.num_steps == expected.num_steps
    assert account.modes() == dict(expected.modes)
    assert account.misses() == dict(expected.misses)
    assert account.padding == expected.padding_tokens
    assert account.real_tokens == expected.real_tokens
    assert account.waste_pct == pytest.approx(expected.waste_pct)
    assert account.time_s == pytest.approx(expected.time_s)
    assert account.eager_time_s == pytest.approx(expected.eager_time_s)
    assert account.num_graphs == expected.num_graphs


def test_parts_in_order_hold_every_step_once(account: Any) -> None:
    """They are ordered by mode and have their padding."""
    assert sum(sum(part.modes.values()) for part in account.bins) == account.num_steps
    assert sum(part.padding for part in account.bins) == account.padding


def test_each_decision_is_explained_as_it_was_taken(account: Any) -> None:
    """Eager decisions name the nearest graphs; replays do not."""
    for one in account.decisions:
        answer = account.explain(one)
        assert answer.decision is one.decision
        assert answer.batch.num_tokens == one.num_tokens
        assert bool(answer.nearest) == (one.bucket is None and bool(answer.candidates))
        chosen = [each.key for each in answer.candidates if each.chosen]
        assert chosen == ([] if one.bucket is None else [one.decision.key])
        assert answer.because
        assert answer.because in str(answer)


class Learner:
    """Replays until it receives a time, then runs eager."""

    name = "learner"

    def __init__(self) -> None:
        self.told: list[float] = []

    def declare(self, config: DispatchConfig) -> list[GraphKey]:
        return [GraphKey(RuntimeMode.FULL, BatchDescriptor(num_tokens=8))]

    def decide(self, batch: Any, graphs: Any) -> Decision:
        keys = list(graphs.covering(batch, RuntimeMode.FULL))
        if not keys or not batch.allows(RuntimeMode.FULL):
            return Decision.eager("too_large")
        return Decision.replay(keys[0], timed=True)

    def observe(self, outcome: Any) -> list[CellUpdate]:
        self.told.append(outcome.elapsed_us)
        return [CellUpdate(outcome.batch, Decision.eager("learnt"))]


def test_a_policy_that_learns_is_told_times_and_its_change_is_seen() -> None:
    """Times arrive in the order of the steps."""
    policy = Learner()
    dispatcher = Dispatcher(policy, DispatchConfig(sizes=[8]), lazy=True)
    made = account_for(StepTrace({"num_tokens": [3, 3, 3, 0]}), dispatcher, MODEL)
    assert policy.told == [MODEL.step_us(3, 8)]
    assert made.modes() == {"NONE": 2, "PIECEWISE": 0, "FULL": 1}
    assert made.misses() == {"learnt": 2}
    (eager,) = [one for one in made.decisions if one.bucket is None]
    assert made.explain(eager).because == "policy: chose eager, reason 'learnt'"
    assert made.explain(eager).nearest.endswith("ready, not preferred")


def test_progress_is_told_to_the_end(trace: Any, plugins: Any) -> None:
    """The callback may drive a progress bar."""
    said: list[tuple[str, int, int]] = []
    config = DispatchConfig(max_num_tokens=4096)
    dispatcher = Dispatcher(plugins.create_policy("vllm"), config, lazy=True)
    account_for(trace, dispatcher, MODEL, progress=lambda *words: said.append(words))
    assert said[0][1] == 0
    assert said[-1][1] == said[-1][2] > 0


def test_bad_input_is_told(plugins: Any) -> None:
    """A trace without tokens and a step beyond the limit are refused."""
    config = DispatchConfig(sizes=[8])
    dispatcher = Dispatcher(plugins.create_policy("vllm"), config, lazy=True)
    with pytest.raises(TraceError, match="no step with tokens"):
        account_for(StepTrace({"num_tokens": [0]}), dispatcher, MODEL)
    with pytest.raises(ConfigError, match=r"at least 9, .* largest step of <memory>"):
        account_for(StepTrace({"num_tokens": [9]}), dispatcher, MODEL)


def test_an_explanation_says_what_stands_behind_each_state(plugins: Any) -> None:
    """States on a live dispatcher: not captured, failed, switched off, ready."""
    from dispatchkit import explain

    dispatcher = Dispatcher(plugins.create_policy("vllm"), DispatchConfig(sizes=[8]))
    registry = dispatcher.registry
    assert explain(dispatcher, 3, 3, 1).because.startswith(
        "state: the graph for this batch is declared"
    )
    assert explain(dispatcher, 3, 3, 1).nearest
    for key in registry:
        registry.failed(key, "out of memory")
    answer = explain(dispatcher, 3, 3, 1)
    assert answer.because == "state: the capture of the graph for this batch failed: out of memory"
    assert explain(dispatcher, 0).because.startswith("constraint: a batch without tokens")
    assert explain(dispatcher, 0).nearest == ""
    assert explain(dispatcher, 3, ceiling=0).because.startswith("constraint: no mode")
    assert attrs.asdict(answer)["largest"] == 8
