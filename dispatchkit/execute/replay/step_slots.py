"""Validate the slots of steps, and save their rows for check mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.plans import Plan
from dispatchkit.execute.replay.split import LazySplitPlan, SplitPlan
from dispatchkit.execute.slots import SavedRows, SlotState


class StepSlots:
    """A reader that takes a step's slots from the call or from the static inputs.

    Args:
        name: Name of the input with the slots.
        state: State of the slots.
        inputs: Static inputs, at the smallest bucket of each axis.
        lane: Lane whose buffers hold the slots of in-place steps.
    """

    def __init__(self, name: str, state: SlotState, inputs: InputSet, lane: Lane) -> None:
        self._name, self._state, self._lane = name, state, lane
        self._index = inputs.names.index(name)

    def check(self, tensors: Sequence[Any] | None, num_tokens: int) -> None:
        """Check that a step's slots belong to distinct sessions.

        Raises:
            DescriptorError: A slot is free, out of range or passed twice; or ``SlotState.compact``
                is set, and the slots are not 0, 1, 2 and so on, in this order.
        """
        self._state.check_slots(self._read(tensors, num_tokens), self._name)

    def save(self, tensors: Sequence[Any] | None, num_tokens: int) -> SavedRows:
        """Save the session rows of a validated step."""
        slots = self._read(tensors, num_tokens)
        own = torch.from_numpy(slots[slots < self._state.num_slots])
        return SavedRows(self._state, own.to(self._state.device))

    def _read(self, tensors: Sequence[Any] | None, num_tokens: int) -> Any:
        """Return the slots of a step as an array (B,); wait for the device if they are on it."""
        if tensors is not None:
            slots = tensors[self._index]
        else:
            buffers = self._lane.buffers
            rows = min(num_tokens, buffers.num_rows)  # larger steps are rejected later
            host = dict(buffers.host_rows(rows))
            slots = host[self._index] if host else buffers.tensors[self._index][:rows]
        return slots.cpu().numpy() if isinstance(slots, torch.Tensor) else slots


class SlotPlan:
    """A plan that validates the slots of a step before the step runs.

    Args:
        plan: Plan that runs the step.
        slots: Reader of the slots.
        num_tokens: Number of rows in each batch of the cell.
    """

    def __init__(
        self, plan: Plan | SplitPlan | LazySplitPlan, slots: StepSlots, num_tokens: int
    ) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._slots, self._num_tokens = plan, slots, num_tokens

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Validate the slots, and run the plan.

        Raises:
            DescriptorError: The slots are invalid (see ``StepSlots.check``).
        """
        self._slots.check(tensors, self._num_tokens)
        return self._plan.run(tensors, stream, readable)
