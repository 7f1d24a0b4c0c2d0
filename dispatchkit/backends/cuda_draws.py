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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class DrawOrder:
    """Lets graphs of a device that draw, and captures, touch the generators' memory in turn.

    Thread safety: one lock around what a thread queues in one turn; a capture holds it from
    its beginning to its end, since torch 2.11 refuses draws of graphs meanwhile.

    Args:
        device_index: The device.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._lock = threading.RLock()
        self._last = torch.cuda.Event()
        self._handle = -1
        self._stream: torch.cuda.Stream | None = None

    def replay(self, launch: Callable[[], None]) -> None:
        """Call what launches on the current stream, after all turns before.

        Recorded after each, since a stream may be gone, or captured, by the next one's turn.
        """
        # Inside a capture nothing outside can be waited for, nor may its thread be kept
        # waiting; what cannot be captured torch refuses.
        if torch.cuda.is_current_stream_capturing():
            return launch()
        with self._lock:
            stream = self._current_stream()
            self._last.wait(stream)
            try:
                launch()
            finally:  # one that failed may have filled the memory
                self._last.record(stream)

    @contextmanager
    def capturing(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Let a capture on a stream, the current one, begin and end in here."""
        with self._lock:
            self._last.wait(stream)
            try:
                yield
            finally:
                # Still capturing: one that could not be ended, which no event can tell of.
                if not torch.cuda.is_current_stream_capturing():
                    self._last.record(stream)

    def settle(self) -> None:
        """Block until all turns so far are over."""
        self._last.synchronize()

    def _current_stream(self) -> torch.cuda.Stream:
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if self._stream is None or handle != self._handle:
            # 4 us on torch's side, so not for each replay.
            self._handle, self._stream = handle, torch.cuda.current_stream(self._index)
        return self._stream


_orders: dict[int, DrawOrder] = {}


def draw_order(device_index: int) -> DrawOrder:
    """Return the order of a device: one for all backends of the process."""
    return _orders.setdefault(device_index, DrawOrder(device_index))
