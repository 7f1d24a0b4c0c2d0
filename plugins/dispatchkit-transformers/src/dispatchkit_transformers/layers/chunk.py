"""Views of one layer's memory for a prompt chunk: T tokens for each of B slots."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from dispatchkit_transformers.layers.attention import AttentionLayer
from dispatchkit_transformers.layers.masks import MaskSpec
from dispatchkit_transformers.layers.recurrent import HybridLayer, RecurrentLayer, States
from dispatchkit_transformers.layers.step_rows import StepRows


@attrs.frozen
class RingMask:
    """Mask over the entries of a ring buffer and the tokens of the chunk itself.

    Attributes:
        capacity: Number of positions that the ring stores.
        window: Number of latest positions that a token may attend to.
        chunk: Size of attention chunks: a token attends to positions from the last multiple of
            this number up to its own position. None without chunked attention.
        sink: Position assigned to padding tokens.
    """

    capacity: int
    window: int
    chunk: int | None
    sink: int

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return a mask (B, 1, T, capacity + T), True where tokens may attend.

        Args:
            positions: Positions of each row's tokens (B, T).
            ahead: Consecutive integers from 0, at least ``capacity`` of them.
        """
        places, tokens = ahead[: self.capacity], positions.shape[1]
        # The position that each ring entry holds before the chunk; negative for unused entries.
        last = positions.amin(1, keepdim=True) - 1
        held = last - (last - places) % self.capacity
        is_padding = positions >= self.sink
        read = torch.cat((held, positions.masked_fill(is_padding, -1)), 1).unsqueeze(1)
        own = positions.unsqueeze(-1)
        since = own - (self.window - 1 if self.chunk is None else own % self.chunk)
        allowed = (read >= since.clamp(min=0)) & (read <= own)
        # Softmax over a fully masked row returns NaN, so padding attends to the whole ring.
        anywhere = torch.nn.functional.pad(torch.ones_like(places, dtype=torch.bool), (0, tokens))
        return (allowed | (is_padding.unsqueeze(-1) & anywhere)).unsqueeze(1)


class ChunkAttention(AttentionLayer):
    """View of a layer's keys and values for a chunk.

    A layer that stores all positions writes first and then reads. A ring buffer reads first,
    because the chunk may overwrite positions that its tokens attend to.
    """

    @property
    def is_ring(self) -> bool:
        """Whether the layer stores fewer positions than a sequence may have."""
        return self.capacity < self.step_rows.sink

    def mask_spec(self, chunk: int | None) -> MaskSpec:
        """Return the mask of this layer; ``chunk`` is the size of attention chunks, if any."""
        if self.is_ring:
            window = self.capacity if self.window is None else self.window
            return RingMask(self.capacity, window, chunk, self.step_rows.sink)
        return super().mask_spec(chunk)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the chunk's keys and values; return the keys and values to attend to.

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
        return memory[:, :, :length].index_select(0, self.step_rows.slots)

    def _write(self, memory: torch.Tensor, states: torch.Tensor) -> None:
        """Write ``states`` (B, heads, T, head size) of the chunk's last T tokens."""
        written = self.step_rows.write_positions(self.capacity)[:, -states.shape[2] :]
        if self.is_ring:
            # All padding is written, in undefined order, to one entry that is never read. Check
            # mode compares whole rings, so the value of this entry must be deterministic.
            states = states.masked_fill((written == self.capacity)[:, None, :, None], 0)
        memory[self.step_rows.slots.unsqueeze(1), :, written] = states.transpose(1, 2)


class ChunkStates(RecurrentLayer):
    """View of a layer's recurrent states for a chunk; the model updates a copy.

    Rows without a token in the chunk keep their states.
    """

    _conv_rows: dict[int, torch.Tensor]
    _recurrent_rows: dict[int, torch.Tensor]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._conv_rows, self._recurrent_rows = {}, {}

    def load(self) -> None:
        """Copy the states of the chunk's slots; the model updates the copies in place."""
        self._conv_rows, self._recurrent_rows = (
            {one: states.index_select(0, self.step_rows.slots) for one, states in kind.items()}
            for kind in self.banks
        )

    def store(self) -> None:
        """Write the states of rows with tokens back to their slots."""
        for bank, rows in zip(self.banks, (self._conv_rows, self._recurrent_rows), strict=True):
            _write_rows(self.step_rows, bank, rows)
        self._conv_rows, self._recurrent_rows = {}, {}

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Convolution states of the chunk's rows."""
        return self._conv_rows

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """Recurrence states of the chunk's rows."""
        return self._recurrent_rows


class ChunkHybrid(ChunkStates, HybridLayer, ChunkAttention):
    """A chunk's view of a layer that has recurrent states, keys and values."""


def chunk_layer(layer: Any) -> Any:
    """Convert a step's view of a layer to a chunk's view of the same memory."""
    if isinstance(layer, HybridLayer):
        return ChunkHybrid(*layer.banks, layer)
    if isinstance(layer, RecurrentLayer):
        return ChunkStates(*layer.banks, layer.step_rows)
    if isinstance(layer, AttentionLayer):
        return ChunkAttention(
            layer.keys, layer.values, layer.step_rows, layer.length, window=layer.window
        )
    return layer


def _write_rows(step_rows: StepRows, memory: States, rows: dict[int, torch.Tensor]) -> None:
    """Write rows of states (B, ...) into the slots of a chunk.

    Rows without a token include padding rows, whose slots may belong to other rows. All rows
    without a token therefore write the first row's values to the first row's slot: the order of
    equal writes does not matter.
    """
    has_tokens = step_rows.has_tokens
    slots = torch.where(has_tokens, step_rows.slots, step_rows.slots[:1])
    for number, states in memory.items():
        shape = (-1, *(1,) * (states.dim() - 1))
        given = torch.where(
            has_tokens.view(shape), rows[number], states.index_select(0, step_rows.slots)
        )
        states[slots] = torch.where(has_tokens.view(shape), given, given[:1])
