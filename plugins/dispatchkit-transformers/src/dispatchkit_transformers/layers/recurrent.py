"""Layers with states of fixed size: linear attention, state-space models, convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dispatchkit_transformers.layers.attention import AttentionLayer
from dispatchkit_transformers.layers.step_rows import StepRows

try:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer
except ImportError:  # before transformers 5, each recurrent model has its own cache class
    LinearAttentionCacheLayerMixin = LinearAttentionLayer = object

#: States of a layer for all slots (slots, ...), keyed by the number of the state.
States = Mapping[int, torch.Tensor]


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]  # the library is not type-checked
    """View of a layer's recurrent states for a step, which updates them in place.

    Args:
        conv_states: Convolution states of all slots.
        recurrent_states: Recurrence states of all slots.
        step_rows: The slots and positions of the step's rows.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, conv_states: States, recurrent_states: States, step_rows: StepRows) -> None:
        # The base class's __init__ would assign its states, which are properties here.
        self._conv_states, self._recurrent_states = conv_states, recurrent_states
        self.step_rows = step_rows
        self.number_of_states = max((*conv_states, *recurrent_states), default=-1) + 1
        numbers = range(self.number_of_states)
        self.is_conv_states_initialized = {one: one in conv_states for one in numbers}
        self.is_recurrent_states_initialized = {one: one in recurrent_states for one in numbers}
        self.has_previous_state = dict.fromkeys(numbers, True)
        self.conv_kernel_size = {one: state.shape[-1] for one, state in conv_states.items()}
        self.record_past = False

    @property
    def banks(self) -> tuple[States, States]:
        """Convolution and recurrence states of all slots."""
        return self._conv_states, self._recurrent_states

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Convolution states of the step's rows."""
        rows = self.step_rows.num_rows
        return {one: states[:rows] for one, states in self._conv_states.items()}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """Recurrence states of the step's rows."""
        rows = self.step_rows.num_rows
        return {one: states[:rows] for one, states in self._recurrent_states.items()}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory was allocated with the cache."""


class HybridLayer(RecurrentLayer, AttentionLayer):
    """View of a layer with recurrent states, keys and values.

    Args:
        conv_states: See ``RecurrentLayer``.
        recurrent_states: See ``RecurrentLayer``.
        attention: View of the layer's keys and values.
    """

    def __init__(
        self, conv_states: States, recurrent_states: States, attention: AttentionLayer
    ) -> None:
        AttentionLayer.__init__(
            self,
            attention.keys,
            attention.values,
            attention.step_rows,
            attention.length,
            window=attention.window,
        )
        RecurrentLayer.__init__(self, conv_states, recurrent_states, attention.step_rows)
