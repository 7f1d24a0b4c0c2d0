"""Lane: static buffers and output memory of graphs that run one at a time.

A call of the runner is launched on the caller's own stream, so that it is ordered with the caller's
earlier and later work at no cost. Only if the caller's stream changes between two steps must the
new stream wait for the old one, since the buffers are shared. Eager steps use no buffers; they are
ordered in the same way if they change state.

Pool and stream are those of the lane's group, which other runners' lanes may share (see
``memory.pool_group``); the stream serves warmup, capture and ``submit``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dispatchkit.backends.base import CapturedGraph, GraphBackend, Stream
from dispatchkit.backends.watching.dispatch_mode import inference_mode
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.outputs import SharedMemory
from dispatchkit.execute.memory import Pacer, PoolGroup
from dispatchkit.keys.batch import GraphKey

# Number of plans that cache their views. A view takes about half a kilobyte, so that tables with
# many thousand cells must not cache all of them.
MAX_READY_PLANS = 2048


class Chain:
    """Serializes steps of several lanes that would access the same memory.

    These are steps that change state, and graphs that draw random numbers, whose seed and offset
    are written to one place on the device before each replay.

    Args:
        backend: The device.
        disjoint_state: Concurrent steps change different parts of the state.
    """

    def __init__(self, backend: GraphBackend, *, disjoint_state: bool) -> None:
        self.disjoint_state = disjoint_state
        self._last = backend.new_event()

    def orders(self, graphs: Iterable[CapturedGraph], *, has_effect: bool) -> bool:
        """Return whether a captured step must wait for others."""
        if has_effect and not self.disjoint_state:
            return True
        return any(graph.has_random_state for graph in graphs)

    def begin(self, lane: Lane) -> Stream | None:
        """Make a lane's stream wait for the last step of the chain; return the stream."""
        stream = lane.last_stream
        if stream is not None:
            self._last.wait(stream)
        return stream

    def end(self, stream: Stream | None) -> None:
        """Note that the work last queued on a stream is the last step of the chain."""
        if stream is not None:
            self._last.record(stream)


