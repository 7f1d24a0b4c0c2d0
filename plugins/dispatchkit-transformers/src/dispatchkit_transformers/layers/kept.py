"""The tensors that a layer of the library's caches stores for each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

#: The library's kinds of layers that are supported, by name: not every release has all of them.
KNOWN = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
)


@attrs.frozen(eq=False)
class Kept:
    """One stored tensor of a layer.

    Attributes:
        name: ``keys``, ``values``, or ``convolution`` or ``recurrence`` with its number.
        states: The library's tensor: keys and values (B, heads, T, head size), states (B, ...).
        capacity: Number of positions stored of keys and values; None for states and sources.
        source_length: The most positions of a source; None for other tensors.
    """

    name: str
    states: torch.Tensor
    capacity: int | None
    source_length: int | None = None

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """The shape of one slot."""
        _, *shape = self.states.shape
        if self.capacity is not None:
            shape[1] = self.capacity + 1
        elif self.source_length is not None:
            shape[1] = self.source_length
        return tuple(shape)

    @property
    def facts(self) -> tuple[Any, ...]:
        """The properties that all tensors in one block of memory share."""
        is_source = self.source_length is not None
        return self.slot_shape, self.states.dtype, self.states.device, self.capacity, is_source


def put_prompts(
    slots: torch.Tensor, states: torch.Tensor, paddings: Sequence[int], width: int
) -> None:
    """Write keys or values of prompts to cleared slots, without padding.

    Args:
        slots: One slot per row (B, heads, capacity + 1, head size).
        states: The library's tensor (B, heads, T, head size).
        paddings: Positions of padding before each row.
        width: Positions of each row including padding, of which ``states`` has the last T.
    """
    if not any(paddings):
        _put_rows(slots, states, width)
        return
    missing = width - states.shape[2]
    for row, padding in enumerate(paddings):
        here = states[row : row + 1, :, max(0, padding - missing) :]
        _put_rows(slots[row : row + 1], here, width - padding)


def _put_rows(slots: torch.Tensor, states: torch.Tensor, length: int) -> None:
    """Write rows of one length, given their last positions (B, heads, T, head size)."""
    capacity = slots.shape[2] - 1
    number = min(states.shape[2], capacity)
    states = states[:, :, states.shape[2] - number :]
    first = (length - number) % capacity
    ahead = min(number, capacity - first)
    slots[:, :, first : first + ahead] = states[:, :, :ahead]
    slots[:, :, : number - ahead] = states[:, :, ahead:]


def kept_of_source(layer: Any, source_length: int) -> Iterator[Kept]:
    """Yield what a layer of the library stores of a source.

    Args:
        layer: A layer of its cross-attention cache.
        source_length: The most positions of a source.
    """
    for name in ("keys", "values"):
        yield Kept(name, getattr(layer, name), None, source_length)


def kept_by(layer: Any, length: int, spare: int = 0) -> Iterator[Kept]:
    """Yield what a layer of the library stores, after it has seen a prompt.

    Args:
        layer: A layer of a kind in ``KNOWN``.
        length: The most positions of a sequence.
        spare: Number of positions that a window stores beyond those a token may attend to.
    """
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor):
        window = layer.sliding_window if layer.is_sliding else length
        for name in ("keys", "values"):
            yield Kept(name, getattr(layer, name), min(window + spare, length))
    for kind, name in (("convolution", "conv_states"), ("recurrence", "recurrent_states")):
        for number, states in getattr(layer, name, {}).items():
            if states is not None:
                yield Kept(f"{kind} {number}", states, None)
