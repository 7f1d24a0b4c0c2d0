"""Cross-attention keys and values of a decoder layer, computed once per sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from dispatchkit_transformers.layers.step_rows import StepRows


class CrossLayer(CacheLayerMixin):  # type: ignore[misc]  # the library is not type-checked
    """View of the keys and values of the encoder output (the source), for steps that read them.

    Args:
        keys: Keys of all slots (slots, heads, source length, head size).
        values: Values of all slots, with the shape of ``keys``.
        step_rows: The slots and positions of the step's rows.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, step_rows: StepRows) -> None:
        # The base class's __init__ would assign keys and values, which are properties here.
        self._keys, self._values, self.step_rows = keys, values, step_rows
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    @property
    def keys(self) -> torch.Tensor:
        """Keys of the step's rows."""
        return self._keys[: self.step_rows.num_rows]

    @property
    def values(self) -> torch.Tensor:
        """Values of the step's rows."""
        return self._values[: self.step_rows.num_rows]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was allocated with the cache."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values. Some models call this although both are already stored."""
        return self.keys, self.values

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the number and the offset of the positions that the step reads."""
        return self._keys.shape[2], 0

    def get_seq_length(self, *args: Any) -> int:
        """Return the source length; if it is above 0, models do not recompute the keys."""
        return self._keys.shape[2]

    def get_max_length(self) -> int:
        """Return the source length."""
        return self._keys.shape[2]

    get_max_cache_shape = get_max_length  # the name before transformers 5
