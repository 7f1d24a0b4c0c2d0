"""Determine from the ranks' notes which ranks made the others stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

WAITED, RAISED, LEFT = "waited", "raised", "left"


@attrs.frozen
class Note:
    """The reason why a rank stopped.

    Attributes:
        kind: ``waited`` (its exchange failed), ``raised`` (an error) or ``left`` (the agreement).
        step: Last step that the rank agreed on.
        text: The error message.
        seconds: How long the rank had waited when its exchange failed.
        timed_out: Whether the exchange exceeded its time limit; False if a connection broke.
    """

    kind: str
    step: int
    text: str
    seconds: float = 0.0
    timed_out: bool = False


@attrs.frozen
class Verdict:
    """The ranks that made the others stop, and the reason.

    Attributes:
        ranks: Global ranks that made the others stop.
        reason: The reason, as in ``RankError.reason``.
        text: The explanation.
    """

    ranks: tuple[int, ...]
    reason: str
    text: str


def verdict(notes: Mapping[int, Note], members: Sequence[int], me: int, where: str) -> Verdict:
    """Return the ranks that made the others stop, and the reason.

    Args:
        notes: The notes that were found, by global rank.
        members: The global ranks of all members.
        me: The global rank of this process.
        where: The point that this rank reached, in words.
    """
    step = max((note.step for note in notes.values()), default=0)
    raised = [number for number in members if number in notes and notes[number].kind == RAISED]
    if raised:
        report = "; ".join(
            f"rank {number} raised {notes[number].text} (last agreed step: {notes[number].step})"
            for number in raised
        )
        return Verdict(tuple(raised), RAISED, f"{report[0].upper()}{report[1:]}.")
    left = [number for number in members if number in notes and notes[number].kind == LEFT]
    if left:
        by_step: dict[int, list[int]] = {}
        for number in left:
            by_step.setdefault(notes[number].step, []).append(number)
        report = "; ".join(
            f"{rank_subject(numbers).lower()} left after step {after}"
            for after, numbers in by_step.items()
        )
        return Verdict(
            tuple(left),
            LEFT,
            f"{report[0].upper()}{report[1:]}, while rank {me} reached {where}. All ranks must run "
            "the same number of steps; an idle rank joins each step with 0 tokens.",
        )
    is_timeout = any(note.timed_out for note in notes.values())
    waited = max((note.seconds for note in notes.values()), default=0.0)
    missing = [number for number in members if number not in notes]
    if missing:
        # All ranks have agreed on the earlier steps; otherwise, no rank would be waiting here.
        lost = (
            f"{rank_subject(missing)} did not reach {where}"
            + (f" within {waited:.3g} s" if is_timeout else ", and a connection broke")
            + f". Last agreed step: {step}."
        )
        return Verdict(tuple(missing), "late", f"{lost} {_if_late(len(missing), is_timeout)}")
    if is_timeout:
        last = min(members, key=lambda number: notes[number].seconds)
        this = " (this process)" if last == me else ""
        return Verdict(
            (last,),
            "late",
            f"Rank {last}{this} reached {where} too late: other ranks had stopped "
            f"waiting after {waited:.3g} s. Last agreed step: {step}. To wait longer, increase "
            "timeout or setup_timeout.",
        )
    return Verdict(
        (),
        "connection",
        f"A connection between the ranks broke during {where}. Check the logs of all ranks.",
    )


def store_verdict(host: int | None, own: Note, where: str) -> Verdict:
    """Return the verdict for a store that does not answer."""
    if host is None:
        return Verdict(
            (),
            "connection",
            f"{where[0].upper()}{where[1:]} failed ({own.text}), and the torch.distributed store "
            f"does not answer. Last agreed step: {own.step}. Check that the process that hosts the "
            "store is running.",
        )
    return Verdict(
        (host,),
        "late",
        f"{where[0].upper()}{where[1:]} failed, and rank {host}, which hosts the torch.distributed "
        f"store, does not answer. Last agreed step: {own.step}. {_if_late(1, own.timed_out)}",
    )


def _if_late(number: int, is_timeout: bool) -> str:
    """Return advice for one or more ranks that did not arrive."""
    process, they = (
        ("its process is", "it is") if number == 1 else ("their processes are", "they are")
    )
    check = f"Check whether {process} still running"
    if not is_timeout:  # a longer timeout would not help
        return f"{check}, and read the logs of all ranks."
    return f"{check}; if {they} only late, increase timeout or setup_timeout."


def rank_subject(numbers: Sequence[int]) -> str:
    """Return ranks as the subject of a sentence, such as "Ranks 1, 2"."""
    return f"Rank{'' if len(numbers) == 1 else 's'} {join_ranks(numbers)}"


def join_ranks(numbers: Sequence[int]) -> str:
    """Return ranks separated by commas, shortened after eight."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
