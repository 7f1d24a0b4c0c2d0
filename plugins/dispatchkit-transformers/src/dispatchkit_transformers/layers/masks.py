"""Attention masks of a step, in the format that the model expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

#: Function that converts a boolean mask, True where a token may attend, to the attention function's
#: format.
Converter = Callable[[torch.Tensor], torch.Tensor]

# The mask type of the attention part of hybrid layers. Their recurrent part gets no mask.
_ATTENTION_OF_HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


class MaskSpec(Protocol):
    """A description of a layer's mask; layers with equal descriptions share one mask."""

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return a mask (B, 1, T, read positions), True where tokens (B, T) may attend."""
        ...


@attrs.frozen
class StepMask:
    """The mask of a step, for layers with the following properties.

    Attributes:
        length: Number of positions that the layers read.
        capacity: Number of positions that the layers store.
        window: Number of latest positions that a token may attend to; None for all stored
            positions.
        chunk: Size of attention chunks: a token attends to positions from the last multiple of
            this number up to its own position. None without chunked attention.
    """

    length: int
    capacity: int
    window: int | None
    chunk: int | None

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return a mask (B, 1, T, length), True where tokens may attend.

        In a ring buffer without spare entries, all written entries are valid. A ring with spare
        entries also contains rejected drafts and positions outside the window. In such a ring,
        each entry stands for the last position that maps to it and does not exceed the token's
        position. The entry is valid if this position is in the window.

        Args:
            positions: Positions of each row's tokens (B, T).
            ahead: Consecutive integers from 0, at least ``length`` of them.
        """
        places, last = ahead[: self.length], positions
        if self.chunk is not None:
            last = positions % self.chunk
        if self.window is not None and self.window < self.capacity:
            # Rows without a sequence must attend to something: softmax of a fully masked row is
            # NaN.
            at = positions.clamp(max=self.length - 1) if self.length < self.capacity else positions
            places = (at.unsqueeze(-1) - places) % self.capacity
            last = last.clamp(max=self.window - 1)
        return (places <= last.unsqueeze(-1)).unsqueeze(1)


class MaskByLayerType:
    """One mask for each layer type in the model's configuration.

    Args:
        text: The configuration of the decoder.
        layers: The step's view of each layer.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        self._specs: dict[str, MaskSpec | None] = {}
        for name, layer in zip(text.layer_types, layers, strict=False):
            if name in _ATTENTION_OF_HYBRID:
                self._specs["linear_attention"] = None
            self._specs.setdefault(
                _ATTENTION_OF_HYBRID.get(name, name), _mask_spec_of(text, name, layer)
            )

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return the model's ``attention_mask`` argument, for tokens at positions (B, T)."""
        made = {
            spec: convert(spec.mask(positions, ahead))
            for spec in dict.fromkeys(self._specs.values())
            if spec is not None
        }
        return {name: spec and made[spec] for name, spec in self._specs.items()}


class SharedMask:
    """One mask for all layers; None if no layer stores keys.

    Args:
        text: The configuration of the decoder.
        layers: The step's view of each layer.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        kind = "chunked_attention" if getattr(text, "attention_chunk_size", None) else ""
        specs = (_mask_spec_of(text, kind, one) for one in layers)
        self._spec = next((one for one in specs if one is not None), None)

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return the model's ``attention_mask`` argument, for tokens at positions (B, T)."""
        return None if self._spec is None else convert(self._spec.mask(positions, ahead))


class PositionMask:
    """A mask over positions (B, length), from which the model derives masks and biases.

    Args:
        text: The configuration of the decoder.
        layers: The step's view of each layer; all have the same length.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        attention = [one for one in layers if hasattr(one, "mask_spec")]
        self._length = attention[0].length
        for one in attention:
            # Report that all positions are used, so that only the mask excludes positions.
            one.past = self._length - 1

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return the model's ``attention_mask`` argument, for rows at positions (B, 1)."""
        return ahead[: self._length] <= positions


#: Mask formats that models expect, the most common first.
MASK_FORMATS: tuple[type[MaskByLayerType | SharedMask | PositionMask], ...] = (
    MaskByLayerType,
    SharedMask,
    PositionMask,
)


def _mask_spec_of(text: Any, kind: str, layer: Any) -> MaskSpec | None:
    if not hasattr(layer, "mask_spec"):
        return None
    spec: MaskSpec = layer.mask_spec(
        text.attention_chunk_size if kind == "chunked_attention" else None
    )
    return spec
