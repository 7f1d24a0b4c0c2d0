"""The tensors that a layer of a transformers cache stores for each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

#: Names of the supported cache layer classes of transformers; some releases lack some of them.
SUPPORTED_LAYERS = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
)


@attrs.frozen(eq=False)
class LayerTensor:
    """One tensor that a layer stores.

    Attributes:
        name: ``keys``, ``values``, ``convolution N`` or ``recurrence N``, where N is the number of
            the state.
        states: The tensor in the transformers cache: keys or values (B, heads, T, head size), or a
            recurrent state (B, ...).
        capacity: Number of positions whose keys and values are stored; None for recurrent states
            and sources (encoder outputs).
        source_length: Maximum number of positions of a source; None for other tensors.
    """

    name: str
    states: torch.Tensor
    capacity: int | None
    source_length: int | None = None

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in one slot."""
        _, *shape = self.states.shape
        if self.capacity is not None:
            shape[1] = self.capacity + 1
        elif self.source_length is not None:
            shape[1] = self.source_length
        return tuple(shape)

    @property
    def bank_key(self) -> tuple[Any, ...]:
        """The properties shared by all tensors in one bank."""
        is_source = self.source_length is not None
        return self.slot_shape, self.states.dtype, self.states.device, self.capacity, is_source


def write_prompts(
    slots: torch.Tensor, states: torch.Tensor, paddings: Sequence[int], width: int
) -> None:
    """Write keys or values of prompts, without their padding, to cleared slots.

    Args:
        slots: One slot per row (B, heads, capacity + 1, head size).
        states: Keys or values from the transformers cache (B, heads, T, head size).
        paddings: Number of padding positions at the start of each row.
        width: Number of positions of each row, padding included. ``states`` contains the last T of
            these positions.
    """
    if not any(paddings):
        _write_rows(slots, states, width)
        return
    missing = width - states.shape[2]
    for row, padding in enumerate(paddings):
        here = states[row : row + 1, :, max(0, padding - missing) :]
        _write_rows(slots[row : row + 1], here, width - padding)


def _write_rows(slots: torch.Tensor, states: torch.Tensor, length: int) -> None:
    """Write ``states`` (B, heads, T, head size), the last T of each row's ``length`` positions."""
    capacity = slots.shape[2] - 1
    number = min(states.shape[2], capacity)
    states = states[:, :, states.shape[2] - number :]
    first = (length - number) % capacity
    ahead = min(number, capacity - first)
    slots[:, :, first : first + ahead] = states[:, :, :ahead]
    slots[:, :, : number - ahead] = states[:, :, ahead:]


def source_tensors(layer: Any, source_length: int) -> Iterator[LayerTensor]:
    """Yield the tensors that a cross-attention layer stores for a source.

    Args:
        layer: A layer of a transformers cross-attention cache.
        source_length: Maximum number of positions of a source.
    """
    for name in ("keys", "values"):
        yield LayerTensor(name, getattr(layer, name), None, source_length)


def layer_tensors(layer: Any, length: int, spare: int = 0) -> Iterator[LayerTensor]:
    """Yield the tensors that a layer stores after a prompt.

    Args:
        layer: A layer of a class in ``SUPPORTED_LAYERS``.
        length: Maximum number of positions of a sequence.
        spare: Number of positions that a layer with a window stores in addition to the window.
    """
    keys = getattr(layer, "keys", None)
    if isinstance(keys, torch.Tensor):
        window = layer.sliding_window if layer.is_sliding else length
        for name in ("keys", "values"):
            yield LayerTensor(name, getattr(layer, name), min(window + spare, length))
    for kind, name in (("convolution", "conv_states"), ("recurrence", "recurrent_states")):
        for number, states in getattr(layer, name, {}).items():
            if states is not None:
                yield LayerTensor(f"{kind} {number}", states, None)
