"""Guards: compare autocast, training flags and weight addresses with those of the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from dispatchkit.dispatch import Reason

#: The reasons to count if a property of a fingerprint differs, in the order of the properties.
FACTS: Final = (Reason.AUTOCAST, Reason.TRAINING_MODE, Reason.MOVED_MODULE)

#: Autocast dtype or None; training flags of the modules; one tensor address for each module.
Fingerprint = tuple[Any, tuple[bool, ...], tuple[int, ...]]
#: A module, its training flag, a function that reads the address of one of its tensors, and the
#: expected address.
Watched = tuple[torch.nn.Module, bool, Callable[[], int], int]


class Guard:
    """Guard on properties of the thread and the modules that affect a step's results.

    Args:
        device_type: Device type whose autocast state is read.
        modules: Modules of the step, whose training flags and weight addresses are read. One weight
            represents all weights of a module, because ``.to()`` moves them together. Changes to a
            single submodule are detected by ``ValueWatch``, possibly many replays later.

    Attributes:
        modules: Modules added so far.
    """

    def __init__(self, device_type: str, modules: Iterable[torch.nn.Module]) -> None:
        self._device_type = device_type
        self.modules: tuple[torch.nn.Module, ...] = ()
        self._places: tuple[Callable[[], int], ...] = ()
        for module in modules:
            self.add(module)

    def add(self, module: torch.nn.Module) -> None:
        """Add a module; must be called before the first capture."""
        # Frozen script modules have no training flag.
        if module not in self.modules and hasattr(module, "training"):
            self.modules += (module,)
            self._places += (address_reader(module),)

    def now(self) -> Fingerprint:
        """Return the current fingerprint."""
        autocast = (
            torch.get_autocast_dtype(self._device_type)
            if torch.is_autocast_enabled(self._device_type)
            else None
        )
        training = tuple(module.training for module in self.modules)
        return autocast, training, tuple(place() for place in self._places)

    def watched(self, made_under: Fingerprint) -> tuple[Watched, ...]:
        """Return one tuple for each module, with the expected values from a fingerprint."""
        return tuple(zip(self.modules, made_under[1], self._places, made_under[2], strict=True))


def address_reader(module: torch.nn.Module) -> Callable[[], int]:
    """Return a function that reads the address of a tensor in a module.

    A move or conversion of a module with parameters or buffers changes this address.
    """
    weights = _sorted(module.named_parameters())
    if weights:  # a move replaces the data of a parameter, not the parameter itself
        return weights[0][1].data_ptr
    buffers = _sorted(module.named_buffers())
    if not buffers:
        return int  # int() returns 0 and creates no Python frame
    path, _, name = buffers[0][0].rpartition(".")
    owner = module.get_submodule(path)

    def read() -> int:  # a move replaces the buffer itself
        buffer = getattr(owner, name, None)
        return 0 if buffer is None else buffer.data_ptr()

    return read


def _sorted(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the strided tensors with their names, floating-point tensors first."""
    strided = [one for one in tensors if one[1].layout is torch.strided]
    return sorted(strided, key=lambda one: not one[1].is_floating_point())


def difference(made_under: Fingerprint, now: Fingerprint) -> str:
    """Return the reason for the first property that differs; empty if all are equal."""
    for name, then, current in zip(FACTS, made_under, now, strict=True):
        if then != current:
            return name
    return ""
