"""SlotCache: one static memory, a slot for each sequence, read by graphs of any size.

The library's own static cache keeps one length for all rows of one batch size. Here every slot
has a length of its own, and a step reads views: of the first slots, as many as its bucket, and
of the first positions, as many as its length bucket. So one cache serves all graphs, sequences
come and go, and a finished one's slot is filled by moving the last one there.

One position more than asked for is kept in each slot, which is never read: rows without a
sequence write there. States of recurrent layers have no such place: rows without a sequence change
those of free slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from dispatchkit_transformers.layers import (
    AttentionLayer,
    CrossLayer,
    HybridLayer,
    Place,
    RecurrentLayer,
)
from dispatchkit_transformers.layers.kept import Kept, kept_by, kept_of_source, put_prompts


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


@attrs.frozen(eq=False)
class Block:
    """The memory of all that has one shape.

    Attributes:
        tensor: All of it (members, slots, ...), for keys and values (members, slots, heads,
            capacity + 1, head size).
        capacity: Positions that are kept of keys and values; None for others.
        is_source: It is of sources, which steps only read.
    """

    tensor: torch.Tensor
    capacity: int | None
    is_source: bool


class SlotCache:
    """The memory of all layers, and the views that steps read.

    Args:
        like: The layers of a cache of the library that has seen a prompt of any size: the kinds,
            shapes, types and devices to make memory for.
        num_slots: Sequences there is room for.
        length: Positions of each.
        cross: The layers of the library's cross-attention cache, where there is one.
        source_length: Most positions of a source.

    Attributes:
        blocks: The tensors that hold everything.
        source_mask: True where a slot's source has a position (slots, source length).
        sink: The position of rows without a sequence, which is never read.
    """

    num_slots: int
    length: int
    sink: int

    def __init__(
        self,
        like: Sequence[Any],
        num_slots: int,
        length: int,
        *,
        cross: Sequence[Any] = (),
        source_length: int = 0,
    ) -> None:
        self.num_slots, self.length, self.sink = num_slots, length, length
        self._source_length = source_length
        kept = [*map(self._kept_by, like), *map(self._kept_of_source, cross)]
        groups: dict[tuple[Any, ...], list[tuple[int, Kept]]] = {}
        for index, members in enumerate(kept):
            for one in members:
                groups.setdefault(one.facts, []).append((index, one))
        self.blocks: list[Block] = []
        placed: list[dict[str, torch.Tensor]] = [{} for _ in kept]
        with torch.inference_mode(False):
            for group in groups.values():
                _, one = group[0]
                shape = (len(group), num_slots, *one.slot_shape)
                block = torch.zeros(shape, dtype=one.states.dtype, device=one.states.device)
                self.blocks.append(Block(block, one.capacity, one.source_length is not None))
                for (index, member), memory in zip(group, block.unbind(0), strict=True):
                    placed[index][member.name] = memory
            device = self.blocks[0].tensor.device
            self._slots = torch.arange(num_slots, device=device)
            shape = (num_slots, source_length)
            self.source_mask: torch.Tensor = torch.zeros(shape, dtype=torch.bool, device=device)
        self._like = like
        self._memory, self._cross = placed[: len(like)], placed[len(like) :]
        self._capacities = {one.capacity for one in self.blocks if one.capacity is not None}

    def _kept_by(self, layer: Any) -> list[Kept]:
        return list(kept_by(layer, self.length))

    def _kept_of_source(self, layer: Any) -> list[Kept]:
        return list(kept_of_source(layer, self._source_length))

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold everything."""
        return [one.tensor for one in self.blocks]

    @property
    def states(self) -> list[torch.Tensor]:
        """The tensors of which rows without a sequence change what may be in use."""
        return [one.tensor for one in self.blocks if one.capacity is None and not one.is_source]

    @property
    def scratch(self) -> list[torch.Tensor]:
        """The tensors in which rows without a sequence have a place of their own."""
        return [one.tensor for one in self.blocks if one.capacity is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(block.untyped_storage().nbytes() for block in self.memory)

    def view(self, length: int) -> tuple[Cache, Place]:
        """Return the cache as a step that reads so many positions takes it, and its place."""
        place = Place(self._slots, self.sink, sorted(self._capacities))
        layers = [
            _layer(given, memory, place, length)
            for given, memory in zip(self._like, self._memory, strict=True)
        ]
        if not self._cross:
            return Cache(layers=layers), place
        cross = [CrossLayer(one["keys"], one["values"], place) for one in self._cross]
        return EncoderDecoderCache(Cache(layers=layers), Cache(layers=cross)), place

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What each layer has of the memory, as steps reach it."""
        return [one for memory in (*self._memory, *self._cross) for one in memory.values()]

    @property
    def has_sources(self) -> bool:
        """Whether it keeps what a decoder needs of an encoder's states."""
        return bool(self._cross)

    def clear(self, start: int, rows: int) -> None:
        """Clear slots from ``start`` on.

        A masked position has weight 0, but 0 * NaN is NaN, so stale positions must be zeroed.
        """
        for block in self.memory:
            block[:, start : start + rows].zero_()

    def fill(self, start: int, layers: Sequence[Any], paddings: Sequence[int], width: int) -> None:
        """Put prompts into the slots from ``start`` on, without their left padding.

        Args:
            start: The first slot.
            layers: The layers of a cache of the library that has seen them.
            paddings: Positions of padding in front of each row.
            width: Positions of each row, padding included.
        """
        rows = len(paddings)
        for layer, memory in zip(layers, self._memory, strict=True):
            for kept in self._kept_by(layer):
                slots = memory[kept.name][start : start + rows]
                if kept.capacity is None:
                    slots.copy_(kept.states)
                else:
                    put_prompts(slots, kept.states, paddings, width)

    def fill_sources(self, start: int, cross: Sequence[Any], mask: torch.Tensor) -> None:
        """Put sources into the slots from ``start`` on.

        Args:
            start: The first slot.
            cross: The layers of a cross-attention cache of the library that has seen them.
            mask: True where a source has a position (B, T).
        """
        rows, length = mask.shape
        for layer, memory in zip(cross, self._cross, strict=True):
            for kept in self._kept_of_source(layer):
                slots = memory[kept.name][start : start + rows]
                slots[:, :, :length] = kept.states
                slots[:, :, length:] = 0
        self.source_mask[start : start + rows, :length] = mask
        self.source_mask[start : start + rows, length:] = False

    def move(self, moves: Sequence[Move]) -> int:
        """Copy sequences to other slots, on the device; returns the bytes copied."""
        num_bytes = 0
        for one in moves if self._cross else ():
            self.source_mask[one.target] = self.source_mask[one.source]
        for block in self.blocks:
            for one in moves:
                source, target = block.tensor[:, one.source], block.tensor[:, one.target]
                if block.capacity is not None:
                    # A ring that is full is in use to its end.
                    source = source[..., : min(one.length, block.capacity), :]
                    target[..., source.shape[-2] :, :] = 0
                    target = target[..., : source.shape[-2], :]
                target.copy_(source)
                num_bytes += source.numel() * source.element_size()
        return num_bytes


def _layer(given: Any, memory: dict[str, torch.Tensor], place: Place, length: int) -> Any:
    """Return what a step sees of a layer like one of the library."""
    convolutions, recurrences = (
        {int(name.rpartition(" ")[2]): one for name, one in memory.items() if name.startswith(kind)}
        for kind in ("convolution", "recurrence")
    )
    if not memory:
        return type(given)()  # what the library has for a layer without memory of its own
    if "keys" not in memory:
        return RecurrentLayer(convolutions, recurrences, place)
    capacity = memory["keys"].shape[2] - 1
    attention = AttentionLayer(
        memory["keys"],
        memory["values"],
        place,
        min(length, capacity),
        is_sliding=bool(given.is_sliding),
    )
    if not convolutions and not recurrences:
        return attention
    return HybridLayer(convolutions, recurrences, attention)


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
