"""How facts are exchanged between ranks, as the deciding part of this package sees it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

#: Number of integers that one exchange can carry.
MAX_COLUMNS = 26


class Phase(enum.IntEnum):
    """What a rank is doing when it reaches an exchange; ranks in different phases stop."""

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
    """A fixed set of ranks; every rank makes the same calls in the same order.

    Attributes:
        rank: Index of this rank, from 0.
        size: Number of ranks.
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
        """Return the maximum of each column over all ranks, with one small collective.

        Args:
            row: At most ``MAX_COLUMNS`` integers.
            phase: What this rank is doing.
            label: The phase in words, for messages.
            mark: An integer that must be equal on all ranks.
            step: Number of the step; recorded as the last known step.

        Raises:
            RankError: The ranks cannot continue together.
        """
        ...

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in order; on cold paths only."""
        ...

    def share(self, text: str) -> str:
        """Return rank 0's text; on cold paths only."""
        ...

    def compare(self, facts: Mapping[str, str]) -> None:
        """Stop on all ranks if any fact is not the same everywhere.

        Raises:
            RankError: It names what differs, and on which ranks.
        """
        ...

    def fail(self, error: BaseException | str) -> None:
        """Report to the other ranks that this rank stops, and why."""
        ...
