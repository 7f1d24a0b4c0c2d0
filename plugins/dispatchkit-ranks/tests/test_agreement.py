"""Ranks as gloo processes decide the same or stop with a message that names a rank."""

from __future__ import annotations

import pytest

# Seconds until a rank has stopped; only tests with an absent rank wait that long.
SHORT, LONG = 1.5, 30.0


def fault(kind, *, bad_rank=1, bad_step=2, num_steps=5, timeout=LONG, seed=0):
    return {
        "seed": seed,
        "num_steps": num_steps,
        "kind": kind,
        "bad_rank": bad_rank,
        "bad_step": bad_step,
        "timeout": timeout,
    }


def run_faults(worlds, *schedules, size=2, **more):
    """Run schedules in one world; return each schedule's results by rank."""
    found = worlds.run_one("faults", size, schedules=list(schedules), **more)
    broken = [each for each in found if isinstance(each, dict)]
    assert not broken, broken
    lists = [each for each in found if isinstance(each, list)]
    return [
        [each[index] if isinstance(each, list) else each for each in found]
        for index in range(len(lists[0]))
    ]


@pytest.mark.parametrize("rule", ["alone", "leader"])
def test_two_processes_decide_the_same(worlds, rule):
    """Different batches, adapters, learners and lost keys, over gloo."""
    first, second = worlds.run_one("schedule", seed=3, num_steps=40, rule=rule)
    assert first == second
    assert len(first["decisions"]) == 40
    assert len({tuple(each) for each in first["decisions"]}) > 5
    assert (first["epoch"] > 2) == (rule == "leader")


def test_a_difference_in_set_up_stops_both_and_is_named(worlds):
    """The message names the difference and the rank."""
    for found in worlds.run_one("alike", odd_rank=1, what="max_loras"):
        assert found["reason"] == "differs"
        assert "config.max_loras" in found["text"]
        assert "rank 1 has 2" in found["text"]


def test_faults_name_the_rank_and_the_last_step(worlds):
    """One rank raises, leaves or captures; the other stops immediately and can start again."""
    schedules = [
        fault("raise"),
        fault("leave"),
        fault("capture"),
        fault("raise", bad_rank=0, bad_step=0),
        fault("none"),
    ]
    raised, left, captures, first, fine = run_faults(worlds, *schedules)
    good, bad = raised
    assert bad["error"] == {"raised": True}
    assert (good["error"]["ranks"], good["error"]["reason"]) == ([1], "raised")
    assert good["error"]["step"] == 3
    assert "Rank 1 raised ZeroDivisionError: planted (last agreed step: 3)" in good["error"]["text"]
    good, bad = left
    assert bad["error"] is None
    assert (good["error"]["ranks"], good["error"]["reason"]) == ([1], "left")
    for rank, each in enumerate(captures):
        assert (each["error"]["ranks"], each["error"]["reason"]) == ([1 - rank], "differs")
    assert (
        "Rank 1 captures a graph, while rank 0 has reached step 4" in captures[0]["error"]["text"]
    )
    assert first[1]["error"]["ranks"] == [0]
    assert [each["error"] for each in fine] == [None, None]
    assert fine[0]["decisions"] == fine[1]["decisions"]
    for each in (*raised, *left, *captures, *first, *fine):
        assert not each["open"]


def test_a_late_rank_is_named_and_finds_out_itself(worlds):
    """It arrives after the others have stopped, and runs no step alone."""
    ((good, late),) = run_faults(worlds, fault("late", timeout=SHORT))
    assert (good["error"]["ranks"], good["error"]["step"]) == ([1], 3)
    assert "Rank 1 did not reach step 4" in good["error"]["text"]
    assert (late["error"]["ranks"], late["error"]["step"]) == ([1], 3)
    assert late["decisions"] == good["decisions"]


@pytest.mark.parametrize("comes", ["after the others stopped", "while they stop"])
def test_a_collective_that_others_gave_up_is_not_taken_for_one_that_all_came_to(worlds, comes):
    """Over NCCL it completes on the late rank, with numbers that no other rank agreed on."""
    good, late = worlds.run_one("given_up", comes=comes, timeout=SHORT)
    for each in (good, late):
        assert each["error"], each
        assert (each["error"]["ranks"], each["error"]["reason"]) == ([1], "late")
        assert each["error"]["step"] == 1


