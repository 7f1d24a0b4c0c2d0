"""GraphRunner: a step function, the graphs of it, and the policy that chooses among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher, Lanes, Policy
from dispatchkit.errors import ConfigError
from dispatchkit.execute.capture.capture import Capturer
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.capture.warmup import Warmups
from dispatchkit.execute.controls import Controls
from dispatchkit.execute.io.axes import AxisCut, AxisInputs
from dispatchkit.execute.io.buffers import StaticBuffers
from dispatchkit.execute.io.inputs import InputSet, StaticInput, inputs_from_example
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.lanes.build import add_lanes, check_lanes
from dispatchkit.execute.lanes.submit import Submitting
from dispatchkit.execute.live.decided import Decided
from dispatchkit.execute.live.notices import Notices
from dispatchkit.execute.live.recording import Recording
from dispatchkit.execute.live.shadowing import Shadowing
from dispatchkit.execute.replay.check import Checker
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.planner import Planner
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.replay.timing import Timings
from dispatchkit.execute.report import ladder
from dispatchkit.execute.setup import (
    RunnerSpec,
    honoured,
    make_backend,
    make_policy,
    merge_config,
)
from dispatchkit.execute.step.guard import Guard
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.state import StepState
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode, RuntimeMode
from dispatchkit.observe.counters import StepCounters
from dispatchkit.options import RunnerOptions, refuses_moved
from dispatchkit.plugins import PolicyWithPlugins
from dispatchkit.registry import GraphRegistry


def _remake(spec: RunnerSpec) -> GraphRunner:
    return GraphRunner(**spec.arguments())


class GraphRunner(Controls, Submitting, Recording, Decided, Shadowing):
    """Run a step through captured graphs, padded to the nearest size, or eager.

    A call gives what the step itself gives on the same inputs. Graphs carry no gradients:
    every step runs under ``torch.no_grad()``, eager ones too. Python effects of the step
    (appends, attribute writes, prints) happen in warmup and capture, not at replay.

    Args:
        step: A function of the named inputs, a module, or a list of ``graph_piece(fn)`` and
            ``eager_piece(fn)``.
        inputs: Static inputs by name.
        example: One tensor for each input, in place of ``inputs``.
        sizes: Capture sizes in tokens, by default derived from ``max_num_tokens``.
        max_num_tokens: Largest batch in tokens.
        mode: Which runtime modes decode and mixed batches use.
        axes: Further facts that graphs are made for; each call gives their values by name.
        policy: Name of the policy, or an object; by default the one that a plugin selects
            for the configuration, else ``vllm``. With plugins of your own:
            ``plugins.with_policy("vllm")``.
        backend: ``auto``, a backend's name, or an object.
        outputs: ``owned``: each call returns fresh tensors. ``view``: what it returns is
            valid until the runner's next call.
        state: Tensors the step changes, such as a KV cache, or a ``StepState`` of these,
            scratch tensors and generators. They are saved around warmups.
        lazy: Capture a key when a call asks for it.
        lanes: Streams that ``submit`` spreads steps over, each with buffers, graphs, table and
            budget of its own; ``Lanes(4, policy)`` for a lane policy that is an object.
        options: All other settings.

    Attributes:
        dispatcher: Decides.
        registry: The keys and their graphs.
        config: Sizes, limits and modes in force; without PIECEWISE where the step is whole.
        mode_reasons: Why the mode in force is less than what was asked for, where a piece or
            the backend says that it supports less.
        backend: The device.
        spec: What it was asked to be.
        known_axis_cuts: Says for values of the axes, and a key, which dimensions of outputs
            follow an axis: indices of output, dimension and axis. None if not measured yet.
        buffers: The static inputs by name, for callers that write them themselves; see
            ``step``.

    Raises:
        ConfigError: A setting cannot be used, or two contradict each other.
        UnknownNameError: No policy, backend, mode or dtype goes by a given name.

    Thread safety: any thread may call it; steps run one at a time.
    """

    @refuses_moved
    def __init__(
        self,
        step: Any,
        inputs: Mapping[str, StaticInput] | None = None,
        *,
        example: Mapping[str, torch.Tensor] | None = None,
        sizes: Sequence[int] | None = None,
        max_num_tokens: int | None = None,
        mode: CUDAGraphMode | str | None = None,
        axes: Sequence[Axis] | None = None,
        policy: str | Policy | PolicyWithPlugins | None = None,
        backend: str | GraphBackend = "auto",
        outputs: str = "owned",
        state: StepState | Iterable[torch.Tensor] = (),
        lazy: bool = False,
        lanes: int | Lanes = 1,
        options: RunnerOptions | None = None,
    ) -> None:
        options = RunnerOptions() if options is None else options
        if not isinstance(options, RunnerOptions):
            raise ConfigError("options", options, "RunnerOptions")
        if isinstance(step, GraphRunner):
            raise ConfigError("step", step, "not a GraphRunner itself", "Wrap its step once.")
        if (inputs is None) == (example is None):
            raise ConfigError("inputs", inputs, "given, or an example of them, and not both")
        for name, by_name in (("inputs", inputs), ("example", example)):
            if by_name is not None and not isinstance(by_name, Mapping):
                allowed = "a dictionary by the names of the step's parameters"
                raise ConfigError(name, type(by_name).__name__, allowed)
        if not isinstance(lazy, bool):  # a word would count as true, "no" as well
            raise ConfigError("lazy", lazy, "True or False")
        if outputs not in ("owned", "view"):
            raise ConfigError("outputs", outputs, "'owned' or 'view'")
        config = merge_config(
            options.config,
            capture_sizes=sizes,
            max_num_tokens=max_num_tokens,
            mode=mode,
            axes=axes,
        )
        # What was asked for: copies, lanes and swaps are made from it.
        self.spec: RunnerSpec = RunnerSpec(
            step=step,
            inputs=inputs,
            example=example,
            policy=policy,
            backend=backend,
            outputs=outputs,
            state=StepState.of(state),
            lazy=lazy,
            lanes=lanes,
            options=attrs.evolve(options, config=config),
        )
        spec, buffers, check = self.spec, options.buffers, options.check
        check_lanes(spec)
        self.owned_outputs: bool = outputs == "owned"
        self.backend: GraphBackend = make_backend(backend, options.device, spec.plugins)
        specs = inputs if inputs is not None else inputs_from_example(example or {})
        device = torch.device(self.backend.torch_device)
        self._axes = AxisInputs(specs, config, device) if config.axes else None
        self._inputs = InputSet(specs, device) if self._axes is None else self._axes.smallest
        row_count = buffers.row_count
        self._step = Step(step, self._inputs.names, row_count, [axis.name for axis in config.axes])
        self._row_count = row_count
        self.mode_reasons: tuple[str, ...]
        self.config: DispatchConfig
        self.config, self.mode_reasons = honoured(config, self._step, self.backend)
        self.guard: Guard = Guard(self._inputs.device.type, self._step.modules)
        self.counters: StepCounters = StepCounters()
        self._lock = threading.RLock()
        self._swap_lock = threading.Lock()

        chosen, origin, plugins = make_policy(
            spec.named_policy, options.policy_options, self.config, spec.plugins
        )
        self._plugins, self._notices = plugins, Notices(plugins)
        modes = frozenset({RuntimeMode.FULL, *([RuntimeMode.PIECEWISE] * self._step.can_split)})
        self.dispatcher: Dispatcher = Dispatcher(
            chosen,
            self.config,
            modes=modes,
            lazy=lazy,
            strict=options.strict,
            origin=origin,
            on_swap=self._notices.policy_swapped,
            on_fault=self._notices.policy_at_fault,
        )
        self.registry: GraphRegistry = self.dispatcher.registry
        # Room for the largest bucket, which is what is cut, whatever batches may come; also for
        # one of a size that only a later policy declares.
        largest = max((key.num_tokens for key in self.registry), default=1)
        num_rows = max(largest, self.config.max_capture_size, buffers.buffer_rows or 0)
        sizing = self._axes is not None and self._axes.has_dimensions
        self._lane = Lane(
            self.backend,
            self._inputs,
            num_rows,
            row_count=row_count is not None,
            inputs_at=self._axes.at if self._axes is not None and sizing else None,
        )
        self.buffers: StaticBuffers = StaticBuffers(self._lane.buffers)
        # Found once, since a step asks for each of them.
        incoming: Any = self._inputs if self._axes is None else self._axes
        self._bind_inputs, self._check_inputs = incoming.bind, incoming.check
        self._to_arrays = incoming.to_arrays
        self._has_host_inputs = bool(self._inputs.host)
        self._is_special = self._has_host_inputs or self._axes is not None
        self._is_capturing = self.backend.is_capturing
        self._current_stream_handle = self.backend.current_stream_handle
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._decide: Callable[..., Decision] = self.dispatcher.dispatch
        self.timings: Timings = Timings(
            self.backend, self.dispatcher, self._lane, options.sample_every
        )
        warm = Warmups(
            self._step,
            self._inputs,
            self.backend,
            row_count=row_count,
            axes=self._axes,
            state=spec.state,
            state_limit_bytes=options.capture.state_limit_bytes,
            output_batch_dims=buffers.output_batch_dims,
            warmups=options.capture.warmups,
        )
        self._snapshot = warm.snapshot
        registry = self.registry
        self.known_axis_cuts: Callable[..., tuple[AxisCut, ...] | None] = warm.known_axis_cuts
        capturer = Capturer(
            warm,
            self.backend,
            self.guard,
            # An only graph has nobody to share with, and needs no copy.
            share_outputs=lambda: buffers.share_outputs and len(registry) > 1,
            notes_facts=bool(check),
        )
        self.checker: Checker | None = (
            Checker(check, warm.snapshot, warm.state, capturer.facts_now) if check else None
        )
        self.lifecycle: Lifecycle = Lifecycle(
            capturer,
            self._lane,
            self.registry,
            modes,
            self.counters,
            self._notices.tell,
            budget=options.memory,
            lazy=lazy,
            capture_after=options.capture.capture_after,
        )
        self.eager: EagerRunner = EagerRunner(
            warm,
            self._inputs,
            self._axes,
            row_count,
            self._lane,
            self.lifecycle,
            self.counters,
            self.checker,
            strict=options.strict,
        )
        self._planner = Planner(
            self.dispatcher,
            self.lifecycle,
            self._lane,
            self.eager,
            self.guard,
            self.counters,
            self.timings,
            self.checker,
            axes=tuple(axis.name for axis in config.axes),
            asked_mode=config.mode,
            is_owned=self.owned_outputs,
        )
        self.dispatcher.bind = self._planner.plan
        if spec.num_lanes > 1:
            add_lanes(self, plugins)

    # -- the step -----------------------------------------------------------------------

    def __call__(
        self,
        *args: Any,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        **inputs: Any,
    ) -> Any:
        """Run one step; it runs exactly once, whatever fails.

        Args:
            args: Inputs in declared order, or
            inputs: Inputs, and values of axes, by name.
            num_reqs: Requests in the batch; 0 where they are not known.
            uniform: False for a mixed batch, True for a uniform decode batch.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.

        Returns:
            What the step returns for these inputs.

        Raises:
            InputError: An input is missing, unknown, or of another type, device or shape.
            DescriptorError: A fact of the batch is impossible or above its limit.
            NoGraphError: Eager is not allowed, or a downgrade in a strict runner.
            ReplayError: A replay failed after the step may have changed something.
        """
        tensors = self._bind_inputs(args, inputs)
        if self._is_special:
            tensors = self._to_arrays(tensors)
            if self._axes is not None:
                loras = self._axes.variant(tensors, loras)
        num_tokens, readable = self._check_inputs(tensors)
        stream = self._current_stream_handle()
        # The default stream, handle 0, is never captured.
        if stream and self._is_capturing():
            return self.eager.run_inside_capture(tensors, num_tokens)
        self._acquire()  # half the price of a with statement
        try:
            plan = self._decide(num_tokens, num_reqs, uniform, loras, ceiling).plan
            result = plan.run(tensors, stream, readable)
            while result is AGAIN:
                plan = self.dispatcher.dispatch(num_tokens, num_reqs, uniform, loras, ceiling).plan
                result = plan.run(tensors, stream, readable)
            return result
        except Exception:
            self.counters.failed_steps += 1
            raise
        finally:
            self._release()

    def step(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Any:
        """Run one step on what is in ``buffers`` already: decide and launch, no more.

        Rows from ``num_tokens`` on need not be written: the runner sets those that its earlier
        steps used back to fill. Everything else is as in a call.

        Raises:
            InputError: No graph serves the batch, and it is larger than the buffers.
        """
        stream = self._current_stream_handle()
        if stream and self._is_capturing():
            return self.eager.run_inside_capture(None, num_tokens)
        self._acquire()
        try:
            plan = self._decide(num_tokens, num_reqs, uniform, loras, ceiling).plan
            result = plan.run(None, stream)
            while result is AGAIN:
                plan = self.dispatcher.dispatch(num_tokens, num_reqs, uniform, loras, ceiling).plan
                result = plan.run(None, stream)
            return result
        except Exception:
            self.counters.failed_steps += 1
            raise
        finally:
            self._release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, or send to another process: the same settings, own buffers and no graphs."""
        return _remake, (self.spec,)

    def __str__(self) -> str:
        return ladder(self)

    def __repr__(self) -> str:
        return (
            f"<GraphRunner {self.dispatcher.policy_name} on {self.backend.name}, "
            f"{self.lifecycle.num_graphs()} of {len(self.registry)} keys captured>"
        )
