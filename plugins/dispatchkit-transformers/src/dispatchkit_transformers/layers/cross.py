"""A decoder layer's cross-attention keys and values, computed once for each sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from dispatchkit_transformers.layers.place import Place


class CrossLayer(CacheLayerMixin):  # type: ignore[misc]  # the library is not type-checked
    """Keys and values of the source, which steps read and never write.

    Args:
        keys: All slots' keys (slots, heads, source length, head size).
        values: All slots' values, same shape.
        place: The rows of the step.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, place: Place) -> None:
        # Do not call the library's __init__, which sets keys and values.
        self._keys, self._values, self.place = keys, values, place
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    @property
    def keys(self) -> torch.Tensor:
        """The keys of the step's rows."""
        return self._keys[: self.place.num_rows]

    @property
    def values(self) -> torch.Tensor:
        """The values of the step's rows."""
        return self._values[: self.place.num_rows]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was allocated with the cache."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged: the library calls it although it has them already."""
        return self.keys, self.values

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return length and offset of what is read."""
        return self._keys.shape[2], 0

    def get_seq_length(self, *args: Any) -> int:
        """Return the source's length: above 0, the library does not recompute keys and values."""
        return self._keys.shape[2]

    def get_max_length(self) -> int:
        """Return the source's length."""
        return self._keys.shape[2]

    get_max_cache_shape = get_max_length  # its name in releases before 5
