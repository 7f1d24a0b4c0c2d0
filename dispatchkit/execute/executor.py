"""Executor: the dispatcher, graphs, counters and plans of a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.optional import features_of
from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.execute.capture.budget import MemoryBudget
from dispatchkit.execute.capture.capture import Capturer
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.capture.live_graphs import LiveGraphs
from dispatchkit.execute.capture.warmup import Warmups
from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import PoolGroup
from dispatchkit.execute.notices import Notices
from dispatchkit.execute.replay.calibration_runs import CalibrationRuns
from dispatchkit.execute.replay.check import Checker
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.planner import Planner
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.replay.step_slots import StepSlots
from dispatchkit.execute.replay.timing import Timings
from dispatchkit.execute.setup import (
    RunnerSpec,
    check_slot_state,
    make_backend,
    make_policy,
    requested_mode,
    resolve_supported_mode,
)
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.guard import Guard
from dispatchkit.execute.step.pieces import Step
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode, RuntimeMode
from dispatchkit.observe.counters import StepCounters
from dispatchkit.registry import GraphRegistry

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet


@attrs.frozen(eq=False)
class Workload:
    """The step and its inputs, shared by all lanes of a runner.

    Attributes:
        spec: The arguments of the runner.
        backend: The backend on which steps run.
        inputs: The static inputs, at the smallest bucket of each axis.
        axes: The inputs for all axis buckets; None without axes.
        slots: Name of the input with slots, and the state of the slots; None without slots.
        step: The step, with its pieces and the inputs that each piece receives.
        guard: Guard on autocast, training flags and weight addresses.
        config: Sizes, limits and the mode, which may be a downgrade of the requested mode.
        mode_reasons: Reasons for the downgrade of the mode; empty without a downgrade.
    """

    spec: RunnerSpec
    backend: GraphBackend
    inputs: InputSet
    axes: AxisInputs | None
    slots: tuple[str, SlotState] | None
    step: Step
    guard: Guard
    config: DispatchConfig
    mode_reasons: tuple[str, ...]


def make_workload(spec: RunnerSpec) -> Workload:
    """Create the workload of a runner from its specification.

    Raises:
        ConfigError: A setting is invalid.
        UnknownNameError: No backend has the given name.
        BackendUnavailableError: The backend cannot run on this machine.
    """
    options, group = spec.options, spec.memory_group
    backend = make_backend(spec.backend, options.device, spec.plugins)
    if group is not None and isinstance(spec.backend, str):
        backend = group.memory.shared_backend(backend)
    device = torch.device(backend.torch_device)
    inputs, slots = spec.static_inputs, spec.slots
    if slots is not None:
        check_slot_state(*slots, device, options)
    axes = AxisInputs(inputs, options.config, device) if options.config.axes else None
    static = InputSet(inputs, device) if axes is None else axes.smallest
    names = () if axes is None else axes.names
    step = Step(
        spec.step,
        static.names,
        options.buffers.row_count,
        names,
        in_segments=options.config.is_mode_given
        and options.config.mode.has_piecewise_cudagraphs()
        and features_of(backend).segments is not None,
        slots=None if slots is None else (slots[0], slots[1].rows),
    )
    config, reasons = resolve_supported_mode(options.config, step, backend)
    guard = Guard(device.type, step.modules)
    return Workload(spec, backend, static, axes, slots, step, guard, config, reasons)


class Executor:
    """The components that dispatch and run the steps of a lane.

    Args:
        work: The step and its inputs.
        group: The group that owns the memory pool and the lock that every step holds.

    Attributes:
        work: The step and its inputs.
        lock: The lock that every step holds.
        spec: The specification of the runner; a swap replaces it.
        mode_reasons: Reasons for a downgrade of the mode; a swap replaces them.
        plugins: The plugins that provide policies by name; loaded on demand.
        notices: The sender of events to plugins.
        dispatcher: The dispatcher, which decides how each step runs.
        decide: ``dispatcher.dispatch``, or a wrapper that records or watches steps.
        registry: The keys and the states of their graphs.
        lane: The stream, memory pool and static inputs.
        counters: The step counters, by graph and by reason for running eager.
        timings: The measured times of steps.
        warmups: The warmups, and the properties of the step that they recorded.
        lifecycle: The captures and evictions of graphs.
        checker: The checker of replays; None without check mode.
        eager: The runner of eager steps.
        planner: The planner, which creates the plans for decisions.
        calibration: The runs that measure graphs for learning policies.
    """

    decide: Callable[..., Decision]

    def __init__(self, work: Workload, group: PoolGroup) -> None:
        spec, options = work.spec, work.spec.options
        self.work, self.lock, self.spec = work, group.lock, spec
        self.mode_reasons: tuple[str, ...] = work.mode_reasons
        policy, origin, plugins = make_policy(
            spec.named_policy, options.policy_options, work.config, spec.plugins
        )
        self.plugins: PluginSet | None = plugins
        self.notices: Notices = Notices(plugins)
        modes = {
            RuntimeMode.FULL,
            RuntimeMode.PIECEWISE if work.step.can_split else RuntimeMode.FULL,
        }
        self.dispatcher: Dispatcher = Dispatcher(
            policy,
            work.config,
            modes=modes,
            lazy=spec.lazy,
            strict=options.strict,
            may_split=options.rows_independent,
            origin=origin,
            on_swap=self.notices.policy_swapped,
            on_fault=self.notices.policy_at_fault,
        )
        self.decide = self.dispatcher.dispatch
        registry = self.dispatcher.registry
        self.registry: GraphRegistry = registry
        self.lane: Lane = self._make_lane(group)
        self.counters: StepCounters = StepCounters()
        self.timings: Timings = Timings(
            work.backend, self.dispatcher, self.lane, options.sample_every
        )
        self.warmups: Warmups = Warmups(
            work.step,
            work.inputs,
            self.lane,
            row_count=options.buffers.row_count,
            axes=work.axes,
            state=spec.state,
            slots=None if work.slots is None else work.slots[1],
            state_limit_bytes=options.capture.state_limit_bytes,
            output_batch_dims=options.buffers.output_batch_dims,
            warmups=options.capture.warmups,
        )
        shares = options.buffers.share_outputs
        capturer = Capturer(
            self.warmups,
            self.lane,
            work.guard,
            # Without other graphs to share with, sharing would only add a copy of the outputs.
            share_outputs=lambda: shares and (len(registry) > 1 or group.is_open),
            prove_rows=options.capture.prove_rows,
            rows_independent=options.rows_independent,
            keeps_outputs=spec.outputs == "view",
            notes_facts=bool(options.check),
            break_on_unsafe=options.capture.break_on_unsafe,
        )
        slots = None
        if work.slots is not None:
            slots = StepSlots(*work.slots, work.inputs, self.lane)
        self.checker: Checker | None = None
        if options.check:
            self.checker = Checker(
                options.check,
                self.warmups.snapshot,
                self.warmups.state,
                capturer.facts_now,
                None if slots is None else slots.save,
            )
        graphs = LiveGraphs(self.lane, registry, self.counters, self.notices.send)
        budget = MemoryBudget(
            options.memory, self.lane, graphs, self.counters, self.warmups.forecast_bytes
        )
        self.lifecycle: Lifecycle = Lifecycle(
            capturer,
            graphs,
            budget,
            self.lane,
            registry,
            frozenset(modes),
            self.counters,
            lazy=spec.lazy,
            capture_after=options.capture.capture_after,
        )
        group.add_member(self.lifecycle)
        self.eager: EagerRunner = EagerRunner(
            self.warmups,
            work.inputs,
            work.axes,
            options.buffers.row_count,
            self.lane,
            self.lifecycle,
            self.counters,
            self.checker,
            strict=options.strict,
        )
        self.planner: Planner = Planner(
            self.dispatcher,
            self.lifecycle,
            self.lane,
            self.eager,
            work.guard,
            self.counters,
            self.timings,
            self.checker,
            inputs=work.inputs if work.axes is None else work.axes,
            axes=() if work.axes is None else work.axes.names,
            slots=slots,
            requested_mode=self.requested_mode,
            is_owned=spec.outputs == "owned",
        )
        self.dispatcher.bind = self.planner.plan
        self.calibration: CalibrationRuns = CalibrationRuns(
            self.dispatcher,
            self.planner,
            self.lifecycle,
            self.timings,
            self.lane,
            self.warmups,
            work.inputs,
            self.counters,
            is_off=self.checker is not None,
        )

    @property
    def requested_mode(self) -> CUDAGraphMode:
        """The requested mode; the mode in effect may be a downgrade."""
        return requested_mode(self.spec.options.config, self.work.step)

    def _make_lane(self, group: PoolGroup) -> Lane:
        """Create the lane.

        Raises:
            ConfigError: The static inputs exceed the budget of the group's ``GraphMemory``.
        """
        work = self.work
        axes, buffers = work.axes, work.spec.options.buffers
        # Large enough for the buckets of this policy, and of a policy that a later swap installs.
        largest = max((key.num_tokens for key in self.registry), default=1)
        num_rows = max(largest, work.config.max_capture_size, buffers.buffer_rows or 0)
        if group.memory is not None:
            group.memory.evict_until_fits(group, work.inputs.num_bytes(num_rows), "static inputs")
        return Lane(
            group,
            work.inputs,
            num_rows,
            row_count=buffers.row_count is not None,
            inputs_at=axes.at if axes is not None and axes.has_dimensions else None,
        )


def run_again(
    dispatcher: Dispatcher,
    eager: EagerRunner,
    tensors: Sequence[Any] | None,
    stream: int,
    readable: bool,
    *batch: int,
) -> Any:
    """Dispatch a step again and run its plan, until a plan is valid; return the result.

    Args:
        dispatcher: The dispatcher of the lane.
        eager: The runner of eager steps.
        tensors: The inputs; None for an in-place step.
        stream: Raw handle of the current stream.
        readable: The second result of ``InputSet.check``.
        batch: The arguments of ``Dispatcher.dispatch``.

    Raises:
        ReplayError: The step had to run exactly as decided (see ``DecisionRunner.run``), but its
            graph was released.
    """
    while True:
        eager.refuse_if_exact("its graph was released")
        result = dispatcher.redispatch(*batch).plan.run(tensors, stream, readable)
        if result is not AGAIN:
            return result
