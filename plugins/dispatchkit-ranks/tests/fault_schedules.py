"""Random faults of ranks, and what the ranks must make of each."""

from __future__ import annotations

import random

# A world ends with a rank that dies; the other faults follow each other in one.
SHORT, MIDDLE, LONG = 2.0, 4.0, 30.0
HARMLESS = ("none", "lose", "slow", "capture_raises")
STOPPING = ("raise", "leave", "capture", "late", "policy", "differ")
FATAL = ("die", "freeze")


def random_worlds(seed, count, *, sizes=(2, 2, 3, 3, 4), per_world=8, device="cpu"):
    """Return requests with so many schedules in all; the last of each world may be fatal."""
    rng = random.Random(seed)
    requests = []
    while count:
        size = rng.choice(sizes)
        schedules = []
        for index in range(min(per_world, count)):
            is_last = index == per_world - 1
            if is_last and rng.random() < 0.8:
                kind = rng.choice(FATAL)
            else:
                kind = rng.choice(rng.choice((HARMLESS, STOPPING)))
            num_steps = rng.randint(1, 6)
            bad_step = rng.randrange(num_steps)
            schedules.append(
                {
                    "seed": rng.randrange(1 << 32),
                    # Batches that differ are found at the second comparison at the latest.
                    "num_steps": bad_step + 8 if kind == "differ" else num_steps,
                    "kind": kind,
                    "bad_rank": rng.randrange(size),
                    "bad_step": bad_step,
                    # Only where a rank does not come does anybody wait to the limit.
                    "timeout": SHORT
                    if kind in ("late", *FATAL)
                    else MIDDLE
                    if kind == "slow"
                    else LONG,
                }
            )
        count -= len(schedules)
        requests.append(
            {
                "case": "faults",
                "size": size,
                "schedules": schedules,
                "host": rng.choice(("agent", "rank 0")),
                "device": device,
            }
        )
    return requests


def check_world(request, by_rank):
    """Check what the ranks of a world made of its schedules; returns how many that were."""
    schedules = request["schedules"]
    fatal = schedules[-1]["kind"] in FATAL
    for rank, each in enumerate(by_rank):
        # "hung" is the watchdog's word, a dictionary an error that nobody expected.
        dead = fatal and rank == schedules[-1]["bad_rank"]
        assert each == "died" if dead else isinstance(each, list), each
    for index, schedule in enumerate(schedules):
        # What a rank that died has seen before is gone with it.
        asked = {rank: each[index] for rank, each in enumerate(by_rank) if each != "died"}
        _check(schedule, asked, request)
    return len(schedules)


def _check(schedule, results, request):
    """Check what the ranks that can be asked made of one schedule, by number."""
    kind, bad_rank, bad_step = (schedule[name] for name in ("kind", "bad_rank", "bad_step"))
    decisions = [each["decisions"] for each in results.values()]
    shortest = min(map(len, decisions))
    if kind == "differ":
        shortest = min(shortest, bad_step)  # what is promised to be the same is not, from there on
    for each in decisions:
        assert each[:shortest] == decisions[0][:shortest], (schedule, results)
    for rank, each in results.items():
        error = each["error"]
        assert not each["open"]
        if kind in HARMLESS:
            assert error is None, (schedule, results)
            assert len(each["decisions"]) == schedule["num_steps"]
            if kind == "capture_raises":
                assert len(each["withheld"]) == (rank != bad_rank), (schedule, results)
        elif kind == "differ":
            assert "different batches" in error["text"], (schedule, results)
            # Of two that differ nobody knows which one is right.
            assert error["ranks"] == [bad_rank] if len(results) > 2 else len(error["ranks"]) == 1
            assert len(each["decisions"]) >= bad_step
        elif rank != bad_rank:
            assert bad_rank in error["ranks"], (schedule, results)
            # One step was agreed on before the schedule's first.
            assert error["step"] == bad_step + 1
            assert len(each["decisions"]) == bad_step
            # The limit itself, and what a busy machine adds.
            assert error["seconds"] < schedule["timeout"] + 5
        elif kind == "late":
            # Where the store has ended with its host, that is all the late rank can see.
            by_host = request["host"] == "rank 0"
            assert error["ranks"] in ([rank], [0] if by_host else [rank])
