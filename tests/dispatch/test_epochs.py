"""A swap in parts: keys are declared in advance and hidden until their policy is active."""

from __future__ import annotations

import attrs
import pytest

from dispatchkit.dispatch import CellUpdate, Decision, Dispatcher, Outcome, Reason, explain
from dispatchkit.dispatch.lanes import lane_priorities, lanes_by_key
from dispatchkit.errors import PolicyError
from dispatchkit.keys import BatchDescriptor, DispatchConfig, GraphKey, RuntimeMode

CONFIG = DispatchConfig(sizes=(8, 16))


def key(size):
    return GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(size))


class Sizes:
    """Declares keys of the given sizes and chooses the smallest ready one."""

    def __init__(self, *sizes, name="sizes", credit=""):
        self.sizes, self.name, self.credit = sizes, name, credit
        self.asked = []

    def declare(self, config):
        return [key(size) for size in self.sizes]

    def decide(self, batch, graphs):
        self.asked.append(batch)
        for one in graphs.covering(batch, RuntimeMode.PIECEWISE):
            if batch.allows(one.mode) and graphs.is_ready(one):
                return attrs.evolve(Decision.replay(one), policy=self.credit)
        return Decision.eager(Reason.NO_KEY)


def test_keys_are_captured_ahead_and_seen_with_their_policy():
    made = Dispatcher(Sizes(8, 16), CONFIG, lazy=True)
    proposal = made.propose(Sizes(4, 16), CONFIG)
    assert made.reserve(proposal) == [key(4)]
    assert key(4) in made.registry
    assert key(4) not in made.graphs
    assert made.graphs.why_not(key(4)) == Reason.NO_KEY
    assert made.dispatch(3).key == key(8)
    assert made.install(proposal) == [key(8)]
    assert (made.epoch, made.dispatch(3).key) == (1, key(4))
    assert made.graphs.why_not(key(8)) == Reason.NO_KEY
    assert made.dispatch(8).key == key(16), "what retired is in the registry still, unseen"
    made.registry.forget(key(8))
    made.show_all()
    assert [*made.graphs] == [key(16), key(4)]


def test_what_another_forgot_is_not_to_be_forgotten_again():
    made = Dispatcher(Sizes(4, 8, 16), CONFIG)
    made.registry.forget(key(8))
    assert made.install(made.propose(Sizes(16), CONFIG)) == [key(4)]


def test_proposal_that_is_given_up_hides_nothing():
    made = Dispatcher(Sizes(8), CONFIG, lazy=True)
    made.reserve(made.propose(Sizes(4), CONFIG))
    made.show_all()
    assert made.graphs.why_not(key(4)) is None


def test_key_that_is_not_known_is_not_ready():
    made = Dispatcher(Sizes(8), CONFIG, lazy=True)
    assert made.graphs.why_not(key(5)) == Reason.NO_KEY
    assert not made.graphs.is_ready(key(5))


def test_explanation_asks_without_requests_first_and_credit_who_answered():
    made = Dispatcher(Sizes(8, credit="member"), CONFIG, lazy=True)
    made.policy.asked.clear()
    assert explain(made, 5, 3).decision.policy == "member"
    assert [batch.num_reqs for batch in made.policy.asked] == [None]
    plain = Dispatcher(Sizes(8), CONFIG, lazy=True)
    assert explain(plain, 5).decision.policy == "sizes"


class Raises:
    def lanes_for_key(self, key, num_lanes):
        raise ZeroDivisionError("by zero")

    stream_priorities = lanes_for_key


def test_lane_policy_that_raises_is_named_with_what_it_raised():
    with pytest.raises(PolicyError, match=r"mine.*lanes_for_key raised ZeroDivisionError: by zero"):
        lanes_by_key(Raises(), [key(8)], 2, name="mine")
    with pytest.raises(PolicyError, match=r"mine.*stream_priorities raised TypeError"):
        lane_priorities(Raises(), 2, name="mine")


def test_what_came_of_a_batch_that_the_new_limits_exclude_is_no_fault_of_the_policy():
    """The policy continues under a new configuration and receives outcomes of earlier steps."""

    class Learner:
        name = "learner"

        def declare(self, config):
            return [GraphKey(RuntimeMode.FULL, BatchDescriptor(n)) for n in config.sizes]

        def decide(self, batch, graphs):
            return Decision.eager("x", timed=True)

        def observe(self, outcome):
            return [CellUpdate(outcome.batch, None)]

    wide = DispatchConfig(sizes=(8, 64), max_num_tokens=64)
    dispatcher = Dispatcher(Learner(), wide, strict=True)
    outcome = Outcome(dispatcher.batch(50), dispatcher.dispatch(50), 10.0)
    dispatcher.swap(config=DispatchConfig(sizes=(8, 32), max_num_tokens=32))
    dispatcher.observe(outcome)
    assert dispatcher.num_policy_errors == 0
