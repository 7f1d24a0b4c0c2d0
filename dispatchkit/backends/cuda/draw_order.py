"""The order of graphs that draw random numbers, on one CUDA device.

Such a graph reads seed and offset from memory of the device. torch fills it on the current
stream before each launch, and nothing of torch's orders the streams. Up to torch 2.11 all
graphs of a generator share that memory, and a capture fills it too, at its beginning, on its
own stream; later each graph has its own (2.13), which two replays of one graph still share. So
a launch could read what another stream's had filled in, or a capture: numbers would be drawn
twice, or from an old seed. Here all of them go one after the other, whatever their streams.

Eager draws get their numbers with the launch of the kernel, and need no order. Graphs that
others capture past this package are not ordered.

Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, ``capture_prologue``, ``replay_prologue``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from dispatchkit.errors import ReplayError

_T = TypeVar("_T")


class DrawOrder:
    """Lets graphs of a device that draw, and captures, touch the generators' memory in turn.

    Thread safety: one lock around what a thread queues in one turn; a capture that may draw
    holds it from its beginning to its end, since torch 2.11 refuses draws of graphs meanwhile.

    Args:
        device_index: The device.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._lock = threading.RLock()
        self._last = torch.cuda.Event()
        self._handle = _NONE
        self._stream: torch.cuda.Stream | None = None

    def replay(self, launch: Callable[[], None]) -> None:
        """Call what launches on the current stream, after all turns before.

        Recorded after each, since a stream may be gone, or captured, by the next one's turn.

        Raises:
            ReplayError: The current stream is being captured: nothing outside can be waited for
                there, and seed and offset would become part of that graph.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                "A graph that draws random numbers, or may do so before its first replay, was "
                "asked to replay inside a capture, whose graph would draw the same ones each "
                "time. Call the captured function itself there."
            )
        with self._lock:
            if torch._C._cuda_getCurrentRawStream(self._index) != self._handle:
                self._come_to(torch.cuda.current_stream(self._index))
            try:
                launch()
            finally:  # one that failed may have filled the memory
                self._last.record(self._stream)

    def capture(self, stream: torch.cuda.Stream, run: Callable[[], _T]) -> _T:
        """Call what begins and ends a capture on a stream, the current one, in its turn."""
        with self._lock:
            self._come_to(stream)
            try:
                return run()
            finally:
                # Still capturing: one that could not be ended, which no event can mark.
                if not torch.cuda.is_current_stream_capturing():
                    self._last.record(stream)

    def pause(self, run: Callable[[], _T]) -> _T:
        """Call something while no graph that draws is launched."""
        with self._lock:
            return run()

    def synchronize(self) -> None:
        """Block until all turns so far are over."""
        self._last.synchronize()

    def _come_to(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the last turn; further ones on it are in its own order."""
        self._last.wait(stream)
        self._stream = stream
        self._handle = stream.cuda_stream if _stays(stream) else _NONE


# The handle of no stream.
_NONE = -1


def _stays(stream: torch.cuda.Stream) -> bool:
    """Return whether a handle is this stream's for good: the default one's, and torch's own.

    One that somebody else made may be destroyed, and another one get its handle. Their ids are
    their addresses, and those of torch's own are odd (c10/cuda/CUDAStream.cpp).
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


_orders: dict[int, DrawOrder] = {}


def draw_order(device_index: int) -> DrawOrder:
    """Return the order of a device: one for all backends of the process."""
    return _orders.setdefault(device_index, DrawOrder(device_index))
