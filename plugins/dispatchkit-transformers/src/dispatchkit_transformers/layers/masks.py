"""The positions that each layer of a step may attend to, in the model's mask format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

#: Converts a boolean mask, True where a token may attend, to the format of a model's attention.
Converter = Callable[[torch.Tensor], torch.Tensor]

# Layer types for which the library has separate masks.
_OF_TWO = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


class LayerLook(Protocol):
    """The positions that layers of one kind may attend to; equal ones share one mask."""

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return True where tokens at positions (B, T) may attend (B, 1, T, read positions)."""
        ...


@attrs.frozen
class Look:
    """The positions that a step may attend to in layers of one kind.

    Attributes:
        length: Number of positions that they read.
        capacity: Number of positions that they store.
        window: Number of positions that they attend to; None: all that are stored.
        chunk: They attend to positions since the last multiple of this; None: no such limit.
    """

    length: int
    capacity: int
    window: int | None
    chunk: int | None

    def mask(self, positions: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Return True where tokens may attend (B, 1, T, length).

        A ring that is not full is read up to the written part, a full one completely: in both
        cases these are the places up to the row's position. A ring with spare places also contains
        positions that are too old or were rejected: a place is read depending on how far before
        the token it was last written, at the token's position or earlier.

        Args:
            positions: Positions of each row's tokens (B, T).
            ahead: Integers from 0 on, at least ``length`` of them.
        """
        places, last = ahead[: self.length], positions
        if self.chunk is not None:
            last = positions % self.chunk
        if self.window is not None and self.window < self.capacity:
            # Rows without a sequence attend somewhere as well, so that nothing is NaN.
            at = positions.clamp(max=self.length - 1) if self.length < self.capacity else positions
            places = (at.unsqueeze(-1) - places) % self.capacity
            last = last.clamp(max=self.window - 1)
        return (places <= last.unsqueeze(-1)).unsqueeze(1)


class ByLayerType:
    """A mask for each type of layer that the configuration lists.

    Args:
        text: The configuration of the decoder.
        layers: A step's view of each layer.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        self._looks: dict[str, LayerLook | None] = {}
        for name, layer in zip(text.layer_types, layers, strict=False):
            if name in _OF_TWO:
                self._looks["linear_attention"] = None
            self._looks.setdefault(_OF_TWO.get(name, name), _look_of(text, name, layer))

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return the model's ``attention_mask`` argument, for tokens at positions (B, T)."""
        made = {
            look: convert(look.mask(positions, ahead))
            for look in dict.fromkeys(self._looks.values())
            if look is not None
        }
        return {name: look and made[look] for name, look in self._looks.items()}


class OneForAll:
    """One mask for all layers, or none if no layer has keys.

    Args:
        text: The configuration of the decoder.
        layers: A step's view of each layer.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        kind = "chunked_attention" if getattr(text, "attention_chunk_size", None) else ""
        looks = (_look_of(text, kind, one) for one in layers)
        self._look = next((one for one in looks if one is not None), None)

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return the model's ``attention_mask`` argument, for tokens at positions (B, T)."""
        return None if self._look is None else convert(self._look.mask(positions, ahead))


class OfPositions:
    """The used positions (B, length), from which a model makes its mask and its biases.

    Args:
        text: The configuration of the decoder.
        layers: A step's view of each layer, all of one length.
    """

    def __init__(self, text: Any, layers: Sequence[Any]) -> None:
        attention = [one for one in layers if hasattr(one, "look")]
        self._length = attention[0].length
        for one in attention:
            # The token may attend to all positions except those that the mask excludes.
            one.past = self._length - 1

    def masks(self, positions: torch.Tensor, ahead: torch.Tensor, convert: Converter) -> Any:
        """Return the model's ``attention_mask`` argument, for rows at positions (B, 1)."""
        return ahead[: self._length] <= positions


#: The mask formats of models, the most common first.
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
