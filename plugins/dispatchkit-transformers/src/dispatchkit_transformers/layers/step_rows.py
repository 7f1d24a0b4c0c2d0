"""The rows of a step and their positions, shared by all layers of a view."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StepRows:
    """The rows of the current step, their slots and the positions that they write.

    A layer that stores fewer positions than a sequence may have is a ring buffer. It stores the
    latest positions, each in the entry with index ``position % capacity``. Rows without a sequence
    have position ``sink``, and write to an additional entry that is never read.

    Args:
        slots: Indices of all slots (slots,).
        sink: The position of rows without a sequence.
        capacities: Numbers of positions that the layers store.

    Attributes:
        sink: The position of rows without a sequence.
        positions: Positions of each row's tokens (B, T); empty between steps.
    """

    sink: int
    positions: torch.Tensor
    _slots: torch.Tensor
    _written: dict[int, torch.Tensor]

    def __init__(self, slots: torch.Tensor, sink: int, capacities: Iterable[int]) -> None:
        self._all, self.sink = slots, sink
        self._capacities = tuple(capacities)
        self.end()

    def begin(self, positions: torch.Tensor, slots: torch.Tensor | None = None) -> None:
        """Begin a step at ``positions`` (B, T), in ``slots`` (B,) or in the first B slots."""
        self.positions = positions
        self._slots = self._all[: positions.shape[0]] if slots is None else slots
        self._written = {one: self._written_at(positions, one) for one in self._capacities}

    def end(self) -> None:
        """End the step and drop its tensors: a step that keeps tensors cannot be captured."""
        self.positions = self._slots = self._all[:0]
        self._written = {}

    @property
    def num_rows(self) -> int:
        """Number of rows in the step."""
        return self.positions.shape[0]

    @property
    def slots(self) -> torch.Tensor:
        """Slots of the rows (B,)."""
        return self._slots

    @property
    def has_tokens(self) -> torch.Tensor:
        """True for rows with at least one token (B,); padding precedes tokens."""
        return self.positions[:, -1] < self.sink

    def write_positions(self, capacity: int) -> torch.Tensor:
        """Return the entries (B, T) in which a layer of this capacity stores the step's tokens."""
        return self._written[capacity]

    def _written_at(self, positions: torch.Tensor, capacity: int) -> torch.Tensor:
        if capacity == self.sink:
            return positions
        return torch.where(positions < self.sink, positions % capacity, capacity)
