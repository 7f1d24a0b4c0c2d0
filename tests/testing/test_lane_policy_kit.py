"""The kit for lane policies rejects every planted fault by name; correct policies pass."""

from __future__ import annotations

import re

import pytest
from faulty_lane_policies import PLANTED, InTurn

from dispatchkit.dispatch import LANE_TRAITS
from dispatchkit.testing import (
    LanePolicyTests,
    run_lane_policy_conformance,
    run_policy_conformance,
)


class TestInTurn(LanePolicyTests):
    """The three lines that a plugin's tests need."""

    def make_lane_policy(self):
        return InTurn()


@pytest.mark.parametrize(
    ("policy", "finding", "message"), PLANTED, ids=[policy.__name__ for policy, _, _ in PLANTED]
)
def test_planted_fault_is_rejected_by_name(policy, finding, message):
    class Tests(LanePolicyTests):
        def make_lane_policy(self):
            return policy()

    with pytest.raises(AssertionError) as caught:
        getattr(Tests(), "test_" + finding.replace(" ", "_"))()
    assert str(caught.value).startswith("Lane policy 'in-turn': ")
    assert re.search(message, str(caught.value)), str(caught.value)


def test_every_property_has_a_planted_fault():
    tests = {name for name in vars(LanePolicyTests) if name.startswith("test_")}
    assert tests == {"test_" + finding.replace(" ", "_") for _, finding, _ in PLANTED}


@pytest.mark.parametrize("policy", [InTurn, InTurn()], ids=["class", "instance"])
def test_verdict_of_a_correct_policy_names_what_holds_and_what_is_claimed(policy):
    verdict = run_lane_policy_conformance(policy, max_examples=5)
    verdict.raise_if_failed()
    assert {*verdict.claimed} == {*InTurn.traits}
    assert {*verdict.not_claimed} == LANE_TRAITS - {*InTurn.traits}
    lines = str(verdict).splitlines()
    assert lines[0] == "Lane policy 'in-turn' satisfies the contract (seed 0)."
    assert "  holds       every step gets a lane" in lines
    assert f"  not claimed, not tested: {', '.join(verdict.not_claimed)}" in lines


def test_verdict_of_a_faulty_policy_says_what_breaks_and_why_it_matters():
    policy, finding, message = PLANTED[0]
    verdict = run_lane_policy_conformance(policy)
    assert not verdict.passed
    assert finding in {each.name for each in verdict.failures}
    with pytest.raises(AssertionError, match=message) as caught:
        verdict.raise_if_failed()
    assert "violates the contract" in str(caught.value)
    assert f"FAILS       {finding}" in str(caught.value)
    assert "why: " in str(caught.value)


def test_verdict_names_a_claim_that_is_no_trait_of_lane_policies():
    class Claims(InTurn):
        traits = frozenset({"monotone"})

    verdict = run_lane_policy_conformance(Claims, max_examples=2)
    assert verdict.unknown == ("monotone",)
    assert not verdict.passed
    assert "unknown traits claimed: monotone (known traits: balances, spreads, sticky)" in str(
        verdict
    )


def test_tested_instance_is_left_as_it_was():
    policy = InTurn()
    before = dict(vars(policy))
    run_lane_policy_conformance(policy, max_examples=2)
    assert vars(policy) == before


def test_verdicts_on_the_other_kind_are_refused_with_the_call_that_is_right():
    with pytest.raises(TypeError, match="For a lane policy, use run_lane_policy_conformance"):
        run_policy_conformance(InTurn)
    with pytest.raises(
        TypeError,
        match=r"A lane policy .*choose.* or a factory that returns one; got 7, which",
    ):
        run_lane_policy_conformance(7)
