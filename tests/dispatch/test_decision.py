"""Invariants of decisions, outcomes and updates."""

from __future__ import annotations

import attrs

from dispatchkit.dispatch import CellUpdate, Decision, Outcome
from dispatchkit.keys import Batch, RuntimeMode


def test_outcome_is_of_a_step_that_ran_as_decided_on_an_idle_stream():
    outcome = Outcome(Batch(8), Decision.eager("slow"))
    assert outcome.elapsed_us is None
    assert (outcome.clock, outcome.queued) == ("device", False)
    assert (outcome.completed, outcome.won, outcome.step) == (True, True, 0)


def test_decision_of_a_policy_is_bound_to_nothing_yet():
    answer = Decision(RuntimeMode.NONE, None, "slow")
    assert answer == Decision.eager("slow")
    assert (answer.timed, answer.one_shot) == (False, False)
    assert (answer.num_tokens, answer.revision) == (0, 0)
    assert answer.max_num_reqs > 1_000_000


def test_plan_is_no_part_of_what_was_decided():
    planned = attrs.evolve(Decision.eager("slow"), plan="of an executor")
    assert planned == Decision.eager("slow")
    assert "of an executor" not in repr(planned)


def test_change_stays_unless_it_is_for_one_step():
    assert CellUpdate(Batch(8), None).one_shot is False
