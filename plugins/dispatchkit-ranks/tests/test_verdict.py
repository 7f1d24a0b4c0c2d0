"""The explanation of a stop, for one rank at fault and for several."""

from __future__ import annotations

from dispatchkit_ranks.verdict import LEFT, WAITED, Note, store_verdict, verdict

MEMBERS = (0, 1, 2)


def test_one_and_several_missing_ranks_are_named():
    waited = {number: Note(WAITED, 3, "timeout", 2.0, True) for number in (0, 1)}
    one = verdict(waited, MEMBERS, 0, "step 4").text
    assert one.startswith(
        "Rank 2 did not reach step 4 within 2 s. Last agreed step: 3. Check whether"
    )
    assert "whether its process is still running; if it is only late" in one
    several = verdict({0: waited[0]}, MEMBERS, 0, "step 4").text
    assert several.startswith("Ranks 1, 2 did not reach step 4")
    assert "whether their processes are still running; if they are only late" in several
    broken = {number: Note(WAITED, 3, "reset by peer", 0.02) for number in (0, 1)}
    dead = verdict(broken, MEMBERS, 0, "step 4")
    assert (dead.ranks, dead.reason) == ((2,), "late")
    assert dead.text == (
        "Rank 2 did not reach step 4, and a connection broke. Last agreed step: 3. Check whether "
        "its process is still running, and read the logs of all ranks."
    )
    alone = store_verdict(0, waited[1], "step 4").text
    assert alone.startswith("Step 4 failed, and rank 0, which hosts the torch.distributed store,")


def test_ranks_that_left_are_listed_by_their_last_step():
    notes = {0: Note(WAITED, 5, "lost"), 1: Note(LEFT, 4, "closed"), 2: Note(LEFT, 5, "closed")}
    assert "Rank 1 left after step 4; rank 2 left after step 5, while rank 0 reached step 6." in (
        verdict(notes, MEMBERS, 0, "step 6").text
    )
    notes[1] = notes[2]
    found = verdict(notes, MEMBERS, 0, "step 6")
    assert found.text.startswith("Ranks 1, 2 left after step 5, while rank 0 reached step 6.")
    assert (found.ranks, found.reason) == ((1, 2), LEFT)
