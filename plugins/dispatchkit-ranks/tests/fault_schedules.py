"""Random faults of ranks and the results expected from each rank."""

from __future__ import annotations

import random

# A rank that dies ends its world; other faults run one after another in the same world.
SHORT, MIDDLE, LONG = 2.0, 4.0, 30.0
HARMLESS = ("none", "lose", "slow", "capture_raises")
STOPPING = ("raise", "leave", "capture", "late", "policy", "differ")
FATAL = ("die", "freeze")


def random_worlds(seed, count, *, sizes=(2, 2, 3, 3, 4), per_world=8, device="cpu"):
    """Return requests with ``count`` schedules in total; a world's last may be fatal."""
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
                    # Different batches are detected at the second comparison at the latest.
                    "num_steps": bad_step + 8 if kind == "differ" else num_steps,
                    "kind": kind,
                    "bad_rank": rng.randrange(size),
                    "bad_step": bad_step,
                    # Only ranks that do not arrive make the others wait until the timeout.
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
    """Check the results of a world; return its number of schedules."""
    schedules = request["schedules"]
    fatal = schedules[-1]["kind"] in FATAL
    for rank, each in enumerate(by_rank):
        # "hung" is set by the watchdog; a dictionary holds an unexpected error.
        dead = fatal and rank == schedules[-1]["bad_rank"]
        assert each == "died" if dead else isinstance(each, list), each
    for index, schedule in enumerate(schedules):
        # A rank that died returns no results.
        asked = {rank: each[index] for rank, each in enumerate(by_rank) if each != "died"}
        _check(schedule, asked, request)
    return len(schedules)


def _check(schedule, results, request):
    """Check the results of one schedule, keyed by rank."""
    kind, bad_rank, bad_step = (schedule[name] for name in ("kind", "bad_rank", "bad_step"))
    decisions = [each["decisions"] for each in results.values()]
    shortest = min(map(len, decisions))
    if kind == "differ":
        shortest = min(shortest, bad_step)  # batches differ from this step on
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
            # With two ranks, either may be named as the differing one.
            assert error["ranks"] == [bad_rank] if len(results) > 2 else len(error["ranks"]) == 1
            assert len(each["decisions"]) >= bad_step
        elif rank != bad_rank:
            assert bad_rank in error["ranks"], (schedule, results)
            # The warmup step before the schedule counts too.
            assert error["step"] == bad_step + 1
            assert len(each["decisions"]) == bad_step
            # The timeout, plus a margin for a busy machine.
            assert error["seconds"] < schedule["timeout"] + 5
        elif kind == "late":
            # If the store ended with rank 0, the late rank can report only rank 0.
            by_host = request["host"] == "rank 0"
            assert error["ranks"] in ([rank], [0] if by_host else [rank])
