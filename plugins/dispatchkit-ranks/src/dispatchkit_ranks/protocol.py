"""What carries facts between ranks, as the deciding part of this package sees it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

#: Whole numbers that one exchange can carry.
MAX_COLUMNS = 26


class Phase(enum.IntEnum):
    """What a rank is doing when it comes to an exchange; ranks in different phases stop."""

    STEP = 0
    SHARE = 1
    CAPTURE = 2
    CLOSE = 3

    @property
    def doing(self) -> str:
        """The phase in words."""
        return _DOING[self]


_DOING = {
    Phase.STEP: "runs a step",
    Phase.SHARE: "compares or shares settings",
    Phase.CAPTURE: "captures",
    Phase.CLOSE: "has closed",
}


class Ranks(Protocol):
    """A fixed set of ranks that meet; every rank makes the same calls in the same order.

    Attributes:
        rank: Number of this one, from 0.
        size: How many there are.
    """

    rank: int
    size: int

    def exchange(
        self,
        row: Sequence[int],
        phase: Phase = Phase.STEP,
        *,
        label: str = "",
        mark: int = 0,
        step: int = 0,
    ) -> list[int]:
        """Return the largest value of each column over all ranks: one small collective.

        Args:
            row: At most ``MAX_COLUMNS`` whole numbers.
            phase: What this rank is doing.
            label: The same in words, for messages.
            mark: A whole number that must be the same on all ranks.
            step: Number of the step, which is the last one known from then on.

        Raises:
            RankError: The ranks cannot go on together.
        """
        ...

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in order; on cold paths only."""
        ...

    def share(self, text: str) -> str:
        """Return the text that rank 0 gave; on cold paths only."""
        ...

    def compare(self, facts: Mapping[str, str]) -> None:
        """Stop on all ranks if any fact is not the same everywhere.

        Raises:
            RankError: It says what differs, and on which ranks.
        """
        ...

    def fail(self, error: BaseException | str) -> None:
        """Tell the other ranks that this one stops, and why."""
        ...
