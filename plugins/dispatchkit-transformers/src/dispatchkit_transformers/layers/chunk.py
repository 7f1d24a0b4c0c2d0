"""A prompt chunk's view of one layer's memory: T tokens for each of B slots."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from dispatchkit_transformers.layers.attention import AttentionLayer
from dispatchkit_transformers.layers.masks import LayerLook
from dispatchkit_transformers.layers.place import Place
from dispatchkit_transformers.layers.recurrent import HybridLayer, RecurrentLayer, States


@attrs.frozen
class RingLook:
    """The positions of a ring that a chunk may attend to: the latest before it, then its own.

    Attributes:
        capacity: Number of positions that the ring stores.
        window: Number of latest positions that tokens attend to.
        chunk: Tokens attend to positions since the last multiple of this; None: all of the window.
        sink: The position of padding.
    """

    capacity: int
    window: int
    chunk: int | None
    sink: int

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return True where tokens may attend (B, 1, T, capacity + T).

        Args:
            positions: Positions of each row's tokens (B, T).
            ahead: Integers from 0 on, at least ``capacity`` of them.
        """
        places, tokens = ahead[: self.capacity], positions.shape[1]
        # The positions in the ring when the chunk begins; below 0 if it is not full.
        last = positions.amin(1, keepdim=True) - 1
        held = last - (last - places) % self.capacity
        is_padding = positions >= self.sink
        read = torch.cat((held, positions.masked_fill(is_padding, -1)), 1).unsqueeze(1)
        own = positions.unsqueeze(-1)
        since = own - (self.window - 1 if self.chunk is None else own % self.chunk)
        allowed = (read >= since.clamp(min=0)) & (read <= own)
        # A token that may not attend anywhere would be NaN, and so would what depends on it.
        anywhere = torch.nn.functional.pad(torch.ones_like(places, dtype=torch.bool), (0, tokens))
        return (allowed | (is_padding.unsqueeze(-1) & anywhere)).unsqueeze(1)


class ChunkAttention(AttentionLayer):
    """Keys and values of all positions, or of the latest ones in a ring.

    A layer with all positions writes and then reads. A ring reads before it writes, because a
    chunk may be longer than the ring.
    """

    @property
    def is_ring(self) -> bool:
        """Whether it stores fewer positions than a sequence may have."""
        return self.capacity < self.place.sink

    def look(self, chunk: int | None) -> LayerLook:
        """Return what a chunk may attend to here."""
        if self.is_ring:
            window = self.capacity if self.window is None else self.window
            return RingLook(self.capacity, window, chunk, self.place.sink)
        return super().look(chunk)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a chunk into the slots of its prompts; return what these may read.

        Shapes: states (B, heads, T, head size), results (B, heads, length, head size) or, for a
        ring, (B, heads, capacity + T, head size).
        """
        pairs = ((self.keys, key_states), (self.values, value_states))
        if not self.is_ring:
            for memory, states in pairs:
                self._write(memory, states)
            keys, values = (self._read(memory, self.length) for memory, _ in pairs)
            return keys, values
        keys, values = (
            torch.cat((self._read(memory, self.capacity), states), 2) for memory, states in pairs
        )
        for memory, states in pairs:
            self._write(memory, states[:, :, -self.capacity :])
        return keys, values

    def _read(self, memory: torch.Tensor, length: int) -> torch.Tensor:
        return memory[:, :, :length].index_select(0, self.place.slots)

    def _write(self, memory: torch.Tensor, states: torch.Tensor) -> None:
        """Write the last tokens of the chunk (B, heads, T, head size)."""
        written = self.place.written(self.capacity)[:, -states.shape[2] :]
        if self.is_ring:
            # Padding is written to one position that is never read, and which value remains there
            # is undefined. Check mode compares windows, so it must always be the same.
            states = states.masked_fill((written == self.capacity)[:, None, :, None], 0)
        memory[self.place.slots.unsqueeze(1), :, written] = states.transpose(1, 2)


class ChunkStates(RecurrentLayer):
    """States of fixed size, copied for the duration of a chunk.

    Rows without a token in the chunk keep their states.
    """

    _conv_rows: dict[int, torch.Tensor]
    _recurrent_rows: dict[int, torch.Tensor]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._conv_rows, self._recurrent_rows = {}, {}

    def enter(self) -> None:
        """Copy the states of the chunk's slots; the library changes the copies in place."""
        self._conv_rows, self._recurrent_rows = (
            {one: states.index_select(0, self.place.slots) for one, states in kind.items()}
            for kind in self.banks
        )

    def leave(self) -> None:
        """Write back the states of rows that had tokens."""
        for bank, rows in zip(self.banks, (self._conv_rows, self._recurrent_rows), strict=True):
            _write_rows(self.place, bank, rows)
        self._conv_rows, self._recurrent_rows = {}, {}

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """The convolution states of the chunk's rows."""
        return self._conv_rows

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """The recurrence states of the chunk's rows."""
        return self._recurrent_rows


class ChunkHybrid(ChunkStates, HybridLayer, ChunkAttention):
    """A layer that stores recurrent states, keys and values."""


def chunk_layer(layer: Any) -> Any:
    """Return the chunk's view of the memory that steps see as ``layer``."""
    if isinstance(layer, HybridLayer):
        return ChunkHybrid(*layer.banks, layer)
    if isinstance(layer, RecurrentLayer):
        return ChunkStates(*layer.banks, layer.place)
    if isinstance(layer, AttentionLayer):
        return ChunkAttention(
            layer.keys, layer.values, layer.place, layer.length, window=layer.window
        )
    return layer


def _write_rows(place: Place, memory: States, rows: dict[int, torch.Tensor]) -> None:
    """Write rows of states (B, ...) into the slots of a chunk.

    Rows of padding refer to a slot that others use. They write the same as the first row, at the
    same place: of equal values it does not matter which is written last.
    """
    has_tokens = place.has_tokens
    slots = torch.where(has_tokens, place.slots, place.slots[:1])
    for number, states in memory.items():
        shape = (-1, *(1,) * (states.dim() - 1))
        given = torch.where(
            has_tokens.view(shape), rows[number], states.index_select(0, place.slots)
        )
        states[slots] = torch.where(has_tokens.view(shape), given, given[:1])
