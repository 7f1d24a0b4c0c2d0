"""Checks of a policy before it is used: a mistake at any size is detected when it is built."""

from __future__ import annotations

import pytest

from dispatchkit.dispatch import Decision, Dispatcher, Reason
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import PolicyError
from dispatchkit.keys import Axis, BatchDescriptor, DispatchConfig, GraphKey, RuntimeMode

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


class WrongAt:
    """Correct except for some batches, for which it chooses an undeclared graph."""

    name = "wrong-at"

    def __init__(self, is_wrong=lambda batch: False):
        self.is_wrong = is_wrong
        self.asked = []

    def declare(self, config):
        return [GraphKey(PIECEWISE, BatchDescriptor(size)) for size in config.sizes]

    def decide(self, batch, graphs):
        self.asked.append(batch)
        if self.is_wrong(batch):
            return Decision.replay(GraphKey(FULL, BatchDescriptor(999)))
        return Decision.eager(Reason.NO_KEY)


@pytest.fixture
def config():
    with pytest.warns(UserWarning, match="33 to 40"):
        return DispatchConfig(sizes=(8, 16, 32), max_num_tokens=40, query_lens=(1, 2), max_loras=4)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 40])
def test_mistake_at_or_beside_a_size_is_found_when_built(config, size):
    with pytest.raises(PolicyError, match="wrong-at"):
        Dispatcher(WrongAt(lambda batch: batch.num_tokens == size), config)


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda batch: batch.query_len == 2,
        lambda batch: not batch.uniform,
        lambda batch: batch.num_active_loras == 0,
        lambda batch: batch.num_active_loras == 1,
        lambda batch: batch.num_active_loras == 4,
        lambda batch: batch.allows(FULL),
        lambda batch: not batch.allows(FULL),
    ],
    ids=["length", "mixed", "none", "one", "most", "full", "piecewise"],
)
def test_mistake_for_one_kind_of_batch_is_found_when_built(config, is_wrong):
    with pytest.raises(PolicyError, match="wrong-at"):
        Dispatcher(WrongAt(is_wrong), config)


def test_graphs_are_shown_as_if_all_were_there(config):
    class TakesTheFirst(WrongAt):
        def decide(self, batch, graphs):
            assert all(graphs.is_ready(key) for key in graphs)
            return Decision.replay(next(iter(graphs)))

    with pytest.raises(PolicyError, match="tokens=8"):
        Dispatcher(TakesTheFirst(), config)


def test_axes_are_asked_for_with_one_of_their_buckets():
    class KnowsAxes(WrongAt):
        def declare(self, config):
            return [GraphKey(PIECEWISE, BatchDescriptor(8, axes=(64,)))]

    policy = KnowsAxes()
    Dispatcher(policy, DispatchConfig(sizes=(8,), axes=Axis("length", 64)))
    assert {batch.axes for batch in policy.asked} == {(64,)}


def test_refusal_of_the_policys_own_is_told_as_it_is(config):
    class Refuses(WrongAt):
        def declare(self, config):
            raise PolicyError("member", "declare", "wants other sizes.")

    with pytest.raises(PolicyError, match=r"'member'.*wants other sizes"):
        Dispatcher(Refuses(), config)


def test_what_is_asked_keeps_within_the_limits(config):
    policy = WrongAt()
    Dispatcher(policy, config)
    assert {batch.num_tokens for batch in policy.asked} == {
        *(1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 40)
    }
    assert {batch.num_active_loras for batch in policy.asked} == {0, 1, 4}


def test_of_many_sizes_some_are_asked_for_and_the_ends_always():
    config = DispatchConfig(sizes=range(10, 4001, 10))
    policy = WrongAt()
    Dispatcher(policy, config)
    sizes = {batch.num_tokens for batch in policy.asked}
    assert {1, 9, 10, 11, 3999, 4000} <= sizes
    assert len(sizes) < 200


def test_batches_tried_say_nothing_of_requests(config):
    policy = WrongAt()
    Dispatcher(policy, config)
    assert {batch.num_reqs for batch in policy.asked} == {None}


def test_each_proposal_is_its_own(config):
    """A reserved proposal is not confused with another one of the same policy."""
    policy = WrongAt()
    made = Dispatcher(policy, config)
    proposal = made.propose(policy, config)
    assert not proposal.adds_axes
    assert not Proposal(proposal.parts, config, "", ()).adds_axes
    assert proposal != made.propose(policy, config)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("observe", 3, "observe is 3; it must be a method"),
        ("calibration_runs", [], "calibration_runs is .*; it must be a method"),
        ("explain", "text", "explain is 'text'; it must be a method"),
        ("traits", "monotone", "traits is 'monotone'; it must be a set of names"),
        ("traits", 3, "traits is 3; it must be a set of names"),
        ("pace", 0, "pace is 0; it must be a whole number"),
        ("pace", True, "pace is True; it must be a whole number"),
        ("pace", 1.5, "pace is 1.5; it must be a whole number"),
    ],
)
def test_optional_part_that_cannot_be_used_is_refused(config, part, value, says):
    policy = WrongAt()
    setattr(policy, part, value)
    with pytest.raises(PolicyError, match=says):
        Dispatcher(policy, config)


def test_pace_that_becomes_wrong_is_a_fault_and_counts_as_1(config):
    policy = WrongAt()
    policy.pace = 4
    told = []
    made = Dispatcher(policy, config, on_fault=lambda *fault: told.append(fault))
    assert made.pace == 4
    policy.pace = "often"
    with pytest.warns(RuntimeWarning, match="pace is 'often'.* measured as if the policy had no"):
        assert made.pace == 1
    assert made.pace == 1
    assert made.num_policy_errors == len(told) == 2
    strict = WrongAt()
    made = Dispatcher(strict, config, strict=True)
    strict.pace = 0
    with pytest.raises(PolicyError, match="pace"):
        _ = made.pace
