"""A dispatch mode that does not load Dynamo for nothing.

torch wraps ``__torch_dispatch__`` of every mode so that Dynamo leaves it alone, and that
wrapper imports the whole of Dynamo on its first call: seconds, in a process that may never
compile anything. Here the wrapper is used only once Dynamo is loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Facts = TypeVar("_Facts")


def _without_dynamo(raw: Callable[..., Any]) -> Callable[..., Any]:
    quiet: Callable[..., Any] = torch._disable_dynamo(raw, recursive=True)  # type: ignore[attr-defined]

    @functools.wraps(raw)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = quiet if "torch._dynamo" in sys.modules else raw
        return run(self, func, types, args, kwargs)

    return dispatch


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or results, those in lists too.

    A fifth of the time of a general tree walk, and modes look at every operation.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


class PerOperation(Generic[_Facts]):
    """What is found out about each operation once.

    By identity: operations hash in Python, several times in each of many thousand calls.

    Args:
        find: Finds it out.
    """

    def __init__(self, find: Callable[[Any], _Facts]) -> None:
        self._find = find
        self._known: dict[int, tuple[Any, _Facts]] = {}

    def __call__(self, func: Any) -> _Facts:
        """Return what is known of an operation."""
        known = self._known.get(id(func))
        if known is None:
            # Kept with the operation, so that no other one gets its identity.
            known = self._known[id(func)] = (func, self._find(func))
        return known[1]


class DispatchMode(TorchDispatchMode):
    """Base of the modes here; a subclass defines ``__torch_dispatch__`` as usual."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch (2.12 and later ask) that the wrapping is done here."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in cls.__dict__:
            setattr(cls, "__torch_dispatch__", _without_dynamo(cls.__torch_dispatch__))  # noqa: B010
