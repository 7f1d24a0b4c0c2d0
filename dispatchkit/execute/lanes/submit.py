"""Steps given to lanes: ``submit`` and what it returns.

Each lane is a runner of its own behind the first: own stream, pool, static buffers, graphs
and table. Nothing is shared but the step, what it reads, and declared state; of the last see
``Chain``. The host gives steps to lanes one at a time, under one lock; the device runs them
at the same time.

Order, both ways, by events: the lane waits for what the caller's stream held when the step was
submitted, and whoever waits for the handle waits for the lane. The inputs are copied on the
lane, so that the caller's stream does not wait for the lane; they are kept alive until then.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils._pytree import tree_leaves

from dispatchkit.backends.base import Event, GraphBackend, Stream
from dispatchkit.dispatch import (
    Decision,
    Dispatcher,
    LanePolicy,
    LaneStep,
    lane_fault,
    lane_homes,
    policy_name,
)
from dispatchkit.errors import PolicyError, ReplayError
from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.live.notices import Notices
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters
from dispatchkit.registry import GraphRegistry, KeyState

if TYPE_CHECKING:
    from dispatchkit.execute.runner import GraphRunner


class LanePolicyWarning(RuntimeWarning):
    """A lane policy raised or named no lane; its steps run on the least busy one."""


class StepHandle:
    """A submitted step: queued on its lane, done some time later.

    Args:
        result: What the step returned; its data is there when the step is done.
        flight: The step in flight.
        lane: Number of the lane.
        is_device: Its tensors are memory of a CUDA device.

    Thread safety: any thread may wait for it, also several.
    """

    __slots__ = ("_flight", "_is_device", "_result", "lane")

    def __init__(self, result: Any, flight: _Flight, lane: int, is_device: bool) -> None:
        self._result, self._flight = result, flight
        self._is_device = is_device
        self.lane: int = lane

    def is_done(self) -> bool:
        """Return whether the step has run; never blocks."""
        return self._flight.done.query()

    def wait(self, stream: Any = None) -> None:
        """Make later work of a stream wait for the step; the host goes on.

        Args:
            stream: A stream of torch or of the backend; the current one by default.
        """
        if stream is not None and not isinstance(getattr(stream, "handle", None), int):
            from dispatchkit.backends.cuda.streams import CudaStream

            stream = CudaStream(stream)
        self._flight.done.wait(stream)
        if self._is_device:
            self._keep_for(stream)

    def synchronize(self) -> None:
        """Block the host until the step has run."""
        self._flight.done.synchronize()

    def result(self) -> Any:
        """Return what the step returned, once the current stream waits for it.

        It may be used on the current stream at once. For another one call ``wait`` with it.
        """
        self.wait()
        return self._result

    def _keep_for(self, stream: Any) -> None:
        """Tell the allocator who reads the result: its memory is the lane's stream's."""
        raw: Any = None if stream is None else stream.raw
        for leaf in tree_leaves(self._result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                raw = torch.cuda.current_stream(leaf.device) if raw is None else raw
                leaf.record_stream(raw)

    def __repr__(self) -> str:
        return f"<StepHandle on lane {self.lane}>"


@attrs.frozen
class LaneStats:
    """What one lane has been given.

    Attributes:
        index: Number of the lane.
        num_steps: Steps submitted to it.
        num_tokens: Tokens of them.
        num_unfinished: Those of the steps that are not done.
        num_graphs: Live graphs.
        num_bytes: Bytes of its graphs and of its static inputs.
    """

    index: int
    num_steps: int
    num_tokens: int
    num_unfinished: int
    num_graphs: int
    num_bytes: int


@attrs.frozen
class LaneCost:
    """What a way to spread keys over lanes is expected to take, in memory.

    Attributes:
        way: ``every lane``: each has all keys. ``homes``: each key where the lane policy
            has its home.
        num_graphs: Graphs on all lanes.
        graph_bytes: Their pools and outputs.
        static_bytes: Static inputs of all lanes, those at every bucket of the axes too.
    """

    way: str
    num_graphs: int
    graph_bytes: int
    static_bytes: int


class _Flight:
    """A step in flight, and what it still reads; shared by its lane and its handle.

    Making and destroying an event costs more than recording it: once neither lane nor handle
    knows the step any more, its event serves another one.

    Args:
        done: Recorded behind the step.
        num_tokens: Its tokens.
        tensors: What it reads; let go of when it is done.
        unused: Takes the event when nobody asks for it any more.
    """

    __slots__ = ("_unused", "done", "num_tokens", "tensors")

    def __init__(self, done: Event, num_tokens: int, tensors: Any, unused: list[Event]) -> None:
        self.done, self.num_tokens, self.tensors = done, num_tokens, tensors
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.done)


class Traffic:
    """What one lane was given and has not finished; a lane policy's view of it.

    Args:
        index: Number of the lane.
        member: The lane as a runner.
    """

    total_steps: int
    total_tokens: int

    def __init__(self, index: int, member: GraphRunner) -> None:
        self.index = index
        self.member = member
        self.stream: Stream = member._lane.stream
        self.handle: int = self.stream.handle
        self.is_on_cuda: bool = member._inputs.device.type == "cuda"
        # Marks on the caller's stream what the lane waits for.
        self.arrived: Event = member.backend.new_event()
        self._unused: list[Event] = []
        self._registry = member.registry
        self._flights: deque[_Flight] = deque()
        self._num_tokens = 0
        self.total_steps = self.total_tokens = 0

    @property
    def num_unfinished(self) -> int:
        """Steps given to the lane that are not done on the device."""
        self.land()
        return len(self._flights)

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of those steps, before padding."""
        self.land()
        return self._num_tokens

    def holds(self, key: GraphKey) -> bool:
        """Return whether the lane has a graph of a key now."""
        entry = self._registry.get(key)
        return entry is not None and entry.state is KeyState.CAPTURED

    def land(self, at_most: int = sys.maxsize) -> None:
        """Let go of what finished steps read.

        Args:
            at_most: How many of them; asking a device costs more than a microsecond.
        """
        flights = self._flights
        while at_most and flights and flights[0].done.query():
            flight = flights.popleft()
            self._num_tokens -= flight.num_tokens
            flight.tensors = None  # the handle keeps the flight, and must not keep these
            at_most -= 1

    def take_off(self, num_tokens: int, tensors: Any) -> _Flight:
        """Note a step that was just queued on the lane's stream."""
        done = self._unused.pop() if self._unused else self.member.backend.new_event()
        done.record(self.stream)
        # Two for each one that comes: all are let go of in time, and the next lane does not wait
        # while the host looks through everything that this one has done since.
        self.land(2)
        flight = _Flight(done, num_tokens, tensors, self._unused)
        self._flights.append(flight)
        self._num_tokens += num_tokens
        self.total_steps += 1
        self.total_tokens += num_tokens
        return flight


