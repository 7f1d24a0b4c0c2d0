"""Looks: cheap keys of calls, and what is known about calls of one look.

A look is cheap but not conclusive: calls of one look may differ, for example in strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import torch

from dispatchkit.execute.io.inputs import TensorGuards, never

_T = TypeVar("_T")

#: Most looks stored at a time.
MAX_LOOKS: Final = 4096
#: Types of values that a look can contain; calls with others are examined fully.
_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})

_facts_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device")
_facts_with_grad_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device", "requires_grad")


class Looks(Generic[_T]):
    """What is known about calls, by look.

    A call whose tensors match those of an earlier call according to torch is recognized without a
    look, in a third of the time. Otherwise the look is used.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _T] = {}
        # By the shape of the first tensor: the other properties of the call, and what is known
        # about it.
        self._at_once: dict[Any, tuple[Callable[..., bool], tuple[Any, ...], _T | None]] = {}

    def at_once(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
    ) -> _T | None:
        """Return what is known about a call from its tensors alone, including types and layouts.

        Args:
            args: The call's arguments.
            kwargs: The call's keyword arguments.
            has_grad: Gradients are enabled.
            is_training: The target is a module in training.
        """
        values = (*args, *kwargs.values()) if kwargs else args
        try:
            known: _T | None
            fits, others, known = self._at_once.get(values[0].shape, _NOTHING)
            if others == (has_grad, is_training, *kwargs) and fits(*values):
                return known
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass  # the first is not a tensor or is nested, or their number differs
        return None

    def get(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
    ) -> _T | None:
        """Return what is known about a call of its look."""
        look = _look_of(args, kwargs, has_grad, is_training) if self._known else None
        return None if look is None else self._known.get(look)

    def remember(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        has_grad: bool,
        is_training: bool,
        what: _T,
    ) -> None:
        """Store what is known about calls that look like this one."""
        look = _look_of(args, kwargs, has_grad, is_training)
        if look is None:
            return
        if len(self._known) >= MAX_LOOKS:
            self.clear()
        self._known[look] = what
        values = (*args, *kwargs.values())
        if TensorGuards is not None and values and {*map(type, values)} == {torch.Tensor}:
            fits = TensorGuards(
                *values,
                dynamic_dims_sizes=[list(one.shape) for one in values],
                dynamic_dims_strides=[[None] * one.dim() for one in values],
            ).check
            self._at_once[values[0].shape] = fits, (has_grad, is_training, *kwargs), what

    def clear(self) -> None:
        """Clear all looks."""
        self._known.clear()
        self._at_once.clear()


_NOTHING: Final = (never, (), None)


def _look_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
) -> Any:
    """Return the look of a call, or None if it is insufficient."""
    facts_of = _facts_with_grad_of if has_grad else _facts_of
    try:
        facts = map(facts_of, (*args, *kwargs.values()))
        look: tuple[Any, ...] = (has_grad, is_training, *kwargs, *facts)
    except AttributeError:  # not all of them are tensors
        look = (has_grad, is_training, *kwargs)
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Tensor):
                look += (facts_of(one),)
            elif type(one) in _SIMPLE:
                look += (one,)
            else:
                return None
    except RuntimeError:  # a nested tensor has no shape
        return None
    try:
        hash(look)
    except TypeError:  # another object with a shape
        return None
    return look
