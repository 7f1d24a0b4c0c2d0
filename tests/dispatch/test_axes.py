"""Policies and the dispatcher with configured axes."""

from __future__ import annotations

import attrs
import pytest

from dispatchkit import (
    Axis,
    Batch,
    BatchDescriptor,
    CellUpdate,
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    Outcome,
    Reason,
    RuntimeMode,
    explain,
)
from dispatchkit.dispatch.axes import PlainView
from dispatchkit.errors import DescriptorError, PolicyError

AXES = (Axis("length", (16, 64)), Axis("kind", (1, 3), exact=True))
CONFIG = DispatchConfig(sizes=(2, 4), mode="FULL", axes=AXES, max_loras=1)
COMBINATIONS = [(16, 1), (16, 3), (64, 1), (64, 3)]


class Plain:
    """Ignores axes."""

    name = "plain"

    def __init__(self):
        self.seen, self.outcomes = [], []

    def declare(self, config):
        return [
            GraphKey(RuntimeMode.FULL, BatchDescriptor(size, num_active_loras=1))
            for size in config.sizes
        ]

    def decide(self, batch, graphs):
        self.seen.append(batch)
        for key in graphs.covering(batch, RuntimeMode.FULL):
            assert key in graphs
            assert key in list(graphs)
            assert len(graphs) == 2
            if batch.allows(key.mode) and graphs.is_ready(key):
                return Decision.replay(key)
        return Decision.eager(Reason.NO_KEY)

    def observe(self, outcome):
        self.outcomes.append(outcome)
        return [CellUpdate(outcome.batch, Decision.eager("learnt"))]


class Aware(Plain):
    """Declares a graph for one combination only."""

    name = "aware"
    axes = (64, 3)

    def declare(self, config):
        return [
            GraphKey(key.mode, attrs.evolve(key.descriptor, axes=self.axes))
            for key in super().declare(config)
        ]

    def decide(self, batch, graphs):
        self.seen.append(batch)
        for key in graphs.covering(batch, RuntimeMode.FULL):
            if batch.allows(key.mode) and graphs.is_ready(key):
                return Decision.replay(key)
        return Decision.eager(Reason.NO_KEY)


def dispatcher_of(policy):
    made = Dispatcher(policy, CONFIG)
    for key in made.registry:
        made.registry.captured(key, object())
    return made


def test_plain_policy_gets_its_keys_for_each_combination():
    made = dispatcher_of(Plain())
    assert len(made.registry) == 8
    for length, kind, axes in ((1, 1, (16, 1)), (17, 3, (64, 3)), (64, 1, (64, 1))):
        decision = made.dispatch(3, loras=CONFIG.variant(0, length=length, kind=kind))
        assert decision.key == GraphKey(
            RuntimeMode.FULL, BatchDescriptor(4, num_active_loras=1, axes=axes)
        )
    assert {batch.axes for batch in made.policy.seen} == {()}


def test_plain_view_holds_the_keys_of_its_graphs_and_nothing_else():
    view = PlainView(dispatcher_of(Plain()).graphs, (16, 1))
    own = BatchDescriptor(4, num_active_loras=1)
    assert GraphKey(RuntimeMode.FULL, own) in view
    assert GraphKey(RuntimeMode.PIECEWISE, own) not in view
    assert "something" not in view


def test_outside_value_is_eager_and_no_policy_is_asked():
    made = dispatcher_of(Plain())
    made.policy.seen.clear()
    for facts in ({"length": 65, "kind": 1}, {"length": 1, "kind": 2}):
        variant = CONFIG.variant(**facts)
        assert made.dispatch(3, loras=variant).reason == Reason.OUTSIDE_AXIS
        assert explain(made, 3, loras=variant).decision.reason == Reason.OUTSIDE_AXIS
    assert made.dispatch(3, loras=0).reason == Reason.OUTSIDE_AXIS  # without values
    assert made.policy.seen == []
    with pytest.raises(DescriptorError, match="Pass the result of"):
        made.dispatch(3, loras=CONFIG.variants.count)


def test_change_of_a_key_is_seen_by_its_own_combination():
    made = dispatcher_of(Plain())
    variants = [CONFIG.variant(length=length, kind=kind) for length, kind in COMBINATIONS]
    lost = made.dispatch(3, loras=variants[1]).key
    made.registry.evicted(lost)
    assert [made.dispatch(3, loras=variant).key is None for variant in variants] == [
        False,
        True,
        False,
        False,
    ]


def test_plain_policy_learns_for_the_combination_it_was_shown():
    made = dispatcher_of(Plain())
    one, other = CONFIG.variant(length=5, kind=1), CONFIG.variant(length=50, kind=1)
    decision = made.dispatch(3, loras=one)
    made.observe(Outcome(made.batch(3, loras=one), decision, elapsed_us=1.0))
    assert made.policy.outcomes[0].batch == Batch(3)
    assert made.policy.outcomes[0].decision.key.descriptor.axes == ()
    assert made.dispatch(3, loras=one).reason == "learnt"
    assert made.dispatch(3, loras=other).reason == Reason.HIT


def test_policy_that_names_axes_decides_by_them():
    made = dispatcher_of(Aware())
    assert len(made.registry) == 2
    assert made.dispatch(3, loras=CONFIG.variant(length=64, kind=3)).reason == Reason.HIT
    assert made.dispatch(3, loras=CONFIG.variant(length=16, kind=3)).reason == Reason.NO_KEY
    assert (64, 3) in {batch.axes for batch in made.policy.seen}


@pytest.mark.parametrize("axes", [(64,), (64, 2), (63, 3), (64, 3, 1)])
def test_key_of_no_bucket_is_refused_by_name(axes):
    policy = Aware()
    policy.axes = axes
    with pytest.raises(PolicyError, match="Policy 'aware': declare"):
        Dispatcher(policy, CONFIG)


def test_many_axes_have_a_table_of_bounded_rows():
    axes = [Axis(name, range(1, 21)) for name in ("a", "b")]
    config = DispatchConfig(sizes=(2, 512), axes=axes)
    made = Dispatcher(Plain(), attrs.evolve(config, max_loras=1))
    variant = made.config.variant(a=3, b=20)
    assert made.dispatch(3, loras=variant) is made.dispatch(3, loras=variant)
    assert made.num_filled_cells == 1
