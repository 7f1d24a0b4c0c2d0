"""Slots of steps: validated before a step runs, and saved if check mode runs it twice."""

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
    """Reads the slots of steps from calls or static inputs.

    Args:
        name: The input of slots.
        state: The state of the slots.
        inputs: The static inputs; with axes, at their smallest buckets.
        lane: The lane whose buffers hold them for steps in place.
    """

    def __init__(self, name: str, state: SlotState, inputs: InputSet, lane: Lane) -> None:
        self._name, self._state, self._lane = name, state, lane
        self._index = inputs.names.index(name)

    def check(self, tensors: Sequence[Any] | None, num_tokens: int) -> None:
        """Check that a step's slots belong to distinct sessions.

        Raises:
            DescriptorError: The slots are invalid.
        """
        self._state.check_slots(self._read(tensors, num_tokens), self._name)

    def save(self, tensors: Sequence[Any] | None, num_tokens: int) -> SavedRows:
        """Save the rows of a checked step's sessions."""
        slots = self._read(tensors, num_tokens)
        own = torch.from_numpy(slots[slots < self._state.num_slots])
        return SavedRows(self._state, own.to(self._state.device))

    def _read(self, tensors: Sequence[Any] | None, num_tokens: int) -> Any:
        """Return the slots of a step as an array (B,), waiting for slots on the device."""
        if tensors is not None:
            slots = tensors[self._index]
        else:
            buffers = self._lane.buffers
            rows = min(num_tokens, buffers.num_rows)  # a larger step is refused behind this
            host = dict(buffers.host_rows(rows))
            slots = host[self._index] if host else buffers.tensors[self._index][:rows]
        return slots.cpu().numpy() if isinstance(slots, torch.Tensor) else slots


class SlotPlan:
    """Checks the slots of a step and runs it.

    Args:
        plan: Runs it.
        slots: Reads and checks its slots.
        num_tokens: Rows of the cell.
    """

    def __init__(
        self, plan: Plan | SplitPlan | LazySplitPlan, slots: StepSlots, num_tokens: int
    ) -> None:
        self.eager: EagerRunner = plan.eager
        self._plan, self._slots, self._num_tokens = plan, slots, num_tokens

    def run(self, tensors: Any, stream: int, readable: bool = False) -> Any:
        """Run a checked call.

        Raises:
            DescriptorError: A slot is free, out of range or named twice.
        """
        self._slots.check(tensors, self._num_tokens)
        return self._plan.run(tensors, stream, readable)
