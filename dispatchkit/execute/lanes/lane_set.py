"""LaneSet: submits steps to lanes and returns futures.

Each lane has its own executor, with a stream, pool, static inputs, graphs and table. Lanes share
only the step function, its weights, and state (see ``Chain``). The host submits steps one at a
time, under one lock, and the device runs them concurrently.

Results are new tensors, or views of the lane's memory. A future raises instead of returning a view
that a later step of the lane may have overwritten.

Events order the streams. At submission, the lane's stream waits for the work already queued on the
caller's stream. ``StepFuture.wait`` makes another stream wait for the step. Inputs are copied on
the lane's stream, so the caller's stream does not wait. The inputs are kept alive until the step
has finished.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, overload

import attrs
import torch

from dispatchkit.backends.base import Event, Stream
from dispatchkit.dispatch import KeyPlacement
from dispatchkit.errors import PolicyError, ReplayError
from dispatchkit.execute.executor import Executor, run_again
from dispatchkit.execute.io.calls import CallReader
from dispatchkit.execute.io.structure import leaves_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.lanes.chooser import LaneChooser
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.keys.batch import GraphKey
from dispatchkit.once import Once, warn_at_call
from dispatchkit.registry import KeyState

#: Arguments of ``dispatch``: tokens, requests, kind, adapters and allowed modes of a step.
_Batch = tuple[int, int, int, int, int]


class LanePolicyWarning(RuntimeWarning):
    """A lane policy raised or returned an invalid lane.

    The affected steps run on the least busy lane.
    """


class StepFuture:
    """The future result of a submitted step.

    Args:
        result: Return value of the step. Its tensors are valid once the step has finished.
        in_flight: The step, with the event that is recorded after it.
        lane: Index of the lane that runs the step.
        is_device: Whether the tensors of the result are on a CUDA device.
        memory: Reference to the lane if its next step may overwrite the result, otherwise None.

    Thread safety: any number of threads may wait for the future.
    """

    __slots__ = ("_in_flight", "_is_device", "_memory", "_result", "_tick", "lane")

    def __init__(
        self,
        result: Any,
        in_flight: InFlight,
        lane: int,
        is_device: bool,
        memory: weakref.ref[Lane] | None = None,
    ) -> None:
        self._result, self._in_flight = result, in_flight
        self._is_device = is_device
        lane_now = None if memory is None else memory()
        self._memory, self._tick = memory, 0 if lane_now is None else lane_now.tick
        self.lane: int = lane

    def is_done(self) -> bool:
        """Return whether the step has finished, without blocking."""
        return self._in_flight.done.query()

    def wait(self, stream: Any = None) -> None:
        """Make later work on a stream wait for the step, without blocking the host.

        Args:
            stream: A torch stream, or a stream of the backend; by default the current stream.
        """
        if stream is not None and not isinstance(getattr(stream, "handle", None), int):
            from dispatchkit.backends.cuda.streams import CudaStream

            stream = CudaStream(stream)
        self._in_flight.done.wait(stream)
        if self._is_device:
            self._record_stream(stream)

    def synchronize(self) -> None:
        """Block the host until the step has finished."""
        self._in_flight.done.synchronize()

    def result(self) -> Any:
        """Make the current stream wait for the step, and return its result.

        The result can be used immediately on the current stream. To use it on another stream, call
        ``wait`` with that stream. With ``outputs="view"``, the result is valid until the next step
        of the lane.

        Raises:
            ReplayError: With ``outputs="view"``, a later step of the lane was launched.
        """
        memory = None if self._memory is None else self._memory()
        if memory is not None and memory.tick != self._tick:
            raise ReplayError(
                f"The result is a view that a later step of lane {self.lane} may have overwritten. "
                "Use the result before the lane's next step, or create the runner with "
                "outputs='owned'."
            )
        self.wait()
        return self._result

    def _record_stream(self, stream: Any) -> None:
        """Make torch's allocator record that a stream reads the result."""
        raw: Any = None if stream is None else stream.raw
        for leaf in leaves_of(self._result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                raw = torch.cuda.current_stream(leaf.device) if raw is None else raw
                leaf.record_stream(raw)

    def __repr__(self) -> str:
        return f"<StepFuture on lane {self.lane}>"


@attrs.frozen
class LaneStats:
    """Statistics of a lane.

    Attributes:
        index: Index of the lane in its runner.
        num_steps: Number of submitted steps.
        num_tokens: Number of tokens in submitted steps.
        num_unfinished: Number of submitted steps that have not finished.
        num_graphs: Number of live graphs.
        num_bytes: Bytes of graphs and static inputs.
    """

    index: int
    num_steps: int
    num_tokens: int
    num_unfinished: int
    num_graphs: int
    num_bytes: int


@attrs.frozen
class LaneCost:
    """The expected memory use of one assignment of keys to lanes.

    Attributes:
        way: ``every lane`` if each lane has all keys; ``assigned lanes`` if each key is only on the
            lanes that the lane policy returns for it.
        num_graphs: Number of graphs on all lanes.
        graph_bytes: Size of pools and outputs on all lanes, in bytes.
        static_bytes: Size of static inputs on all lanes and for all buckets of axes, in bytes.
    """

    way: str
    num_graphs: int
    graph_bytes: int
    static_bytes: int


class InFlight:
    """The record of a step in flight, referenced by a lane and a future.

    Creating and destroying events takes longer than recording them. The event is therefore reused
    once neither the lane nor the future references this object.

    Args:
        done: Event recorded after the step.
        num_tokens: Number of tokens in the step, before padding.
        tensors: Tensors that the step reads; released when the step has finished.
        unused: List to which the event is returned for reuse.
    """

    __slots__ = ("_unused", "done", "num_tokens", "tensors")

    def __init__(self, done: Event, num_tokens: int, tensors: Any, unused: list[Event]) -> None:
        self.done, self.num_tokens, self.tensors = done, num_tokens, tensors
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.done)