class Lane:
    """Static buffers and output memory of graphs in the pool of a group.

    Args:
        group: Pool and stream.
        inputs: The declarations of the inputs.
        num_rows: Rows of the buffers: those of the largest bucket, not of the largest batch.
        row_count: Keep a device value with the true row count for graphs.
        inputs_at: Returns the inputs at the buckets of axes, if inputs have axes.

    Attributes:
        group: Pool and stream.
        index: Number of the lane.
        chain: Serializes steps that must not overlap; None with one lane.
        tick: Counts runs of the step, including eager ones, to order graphs by last use.
        handle: Raw handle of the stream of the last step, None before the first.
        stream_argument: The handle as an argument of driver calls.
        last_stream: The stream of the last step.
    """

    def __init__(
        self,
        group: PoolGroup,
        inputs: InputSet,
        num_rows: int,
        *,
        row_count: bool = False,
        inputs_at: Callable[[Sequence[int]], InputSet] | None = None,
    ) -> None:
        self.group = group
        self.backend: GraphBackend = group.backend
        self.index: int = 0
        self._peers: tuple[weakref.ref[Lane], ...] = ()
        self.chain: Chain | None = None
        self.buffers: InputBuffers = InputBuffers(
            inputs, num_rows, backend=group.backend, allocate=group.allocate
        )
        self._inputs_at = inputs_at
        self._by_axes: dict[Any, InputBuffers] = {}
        self._by_shapes: dict[Any, InputBuffers] = {_shapes(inputs): self.buffers}
        self.outputs: SharedMemory = SharedMemory(inputs.device, group.allocate)
        self.between: SharedMemory = SharedMemory(inputs.device, group.allocate)
        self.row_count: torch.Tensor | None = None
        if row_count:
            with inference_mode(False):
                self.row_count = group.allocate(
                    lambda: torch.zeros((), dtype=torch.int64, device=inputs.device)
                )
        self.tick = 0
        self._rows = 0
        self.handle: int | None = None
        self.stream_argument: ctypes.c_void_p = ctypes.c_void_p()
        self.last_stream: Stream | None = None
        self._ready: deque[weakref.ref[Any]] = deque()
        group.add_lane(self)

    @property
    def stream(self) -> Stream:
        """The stream for warmup and capture of its graphs, and for submitted steps."""
        return self.group.stream

    @property
    def pool(self) -> Any:
        """The pool of its graphs."""
        return self.group.pool

    def buffers_of(self, key: GraphKey) -> InputBuffers:
        """Return the buffers that the graph of a key reads, which may depend on axes."""
        axes: Any = key.descriptor.axes
        if self._inputs_at is None or not axes:
            return self.buffers
        found = self._by_axes.get(axes)
        if found is None:
            inputs = self._inputs_at(axes)
            # An axis that is not a dimension of an input does not affect the memory.
            found = self._by_shapes.get(_shapes(inputs))
            if found is None:
                found = InputBuffers(
                    inputs,
                    self.buffers.num_rows,
                    backend=self.backend,
                    allocate=self.group.allocate,
                )
                self._by_shapes[_shapes(inputs)] = found
            self._by_axes[axes] = found
        return found

    def static_bytes_of(self, keys: Iterable[GraphKey]) -> int:
        """Return the device bytes of its static inputs once some keys have graphs."""
        wanted = {_shapes(self.buffers.inputs): self.buffers.inputs}
        for key in keys:
            if self._inputs_at is not None and key.descriptor.axes:
                inputs = self._inputs_at(key.descriptor.axes)
                wanted[_shapes(inputs)] = inputs
        return sum(inputs.num_bytes(self.buffers.num_rows) for inputs in wanted.values())

    @property
    def static_bytes(self) -> int:
        """Bytes of its static inputs on the device."""
        return sum(buffers.num_bytes for buffers in self._by_shapes.values())

    def order(self) -> None:
        """Make the current stream wait for the lane's earlier steps, if it has changed."""
        handle = self.backend.current_stream_handle()
        if handle != self.handle:
            self.switch(handle)

    def switch(self, handle: int) -> None:
        """Make the current stream, which has changed, wait for the lane's earlier steps."""
        current = self.group.order(self, handle)
        self.handle, self.last_stream = handle, current
        self.stream_argument = ctypes.c_void_p(handle)

    def refill(self) -> None:
        """Reset its static inputs to their initial contents, after its memory was lost."""
        for buffers in self._by_shapes.values():
            buffers.refill()
        if self.row_count is not None:
            self.row_count.fill_(self._rows)

    def synchronize(self) -> None:
        """Block until the lane's steps are done and none is in flight."""
        if self.last_stream is not None:
            self.last_stream.synchronize()
        # During a background capture it must not be waited for, and has no step's work.
        if not self.group.turns.is_under_way:
            self.stream.synchronize()

    def join(self, index: int, priority: int, peers: tuple[Lane, ...], chain: Chain) -> None:
        """Become one of several lanes of a runner; before anything is captured."""
        self.index, self.chain = index, chain
        # A weak reference, as for plans below: a lane's memory must be freed with its runner.
        self._peers = tuple(weakref.ref(peer) for peer in peers)
        if priority:
            self.group.use_priority(priority)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for other lanes' work, and make the current stream wait for this lane's.

        For code that saves and restores state, which would lose changes of steps in flight.
        """
        for reference in self._peers:
            peer = reference()
            if peer is not None:
                peer.synchronize()
        self.order()
        try:
            yield
        finally:
            if self._peers:
                self.backend.current_stream().synchronize()
                self.synchronize()

    @property
    def pacer(self) -> Pacer | None:
        """The pacer that lets steps in, if this thread captures in the background."""
        pacer = self.group.turns.pacer
        return pacer if pacer is not None and pacer.allows_turns else None

    def let_steps_in(self, part: str) -> bool:
        """Let steps of other threads run if this thread captures in the background.

        Args:
            part: The finished phase of the capture.

        Returns:
            Whether any may have run: static inputs and shared outputs may now hold theirs.
        """
        pacer = self.pacer
        if pacer is None:
            return False
        self.backend.current_stream().synchronize()  # they would wait for it on the device
        pacer.end_part(part)
        self.go_on(pacer)
        return True

    def go_on(self, pacer: Pacer) -> None:
        """Resume a background capture after the steps that were let in are done.

        The next step would wait for them, too, so this time does not count.
        """
        self.order()
        self.backend.current_stream().synchronize()
        pacer.resume()

    @property
    def has_peers(self) -> bool:
        """Whether it is one of several lanes of a runner."""
        return bool(self._peers)

    def set_rows(self, num_rows: int) -> None:
        """Write the true row count for graphs to its device value."""
        if num_rows != self._rows and self.row_count is not None:
            self.row_count.fill_(num_rows)
            self._rows = num_rows

    def keep_ready(self, plan: Any) -> None:
        """Note that a plan caches views; beyond a bound the oldest plan drops its views."""
        self._ready.append(weakref.ref(plan))
        if len(self._ready) > MAX_READY_PLANS:
            self._forget_oldest()

    def forget_plans(self) -> None:
        """Drop all cached views."""
        while self._ready:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        plan = self._ready.popleft()()
        if plan is not None:
            plan.forget()

    def num_bytes(self) -> int:
        """Return the bytes of its graphs: the pool and their shared outputs."""
        return self.backend.pool_bytes(self.pool) + self.shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the outputs that its graphs share."""
        return self.outputs.num_bytes + self.between.num_bytes

    def drop_outputs(self) -> None:
        """Start new output memory, after graphs that write to the old were released."""
        self.forget_plans()
        self.outputs.clear()
        self.between.clear()

    def measuring(self, part: str) -> AbstractContextManager[None]:
        """Record memory that the driver takes in a block, if runners share a ``GraphMemory``."""
        memory = self.group.memory
        return nullcontext() if memory is None else memory.measuring(self.backend, part)


def _shapes(inputs: InputSet) -> tuple[Any, ...]:
    return tuple(spec.shape for spec in inputs)
