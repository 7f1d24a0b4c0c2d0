"""Lane: the static inputs and output memory of graphs that run one at a time.

A call launches on the caller's stream, which orders it with the caller's other work at no cost. If
the stream changes between two steps, the new stream waits for the old one, because the steps share
static inputs. Eager steps do not write static inputs, so they wait only if they change state.

The pool and the stream for warmups, captures and ``submit`` belong to the lane's group, which may
also contain lanes of other runners (see ``memory.pool_group``).
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

# Maximum number of plans that cache views. A view uses about 0.5 KB, so caching views for every
# cell of a large table would use too much memory.
MAX_CACHING_PLANS = 2048


class Chain:
    """Orders steps that access the same memory but run on different lanes.

    Steps that change state belong to the chain, unless ``disjoint_state`` is set. Replays of graphs
    that draw random numbers always belong to it: these graphs share the device memory to which
    their seed and offset are written before each replay.

    Args:
        backend: The backend on which the lanes run.
        disjoint_state: Whether concurrent steps change different parts of the state.
    """

    def __init__(self, backend: GraphBackend, *, disjoint_state: bool) -> None:
        self.disjoint_state = disjoint_state
        self._last = backend.new_event()

    def orders(self, graphs: Iterable[CapturedGraph], *, has_effect: bool) -> bool:
        """Return whether a captured step must wait for steps of other lanes."""
        if has_effect and not self.disjoint_state:
            return True
        return any(graph.has_random_state for graph in graphs)

    def begin(self, lane: Lane) -> Stream | None:
        """Make ``lane.last_stream`` wait for the last step of the chain; return the stream."""
        stream = lane.last_stream
        if stream is not None:
            self._last.wait(stream)
        return stream

    def end(self, stream: Stream | None) -> None:
        """Record the end of the last step queued on a stream."""
        if stream is not None:
            self._last.record(stream)


class Lane:
    """The static inputs and output memory of graphs that run one at a time.

    Args:
        group: The group that owns the pool and the stream.
        inputs: The declarations of the inputs.
        num_rows: Number of rows in the buffers; at least the largest bucket.
        row_count: Whether graphs read the number of real rows from device memory.
        inputs_at: Function that returns the declarations of the inputs for given buckets of the
            axes; None if no axis is a dimension of an input.

    Attributes:
        group: The group that owns the pool and the stream.
        index: Index of the lane in its runner.
        chain: The chain shared by all lanes of the runner; None for a single lane.
        tick: Number of steps so far, including eager steps. A graph stores the tick of its last
            use.
        handle: Raw handle of ``last_stream``; None if the next step must call ``switch``.
        stream_argument: ``handle`` as an argument of driver calls.
        last_stream: The stream on which static inputs or state were last used; None before the
            first step.
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
        """The stream of warmups, captures and submitted steps."""
        return self.group.stream

    @property
    def pool(self) -> Any:
        """The memory pool of the lane's graphs."""
        return self.group.pool

    def buffers_of(self, key: GraphKey) -> InputBuffers:
        """Return the input buffers that the graph of a key reads."""
        axes: Any = key.descriptor.axes
        if self._inputs_at is None or not axes:
            return self.buffers
        found = self._by_axes.get(axes)
        if found is None:
            inputs = self._inputs_at(axes)
            # Axes that are not dimensions of an input do not change the shapes of the buffers.
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
        """Return the device bytes of the static inputs that graphs of the keys need."""
        wanted = {_shapes(self.buffers.inputs): self.buffers.inputs}
        for key in keys:
            if self._inputs_at is not None and key.descriptor.axes:
                inputs = self._inputs_at(key.descriptor.axes)
                wanted[_shapes(inputs)] = inputs
        return sum(inputs.num_bytes(self.buffers.num_rows) for inputs in wanted.values())

    @property
    def static_bytes(self) -> int:
        """Device bytes of all static inputs."""
        return sum(buffers.num_bytes for buffers in self._by_shapes.values())

    def order(self, *, is_eager: bool = False) -> None:
        """If the current stream has changed, make it wait for earlier steps."""
        handle = self.backend.current_stream_handle()
        if handle != self.handle:
            self.switch(handle, is_eager=is_eager)

    def switch(self, handle: int, *, is_eager: bool = False) -> None:
        """Make the new current stream wait for the lane's earlier steps.

        An eager step may run while the memory is asleep; a later replay is then still rejected.
        """
        current = self.group.order(self, handle, is_eager=is_eager)
        self.handle, self.last_stream = None if self.group.is_asleep else handle, current
        self.stream_argument = ctypes.c_void_p(handle)

    def refill(self) -> None:
        """Reset the static inputs and restore the row count, after sleep released their memory."""
        for buffers in self._by_shapes.values():
            buffers.refill()
        if self.row_count is not None:
            self.row_count.fill_(self._rows)

    def synchronize(self) -> None:
        """Block until no step of the lane is in flight."""
        if self.last_stream is not None:
            self.last_stream.synchronize()
        # During a background capture, the group's stream has no steps and must not be synchronized.
        if not self.group.turns.is_under_way:
            self.stream.synchronize()

    def join(self, index: int, priority: int, peers: tuple[Lane, ...], chain: Chain) -> None:
        """Connect the lane with its runner's other lanes; call before the first capture."""
        self.index, self.chain = index, chain
        # Weak references, so that the lane is freed with its runner.
        self._peers = tuple(weakref.ref(peer) for peer in peers)
        if priority:
            self.group.use_priority(priority)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude steps of other lanes while state is saved and restored.

        On entry, wait for the steps in flight on other lanes. Otherwise, restoring the state would
        undo their changes. On exit, wait for the work of this lane if there are other lanes.
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
        """The pacer of this thread's background capture if steps may run during it, or None."""
        pacer = self.group.turns.pacer
        return pacer if pacer is not None and pacer.allows_turns else None

    def let_steps_run(self, part: str) -> bool:
        """Let other threads run steps between two phases of a background capture.

        Do nothing outside a background capture, or if steps may not run during the capture.

        Args:
            part: Name of the phase that has finished.

        Returns:
            Whether steps may have run and overwritten static inputs and shared outputs.
        """
        pacer = self.pacer
        if pacer is None:
            return False
        self.backend.current_stream().synchronize()  # otherwise, steps would wait for this work
        pacer.end_part(part)
        self.resume_capture(pacer)
        return True

    def resume_capture(self, pacer: Pacer) -> None:
        """Wait for the steps of other threads, then resume the capture.

        The pacer does not count this wait as a delay of steps, because the next step would have to
        wait for the same steps anyway.
        """
        self.order()
        self.backend.current_stream().synchronize()
        pacer.resume()

    @property
    def has_peers(self) -> bool:
        """Whether the runner has several lanes."""
        return bool(self._peers)

    def set_rows(self, num_rows: int) -> None:
        """Write the number of real rows to the device memory that graphs read."""
        if num_rows != self._rows and self.row_count is not None:
            self.row_count.fill_(num_rows)
            self._rows = num_rows

    def add_caching_plan(self, plan: Any) -> None:
        """Record a plan that caches views; above ``MAX_CACHING_PLANS``, drop the oldest views."""
        self._ready.append(weakref.ref(plan))
        if len(self._ready) > MAX_CACHING_PLANS:
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
        """Return the bytes of the lane's graphs: the pool and shared outputs."""
        return self.backend.pool_bytes(self.pool) + self.shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of outputs that graphs share, and of results of eager pieces that graphs read."""
        return self.outputs.num_bytes + self.between.num_bytes

    def drop_outputs(self) -> None:
        """Release the output memory; call after the graphs that write it are destroyed."""
        self.forget_plans()
        self.outputs.clear()
        self.between.clear()

    def measuring(self, part: str) -> AbstractContextManager[None]:
        """Return a context that charges new driver memory to a ``part`` of the memory account."""
        memory = self.group.memory
        return nullcontext() if memory is None else memory.measuring(self.backend, part)


def _shapes(inputs: InputSet) -> tuple[Any, ...]:
    return tuple(spec.shape for spec in inputs)
