"""Begin a capture that draws nothing, and leave the default generator to other threads.

Up to torch 2.12 the beginning of a capture registers the default generator's state with the
graph and marks it as captured until the end, whether or not anything is drawn: whoever draws
eagerly meanwhile gets "Offset increment outside graph capture encountered unexpectedly"
(aten/src/ATen/cuda/CUDAGraph.cpp, ``capture_begin``; CUDAGeneratorImpl.cpp, ``capture_prologue``
and ``increase``). Later torch registers a state when it is drawn from in a capture
(pytorch/pytorch#176753).

So another state of the same seed and offset takes its place for the moment in which torch looks
for the state to register. Torch first allocates the memory of a state that no graph has yet, and
marks the state only after that: a dispatch mode sees that allocation, and there the first state
comes back and goes on where the other one got to. Numbers that others draw in between are those
that they would have drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dispatchkit.backends.cuda.streams import UseStream
from dispatchkit.backends.watching.dispatch_mode import DispatchMode

# The exchange is of the process's default generator: one at a time.
_lock = threading.Lock()
# Whether torch registers the default generator; not known before the first exchange.
_registers: dict[str, bool] = {}


def begin_beside_draws(begin: Callable[[], None], device_index: int) -> None:
    """Call what begins a capture on the current stream, the default generator left alone.

    Args:
        begin: Begins the capture.
        device_index: The device, which is the current one.
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
                _come_back(exchange, device_index)
        finally:  # again: a signal's exception may have come in the first
            _come_back(exchange, device_index)
        _registers["default"] = exchange.was_registered


def _come_back(exchange: _Exchange, device_index: int) -> None:
    if exchange.is_on:  # torch registered nothing, or failed before
        # A generator can be read and set only where the current stream is not captured.
        with UseStream(torch.cuda.default_stream(device_index)):
            exchange.end()


class _Exchange(DispatchMode):
    """Another state in the place of a generator's own, until torch allocates its memory.

    Args:
        generator: The generator.

    Attributes:
        is_on: The other one is in its place.
        was_registered: Torch allocated memory for it.
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
        """Let compiled functions run compiled: nothing of the step runs meanwhile."""
        return True

    def begin(self) -> None:
        """Put the other state in its place."""
        own, other = self._own, self._other
        other.set_state(own.get_state())
        start = own.get_offset()
        other.set_offset(start)
        self.is_on = True
        self._generator.graphsafe_set_state(other)
        if own.get_offset() != start:  # drawn by another thread just before
            other.set_offset(max(own.get_offset(), other.get_offset()))

    def end(self) -> None:
        """Put its own state back, at the number that the other one got to."""
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
