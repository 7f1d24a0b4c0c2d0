"""Whether the results of a function require gradients, by the weights that it holds.

A tensor of a call, or a module in training, says so before the call. What a function closes over,
the object of a method and the arguments of a ``partial`` do not: where they hold a tensor that
requires gradients, the first call with gradients enabled runs plainly, and its result tells.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from dispatchkit.execute.io.structure import leaves_of
from dispatchkit.execute.step.python_state import PythonState


class HeldWeights:
    """Tells which calls of a function must run plainly while gradients are enabled.

    Args:
        target: The function.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._turn: Iterator[weakref.ref[torch.Tensor]] | None = None
        self._has_trainable = False
        self._needed: dict[Hashable, bool] = {}

    def need_gradients(self, form: Hashable) -> bool:
        """Return whether a call must run plainly, also where only its result can tell.

        Where nothing held requires gradients, one held tensor is looked at in each call, in turn.

        Args:
            form: Calls of one form are alike in this.
        """
        if self._turn is None:
            tensors = list(_held_tensors(self._target))
            self._turn = itertools.cycle([weakref.ref(one) for one in tensors])
            self._has_trainable = any(one.requires_grad for one in tensors)
        if not self._has_trainable:
            held = next(self._turn, None)
            tensor = None if held is None else held()
            self._has_trainable = tensor is not None and tensor.requires_grad
        return self._has_trainable and self._needed.get(form, True)

    def note(self, form: Hashable, result: Any) -> bool:
        """Return whether the result of a plain call requires gradients, for the next call."""
        leaves = [result] if type(result) is torch.Tensor else leaves_of(result)
        needed = any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaves)
        self._needed[form] = needed
        return needed


def _held_tensors(target: Callable[..., Any]) -> Iterator[torch.Tensor]:
    state = PythonState({"step": target})
    yield from state.tensors
    for module in state.modules:
        if isinstance(module, torch.jit.ScriptModule):  # its parameters are no Python attributes
            yield from module.parameters()