class Submitting:
    """The part of GraphRunner that gives steps to lanes."""

    eager: EagerRunner
    backend: GraphBackend
    counters: StepCounters
    dispatcher: Dispatcher
    registry: GraphRegistry
    _lock: threading.RLock
    _lane: Lane
    _inputs: InputSet
    _axes: AxisInputs | None
    _has_host_inputs: bool
    _is_special: bool
    _to_arrays: Callable[[Any], Any]
    _bind_inputs: Callable[..., Any]
    _check_inputs: Callable[..., tuple[int, bool]]
    _is_capturing: Callable[[], bool]
    _current_stream_handle: Callable[[], int]
    _acquire: Callable[[], bool]
    _release: Callable[[], None]
    _decide: Callable[..., Decision]
    _notices: Notices
    _siblings: tuple[GraphRunner, ...] = ()
    _lane_policy: LanePolicy | None = None
    _lane_origin: str = ""
    _router: Dispatcher | None = None
    _traffic: tuple[Traffic, ...] = ()
    _caller: tuple[int, Stream] | None = None
    _is_lane_fault_told = False
    lane_faults: int = 0

    @property
    def lanes(self) -> tuple[GraphRunner, ...]:
        """The lanes, each a runner of its own; the first is this one."""
        first: Any = self
        return (first, *self._siblings)

    def submit(
        self,
        *args: Any,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        priority: int = 0,
        **inputs: Any,
    ) -> StepHandle:
        """Queue one step on a lane and return at once; it runs exactly once.

        The step waits for what the current stream holds now. Inputs on the device must not be
        written before the step is done: let the writing stream ``wait`` for the handle. Host
        inputs are copied before this returns.

        Args:
            args: Inputs in declared order, or
            inputs: Inputs by name.
            num_reqs: As in a call, like the next three.
            uniform: Kind of batch.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed.
            priority: How urgent the step is, for lane policies that care.

        Raises:
            InputError: As in a call.
            ReplayError: As in a call; or this stream is being captured.
            PolicyError: The lane policy is at fault, and the runner is strict.
        """
        tensors = self._bind_inputs(args, inputs)
        if self._is_special:
            tensors = self._to_arrays(tensors)
            if self._axes is not None:
                loras = self._axes.variant(tensors, loras)
        num_tokens, readable = self._check_inputs(tensors)
        caller = self._current_stream_handle()
        # The default stream, handle 0, is never captured.
        if caller and self._is_capturing():
            raise ReplayError(
                "submit() was called inside a capture, which cannot wait for lanes. Call the "
                "runner itself there, or submit outside."
            )
        facts = (num_tokens, num_reqs, uniform, loras, ceiling)
        with self._lock:
            traffic = self._choose_lane(facts, priority)
            if not self._has_host_inputs:
                return self._give(traffic, caller, facts, tensors, readable)
        staging = traffic.member._lane.buffers.staging
        if staging is not None:
            staging.wait()  # without the lock: other lanes are free to be given steps
        with self._lock:
            return self._give(traffic, caller, facts, tensors, readable)

    def lane_stats(self) -> tuple[LaneStats, ...]:
        """Return what each lane has been given so far."""
        with self._lock:
            return tuple(
                LaneStats(
                    index=traffic.index,
                    num_steps=traffic.total_steps,
                    num_tokens=traffic.total_tokens,
                    num_unfinished=traffic.num_unfinished,
                    num_graphs=member.lifecycle.num_graphs(),
                    num_bytes=member._lane.num_bytes() + member._lane.static_bytes,
                )
                for member, traffic in zip(self.lanes, self._ready_traffic(), strict=True)
            )

    def lane_costs(self) -> tuple[LaneCost, ...]:
        """Return what the lanes' graphs are expected to take, before they are captured.

        The largest graph of each lane is rehearsed, or warmed up where the backend cannot
        rehearse; smaller ones reuse its memory.
        """
        with self._lock:
            keys, number = tuple(self.registry), len(self.lanes)
            every = [keys] * number
            ways = [("every lane", every)]
            if getattr(self._lane_policy, "homes", None) is not None:
                homes = self._homes()
                own = [tuple(key for key in keys if lane in homes[key]) for lane in range(number)]
                ways.append(("homes", own))
            needs: dict[tuple[GraphKey, ...], int] = {}
            for keys_of_lane in (one for _, lanes in ways for one in lanes):
                if keys_of_lane not in needs:
                    needs[keys_of_lane] = self.lanes[0].lifecycle.expect_bytes(keys_of_lane)
            return tuple(
                LaneCost(
                    way,
                    num_graphs=sum(map(len, lanes)),
                    graph_bytes=sum(needs[one] for one in lanes),
                    static_bytes=sum(map(self._lane.static_bytes_of, lanes)),
                )
                for way, lanes in ways
            )

    # -- inside -------------------------------------------------------------------------

    def _share(self, lock: threading.RLock) -> None:
        """Take another runner's lock: the host gives steps to their lanes one at a time."""
        self._lock = lock
        self._acquire, self._release = lock.acquire, lock.release

    def _homes(self) -> dict[GraphKey, tuple[int, ...]]:
        """Return on which lanes each key is captured."""
        return lane_homes(
            self._lane_policy,
            self.registry,
            len(self.lanes),
            name=policy_name(self._lane_policy),
            origin=self._lane_origin,
        )

    def _keys_of_lanes(self, keys: Sequence[GraphKey] | None) -> list[Sequence[GraphKey] | None]:
        """Return which of some keys each lane is to capture; None stands for all."""
        if getattr(self._lane_policy, "homes", None) is None:
            return [keys] * len(self.lanes)
        homes = self._homes()
        wanted = tuple(self.registry) if keys is None else keys
        return [
            [key for key in wanted if lane in homes.get(key, (lane,))]
            for lane in range(len(self.lanes))
        ]

    def _ready_traffic(self) -> tuple[Traffic, ...]:
        if not self._traffic:
            self._traffic = tuple(Traffic(index, member) for index, member in enumerate(self.lanes))
        return self._traffic

    def _choose_lane(self, facts: tuple[int, int, int, int, int], priority: int) -> Traffic:
        policy, traffic = self._lane_policy, self._traffic or self._ready_traffic()
        if policy is None:
            return traffic[0]
        key = None if self._router is None else self._router.dispatch(*facts).key
        try:
            answer = policy.choose(LaneStep(facts[0], key, priority), traffic)
        except Exception as error:  # noqa: BLE001 - a lane policy's fault loses no step
            return self._lane_policy_at_fault(f"raised {type(error).__name__}: {error}", error)
        if type(answer) is int and 0 <= answer < len(traffic):
            return traffic[answer]
        fault = lane_fault(answer, len(traffic))
        return self._lane_policy_at_fault(fault, None, answer) if fault else traffic[answer]

    def _lane_policy_at_fault(
        self, problem: str, cause: Exception | None, answer: Any = None
    ) -> Traffic:
        """Count a fault, tell of it once, and return the lane that the step runs on instead."""
        name = policy_name(self._lane_policy)
        error = PolicyError(name, "choose", problem, origin=self._lane_origin, value=answer)
        self.lane_faults += 1
        if self.eager.strict:
            raise error from cause
        least = min(self._traffic, key=lambda one: one.num_unfinished)
        if not self._is_lane_fault_told:
            self._is_lane_fault_told = True
            self._notices.policy_at_fault(error, None, self.dispatcher.epoch)
            warnings.warn(
                f"{error}. Such steps run on the least busy lane. Told once; "
                "runner.lane_faults counts them.",
                LanePolicyWarning,
                stacklevel=4,
            )
        return least

    def _give(
        self,
        traffic: Traffic,
        caller: int,
        facts: tuple[int, int, int, int, int],
        tensors: Any,
        readable: bool,
    ) -> StepHandle:
        """Queue a checked step on a lane; under the lock."""
        member, stream = traffic.member, traffic.stream
        if caller != traffic.handle:
            if self._caller is None or self._caller[0] != caller:
                self._caller = (caller, self.backend.current_stream())
            traffic.arrived.record(self._caller[1])
            traffic.arrived.wait(stream)
        try:
            with self.backend.use_stream(stream):
                result = member._decide(*facts).plan.run(tensors, traffic.handle, readable)
                while result is AGAIN:
                    plan = member.dispatcher.dispatch(*facts).plan
                    result = plan.run(tensors, traffic.handle, readable)
        except Exception:
            member.counters.failed_steps += 1
            stream.synchronize()  # nothing of it reads the caller's tensors any more
            raise
        flight = traffic.take_off(facts[0], tensors)
        return StepHandle(result, flight, traffic.index, traffic.is_on_cuda)
