"""Three to eight processes with random faults: the same decisions, or a clean stop."""

from __future__ import annotations

import pytest
from fault_schedules import FATAL, HARMLESS, STOPPING, check_world, random_worlds
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

# Groups that run concurrently, because a fault is mostly waiting.
AT_ONCE = 4
few = settings(max_examples=max(3, settings.default.max_examples // 10))


@few
@given(st.data())
def test_many_processes_decide_the_same(worlds, data):
    """For any batches, learners and lost keys of each rank."""
    sizes = data.draw(st.lists(st.integers(3, 8), min_size=1, max_size=2))
    requests = [
        {
            "case": "schedule",
            "size": size,
            "seed": data.draw(st.integers(0, 1 << 32)),
            "num_steps": data.draw(st.integers(1, 20)),
            "rule": data.draw(st.sampled_from(["alone", "leader"])),
        }
        for size in sizes
    ]
    for request, results in zip(requests, worlds.run(requests, at_once=2), strict=True):
        assert len(results[0]["decisions"]) == request["num_steps"]
        for each in results:
            assert each == results[0]


@pytest.mark.parametrize("size", [3, 8])
def test_the_odd_one_of_many_is_named(worlds, size):
    """Most ranks agree, and the message names the one that does not."""
    for found in worlds.run_one("alike", size, odd_rank=2, what="max_loras"):
        assert found["ranks"] == [2]
        assert "rank 2 has 2" in found["text"]


def test_random_faults_stop_cleanly(worlds, is_nightly):
    """Ranks raise, leave, differ, come late, freeze or die: no hang, and the right name.

    This includes faults in a policy and in a capture. 120 schedules; a thousand in the nightly
    profile.
    """
    num_schedules = 1000 if is_nightly else 120
    requests = random_worlds(0, num_schedules)
    found = worlds.run(requests, at_once=AT_ONCE)
    assert sum(map(check_world, requests, found)) == num_schedules
    kinds = {schedule["kind"] for request in requests for schedule in request["schedules"]}
    assert kinds == {*HARMLESS, *STOPPING, *FATAL}