class LaneQueue:
    """The unfinished steps of a lane; implements ``LaneState``.

    Args:
        index: Index of the lane in its runner.
        executor: Executor that runs the lane's steps.
    """

    def __init__(self, index: int, executor: Executor) -> None:
        self.index = index
        self.executor = executor
        self.stream: Stream = executor.lane.stream
        # The lane owns the memory of views. Weak reference, because futures may outlive the runner.
        is_view = executor.spec.outputs == "view"
        self.memory: weakref.ref[Lane] | None = weakref.ref(executor.lane) if is_view else None
        self.handle: int = self.stream.handle
        self.is_on_cuda: bool = executor.work.inputs.device.type == "cuda"
        # Event that is recorded on the caller's stream, and that the lane's stream waits for.
        self.arrived: Event = executor.work.backend.new_event()
        self._unused: list[Event] = []
        self._registry = executor.registry
        self._in_flight: deque[InFlight] = deque()
        self._num_tokens = 0
        self.total_steps: int = 0
        self.total_tokens: int = 0

    @property
    def num_unfinished(self) -> int:
        """Number of submitted steps that have not finished on the device."""
        self.reap()
        return len(self._in_flight)

    @property
    def unfinished_tokens(self) -> int:
        """Number of tokens in unfinished steps, before padding."""
        self.reap()
        return self._num_tokens

    def holds(self, key: GraphKey) -> bool:
        """Return whether the lane has a captured graph for a key."""
        entry = self._registry.get(key)
        return entry is not None and entry.state is KeyState.CAPTURED

    def reap(self, at_most: int = sys.maxsize) -> None:
        """Release the tensors that finished steps read.

        Args:
            at_most: Maximum number of steps to check. Each check queries the device, which takes
                more than a microsecond.
        """
        in_flight = self._in_flight
        while at_most and in_flight and in_flight[0].done.query():
            step = in_flight.popleft()
            self._num_tokens -= step.num_tokens
            step.tensors = None  # the future may outlive the step, but must not keep its inputs
            at_most -= 1

    def push(self, num_tokens: int, tensors: Any) -> InFlight:
        """Add a step just launched on the lane's stream, and return its record."""
        done = self._unused.pop() if self._unused else self.executor.work.backend.new_event()
        done.record(self.stream)
        # Check only two earlier steps, so that no submission takes long. Every finished step is
        # eventually released, because a submission adds only one step.
        self.reap(2)
        step = InFlight(done, num_tokens, tensors, self._unused)
        self._in_flight.append(step)
        self._num_tokens += num_tokens
        self.total_steps += 1
        self.total_tokens += num_tokens
        return step


