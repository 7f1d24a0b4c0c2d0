"""Layers that store a state of fixed size: linear attention, state-space models, convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dispatchkit_transformers.layers.attention import AttentionLayer
from dispatchkit_transformers.layers.place import Place

try:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer
except ImportError:  # before release 5 each model has its own cache class for such states
    LinearAttentionCacheLayerMixin = LinearAttentionLayer = object

#: States of a layer by number, for all slots (slots, ...).
States = Mapping[int, torch.Tensor]


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]  # the library is not type-checked
    """States as seen by a step: views of its rows' states, which it changes in place.

    Args:
        conv_states: Convolution states.
        recurrent_states: Recurrence states.
        place: The rows of the step.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, conv_states: States, recurrent_states: States, place: Place) -> None:
        # Do not call the library's __init__: it creates states on first use.
        self._conv_states, self._recurrent_states = conv_states, recurrent_states
        self.place = place
        self.number_of_states = max((*conv_states, *recurrent_states), default=-1) + 1
        numbers = range(self.number_of_states)
        self.is_conv_states_initialized = {one: one in conv_states for one in numbers}
        self.is_recurrent_states_initialized = {one: one in recurrent_states for one in numbers}
        self.has_previous_state = dict.fromkeys(numbers, True)
        self.conv_kernel_size = {one: state.shape[-1] for one, state in conv_states.items()}
        self.record_past = False

    @property
    def banks(self) -> tuple[States, States]:
        """The convolution and recurrence states of all slots."""
        return self._conv_states, self._recurrent_states

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """The convolution states of the step's rows."""
        rows = self.place.num_rows
        return {one: states[:rows] for one, states in self._conv_states.items()}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """The recurrence states of the step's rows."""
        rows = self.place.num_rows
        return {one: states[:rows] for one, states in self._recurrent_states.items()}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was allocated with the cache."""


class HybridLayer(RecurrentLayer, AttentionLayer):
    """A layer that stores recurrent states, keys and values.

    Args:
        conv_states: As for ``RecurrentLayer``.
        recurrent_states: As for ``RecurrentLayer``.
        attention: The layer's keys and values.
    """

    def __init__(
        self, conv_states: States, recurrent_states: States, attention: AttentionLayer
    ) -> None:
        AttentionLayer.__init__(
            self,
            attention.keys,
            attention.values,
            attention.place,
            attention.length,
            window=attention.window,
        )
        RecurrentLayer.__init__(self, conv_states, recurrent_states, attention.place)
