"""Guards: properties other than inputs that a graph depends on, compared at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from dispatchkit.dispatch import Reason

#: The reason to count for each property of a fingerprint, in order.
FACTS: Final = (Reason.AUTOCAST, Reason.TRAINING_MODE, Reason.MOVED_MODULE)

#: Autocast dtype or None; training flag and address of each module.
Fingerprint = tuple[Any, tuple[bool, ...], tuple[int, ...]]
#: A module, its training flag, a function that returns the address of one of its tensors, and that
#: address.
Watched = tuple[torch.nn.Module, bool, Callable[[], int], int]


class Guard:
    """Reads properties of the calling thread and modules that affect what a step computes.

    Args:
        device_type: The device type whose autocast matters.
        modules: The step's modules, whose training flags and addresses of weights matter. One
            weight of each represents all, since ``.to()`` moves them together. Submodules that are
            switched or changed alone are detected in check mode.

    Attributes:
        modules: The modules.
    """

    def __init__(self, device_type: str, modules: Iterable[torch.nn.Module]) -> None:
        self._device_type = device_type
        self.modules: tuple[torch.nn.Module, ...] = ()
        self._places: tuple[Callable[[], int], ...] = ()
        for module in modules:
            self.add(module)

    def add(self, module: torch.nn.Module) -> None:
        """Add a module that the step reaches in another way, before the first capture."""
        if module not in self.modules and hasattr(module, "training"):  # a frozen one has none
            self.modules += (module,)
            self._places += (place_of(module),)

    def now(self) -> Fingerprint:
        """Return the current properties."""
        autocast = (
            torch.get_autocast_dtype(self._device_type)
            if torch.is_autocast_enabled(self._device_type)
            else None
        )
        training = tuple(module.training for module in self.modules)
        return autocast, training, tuple(place() for place in self._places)

    def watched(self, made_under: Fingerprint) -> tuple[Watched, ...]:
        """Return the modules as of a fingerprint, for comparison in a step."""
        return tuple(zip(self.modules, made_under[1], self._places, made_under[2], strict=True))


def place_of(module: torch.nn.Module) -> Callable[[], int]:
    """Return a function for a module's address, by a tensor that every move or conversion moves."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors = [one for one in tensors if one.layout is torch.strided]  # others have no one place
    floating = [one for one in tensors if one.is_floating_point()]
    found = floating or tensors
    return found[0].data_ptr if found else int  # int() is 0, without a Python frame


def difference(made_under: Fingerprint, now: Fingerprint) -> str:
    """Return the property that differs, as a reason to count."""
    for name, then, current in zip(FACTS, made_under, now, strict=True):
        if then != current:
            return name
    return ""