@pytest.mark.slow_except("agent-1-die", "rank 0-0-die")
@pytest.mark.parametrize(
    ("host", "bad_rank", "kind"),
    [
        ("agent", 1, "die"),
        ("agent", 1, "freeze"),
        ("rank 0", 0, "die"),
        pytest.param("rank 0", 0, "freeze", marks=pytest.mark.slow),
    ],
)
def test_a_dead_or_frozen_rank_is_named(worlds, kind, host, bad_rank):
    """This includes the rank whose process serves the store."""
    found = worlds.run_one(
        "faults", host=host, schedules=[fault(kind, bad_rank=bad_rank, timeout=SHORT)]
    )
    assert found[bad_rank] == "died"
    (good,) = found[1 - bad_rank]
    assert (good["error"]["ranks"], good["error"]["step"]) == ([bad_rank], 3)
    assert good["error"]["reason"] == "late"


def test_a_rank_that_does_not_start_is_named(worlds):
    """There is no agreement yet, but the store lists the ranks that arrived."""
    first, _ = worlds.run_one("not_coming")
    assert first["ranks"] == [1]
    assert "Rank 1 did not join the agreement of ranks 0, 1" in first["text"]


def test_nothing_is_left_after_the_end(worlds):
    """No group, thread or connection outlives an agreement."""
    for counts in worlds.run_one("leftovers", num_lives=4):
        first, last = counts[0], counts[-1]
        assert first[:2] == last[:2] == [1, 1]
        # A connection may take a moment to close, but four lives leave less than four of anything.
        assert all(after - before < 4 for before, after in zip(first, last, strict=True))


def test_start_up_skew_is_not_a_cost_of_agreement(worlds):
    """The first step waits for ranks that are still loading weights."""
    first, _ = worlds.run_one("statistics")
    assert first["steps"] == 3
    assert first["waited"] > 0.5 > first["total"]


@pytest.mark.parametrize("fails_on", [None, 1])
def test_runners_pad_to_the_largest_batch_and_compute_each_its_own(worlds, fails_on):
    """Both ranks replay the same graphs, each with its own rows."""
    first, second = worlds.run_one("padded_steps", fails_on=fails_on)
    assert first["hits"] == second["hits"]
    assert first["hits"]
    assert first["worst"] < 1e-6
    assert second["worst"] < 1e-6
    assert all(first["found"])
    assert all(second["found"])
    assert first["lost"] == second["lost"]
    assert bool(first["lost"]) == (fails_on is not None)
    assert not set(first["lost"]) & set(first["hits"])
    for why in first["lost"].values():
        assert "no room" in why["1"]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [12, 400])
def test_collectives_inside_graphs_compute_what_one_rank_does(worlds, num_steps):
    """Two gloo processes hold half a decoder each, with all-reduce inside the tape's FULL graphs.

    Prompts and decode steps are mixed; each decode step continues with the chosen token.
    """
    arguments = {"num_steps": num_steps, "device": "cpu", "same_batches": True}
    for found in worlds.run_one("tensor_parallel", 2, limit=200, **arguments):
        assert "error" not in found, found
        assert found["lost"] == 0
        assert found["steps"] == {"NONE": 0, "PIECEWISE": 0, "FULL": num_steps}
        assert found["greedy"]["different"] == 0
        assert found["greedy"]["tokens"] > 2 * num_steps
        assert found["greedy"]["decoded"] > num_steps
        # Sums over ranks round in another order.
        assert found["worst"] < 1e-4 * found["largest"]
        assert found["exchanges"] == 0


def test_ranks_with_different_batches_run_graphs_of_one_size(worlds):
    """Rows are summed over ranks inside the graph; idle ranks contribute filler rows."""
    for found in worlds.run_one("spread_rows", 2, num_steps=12, device="cpu"):
        assert "error" not in found, found
        assert found["worst"] < 1e-5
        assert found["steps"]["NONE"] == 0
        assert found["steps"]["FULL"] > 8
