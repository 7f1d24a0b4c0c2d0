"""SlotCache: one static key/value cache, a slot for each sequence, read by graphs of any size.

The library's own static cache keeps one length for all rows of one batch size. Here every slot
has a length of its own, and a step reads views: of the first slots, as many as its bucket, and
of the first positions, as many as its length bucket. So one cache serves all graphs, sequences
come and go, and a finished one's slot is filled by moving the last one there.

One position more than asked for is kept in each slot, which is never read: rows without a
sequence write there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Place:
    """Where a step writes; one for all layers of a view, set by the step itself.

    Args:
        slots: The numbers of all slots (slots,).

    Attributes:
        positions: Position of each row's token (B,) during a step; None between steps.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots: torch.Tensor = slots
        self.positions: torch.Tensor | None = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # the library is not type-checked
    """One layer of the cache as a step of one length sees it.

    Args:
        keys: All slots' keys (slots, heads, length + 1, head size).
        values: All slots' values, likewise.
        place: Where the step writes.
        length: Positions that the step reads.
    """

    keys: torch.Tensor
    values: torch.Tensor
    place: Place
    length: int
    device: torch.device
    dtype: torch.dtype

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, place: Place, length: int) -> None:
        super().__init__()
        self.keys, self.values, self.place, self.length = keys, values, place, length
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was made with the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row at its own position; return what the step may read.

        Shapes: states (B, heads, 1, head size), results (B, heads, length, head size).
        """
        rows = key_states.shape[0]
        slots = self.place.slots[:rows]
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            # Compiled code does this in place; for a scatter it copies all rows, there and back.
            memory[slots, :, self.place.positions] = states.squeeze(2)
        return self.keys[:rows, :, : self.length], self.values[:rows, :, : self.length]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return length and offset of what is read; the step brings its own mask, though."""
        return self.length, 0

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: rows have lengths of their own, and the step gives their positions."""
        return 0

    def get_max_length(self) -> int:
        """Return the positions that are read."""
        return self.length

    get_max_cache_shape = get_max_length  # what the releases before 5 call it


@attrs.frozen
class Move:
    """One sequence that goes to another slot.

    Attributes:
        source: The slot it is in.
        target: The slot it goes to.
        length: Positions of it that are in use.
    """

    source: int
    target: int
    length: int


class SlotCache:
    """The memory of all layers, and the views that steps read.

    Args:
        like: One layer's keys and values each (B, heads, T, head size), of any B and T: the
            shapes, types and devices to make memory for.
        num_slots: Sequences there is room for.
        length: Positions of each.

    Attributes:
        memory: The tensors that hold everything: layers of one shape share one
            (layers x 2, slots, heads, length + 1, head size).
        sink: The position that is never read.
    """

    num_slots: int
    length: int
    sink: int

    def __init__(
        self, like: Sequence[tuple[torch.Tensor, torch.Tensor]], num_slots: int, length: int
    ) -> None:
        self.num_slots, self.length, self.sink = num_slots, length, length
        flat = [tensor for pair in like for tensor in pair]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, tensor in enumerate(flat):
            facts = (tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
            groups.setdefault(facts, []).append(index)
        self.memory: list[torch.Tensor] = []
        placed: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False):
            for (heads, size, dtype, device), members in groups.items():
                shape = (len(members), num_slots, heads, length + 1, size)
                block = torch.zeros(shape, dtype=dtype, device=device)
                self.memory.append(block)
                placed |= dict(zip(members, block.unbind(0), strict=True))
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            (placed[2 * index], placed[2 * index + 1]) for index in range(len(like))
        ]
        self._slots = torch.arange(num_slots, device=flat[0].device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(block.untyped_storage().nbytes() for block in self.memory)

    def view(self, length: int) -> tuple[Cache, Place]:
        """Return the cache as a step that reads so many positions takes it, and its place."""
        place = Place(self._slots)
        layers = [SlotLayer(keys, values, place, length) for keys, values in self.layers]
        return Cache(layers=layers), place

    def clear(self, start: int, rows: int) -> None:
        """Clear slots from ``start`` on.

        A masked position has weight 0, but 0 * NaN is NaN, so stale positions must be zeroed.
        """
        for block in self.memory:
            block[:, start : start + rows].zero_()

    def fill(
        self,
        start: int,
        states: Sequence[tuple[torch.Tensor, torch.Tensor]],
        paddings: Sequence[int],
    ) -> None:
        """Put prompts into the slots from ``start`` on, without their left padding.

        Args:
            start: The first slot.
            states: One layer's keys and values each (B, heads, T, head size).
            paddings: Positions of padding in front of each row.
        """
        rows = len(paddings)
        for (keys, values), pair in zip(self.layers, states, strict=True):
            for memory, given in zip((keys, values), pair, strict=True):
                if not any(paddings):
                    _put(memory[start : start + rows], given)
                    continue
                for row, padding in enumerate(paddings):
                    _put(memory[start + row], given[row, :, padding:])

    def move(self, moves: Sequence[Move]) -> int:
        """Copy sequences to other slots, on the device; returns the bytes copied."""
        num_bytes = 0
        for block in self.memory:
            for one in moves:
                source = block[:, one.source, :, : one.length]
                _put(block[:, one.target], source)
                num_bytes += source.numel() * source.element_size()
        return num_bytes


def _put(slots: torch.Tensor, states: torch.Tensor) -> None:
    """Write states to the first positions of slots, and clear what was left behind them.

    A mask gives that no weight, but no weight times what is no number is none either.

    Shapes: slots (..., length + 1, head size), states (..., T, head size).
    """
    length = states.shape[-2]
    slots[..., :length, :] = states
    slots[..., length:, :] = 0


def plan_moves(lengths: Sequence[int], drop: Sequence[int]) -> tuple[list[Move], list[int]]:
    """Return how to close the gaps that dropped rows leave, with the fewest moves.

    Args:
        lengths: Positions in use, for each row.
        drop: Rows that go.

    Returns:
        The moves, and for each row that stays, in its new order, where it was.
    """
    gone = set(drop)
    num_left = len(lengths) - len(gone)
    order = list(range(num_left))
    movers = (row for row in range(num_left, len(lengths)) if row not in gone)
    moves = []
    for target in sorted(row for row in gone if row < num_left):
        source = next(movers)
        moves.append(Move(source, target, lengths[source]))
        order[target] = source
    return moves, order


def states_of(cache: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the keys and values of each layer of a cache of the library."""
    for layer in cache.layers:
        yield layer.keys, layer.values
