"""Detect whether results of a function require gradients because of weights that it holds.

The tensors of a call and the training mode of a module can be checked before the call. A function
may also hold tensors in its closure, in the object that a method is bound to, or in the arguments
of a ``partial``. If a held tensor requires gradients and gradients are enabled, the first call of
each kind runs eager. Its result shows whether calls of this kind need gradients.
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
    """The weights that a function holds, and the kinds of calls that need their gradients.

    Args:
        target: Function that may hold weights.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._turn: Iterator[weakref.ref[torch.Tensor]] | None = None
        self._has_trainable = False
        self._needed: dict[Hashable, bool] = {}

    def need_gradients(self, kind: Hashable) -> bool:
        """Return whether a call must run eager while gradients are enabled.

        A call must run eager if its results require gradients, or if this is not yet known. As long
        as no held tensor is known to require gradients, each call checks one held tensor, in turn.

        Args:
            kind: Kind of the call, as in ``_GradientProbe``.
        """
        if self._turn is None:
            tensors = list(_held_tensors(self._target))
            self._turn = itertools.cycle([weakref.ref(one) for one in tensors])
            self._has_trainable = any(one.requires_grad for one in tensors)
        if not self._has_trainable:
            held = next(self._turn, None)
            tensor = None if held is None else held()
            self._has_trainable = tensor is not None and tensor.requires_grad
        return self._has_trainable and self._needed.get(kind, True)

    def note(self, kind: Hashable, result: Any) -> bool:
        """Record and return whether the result of an eager call requires gradients."""
        leaves = [result] if type(result) is torch.Tensor else leaves_of(result)
        needed = any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaves)
        self._needed[kind] = needed
        return needed


def _held_tensors(target: Callable[..., Any]) -> Iterator[torch.Tensor]:
    state = PythonState({"step": target})
    yield from state.tensors
    for module in state.modules:
        if isinstance(
            module, torch.jit.ScriptModule
        ):  # parameters of script modules are not Python attributes
            yield from module.parameters()
