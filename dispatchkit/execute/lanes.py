"""Lane: one stream, one memory pool, and buffers whose graphs run one at a time.

With one lane a replay is launched on the caller's own stream, so that it is ordered with
the caller's work before and after it, for nothing. Only when the caller's stream changes
between two steps is the new stream made to wait for the old one: the buffers are shared.
The lane's own stream serves warmup and capture.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend, Stream
from dispatchkit.execute.buffers import InputBuffers
from dispatchkit.execute.inputs import InputSet
from dispatchkit.execute.outputs import SharedMemory

# Plans that keep their views ready. A view costs about half a kilobyte, so that tables with
# many thousand cells must not keep them all.
MAX_READY_PLANS = 2048


class Lane:
    """One stream with one pool, static buffers and output memory.

    Args:
        backend: The device.
        inputs: What is declared of the inputs.
        num_rows: Rows the buffers make room for: the largest bucket, not the largest batch.
        row_count: Keep a device value that tells graphs the true row count.
        index: Number of the lane.

    Attributes:
        tick: Counts launches; says which graph was used last.
        handle: Raw handle of the stream of the last step, None before the first.
        stream_argument: The same, ready for a call of the driver.
        last_stream: That stream.
    """

    def __init__(
        self,
        backend: GraphBackend,
        inputs: InputSet,
        num_rows: int,
        *,
        row_count: bool = False,
        index: int = 0,
    ) -> None:
        self.backend = backend
        self.index = index
        self.stream: Stream = backend.new_stream()
        self.pool: Any = backend.new_pool()
        self.buffers: InputBuffers = InputBuffers(inputs, num_rows, backend=backend)
        self.outputs: SharedMemory = SharedMemory(inputs.device)
        self.between: SharedMemory = SharedMemory(inputs.device)
        self.row_count: torch.Tensor | None = None
        if row_count:
            with torch.inference_mode(False):
                self.row_count = torch.zeros((), dtype=torch.int64, device=inputs.device)
        self.tick = 0
        self._rows = 0
        self.handle: int | None = None
        self.stream_argument: ctypes.c_void_p = ctypes.c_void_p()
        self.last_stream: Stream | None = None
        self._ready: deque[Any] = deque()

    def order(self) -> None:
        """Make the current stream wait for the lane's earlier steps, if it is another one."""
        handle = self.backend.current_stream_handle()
        if handle != self.handle:
            self.switch(handle)

    def switch(self, handle: int) -> None:
        """Make the current stream, another one than before, wait for the lane's earlier steps."""
        current = self.backend.current_stream()
        if self.last_stream is not None:
            # Also covers what the old stream's user queued there to read views of outputs.
            current.wait_stream(self.last_stream)
        self.handle, self.last_stream = handle, current
        self.stream_argument = ctypes.c_void_p(handle)

    def settle(self) -> None:
        """Block until the lane's steps are done; nothing of it is in flight afterwards."""
        if self.last_stream is not None:
            self.last_stream.synchronize()
        self.stream.synchronize()

    def set_rows(self, num_rows: int) -> None:
        """Tell graphs the true row count, through its device value."""
        if num_rows != self._rows and self.row_count is not None:
            self.row_count.fill_(num_rows)
            self._rows = num_rows

    def keep_ready(self, plan: Any) -> None:
        """Note that a plan holds views; the oldest beyond a bound gives them up."""
        self._ready.append(plan)
        if len(self._ready) > MAX_READY_PLANS:
            self._ready.popleft().forget()

    def forget_plans(self) -> None:
        """Let go of all kept views."""
        while self._ready:
            self._ready.popleft().forget()

    def num_bytes(self) -> int:
        """Return the bytes of its graphs: the pool, and the outputs they share."""
        shared = self.outputs.num_bytes + self.between.num_bytes
        return self.backend.pool_bytes(self.pool) + shared

    def drop_pool(self) -> None:
        """Start a new pool and new output memory; the graphs of the old are released before."""
        self.forget_plans()
        self.pool = self.backend.new_pool()
        self.outputs.clear()
        self.between.clear()
