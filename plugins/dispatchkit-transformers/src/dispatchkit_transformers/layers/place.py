"""Where a step reads and writes, common to all layers of a view."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Place:
    """The rows of a step and the positions that they write, set by the step itself.

    A layer with fewer positions than a sequence may have is a ring: it stores the latest ones, each
    at its position modulo the capacity. Rows without a sequence are at ``sink``, and write to an
    additional position, which is never read.

    Args:
        slots: The indices of all slots (slots,).
        sink: The position of rows without a sequence.
        capacities: The numbers of positions that layers store.

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
        self.leave()

    def enter(self, positions: torch.Tensor, slots: torch.Tensor | None = None) -> None:
        """Begin a step of rows at these positions, in the first slots or in ``slots`` (B,)."""
        self.positions = positions
        self._slots = self._all[: positions.shape[0]] if slots is None else slots
        self._written = {one: self._written_at(positions, one) for one in self._capacities}

    def leave(self) -> None:
        """End the step; state that it left behind would prevent its capture."""
        self.positions = self._slots = self._all[:0]
        self._written = {}

    @property
    def num_rows(self) -> int:
        """Number of rows of the step."""
        return self.positions.shape[0]

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the rows (B,)."""
        return self._slots

    @property
    def has_tokens(self) -> torch.Tensor:
        """True for rows that have at least one of their T tokens (B,), namely the last one."""
        return self.positions[:, -1] < self.sink

    def written(self, capacity: int) -> torch.Tensor:
        """Return where a layer with ``capacity`` stores the step's tokens, as ``positions``."""
        return self._written[capacity]

    def _written_at(self, positions: torch.Tensor, capacity: int) -> torch.Tensor:
        if capacity == self.sink:
            return positions
        return torch.where(positions < self.sink, positions % capacity, capacity)
