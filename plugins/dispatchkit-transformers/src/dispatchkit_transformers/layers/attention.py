"""A layer that stores keys and values of all positions, or of the latest ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from dispatchkit_transformers.layers.masks import LayerLook, Look
from dispatchkit_transformers.layers.place import Place


class AttentionLayer(CacheLayerMixin):  # type: ignore[misc]  # the library is not type-checked
    """Keys and values as seen by a step of one length.

    Args:
        keys: All slots' keys (slots, heads, capacity + 1, head size).
        values: All slots' values, same shape.
        place: Where the step writes.
        length: Number of positions that the step reads, from the first on.
        window: Number of positions that a token may attend to, in a layer that stores only the
            latest ones; None if it stores all.

    Attributes:
        is_sliding: The library's term for layers with a window.
        past: Number of positions to report to a model that asks its cache for it; None: the
            number of each row (B, 1).
    """

    keys: torch.Tensor
    values: torch.Tensor
    place: Place
    length: int
    device: torch.device
    dtype: torch.dtype
    window: int | None
    is_sliding: bool
    past: int | None

    is_compileable = True

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        place: Place,
        length: int,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.keys, self.values, self.place, self.length = keys, values, place, length
        self.window, self.is_sliding, self.past = window, window is not None, 0
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    @property
    def capacity(self) -> int:
        """Number of positions that are stored."""
        return self.keys.shape[2] - 1

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was allocated with the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens of each row at their own positions; return what the step may read.

        Shapes: states (B, heads, T, head size), results (B, heads, length, head size).
        """
        rows, slots = self.place.num_rows, self.place.slots.unsqueeze(1)
        written = self.place.written(self.capacity)
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            if written.shape[1] > 1:
                # Tokens after the first may be wrong. Tokens before them give them weight 0, but
                # 0 * NaN is NaN, and only the sequence with such tokens may become NaN.
                states = states.nan_to_num(0.0, 0.0, 0.0)
            # Compiled code does this in place; for a scatter it copies all rows, there and back.
            memory[slots, :, written] = states.transpose(1, 2)
        return self.keys[:rows, :, : self.length], self.values[:rows, :, : self.length]

    def look(self, chunk: int | None) -> LayerLook:
        """Return what a step may attend to here: all, or the part since a multiple of ``chunk``."""
        return Look(self.length, self.capacity, self.window, chunk)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return length and offset of what is read, although the step has its own mask."""
        return self.length, 0

    def get_seq_length(self, *args: Any) -> Any:
        """Return ``past``, or the position of each row's first token (B, 1)."""
        return self.place.positions[:, :1] if self.past is None else self.past

    def get_max_length(self) -> int:
        """Return the number of positions that are read."""
        return self.length

    get_max_cache_shape = get_max_length  # its name in releases before 5
