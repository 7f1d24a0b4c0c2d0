"""Which positions each layer of a step may look at, in the form that the model takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

#: Makes the mask that a model's attention takes of one that is True where a token may look.
Converter = Callable[[torch.Tensor], torch.Tensor]

# What the library has two masks for.
_OF_TWO = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


class LayerLook(Protocol):
    """What the layers of one kind may look at; equal ones have one mask."""

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return True where tokens at positions (B, T) may look (B, 1, T, what is read)."""
        ...


@attrs.frozen
class Look:
    """What a step may look at in layers of one kind.

    Attributes:
        length: Positions that they read.
        capacity: Positions that they keep.
        window: The latest positions, which they see; None: all that they keep.
        chunk: They see those since the last multiple of this; None: whatever the window has.
    """

    length: int
    capacity: int
    window: int | None
    chunk: int | None

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return True where tokens may look (B, 1, T, length).

        A ring that is not full yet is read as far as it is written, a full one whole: both are
        the places up to the row's position. One with spare places also has what is too old, or
        what was rejected: it is read by how far back of the token a place was written last, at
        the token's position or before.

        Args:
            positions: Of each row's tokens (B, T).
            ahead: Numbers from 0 on, ``length`` of them or more.
        """
        places, last = ahead[: self.length], positions
        if self.chunk is not None:
            last = positions % self.chunk
        if self.window is not None and self.window < self.capacity:
            # Rows without a sequence look somewhere, too: nothing is NaN.
            at = positions.clamp(max=self.length - 1) if self.length < self.capacity else positions
            places = (at.unsqueeze(-1) - places) % self.capacity
            last = last.clamp(max=self.window - 1)
        return (places <= last.unsqueeze(-1)).unsqueeze(1)


class ByLayerType:
    """A mask for each type of layer that the configuration names.

    Args:
        text: The configuration of the decoder.
        layers: What a step sees of each layer.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        self._looks: dict[str, LayerLook | None] = {}
        for name, layer in zip(text.layer_types, layers, strict=False):
            if name in _OF_TWO:
                self._looks["linear_attention"] = None
            self._looks.setdefault(_OF_TWO.get(name, name), _look_of(text, name, layer))

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return what a model takes as ``attention_mask``, for tokens at positions (B, T)."""
        made = {
            look: convert(look.mask(positions, ahead))
            for look in dict.fromkeys(self._looks.values())
            if look is not None
        }
        return {name: look and made[look] for name, look in self._looks.items()}


class OneForAll:
    """One mask for all layers, or none where no layer has keys.

    Args:
        text: The configuration of the decoder.
        layers: What a step sees of each layer.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        kind = "chunked_attention" if getattr(text, "attention_chunk_size", None) else ""
        looks = (_look_of(text, kind, one) for one in layers)
        self._look = next((one for one in looks if one is not None), None)

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return what a model takes as ``attention_mask``, for tokens at positions (B, T)."""
        return None if self._look is None else convert(self._look.mask(positions, ahead))


class OfPositions:
    """Which positions are in use (B, length), of which a model makes its mask and its biases.

    Args:
        text: The configuration of the decoder.
        layers: What a step sees of each layer, all of one length.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        attention = [one for one in layers if hasattr(one, "look")]
        self._length = attention[0].length
        for one in attention:
            # The token may look at all positions, but for those that the mask has none of.
            one.past = self._length - 1

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return what a model takes as ``attention_mask``, for rows at positions (B, 1)."""
        return ahead[: self._length] <= positions


#: The ways that models take masks, the likeliest first.
FORMS: tuple[type[ByLayerType | OneForAll | OfPositions], ...] = (
    ByLayerType,
    OneForAll,
    OfPositions,
)


def _look_of(text: Any, kind: str, layer: Any) -> LayerLook | None:
    if not hasattr(layer, "look"):
        return None
    look: LayerLook = layer.look(text.attention_chunk_size if kind == "chunked_attention" else None)
    return look
