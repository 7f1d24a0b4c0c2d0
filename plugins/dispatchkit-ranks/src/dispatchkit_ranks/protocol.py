"""The interface for exchanges between ranks, without torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

#: Maximum number of integers in the row of an exchange.
MAX_COLUMNS = 26


class Phase(enum.IntEnum):
    """The activity of a rank at an exchange; ranks in different phases stop with an error."""

    STEP = 0
    SHARE = 1
    CAPTURE = 2
    CLOSE = 3

    @property
    def description(self) -> str:
        """The phase as a verb phrase, for messages."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Phase.STEP: "runs a step",
    Phase.SHARE: "compares settings, exchanges keys or waits at a barrier",
    Phase.CAPTURE: "captures a graph",
    Phase.CLOSE: "has closed its agreement",
}


class Ranks(Protocol):
    """A fixed set of ranks; all ranks must make the same calls in the same order.

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
        """Return the maximum of each column over all ranks, using one small collective.

        Args:
            row: At most ``MAX_COLUMNS`` integers.
            phase: The activity of this rank.
            label: Description of the activity, for messages.
            mark: An integer that must be equal on all ranks.
            step: Number of the step, recorded as the last agreed step; 0 outside steps.

        Raises:
            RankError: A rank is late, has left or has raised an error; the ranks have different
                phases or marks; or the agreement has ended.
        """
        ...

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order; not for use in steps."""
        ...

    def share(self, text: str) -> str:
        """Return the text of rank 0; not for use in steps."""
        ...

    def compare(self, facts: Mapping[str, str]) -> None:
        """End the agreement on all ranks if any value of ``facts`` differs between ranks.

        Raises:
            RankError: Values differ; the error lists them by rank.
        """
        ...

    def fail(self, error: BaseException | str) -> None:
        """Report to the other ranks that this rank stops because of an error."""
        ...
