"""The lane policies pass the kit, and each has its intended effect."""

from __future__ import annotations

import pytest

from dispatchkit import BatchDescriptor, GraphKey, RuntimeMode, load_plugins
from dispatchkit.dispatch import PendingStep
from dispatchkit.errors import ConfigError
from dispatchkit.testing import LanePolicyTests, SampleLane

from dispatchkit_multistream import ByKey, LeastLoaded, Priority, RoundRobin

KEYS = [GraphKey(RuntimeMode.FULL, BatchDescriptor(size)) for size in (1, 2, 4, 8, 16, 32)]


class TestRoundRobin(LanePolicyTests):
    def make_lane_policy(self) -> RoundRobin:
        return RoundRobin()


class TestLeastLoaded(LanePolicyTests):
    def make_lane_policy(self) -> LeastLoaded:
        return LeastLoaded()


@pytest.mark.slow
class TestLeastLoadedBySteps(LanePolicyTests):
    def make_lane_policy(self) -> LeastLoaded:
        return LeastLoaded(by="steps")


class TestByKey(LanePolicyTests):
    def make_lane_policy(self) -> ByKey:
        return ByKey()


@pytest.mark.slow
class TestByKeyTwice(LanePolicyTests):
    def make_lane_policy(self) -> ByKey:
        return ByKey(copies=2)


class TestPriority(LanePolicyTests):
    def make_lane_policy(self) -> Priority:
        return Priority()


@pytest.mark.slow
class TestPriorityOfMany(LanePolicyTests):
    def make_lane_policy(self) -> Priority:
        return Priority(reserved=9)


def lanes(number: int) -> list[SampleLane]:
    return [SampleLane(index, KEYS) for index in range(number)]


def test_in_turn_comes_round() -> None:
    policy, three = RoundRobin(), lanes(3)
    assert [policy.choose(PendingStep(1), three) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_busy_in_tokens_and_in_steps() -> None:
    two = lanes(2)
    two[0].submit(100)
    two[1].submit(10)
    two[1].submit(10)
    assert LeastLoaded().choose(PendingStep(1), two) == 1
    assert LeastLoaded(by="steps").choose(PendingStep(1), two) == 0


def test_each_key_has_a_lane_and_eager_steps_have_none() -> None:
    policy, four = ByKey(), lanes(4)
    assigned = {key: policy.lanes_for_key(key, 4) for key in KEYS}
    assert len({lane for (lane,) in assigned.values()}) > 1
    own = [SampleLane(index, [k for k in KEYS if index in assigned[k]]) for index in range(4)]
    for key in KEYS:
        for _ in range(3):
            lane = policy.choose(PendingStep(1, key), own)
            assert [lane] == list(assigned[key])
            own[lane].submit(1)
    four[0].submit(5)
    assert policy.choose(PendingStep(1), four) != 0


def test_assigned_lanes_do_not_depend_on_the_process() -> None:
    """Python's hash of strings varies; the constants are from when this was written."""
    assert [ByKey().lanes_for_key(key, 8)[0] for key in KEYS] == [2, 0, 5, 6, 5, 6]


def test_urgent_steps_find_a_free_lane_and_usual_ones_never_take_it() -> None:
    policy, three = Priority(), lanes(3)
    assert policy.stream_priorities(3) == [0, 0, 1]
    for _ in range(6):
        lane = policy.choose(PendingStep(8), three)
        assert lane in (0, 1)
        three[lane].submit(8)
    assert policy.choose(PendingStep(8, priority=1), three) == 2
    for _ in range(9):
        three[2].submit(8)
    assert policy.choose(PendingStep(8, priority=1), three) in (0, 1)


def test_they_are_found_by_name_with_options_as_text() -> None:
    plugins = load_plugins()
    assert {"round-robin", "least-loaded", "by-key", "priority"} <= set(plugins.lane_policies)
    made = plugins.create_lane_policy("by-key", copies="2")
    assert len(made.lanes_for_key(KEYS[0], 4)) == 2


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: LeastLoaded(by="bytes"), "by"),
        (lambda: ByKey(copies=0), "copies"),
        (lambda: Priority(reserved=0), "reserved"),
        (lambda: Priority(threshold=0), "threshold"),
    ],
)
def test_bad_options_are_refused_by_name(make, setting) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting == setting
