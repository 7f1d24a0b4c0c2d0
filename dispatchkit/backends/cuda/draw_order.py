"""Order the launches and captures of graphs that draw random numbers on one CUDA device.

These graphs read their seed and offset from device memory, which torch writes on the current stream
before each launch. torch does not order launches on different streams. Up to torch 2.11, all graphs
that draw from the same generator share this memory, and the beginning of a capture also writes it.
In torch 2.13, each graph has its own memory, but replays of the same graph share it. Without
further ordering, a launch could read the values of another launch or capture, and repeat numbers or
use an old seed. Therefore, this module runs these launches and captures one after the other.

Eager operations receive the seed and offset as kernel arguments, so they need no ordering. Graphs
captured by other code are not ordered.

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
    """The order of captures and launches that draw random numbers on one device.

    Thread safety: all methods may be called from any thread. Launches and captures hold the same
    lock. A capture holds it until its end, because during a capture, torch 2.11 rejects replays of
    graphs that draw.

    Args:
        device_index: Index of the CUDA device whose graphs are ordered.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._lock = threading.RLock()
        self._last = torch.cuda.Event()
        self._handle = _NONE
        self._stream: torch.cuda.Stream | None = None

    def replay(self, launch: Callable[[], None]) -> None:
        """Launch a graph on the current stream, after all earlier launches and captures.

        An event is recorded after each launch, because the stream may no longer exist, or may be
        capturing, at the next launch.

        Raises:
            ReplayError: The current stream is capturing. A capturing stream cannot wait for work
                outside the capture, and the seed and offset would become part of the graph being
                captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                "A graph that may draw random numbers was replayed inside a capture. The new graph "
                "would draw the same numbers in every replay. Instead of replaying the graph, call "
                "the function that it was captured from."
            )
        with self._lock:
            if torch._C._cuda_getCurrentRawStream(self._index) != self._handle:
                self._switch_to(torch.cuda.current_stream(self._index))
            try:
                launch()
            finally:  # a failed launch may have written the seed and offset
                self._last.record(self._stream)

    def capture(self, stream: torch.cuda.Stream, run: Callable[[], _T]) -> _T:
        """Run a capture after all earlier launches and captures, and return its result.

        Args:
            stream: The current stream, on which the capture runs.
            run: Function that captures, and returns the result.
        """
        with self._lock:
            self._switch_to(stream)
            try:
                return run()
            finally:
                # If the capture could not be ended, the stream cannot record an event.
                if not torch.cuda.is_current_stream_capturing():
                    self._last.record(stream)

    def pause(self, run: Callable[[], _T]) -> _T:
        """Call a function while no graph that draws can be launched; return its result."""
        with self._lock:
            return run()

    def synchronize(self) -> None:
        """Block the host until all earlier launches and captures are done."""
        self._last.synchronize()

    def _switch_to(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the last event; later launches on it are in stream order."""
        self._last.wait(stream)
        self._stream = stream
        self._handle = stream.cuda_stream if _has_permanent_handle(stream) else _NONE


# Not the handle of any stream.
_NONE = -1


def _has_permanent_handle(stream: torch.cuda.Stream) -> bool:
    """Return whether a stream's handle is never reused for another stream.

    This is true for the default stream, whose ID is 0, and for torch's streams, whose IDs are odd
    (c10/cuda/CUDAStream.cpp). The IDs of other streams are their addresses. Other code may destroy
    its streams, and their handles may then be reused.
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


_orders: dict[int, DrawOrder] = {}


def draw_order(device_index: int) -> DrawOrder:
    """Return the DrawOrder that all backends of the process share for a device."""
    return _orders.setdefault(device_index, DrawOrder(device_index))
