"""Three to eight processes, and hundreds of random faults: the same decisions, or a clean stop."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

# Groups that run at the same time; most of a fault's time is a wait.
AT_ONCE = 4
# A world ends with a rank that dies; the other faults follow each other in one.
PER_WORLD = 8
SHORT, LONG = 2.0, 30.0
SURVIVED = ("none", "none", "raise", "raise", "leave", "capture", "lose", "late")
FATAL = ("die", "freeze")

few = settings(max_examples=max(3, settings.default.max_examples // 10))


@few
@given(st.data())
def test_many_processes_decide_the_same(worlds, data):
    """Whatever each rank's batches, learner and lost keys are."""
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
    """Most ranks agree; the message blames the one that does not."""
    for found in worlds.run_one("alike", size, odd_rank=2, what="max_loras"):
        assert found["ranks"] == [2]
        assert "rank 2 has 2" in found["text"]


def random_worlds(seed, count):
    """Return requests with so many schedules in all; the last of each world may be fatal."""
    rng = random.Random(seed)
    requests = []
    while count:
        size = rng.choice((2, 2, 3, 3, 4))
        schedules = []
        for index in range(min(PER_WORLD, count)):
            is_last = index == PER_WORLD - 1
            kind = rng.choice(FATAL if is_last and rng.random() < 0.8 else SURVIVED)
            num_steps = rng.randint(1, 6)
            schedules.append(
                {
                    "seed": rng.randrange(1 << 32),
                    "num_steps": num_steps,
                    "kind": kind,
                    "bad_rank": rng.randrange(size),
                    "bad_step": rng.randrange(num_steps),
                    # Only where a rank does not come does anybody wait to the limit.
                    "timeout": SHORT if kind in ("late", *FATAL) else LONG,
                }
            )
        count -= len(schedules)
        requests.append(
            {
                "case": "faults",
                "size": size,
                "schedules": schedules,
                "host": rng.choice(("agent", "rank 0")),
            }
        )
    return requests


def check(schedule, results, host):
    """Check what the ranks that can be asked made of one schedule, by number."""
    kind, bad_rank = schedule["kind"], schedule["bad_rank"]
    decisions = [each["decisions"] for each in results.values()]
    shortest = min(map(len, decisions))
    for each in decisions:
        assert each[:shortest] == decisions[0][:shortest]
    for rank, each in results.items():
        error = each["error"]
        assert not each["open"]
        if kind in ("none", "lose"):
            assert error is None
            assert len(each["decisions"]) == schedule["num_steps"]
        elif rank != bad_rank:
            assert bad_rank in error["ranks"], (schedule, results)
            # One step was agreed on before the schedule's first.
            assert error["step"] == schedule["bad_step"] + 1
            assert len(each["decisions"]) == schedule["bad_step"]
            # The limit itself, and what a busy machine adds.
            assert error["seconds"] < schedule["timeout"] + 5
        elif kind == "late":
            # Where the store has ended with its host, that is all the late rank can see.
            assert error["ranks"] in ([rank], [0] if host == "rank 0" else [rank])


def test_random_faults_stop_cleanly(worlds, is_nightly):
    """Ranks that raise, leave, come late, freeze or die, anywhere: no hang, and the right name.

    Two hundred schedules; a thousand in the nightly profile.
    """
    num_schedules = 1000 if is_nightly else 200
    requests = random_worlds(0, num_schedules)
    counted = 0
    for request, by_rank in zip(requests, worlds.run(requests, at_once=AT_ONCE), strict=True):
        schedules = request["schedules"]
        fatal = schedules[-1]["kind"] in FATAL
        for rank, each in enumerate(by_rank):
            # "hung" is the watchdog's word, a dictionary an error that nobody expected.
            dead = fatal and rank == schedules[-1]["bad_rank"]
            assert each == "died" if dead else isinstance(each, list), each
        for index, schedule in enumerate(schedules):
            # What a rank that died has seen before is gone with it.
            asked = {rank: each[index] for rank, each in enumerate(by_rank) if each != "died"}
            check(schedule, asked, request["host"])
            counted += 1
    assert counted == num_schedules
