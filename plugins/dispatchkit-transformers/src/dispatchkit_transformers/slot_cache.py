"""The memory of all layers, with one slot per sequence, shared by graphs of all sizes.

The static cache of transformers has one length for all rows and one batch size. In a ``SlotCache``,
the length differs between slots. A step reads a view with as many slots as its capture size, and as
many positions as its cache length. One cache therefore serves all graphs. Sequences join and leave
as sessions of a ``SlotState``, which keeps them in the first slots.

Rows without a sequence write to an additional position that is never read. In recurrent layers,
which have no positions, these rows update the states of free slots.
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
    RecurrentLayer,
    StepRows,
)
from dispatchkit_transformers.layers.layer_tensors import (
    LayerTensor,
    layer_tensors,
    source_tensors,
    write_prompts,
)

_MASK = "source mask"


class SlotCache:
    """The memory of all layers, and the views that steps read.

    Args:
        like: Layers of a transformers cache after a prompt of any size. These layers determine the
            kinds, shapes, dtypes and devices of the memory.
        num_slots: Maximum number of sequences.
        length: Number of positions per sequence.
        cross: Layers of the cross-attention cache of transformers, if the model has one.
        source_length: Maximum number of positions of a source (an encoder output).
        spare: Number of additional positions in layers with windows. These positions make room for
            drafts: a rejected draft must not overwrite a position that the next token attends to.

    Attributes:
        slots: The sequences and their memory. Tensors of equal shape share a bank (tensors, slots,
            ...). Banks of keys and values have shape (tensors, slots, heads, capacity + 1, head
            size).
        source_mask: True where the source of a slot has a position (slots, source length).
        sink: Position assigned to rows without a sequence; it is never read.
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
        stored = [*map(self._layer_tensors, like), *map(self._source_tensors, cross)]
        groups: dict[tuple[Any, ...], list[tuple[int, LayerTensor]]] = {}
        for index, members in enumerate(stored):
            for one in members:
                groups.setdefault(one.bank_key, []).append((index, one))
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
        memory_of: list[dict[str, torch.Tensor]] = [{} for _ in stored]
        for block, group in zip(self.memory, groups.values(), strict=True):
            for (index, member), memory in zip(group, block.unbind(0), strict=True):
                memory_of[index][member.name] = memory
        self.source_mask: torch.Tensor = self.slots.get_bank(_MASK).tensor
        with torch.inference_mode(False):
            self._numbers = torch.arange(num_slots, device=device)
        self._like = like
        self._memory, self._cross = memory_of[: len(like)], memory_of[len(like) :]
        capacities = {one.capacity for members in stored for one in members}
        self._capacities = sorted(one for one in capacities if one is not None)
        self._names = itertools.count()

    def _layer_tensors(self, layer: Any) -> list[LayerTensor]:
        return list(layer_tensors(layer, self.length, self._spare))

    def _source_tensors(self, layer: Any) -> list[LayerTensor]:
        return list(source_tensors(layer, self._source_length))

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors of all banks except the source mask: the memory of all layers."""
        *blocks, _ = self.slots.tensors
        return blocks

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """The states of recurrent layers; rows without a sequence update those of free slots."""
        return self.slots.step_state.tensors

    def chunk_state(self, *, runs_twice: bool) -> StepState:
        """Return the state that prompt chunks change; padding changes nothing that is read.

        Args:
            runs_twice: Whether each step runs twice from the same state, as in check mode. Chunks
                read states and windows before writing them, so both must be restored for the second
                run.
        """
        again = [*self.states, *self._rings] if runs_twice else []
        others = [one for one in self.memory if all(one is not other for other in again)]
        return StepState(tensors=again, scratch=others)

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache in bytes."""
        return self.slots.num_bytes

    def view(self, length: int) -> tuple[Cache, StepRows]:
        """Return a step's view of ``length`` positions of the cache, and the rows of that step."""
        step_rows = StepRows(self._numbers, self.sink, self._capacities)
        layers = [
            _layer(given, memory, step_rows, length)
            for given, memory in zip(self._like, self._memory, strict=True)
        ]
        if not self._cross:
            return Cache(layers=layers), step_rows
        cross = [CrossLayer(one["keys"], one["values"], step_rows) for one in self._cross]
        return EncoderDecoderCache(Cache(layers=layers), Cache(layers=cross)), step_rows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers, which are views of the banks."""
        return [one for memory in (*self._memory, *self._cross) for one in memory.values()]

    @property
    def has_sources(self) -> bool:
        """Whether the cache stores cross-attention keys and values."""
        return bool(self._cross)

    @property
    def max_discarded(self) -> int | None:
        """Maximum number of positions that a sequence can discard at its end; None for no limit."""
        if self.states:
            return 0
        # Add 1, because a window includes the position of the next token itself.
        return None if self._capacities == [self.length] else self._spare + 1

    @contextmanager
    def joining(self, rows: int) -> Iterator[int]:
        """Clear the next ``rows`` free slots for new sequences, and yield the first slot.

        Masked positions get weight 0, but 0 * NaN is NaN, so stale positions must be zeroed. If
        the context raises an error, the sequences are removed again.
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
        """Remove sequences, and move the last sequences to the freed slots.

        Args:
            rows: Slots of the sequences to remove.
            lengths: Number of used positions of every sequence, by slot.
        """
        there = self.slots.sessions
        used = dict(zip(there, lengths, strict=True))
        return self.slots.leave(*(there[row] for row in rows), used=used)

    def fill(self, start: int, layers: Sequence[Any], paddings: Sequence[int], width: int) -> None:
        """Write prompts, without their left padding, to cleared slots from ``start`` on.

        Args:
            start: The first slot.
            layers: Layers of a transformers cache after the prompts.
            paddings: Number of padding positions at the start of each row.
            width: Number of positions of each row, padding included.
        """
        rows = len(paddings)
        for layer, memory in zip(layers, self._memory, strict=True):
            for tensor in self._layer_tensors(layer):
                slots = memory[tensor.name][start : start + rows]
                if tensor.capacity is None:
                    slots.copy_(tensor.states)
                else:
                    write_prompts(slots, tensor.states, paddings, width)

    def fill_sources(self, start: int, cross: Sequence[Any], mask: torch.Tensor) -> None:
        """Write sources to cleared slots from ``start`` on.

        Args:
            start: The first slot.
            cross: Layers of a transformers cross-attention cache, computed from the sources.
            mask: True where a source has a position (B, T).
        """
        rows, length = mask.shape
        for layer, memory in zip(cross, self._cross, strict=True):
            for tensor in self._source_tensors(layer):
                memory[tensor.name][start : start + rows, :, :length] = tensor.states
        self.source_mask[start : start + rows, :length] = mask


def _bank_of(tensor: LayerTensor, number: int) -> RawBank:
    """Return a bank for ``number`` tensors like ``tensor``."""
    return RawBank(
        (number, None, *tensor.slot_shape),
        tensor.states.dtype,
        positions=None if tensor.capacity is None else 3,
        is_read_only=tensor.source_length is not None,
    )


def _layer(given: Any, memory: dict[str, torch.Tensor], step_rows: StepRows, length: int) -> Any:
    """Return a step's view of the memory of the layer ``given``."""
    convolutions, recurrences = (
        {int(name.rpartition(" ")[2]): one for name, one in memory.items() if name.startswith(kind)}
        for kind in ("convolution", "recurrence")
    )
    if not memory:
        return type(given)()  # a layer class of transformers that stores nothing
    if "keys" not in memory:
        return RecurrentLayer(convolutions, recurrences, step_rows)
    capacity = memory["keys"].shape[2] - 1
    attention = AttentionLayer(
        memory["keys"],
        memory["values"],
        step_rows,
        min(length, capacity),
        window=given.sliding_window if given.is_sliding else None,
    )
    if not convolutions and not recurrences:
        return attention
    return HybridLayer(convolutions, recurrences, attention)
