"""What a graph was made under besides its inputs; a call that differs does not get it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from dispatchkit.dispatch import Reason

#: The reason to count for each fact of a fingerprint, in order.
FACTS: Final = (Reason.AUTOCAST, Reason.TRAINING_MODE, Reason.MOVED_MODULE)

#: Autocast type or None; training flag and place of each module.
Fingerprint = tuple[Any, tuple[bool, ...], tuple[int, ...]]
#: A module, its training flag, what tells where one of its tensors is, and where that was.
Watched = tuple[torch.nn.Module, bool, Callable[[], int], int]


class Guard:
    """Reads the facts of the calling thread that steer what a step computes.

    Args:
        device_type: Whose autocast matters.
        modules: The modules that the step is made of: their training flags matter, and where
            their weights are. One weight of each stands for all: ``.to()`` moves them together.
            Submodules that are switched or changed alone are found in check mode.

    Attributes:
        modules: Those modules.
    """

    def __init__(self, device_type: str, modules: Iterable[torch.nn.Module]) -> None:
        self._device_type = device_type
        self.modules: tuple[torch.nn.Module, ...] = ()
        self._places: tuple[Callable[[], int], ...] = ()
        for module in modules:
            self.add(module)

    def add(self, module: torch.nn.Module) -> None:
        """Watch a module that the step reaches in another way; before the first capture."""
        if module not in self.modules and hasattr(module, "training"):  # a frozen one has none
            self.modules += (module,)
            self._places += (place_of(module),)

    def now(self) -> Fingerprint:
        """Return the facts as they are now."""
        autocast = (
            torch.get_autocast_dtype(self._device_type)
            if torch.is_autocast_enabled(self._device_type)
            else None
        )
        training = tuple(module.training for module in self.modules)
        return autocast, training, tuple(place() for place in self._places)

    def watched(self, made_under: Fingerprint) -> tuple[Watched, ...]:
        """Return what a step has to look at: each module as it was in a fingerprint."""
        return tuple(zip(self.modules, made_under[1], self._places, made_under[2], strict=True))


def place_of(module: torch.nn.Module) -> Callable[[], int]:
    """Return what tells where a module is: by a tensor that every move and change of type moves."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors = [one for one in tensors if one.layout is torch.strided]  # others have no one place
    floating = [one for one in tensors if one.is_floating_point()]
    found = floating or tensors
    return found[0].data_ptr if found else int  # int() is 0, and costs a step no frame


def difference(made_under: Fingerprint, now: Fingerprint) -> str:
    """Return which fact differs, as a reason to count."""
    for name, then, current in zip(FACTS, made_under, now, strict=True):
        if then != current:
            return name
    return ""
