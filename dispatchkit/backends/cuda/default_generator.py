"""Begin a capture without draws, leaving the default generator to other threads.

Up to torch 2.12, beginning a capture registers the default generator's state with the graph and
marks it as captured until the end, whether or not anything is drawn. Eager draws in the meantime
raise "Offset increment outside graph capture encountered unexpectedly"
(aten/src/ATen/cuda/CUDAGraph.cpp, ``capture_begin``; CUDAGeneratorImpl.cpp, ``capture_prologue``
and ``increase``). Later torch registers a state when it is drawn from in a capture
(pytorch/pytorch#176753).

So a second state with the same seed and offset takes its place while torch looks up the state to
register. For a state without graphs, torch first allocates memory and only then marks the state. A
dispatch mode sees that allocation and restores the first state, advanced to the second one's
offset. Numbers drawn by others in between are the ones they would have drawn anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dispatchkit.backends.cuda.streams import UseStream
from dispatchkit.backends.watching.dispatch_mode import DispatchMode

# The process has one default generator, so one exchange at a time.
_lock = threading.Lock()
# Whether torch registers the default generator; unknown before the first exchange.
_registers: dict[str, bool] = {}


def begin_allowing_draws(begin: Callable[[], None], device_index: int) -> None:
    """Begin a capture on the current stream without marking the default generator.

    Args:
        begin: Begins the capture.
        device_index: The device, which must be the current one.
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
        finally:  # again: a signal handler may have raised in the first
            _restore(exchange, device_index)
        _registers["default"] = exchange.was_registered


def _restore(exchange: _Exchange, device_index: int) -> None:
    if exchange.is_on:  # torch registered nothing, or failed before
        # A generator can be read and set only while the current stream is not capturing.
        with UseStream(torch.cuda.default_stream(device_index)):
            exchange.end()


class _Exchange(DispatchMode):
    """Replaces a generator's state until torch allocates memory for the replacement.

    Args:
        generator: The generator.

    Attributes:
        is_on: The replacement is in place.
        was_registered: Torch allocated memory for the replacement.
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
        """Let compiled functions run compiled: no part of the step runs meanwhile."""
        return True

    def begin(self) -> None:
        """Install the replacement."""
        own, other = self._own, self._other
        other.set_state(own.get_state())
        start = own.get_offset()
        other.set_offset(start)
        self.is_on = True
        self._generator.graphsafe_set_state(other)
        if own.get_offset() != start:  # drawn by another thread just before
            other.set_offset(max(own.get_offset(), other.get_offset()))

    def end(self) -> None:
        """Restore the original state, at the offset that the replacement reached."""
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
