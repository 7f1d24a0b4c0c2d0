"""Order graphs that draw random numbers on one CUDA device.

Such a graph reads seed and offset from device memory. torch fills it on the current stream before
each launch, but does not order the streams. Up to torch 2.11 all graphs of a generator share that
memory, and the beginning of a capture also fills it, on its own stream. Later each graph has its
own memory (2.13), which two replays of one graph still share. So a launch could read values filled
in by another stream's launch or by a capture, and numbers would be drawn twice or from an old seed.
Here all of these run one after the other, regardless of stream.

Eager draws get seed and offset as kernel arguments and need no ordering. Graphs captured outside
this package are not ordered.

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
    """Serializes access to the generators' memory by captures and graphs that draw.

    Thread safety: one lock around everything a thread queues in one turn. A capture that may draw
    holds it throughout, since torch 2.11 refuses draws of graphs meanwhile.

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
        """Launch on the current stream, after all earlier turns.

        An event is recorded after each turn, since by the next turn the stream may be gone or
        capturing.

        Raises:
            ReplayError: The current stream is capturing: it cannot wait for outside work, and seed
                and offset would become part of that graph.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                "A graph that draws random numbers, or was never replayed and may draw, was "
                "replayed inside a capture. The captured graph would draw the same numbers in "
                "every replay. Call the captured function itself there."
            )
        with self._lock:
            if torch._C._cuda_getCurrentRawStream(self._index) != self._handle:
                self._switch_to(torch.cuda.current_stream(self._index))
            try:
                launch()
            finally:  # a failed one may have filled the memory
                self._last.record(self._stream)

    def capture(self, stream: torch.cuda.Stream, run: Callable[[], _T]) -> _T:
        """Run a capture on a stream, the current one, in turn."""
        with self._lock:
            self._switch_to(stream)
            try:
                return run()
            finally:
                # Still capturing: the capture could not be ended, so no event can be recorded.
                if not torch.cuda.is_current_stream_capturing():
                    self._last.record(stream)

    def pause(self, run: Callable[[], _T]) -> _T:
        """Call a function while no graph that draws is launched."""
        with self._lock:
            return run()

    def synchronize(self) -> None:
        """Block until all turns so far have finished."""
        self._last.synchronize()

    def _switch_to(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the last turn; further turns on the stream are in stream order."""
        self._last.wait(stream)
        self._stream = stream
        self._handle = stream.cuda_stream if _has_permanent_handle(stream) else _NONE


# Not the handle of any stream.
_NONE = -1


def _has_permanent_handle(stream: torch.cuda.Stream) -> bool:
    """Return whether a handle permanently identifies its stream: the default's and torch's own do.

    A stream created by other code may be destroyed and its handle reused. The IDs of such streams
    are their addresses; those of torch's own are odd (c10/cuda/CUDAStream.cpp).
    """
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


_orders: dict[int, DrawOrder] = {}


def draw_order(device_index: int) -> DrawOrder:
    """Return the order of a device, shared by all backends of the process."""
    return _orders.setdefault(device_index, DrawOrder(device_index))
