"""CallCache: finds the result of analyzing an earlier, equivalent call.

A cache key is cheap to compute but not conclusive. Calls with equal keys may differ, for example in
the layouts of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import torch

from dispatchkit.execute.io.inputs import TensorGuards, never

_T = TypeVar("_T")

#: Maximum number of cached calls.
MAX_CACHED_CALLS: Final = 4096
#: Types of values, besides tensors, that a key can contain; calls with other values are not cached.
_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})

_facts_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device")
_facts_with_grad_of: Callable[[Any], Any] = attrgetter("shape", "dtype", "device", "requires_grad")


class CallCache(Generic[_T]):
    """A cache with one value for each cache key.

    torch's tensor guards recognize a call in a third of the time it takes to compute its key. The
    key is used only if the guards do not match.
    """

    def __init__(self) -> None:
        self._values: dict[Any, _T] = {}
        # By the shape of a call's first tensor: guards on the call's tensors, the properties that
        # guards do not compare, and the value of the call.
        self._guarded: dict[Any, tuple[Callable[..., bool], tuple[Any, ...], _T | None]] = {}

    def get_guarded(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
    ) -> _T | None:
        """Return the value of an earlier call whose tensors match, or None.

        Unlike cache keys, this comparison includes the types and layouts of tensors.

        Args:
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
            has_grad: Whether gradients are enabled.
            is_training: Whether the target is a module in training mode.
        """
        values = (*args, *kwargs.values()) if kwargs else args
        try:
            cached: _T | None
            fits, others, cached = self._guarded.get(values[0].shape, _NOT_CACHED)
            if others == (has_grad, is_training, *kwargs) and fits(*values):
                return cached
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass  # the first value is not a plain tensor, or the number of values differs
        return None

    def get(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
    ) -> _T | None:
        """Return the value of an earlier call with the same key, or None."""
        key = _key_of(args, kwargs, has_grad, is_training) if self._values else None
        return None if key is None else self._values.get(key)

    def put(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        has_grad: bool,
        is_training: bool,
        value: _T,
    ) -> None:
        """Store the value of a call, unless the call has no key."""
        key = _key_of(args, kwargs, has_grad, is_training)
        if key is None:
            return
        if len(self._values) >= MAX_CACHED_CALLS:
            self.clear()
        self._values[key] = value
        values = (*args, *kwargs.values())
        if TensorGuards is not None and values and {*map(type, values)} == {torch.Tensor}:
            fits = TensorGuards(
                *values,
                dynamic_dims_sizes=[list(one.shape) for one in values],
                dynamic_dims_strides=[[None] * one.dim() for one in values],
            ).check
            self._guarded[values[0].shape] = fits, (has_grad, is_training, *kwargs), value

    def clear(self) -> None:
        """Remove all calls."""
        self._values.clear()
        self._guarded.clear()


_NOT_CACHED: Final = (never, (), None)


def _key_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], has_grad: bool, is_training: bool
) -> Any:
    """Return the key of a call, or None if an argument cannot be part of a key."""
    facts_of = _facts_with_grad_of if has_grad else _facts_of
    try:
        facts = map(facts_of, (*args, *kwargs.values()))
        key: tuple[Any, ...] = (has_grad, is_training, *kwargs, *facts)
    except AttributeError:  # not all arguments are tensors
        key = (has_grad, is_training, *kwargs)
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Tensor):
                key += (facts_of(one),)
            elif type(one) in _SIMPLE:
                key += (one,)
            else:
                return None
    except RuntimeError:  # a nested tensor has no shape
        return None
    try:
        hash(key)
    except TypeError:  # an argument other than a tensor has an unhashable shape, dtype or device
        return None
    return key
