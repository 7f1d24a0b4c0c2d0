"""SlotCache: the memory of all layers, with a slot per sequence, for graphs of any size.

The library's own static cache has one length for all rows of one batch size. Here every slot has
its own length, and a step reads views: of the first slots, up to its bucket, and of the first
positions, up to its length bucket. So one cache serves all graphs, and sequences are admitted and
dropped as sessions of a ``SlotState``, which keeps them in the first slots.

Rows without a sequence write to an additional position, which is never read. States of recurrent
layers have no such position: rows without a sequence change the states of free slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from dispatchkit.execute import RawBank, SlotMove, SlotState, StepState

from dispatchkit_transformers.layers import (
    AttentionLayer,
    CrossLayer,
    HybridLayer,
    Place,
    RecurrentLayer,
)
from dispatchkit_transformers.layers.kept import Kept, kept_by, kept_of_source, put_prompts

_MASK = "source mask"


class SlotCache:
    """The memory of all layers, and the views of it that steps read.

    Args:
        like: The layers of a cache of the library that has seen a prompt of any size; they
            determine the kinds, shapes, types and devices of the memory.
        num_slots: The most sequences.
        length: Number of positions of each sequence.
        cross: The layers of the library's cross-attention cache, if there is one.
        source_length: The most positions of a source.
        spare: Number of additional positions of layers with windows, for tokens that may be
            rejected: these must not overwrite what the next token attends to.

    Attributes:
        slots: The sequences and their memory: one bank for all tensors of a shape (tensors, slots,
            ...), for keys and values (tensors, slots, heads, capacity + 1, head size).
        source_mask: True where a slot's source has a position (slots, source length).
        sink: The position of rows without a sequence, which is never read.
    """

    num_slots: int
    length: int
    sink: int
    slots: SlotState

    def __init__(
        self,
        like: Sequence[Any],
        num_slots: int,
        length: int,
        *,
        cross: Sequence[Any] = (),
        source_length: int = 0,
        spare: int = 0,
    ) -> None:
        self.num_slots, self.length, self.sink = num_slots, length, length
        self._source_length, self._spare = source_length, spare
        kept = [*map(self._kept_by, like), *map(self._kept_of_source, cross)]
        groups: dict[tuple[Any, ...], list[tuple[int, Kept]]] = {}
        for index, members in enumerate(kept):
            for one in members:
                groups.setdefault(one.facts, []).append((index, one))
        banks = {
            f"{group[0][1].name} {number}": _bank_of(group[0][1], len(group))
            for number, group in enumerate(groups.values())
        }
        device = next(iter(groups.values()))[0][1].states.device
        mask = RawBank((None, source_length), "bool", is_read_only=True)
        self.slots = SlotState({**banks, _MASK: mask}, num_slots, compact=True, device=device)
        self._rings = [
            block
            for block, group in zip(self.memory, groups.values(), strict=True)
            if group[0][1].capacity not in (None, length)
        ]
        placed: list[dict[str, torch.Tensor]] = [{} for _ in kept]
        for block, group in zip(self.memory, groups.values(), strict=True):
            for (index, member), memory in zip(group, block.unbind(0), strict=True):
                placed[index][member.name] = memory
        self.source_mask: torch.Tensor = self.slots.get_bank(_MASK).tensor
        with torch.inference_mode(False):
            self._numbers = torch.arange(num_slots, device=device)
        self._like = like
        self._memory, self._cross = placed[: len(like)], placed[len(like) :]
        capacities = {one.capacity for members in kept for one in members}
        self._capacities = sorted(one for one in capacities if one is not None)
        self._names = itertools.count()

    def _kept_by(self, layer: Any) -> list[Kept]:
        return list(kept_by(layer, self.length, self._spare))

    def _kept_of_source(self, layer: Any) -> list[Kept]:
        return list(kept_of_source(layer, self._source_length))

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors with the memory of all layers."""
        *blocks, _ = self.slots.tensors
        return blocks

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """The tensors of recurrent layers, in which rows without a sequence change free slots."""
        return self.slots.step_state.tensors

    def chunk_state(self, *, runs_twice: bool) -> StepState:
        """Return what chunks of prompts change; rows without a token change none of it.

        Args:
            runs_twice: Whether steps run twice from one state, as in check mode. Chunks read
                states and windows before they write them.
        """
        again = [*self.states, *self._rings] if runs_twice else []
        others = [one for one in self.memory if all(one is not other for other in again)]
        return StepState(tensors=again, scratch=others)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.slots.num_bytes

    def view(self, length: int) -> tuple[Cache, Place]:
        """Return the cache as seen by a step that reads ``length`` positions, and its place."""
        place = Place(self._numbers, self.sink, self._capacities)
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
        """Each layer's part of the memory, as steps access it."""
        return [one for memory in (*self._memory, *self._cross) for one in memory.values()]

    @property
    def has_sources(self) -> bool:
        """Whether it stores cross-attention keys and values of sources."""
        return bool(self._cross)

    @property
    def most_back(self) -> int | None:
        """The most positions at its end that a sequence can discard; None: all of them."""
        if self.states:
            return 0
        # The position that the next token is written to may be lost, too.
        return None if self._capacities == [self.length] else self._spare + 1

    @contextmanager
    def joining(self, rows: int) -> Iterator[int]:
        """Clear the next free slots for sequences, and yield the first of these slots.

        A masked position has weight 0, but 0 * NaN is NaN, so stale positions must be zeroed.
        The sequences leave again if the body raises.
        """
        first, sequences = len(self.slots), list(itertools.islice(self._names, rows))
        try:
            for sequence in sequences:
                self.slots.join(sequence)
            yield first
        except BaseException:
            self.slots.leave(*(one for one in sequences if one in self.slots))
            raise

    def leave(self, rows: Iterable[int], lengths: Sequence[int]) -> list[SlotMove]:
        """Remove sequences from their slots; the last ones move there, on the device.

        Args:
            rows: The slots of the sequences to remove.
            lengths: Used positions of all sequences, in their order.
        """
        there = self.slots.sessions
        used = dict(zip(there, lengths, strict=True))
        return self.slots.leave(*(there[row] for row in rows), used=used)

    def fill(self, start: int, layers: Sequence[Any], paddings: Sequence[int], width: int) -> None:
        """Write prompts to cleared slots from ``start`` on, without their left padding.

        Args:
            start: The first slot.
            layers: The layers of a cache of the library that has seen the prompts.
            paddings: Positions of padding before each row.
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
        """Write sources to cleared slots from ``start`` on.

        Args:
            start: The first slot.
            cross: The layers of a cross-attention cache of the library that has seen the sources.
            mask: True where a source has a position (B, T).
        """
        rows, length = mask.shape
        for layer, memory in zip(cross, self._cross, strict=True):
            for kept in self._kept_of_source(layer):
                memory[kept.name][start : start + rows, :, :length] = kept.states
        self.source_mask[start : start + rows, :length] = mask


def _bank_of(kept: Kept, number: int) -> RawBank:
    """Return a bank for a number of tensors with the same properties."""
    return RawBank(
        (number, None, *kept.slot_shape),
        kept.states.dtype,
        positions=None if kept.capacity is None else 3,
        is_read_only=kept.source_length is not None,
    )


def _layer(given: Any, memory: dict[str, torch.Tensor], place: Place, length: int) -> Any:
    """Return a step's view of a layer like one of the library."""
    convolutions, recurrences = (
        {int(name.rpartition(" ")[2]): one for name, one in memory.items() if name.startswith(kind)}
        for kind in ("convolution", "recurrence")
    )
    if not memory:
        return type(given)()  # the library's own layer without memory
    if "keys" not in memory:
        return RecurrentLayer(convolutions, recurrences, place)
    capacity = memory["keys"].shape[2] - 1
    attention = AttentionLayer(
        memory["keys"],
        memory["values"],
        place,
        min(length, capacity),
        window=given.sliding_window if given.is_sliding else None,
    )
    if not convolutions and not recurrences:
        return attention
    return HybridLayer(convolutions, recurrences, attention)
