"""Who stopped the ranks, determined from the notes that they left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

WAITED, RAISED, LEFT = "waited", "raised", "left"


@attrs.frozen
class Note:
    """Why a rank stopped, in its own words.

    Attributes:
        what: ``waited`` (in vain, for other ranks), ``raised`` or ``left``.
        step: Last step that it agreed on.
        text: The error, or what it was doing.
        seconds: How long it had waited when its exchange failed.
        timed_out: The exchange failed by its time limit, not by a broken connection.
    """

    what: str
    step: int
    text: str
    seconds: float = 0.0
    timed_out: bool = False


@attrs.frozen
class Verdict:
    """Who stopped the ranks, and why.

    Attributes:
        ranks: Global numbers of the ranks responsible.
        reason: A short word.
        text: The full explanation, in one or two sentences.
    """

    ranks: tuple[int, ...]
    reason: str
    text: str


def verdict(notes: Mapping[int, Note], members: Sequence[int], me: int, where: str) -> Verdict:
    """Return who stopped the ranks, from the notes that were found.

    Args:
        notes: Notes by global number.
        members: The global numbers of all ranks.
        me: The number of this rank.
        where: What this rank was waiting in.
    """
    step = max((note.step for note in notes.values()), default=0)
    raised = [number for number in members if number in notes and notes[number].what == RAISED]
    if raised:
        told = "; ".join(
            f"rank {number} raised {notes[number].text} (last step: {notes[number].step})"
            for number in raised
        )
        return Verdict(tuple(raised), RAISED, f"{told[0].upper()}{told[1:]}.")
    left = [number for number in members if number in notes and notes[number].what == LEFT]
    if left:
        return Verdict(
            tuple(left),
            LEFT,
            f"{ranks_named(left)} left after step {notes[left[0]].step}, while rank {me} reached "
            f"{where}. All ranks must run the same number of steps; an idle rank joins with 0 "
            "tokens.",
        )
    waited = max((note.seconds for note in notes.values()), default=0.0)
    missing = [number for number in members if number not in notes]
    if missing:
        # A rank that waits has agreed on every step before, and so have all the others.
        return Verdict(
            tuple(missing),
            "late",
            f"{ranks_named(missing)} did not reach {where}; others had waited for it "
            f"{waited:.3g} s: late or dead. Last step: {step}.",
        )
    if any(note.timed_out for note in notes.values()):
        last = min(members, key=lambda number: notes[number].seconds)
        this = " This is that rank." if last == me else ""
        return Verdict(
            (last,),
            "late",
            f"Rank {last} reached {where} too late: the others had stopped after {waited:.3g} s. "
            f"Last step: {step}.{this}",
        )
    return Verdict((), "connection", f"The connection between the ranks broke during {where}.")


def store_gone(host: int | None, own: Note, where: str) -> Verdict:
    """Return the verdict when no notes can be read."""
    if host is None:
        return Verdict(
            (),
            "connection",
            f"{where[0].upper()}{where[1:]} failed ({own.text}), and the store of "
            f"torch.distributed does not answer. Last step: {own.step}.",
        )
    return Verdict(
        (host,),
        "late",
        f"Rank {host}, which hosts the store of torch.distributed, does not answer and did not "
        f"reach {where}: it is late, dead, or has ended. Last step: {own.step}.",
    )


def ranks_named(numbers: Sequence[int]) -> str:
    """Return numbers as the subject of a sentence, such as "Ranks 1, 2"."""
    return f"Rank{'' if len(numbers) == 1 else 's'} {listing(numbers)}"


def listing(numbers: Sequence[int]) -> str:
    """Return numbers separated by commas; a long list is shortened."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
