"""Batches above the largest size: the policy learns whether parts are faster."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dispatchkit import Decision, DispatchConfig, Dispatcher, GraphView, Outcome, load_plugins
from dispatchkit.dispatch import Part
from dispatchkit.keys import Batch, CaptureSizeWarning
from dispatchkit.testing import OneBucketPolicy

from dispatchkit_adaptive import AdaptivePolicy

PLUGINS = load_plugins()
SIZES = range(520, 640, 7)


def serve(policy: AdaptivePolicy, *, may_split: bool = True) -> Dispatcher:
    with pytest.warns(CaptureSizeWarning):
        config = DispatchConfig(mode="FULL", sizes=(128, 512), max_num_tokens=1024)
    dispatcher = Dispatcher(policy, config, strict=True, may_split=may_split)
    for key in dispatcher.registry:
        dispatcher.registry.captured(key, object())
    return dispatcher


def adaptive(**options: Any) -> AdaptivePolicy:
    return AdaptivePolicy(plugins=PLUGINS, **options)


def run(
    dispatcher: Dispatcher, steps: int, *, eager_us: float, graph_us: float
) -> tuple[float, list[Decision]]:
    """Run measured steps at known costs; return their total time and the last decisions."""
    chance, total, decisions = random.Random(1), 0.0, []
    for step in range(1, steps + 1):
        num_tokens = chance.choice(SIZES)
        decision = dispatcher.dispatch(num_tokens)
        us = sum(graph_us * key.num_tokens / 512 for key in decision.keys) or eager_us
        total += us
        if decision.timed:
            batch = dispatcher.batch(num_tokens)
            dispatcher.observe(Outcome(batch, decision, us * chance.gauss(1, 0.02), step=step))
        decisions.append(decision)
    return total, decisions[-100:]


@pytest.mark.slow_except("400.0-True-vllm")
@pytest.mark.parametrize("base", ["vllm", "threshold"])
@pytest.mark.parametrize(("graph_us", "splits"), [(400.0, True), (1500.0, False)])
def test_parts_are_used_where_they_are_faster_whatever_the_base_does(
    base: str, graph_us: float, *, splits: bool
) -> None:
    """The slower way runs only in occasional probes, so the policy stays close to the base."""
    options = {"split": True} if base == "threshold" else {}
    dispatcher = serve(adaptive(base=base, base_options=options))
    took, last = run(dispatcher, 3000, eager_us=1000.0, graph_us=graph_us)
    share = sum(bool(decision.parts) for decision in last) / len(last)
    assert share > 0.95 if splits else share < 0.05
    of_base = 1.25 * graph_us if options else 1000.0
    assert took < 1.02 * 3000 * of_base
    assert dispatcher.num_policy_errors == 0
    if splits:
        reasons = {decision.reason for decision in last if decision.reason != "probe"}
        assert reasons == {"hit" if options else "parts_are_faster"}
        assert [part.num_tokens for part in dispatcher.dispatch(600).parts] == [512, 88]
        assert "tokens=512 reqs=512 + FULL tokens=128" in str(dispatcher.policy.explain())  # type: ignore[attr-defined]


def test_nothing_is_tried_where_batches_may_not_be_split() -> None:
    dispatcher = serve(adaptive(), may_split=False)
    _, last = run(dispatcher, 300, eager_us=1000.0, graph_us=1.0)
    assert {decision.reason for decision in last} == {"above_largest_size"}


def test_one_graph_gives_way_to_parts_that_compute_far_less() -> None:
    """A batch of 136 fits the graph of 512 with much padding, or two of 128 with little."""
    dispatcher = serve(adaptive())
    arms = {arm for _ in range(2) for arm in _arms_of(dispatcher, 136)}
    assert any(" + " in arm for arm in arms)
    assert not any(" + " in arm for arm in _arms_of(dispatcher, 500))


def _arms_of(dispatcher: Dispatcher, num_tokens: int) -> set[str]:
    dispatcher.decide(dispatcher.batch(num_tokens))
    reports = dispatcher.policy.explain()  # type: ignore[attr-defined]
    return {
        arm.arm for one in reports if one.sizes[0] <= num_tokens <= one.sizes[1] for arm in one.arms
    }


def test_what_was_learnt_of_parts_is_in_the_state_file(tmp_path: Path) -> None:
    policy = adaptive()
    run(serve(policy), 1000, eager_us=1000.0, graph_us=400.0)
    again = adaptive(state=policy.save(tmp_path / "state.json"))
    dispatcher = serve(again)
    assert {str(ident) for ident in again._arms} == {str(ident) for ident in policy._arms}
    _, last = run(dispatcher, 150, eager_us=1000.0, graph_us=400.0)
    assert sum(bool(decision.parts) for decision in last) > 95


class HalvingPolicy(OneBucketPolicy):
    """Policy that splits batches into halves, which is not an arm of ``adaptive``."""

    def decide(self, batch: Batch, graphs: GraphView) -> Decision:
        answer = super().decide(batch, graphs)
        if answer.key is not None or batch.uniform or not graphs.may_split:
            return answer
        key = max(graphs, key=lambda one: one.num_tokens)
        half = batch.num_tokens // 2
        if not batch.allows(key.mode) or batch.num_tokens - half > key.num_tokens:
            return answer
        return Decision.split([Part(key, batch.num_tokens - half), Part(key, half)])


def test_a_base_that_splits_in_a_way_of_its_own_is_left_alone() -> None:
    dispatcher = serve(adaptive(base=HalvingPolicy()))
    _, last = run(dispatcher, 300, eager_us=1.0, graph_us=1000.0)
    assert all(len(decision.parts) == 2 and not decision.timed for decision in last)
