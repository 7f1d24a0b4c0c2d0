"""Begin captures that leave the default generator usable in other threads.

Up to torch 2.12, the beginning of a capture registers the state of the default generator with the
graph, even if the capture draws no random numbers. The state is marked as captured until the
capture ends. Meanwhile, eager draws raise "Offset increment outside graph capture encountered
unexpectedly" (aten/src/ATen/cuda/CUDAGraph.cpp, ``capture_begin``; CUDAGeneratorImpl.cpp,
``capture_prologue`` and ``increase``). Later versions register a state when a captured operation
draws from it (pytorch/pytorch#176753).

For captures that draw no random numbers, this module therefore replaces the state with a second
state that has the same seed and offset. torch then registers the second state. When a state is
registered for the first time, torch allocates memory before marking the state. A dispatch mode
intercepts this allocation and restores the first state, advanced to the offset of the second.
Threads that draw in the meantime get the same numbers as without the replacement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dispatchkit.backends.cuda.streams import UseStream
from dispatchkit.backends.watching.dispatch_mode import DispatchMode

# Only one thread at a time may replace a default generator's state, because threads share the
# generators.
_lock = threading.Lock()
# Whether the beginning of a capture registers the default generator; empty until the first capture
# shows it.
_registers: dict[str, bool] = {}


def begin_allowing_draws(begin: Callable[[], None], device_index: int) -> None:
    """Begin a capture on the current stream without marking the default generator.

    Args:
        begin: Function that begins the capture.
        device_index: Index of the device, which must be the current device.
    """
    if not _registers.get("default", True):
        begin()
        return
    with _lock:
        exchange = _Exchange(torch.cuda.default_generators[device_index])
        try:
            try:
                exchange.begin()
                with exchange:
                    begin()
            finally:
                _restore(exchange, device_index)
        finally:  # repeated, because a signal handler may have raised in the first call
            _restore(exchange, device_index)
        _registers["default"] = exchange.was_registered


def _restore(exchange: _Exchange, device_index: int) -> None:
    if exchange.is_on:  # torch registered no state, or failed before it did
        # A generator can be read and set only while the current stream is not capturing.
        with UseStream(torch.cuda.default_stream(device_index)):
            exchange.end()


class _Exchange(DispatchMode):
    """A mode that replaces a generator's state until torch allocates memory for the replacement.

    Args:
        generator: Generator whose state is replaced.

    Attributes:
        is_on: Whether the replacement is in use.
        was_registered: Whether torch allocated memory for the replacement.
    """

    def __init__(self, generator: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self._own: Any = generator.graphsafe_get_state()
        self._other: Any = torch.Generator(device=generator.device)
        self.is_on = False
        self.was_registered = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because this mode does not affect compiled functions."""
        return True

    def begin(self) -> None:
        """Replace the state of the generator."""
        own, other = self._own, self._other
        other.set_state(own.get_state())
        start = own.get_offset()
        other.set_offset(start)
        self.is_on = True
        self._generator.graphsafe_set_state(other)
        if own.get_offset() != start:  # another thread drew numbers before the replacement
            other.set_offset(max(own.get_offset(), other.get_offset()))

    def end(self) -> None:
        """Restore the original state, with the offset of the replacement."""
        own, other = self._own, self._other
        own.set_state(other.get_state())
        reached = other.get_offset()
        own.set_offset(reached)
        self._generator.graphsafe_set_state(own)
        self.is_on = False
        if other.get_offset() != reached:
            own.set_offset(max(own.get_offset(), other.get_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_on:
            self.end()
            self.was_registered = True
        return func(*args, **(kwargs or {}))
