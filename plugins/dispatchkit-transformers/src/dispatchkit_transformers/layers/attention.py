"""Keys and values of an attention layer, as a step reads and writes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from dispatchkit_transformers.layers.masks import MaskSpec, StepMask
from dispatchkit_transformers.layers.step_rows import StepRows


class AttentionLayer(CacheLayerMixin):  # type: ignore[misc]  # the library is not type-checked
    """View of a layer's keys and values, for steps that read ``length`` positions.

    The layer stores all positions, or only the latest ones.

    Args:
        keys: Keys of all slots (slots, heads, capacity + 1, head size).
        values: Values of all slots, with the shape of ``keys``.
        step_rows: The rows of the step and the positions that they write.
        length: Number of stored positions that the step reads.
        window: Number of latest positions that a token may attend to; None for all positions.

    Attributes:
        is_sliding: Whether the layer has a window; transformers uses this name.
        past: Value that ``get_seq_length`` returns; None to return the position of each row's first
            token (B, 1).
    """

    keys: torch.Tensor
    values: torch.Tensor
    step_rows: StepRows
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
        step_rows: StepRows,
        length: int,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.keys, self.values, self.step_rows, self.length = keys, values, step_rows, length
        self.window, self.is_sliding, self.past = window, window is not None, 0
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    @property
    def capacity(self) -> int:
        """Number of positions that the layer stores."""
        return self.keys.shape[2] - 1

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was allocated with the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values; return the keys and values to attend to.

        Shapes: states (B, heads, T, head size), results (B, heads, length, head size).
        """
        rows, slots = self.step_rows.num_rows, self.step_rows.slots.unsqueeze(1)
        written = self.step_rows.write_positions(self.capacity)
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            if written.shape[1] > 1:
                # Tokens after the first may be rejected drafts. Earlier tokens give them weight
                # 0, but 0 * NaN is NaN, so a NaN here would spread to accepted tokens.
                states = states.nan_to_num(0.0, 0.0, 0.0)
            # Inductor compiles this assignment to an in-place write. It would compile a scatter to
            # a copy of all rows.
            memory[slots, :, written] = states.transpose(1, 2)
        return self.keys[:rows, :, : self.length], self.values[:rows, :, : self.length]

    def mask_spec(self, chunk: int | None) -> MaskSpec:
        """Return the mask of this layer; ``chunk`` is the size of attention chunks, if any."""
        return StepMask(self.length, self.capacity, self.window, chunk)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the number and the offset of the positions that the step reads."""
        return self.length, 0

    def get_seq_length(self, *args: Any) -> Any:
        """Return ``past``, or the position of each row's first token (B, 1)."""
        return self.step_rows.positions[:, :1] if self.past is None else self.past

    def get_max_length(self) -> int:
        """Return the number of positions that the step reads."""
        return self.length

    get_max_cache_shape = get_max_length  # the name before transformers 5
