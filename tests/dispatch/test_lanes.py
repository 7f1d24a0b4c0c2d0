"""Valid and invalid answers of a lane policy."""

from __future__ import annotations

import pytest

from dispatchkit.dispatch import lane_fault, lane_priorities
from dispatchkit.dispatch.lanes import PendingStep
from dispatchkit.errors import PolicyError


class Urgent:
    def __init__(self, answer):
        self.answer = answer

    def stream_priorities(self, num_lanes):
        return self.answer


def test_lane_that_exists_is_no_fault():
    assert lane_fault(0, 2) == ""
    assert lane_fault(1, 2) == ""
    assert "but the indices are 0 to 1" in lane_fault(2, 2)


def test_step_has_usual_priority_and_no_key_unless_told():
    step = PendingStep(7)
    assert (step.key, step.priority) == (None, 0)


def test_streams_have_usual_priority_where_a_policy_says_nothing():
    assert lane_priorities(object(), 3, name="mine") == (0, 0, 0)


def test_stream_priorities_are_as_the_policy_says():
    assert lane_priorities(Urgent([0, 1]), 2, name="mine") == (0, 1)


@pytest.mark.parametrize("answer", [(0, -1), (True, 0), (0, "1"), (0, 1.0), (0,), (0, 0, 0)])
def test_priorities_that_are_not_whole_numbers_from_0_for_each_lane_are_refused(answer):
    with pytest.raises(PolicyError, match=r"return one non-negative integer per lane \(2 lanes\)"):
        lane_priorities(Urgent(answer), 2, name="mine")
