"""The kit for lane policies: every planted fault is rejected by name, correct ones pass."""

from __future__ import annotations

import re

import pytest
from faulty_lane_policies import PLANTED, InTurn

from dispatchkit.testing import LanePolicyTests


class TestInTurn(LanePolicyTests):
    """The three lines of a plugin's tests."""

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


def test_every_property_has_a_planted_fault_and_says_why():
    tests = {name: test for name, test in vars(LanePolicyTests).items() if name[:5] == "test_"}
    assert set(tests) == {"test_" + finding.replace(" ", "_") for _, finding, _ in PLANTED}
    for name, test in tests.items():
        assert len(test.__doc__.split()) > 15, name
