"""What calls look like, and what is known of those that look alike.

A look is cheap and no proof: calls of one look may differ, such as in strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import torch

from dispatchkit.execute.io.inputs import TensorGuards, never

_T = TypeVar("_T")

#: Looks that are known at a time.
MAX_LOOKS: Final = 4096
#: Values that say what they are; of others a call is looked at in full.
_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})

_facts_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device")
_facts_with_grad_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device", "requires_grad")


class Looks(Generic[_T]):
    """What is known of calls, by their looks.

    A call whose tensors are as torch saw those of an earlier one is known at once, which costs
    a third of a look. Where torch says no, the look is asked.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _T] = {}
        # By the shape of the first tensor: what else a call must be, and what is known of it.
        self._at_once: dict[Any, tuple[Callable[..., bool], tuple[Any, ...], _T | None]] = {}

    def at_once(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
    ) -> _T | None:
        """Return what is known of a call by its tensors alone, also by their type and layout.

        Args:
            args: Of the call.
            kwargs: Of the call.
            has_grad: Gradients are enabled.
            is_training: What is called is a module in training.
        """
        values = (*args, *kwargs.values()) if kwargs else args
        try:
            known: _T | None
            fits, others, known = self._at_once.get(values[0].shape, _NOTHING)
            if others == (has_grad, is_training, *kwargs) and fits(*values):
                return known
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass  # no tensor comes first, a nested one, or another number of them
        return None

    def get(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
    ) -> _T | None:
        """Return what is known of a call by its look."""
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
        """Know calls that look like this one."""
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
        """Know nothing any more."""
        self._known.clear()
        self._at_once.clear()


_NOTHING: Final = (never, (), None)


def _look_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
) -> Any:
    """Return what a call looks like; None where that says too little."""
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
    except TypeError:  # something else that has a shape
        return None
    return look