class LaneSet(Sequence[Executor]):
    """The lanes of a runner, with the lane chooser.

    The items of this sequence are the executors of the lanes.

    Args:
        executors: Executor of each lane.
        chooser: Lane chooser; None for a single lane.
        placement: The lanes on which each key is captured.
        reader: Reader that binds and validates the inputs of steps.
        lock: Lock that is held while the host submits a step.

    Attributes:
        num_faults: Number of steps for which the lane policy raised or returned an invalid lane.
    """

    num_faults: int

    def __init__(
        self,
        executors: Sequence[Executor],
        chooser: LaneChooser | None,
        placement: KeyPlacement,
        reader: CallReader,
        lock: threading.RLock,
    ) -> None:
        self._executors, self._chooser, self._placement = tuple(executors), chooser, placement
        self._first, self._lock = executors[0], lock
        self._turns = executors[0].lane.group.turns
        self._reader, self._bind, self._check = reader, reader.bind, reader.check
        self._backend = executors[0].work.backend
        self._is_capturing = self._backend.is_capturing
        self._current_stream_handle = self._backend.current_stream_handle
        self._queues: tuple[LaneQueue, ...] = ()
        self._caller: tuple[int, Stream] | None = None
        self._once = Once()
        self.num_faults = 0

    @overload
    def __getitem__(self, index: int) -> Executor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Executor]: ...

    def __getitem__(self, index: int | slice) -> Executor | Sequence[Executor]:
        return self._executors[index]

    def __len__(self) -> int:
        return len(self._executors)

    def submit(
        self,
        *args: Any,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        priority: int = 0,
        **inputs: Any,
    ) -> StepFuture:
        """Submit a step to a lane, and return without waiting for it.

        See ``GraphRunner.submit``.
        """
        reader = self._reader
        tensors = self._bind(args, inputs)
        if reader.is_special:
            tensors = reader.to_arrays(tensors)
            if reader.axes is not None:
                loras = reader.axes.variant(tensors, loras)
        num_tokens, readable = self._check(tensors)
        caller = self._current_stream_handle()
        # The default stream, handle 0, is never captured.
        if caller and self._is_capturing():
            raise ReplayError(
                "submit() was called inside a capture, which cannot contain a step on a lane's "
                "stream. Call the runner instead, or call submit() outside the capture."
            )
        batch = (num_tokens, num_reqs, uniform, loras, ceiling)
        with self._lock:
            queue = self._choose(batch, priority)
            if not reader.has_host:
                return self._launch(queue, caller, batch, tensors, readable)
        staging = queue.executor.lane.buffers.staging
        if staging is not None:
            staging.wait()  # without the lock, so that other lanes are not blocked
        with self._lock:
            return self._launch(queue, caller, batch, tensors, readable)

    def stats(self) -> tuple[LaneStats, ...]:
        """Return the statistics of each lane."""
        with self._lock:
            return tuple(
                LaneStats(
                    index=queue.index,
                    num_steps=queue.total_steps,
                    num_tokens=queue.total_tokens,
                    num_unfinished=queue.num_unfinished,
                    num_graphs=executor.lifecycle.num_graphs(),
                    num_bytes=executor.lane.num_bytes() + executor.lane.static_bytes,
                )
                for executor, queue in zip(self, self._ready_queues(), strict=True)
            )

    def costs(self) -> tuple[LaneCost, ...]:
        """Return the expected memory use of the lanes, measured without a capture.

        The method measures the memory of the largest graph of each lane, and assumes that smaller
        graphs reuse this memory. If the backend cannot measure a capture in advance, the memory of
        a warmup is used.
        """
        with self._lock:
            first, number = self._first, len(self)
            keys = tuple(first.registry)
            every = [keys] * number
            ways = [("every lane", every)]
            if self._placement.are_chosen:
                lanes_by_key = self._placement.by_key()
                own = [
                    tuple(key for key in keys if lane in lanes_by_key[key])
                    for lane in range(number)
                ]
                ways.append(("assigned lanes", own))
            needs: dict[tuple[GraphKey, ...], int] = {}
            for keys_of_lane in (one for _, lanes in ways for one in lanes):
                if keys_of_lane not in needs:
                    needs[keys_of_lane] = first.lifecycle.expect_bytes(keys_of_lane)
            return tuple(
                LaneCost(
                    way,
                    num_graphs=sum(map(len, lanes)),
                    graph_bytes=sum(needs[one] for one in lanes),
                    static_bytes=sum(map(first.lane.static_bytes_of, lanes)),
                )
                for way, lanes in ways
            )

    # -- internals ----------------------------------------------------------------------

    def _ready_queues(self) -> tuple[LaneQueue, ...]:
        if not self._queues:
            self._queues = tuple(LaneQueue(index, one) for index, one in enumerate(self))
        return self._queues

    def _choose(self, batch: _Batch, priority: int) -> LaneQueue:
        chooser, queues = self._chooser, self._queues or self._ready_queues()
        if chooser is None:
            return queues[0]
        try:
            return queues[chooser.choose(batch, priority, queues)]
        except PolicyError as error:
            self.num_faults += 1
            if self._first.eager.strict:
                raise
            self._warn(error)
        return min(queues, key=lambda one: one.num_unfinished)

    def _warn(self, error: PolicyError) -> None:
        """Warn about the first fault of the lane policy."""
        if not self._once.first():
            return
        first = self._first
        first.notices.policy_at_fault(error, None, first.dispatcher.epoch)
        warn_at_call(
            f"{str(error).rstrip('.')}. Steps for which the lane policy fails run on the least "
            "busy lane. Warned once; runner.lanes.num_faults counts these steps.",
            LanePolicyWarning,
        )

    def _launch(
        self, queue: LaneQueue, caller: int, batch: _Batch, tensors: Any, readable: bool
    ) -> StepFuture:
        """Launch a validated step on a lane, and return its future; the caller holds the lock."""
        executor, stream = queue.executor, queue.stream
        if self._turns.is_under_way:
            self._turns.wait()  # a background capture is using the lane's stream
        if caller != queue.handle:
            if self._caller is None or self._caller[0] != caller:
                self._caller = (caller, self._backend.current_stream())
            queue.arrived.record(self._caller[1])
            queue.arrived.wait(stream)
        try:
            with self._backend.use_stream(stream):
                result = executor.decide(*batch).plan.run(tensors, queue.handle, readable)
                if result is AGAIN:
                    result = run_again(
                        executor.dispatcher, executor.eager, tensors, queue.handle, readable, *batch
                    )
        except Exception:
            executor.counters.failed_steps += 1
            stream.synchronize()  # afterwards, the step no longer reads the caller's tensors
            raise
        in_flight = queue.push(batch[0], tensors)
        return StepFuture(result, in_flight, queue.index, queue.is_on_cuda, queue.memory)
