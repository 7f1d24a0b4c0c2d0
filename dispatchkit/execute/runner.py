"""GraphRunner: a step function, the graphs of it, and the policy that chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.capture_guard import free_in_children
from dispatchkit.dispatch import CostModel, Dispatcher, Explanation, Lanes, Policy
from dispatchkit.errors import ConfigError
from dispatchkit.execute.capture.report import CaptureReport
from dispatchkit.execute.controls import Controls
from dispatchkit.execute.executor import make_workload, run_again
from dispatchkit.execute.io.buffers import StaticBuffers
from dispatchkit.execute.io.calls import CallReader
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.execute.lanes.build import check_lanes, join_lanes, make_executors
from dispatchkit.execute.lanes.lane_set import LaneSet, StepHandle
from dispatchkit.execute.live.decisions import DecisionRunner
from dispatchkit.execute.live.swap import Swapper, SwapReport
from dispatchkit.execute.live.swap_requests import UNCHANGED
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.report import ladder
from dispatchkit.execute.setup import RunnerSpec, merge_config
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.state import StepState
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import check_flag
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.observe.counters import RunnerStats
from dispatchkit.observe.recorder import DEFAULT_CAPACITY, StepRecorder
from dispatchkit.options import RunnerOptions, refuses_moved
from dispatchkit.plugins import PolicyWithPlugins
from dispatchkit.registry import GraphRegistry


def _remake(spec: RunnerSpec) -> GraphRunner:
    return GraphRunner(**spec.arguments())


class GraphRunner:
    """Run a step through captured graphs, padded to the nearest size, or eager.

    A call gives what the step itself gives on the same inputs. Graphs carry no gradients:
    every step runs under ``torch.no_grad()``, eager ones too. A padded step that draws random
    numbers draws for the rows of padding too: see docs/how-to/steps.md. Python effects of the step
    (appends, attribute writes, prints) happen in warmup and capture, not at replay.

    Args:
        step: A function of the named inputs, a module, or a list of ``graph_piece(fn)`` and
            ``eager_piece(fn)``.
        inputs: Static inputs by name. A ``SlotState`` among them is state of sessions: calls name
            slots, and the step is given the rows of these.
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
            valid until the runner's next call, and what a lane returns until that lane's next.
        state: Tensors the step changes, such as a KV cache, or a ``StepState`` of these,
            scratch tensors and generators. They are saved around warmups.
        lazy: Capture a key when a call asks for it.
        lanes: Streams that ``submit`` spreads steps over, each with buffers, graphs, table and
            budget of its own; ``Lanes(4, policy)`` for a lane policy that is an object,
            ``Lanes(memory=memory)`` for a ``GraphMemory`` that runners share.
        options: All other settings.

    Attributes:
        backend: The device.
        buffers: The static inputs by name, for callers that write them themselves; see
            ``run_in_place``.
        controls: Capture, freeze, evict, and what is asked for seldom: warm-ups beforehand,
            graphs from elsewhere, keys switched off, how a graph is launched.
        lanes: The lanes, each an executor with a dispatcher, graphs and counters of its own.
        taps: What follows the decisions of steps: recordings, listeners, watchers.
        decisions: Steps that are decided first and run later, as ranks do.
        swapper: Changes what decides, while steps run.

    Raises:
        ConfigError: A setting cannot be used, or two contradict each other.
        UnknownNameError: No policy, backend, mode or dtype goes by a given name.

    Thread safety: any thread may call it; steps run one at a time.
    """

    @refuses_moved
    def __init__(
        self,
        step: Any,
        inputs: Mapping[str, StaticInput | SlotState] | None = None,
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
        lazy = check_flag(lazy, "lazy")
        if outputs not in ("owned", "view"):
            raise ConfigError("outputs", outputs, "'owned' or 'view'")
        config = merge_config(
            options.config,
            sizes=sizes,
            max_num_tokens=max_num_tokens,
            mode=mode,
            axes=axes,
        )
        # What was asked for: copies, lanes and swaps are made from it.
        spec = RunnerSpec(
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
        check_lanes(spec)
        work = make_workload(spec)
        executors = make_executors(work)
        lock = executors[0].lane.group.lock
        free_in_children(lock, *(executor.registry.lock for executor in executors))
        chooser, homes = join_lanes(executors)
        self._executor = executors[0]
        self.backend: GraphBackend = work.backend
        self.buffers: StaticBuffers = StaticBuffers(self._executor.lane.buffers)
        reader = CallReader(work.inputs, work.axes)
        self.controls: Controls = Controls(executors, homes, lock)
        self.lanes: LaneSet = LaneSet(executors, chooser, homes, reader, lock)
        self.taps: StepTaps = StepTaps(executors, lock)
        self.decisions: DecisionRunner = DecisionRunner(self._executor, reader, self.taps, lock)
        self.swapper: Swapper = Swapper(self._executor, self.taps, len(executors), lock)
        # Found once, since a step asks for each of them.
        self._axes, self._is_special = work.axes, reader.is_special
        self._bind, self._to_arrays, self._check = reader.bind, reader.to_arrays, reader.check
        self._is_capturing = self.backend.is_capturing
        self._current_stream_handle = self.backend.current_stream_handle
        self._lock = lock

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
            uniform: True for a uniform decode batch: every request is past its prompt and brings
                exactly ``query_len`` tokens. False for a mixed batch, as any with a chunk of a
                prompt is, the last one too, whatever its length.
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
        tensors = self._bind(args, inputs)
        if self._is_special:
            tensors = self._to_arrays(tensors)
            if self._axes is not None:
                loras = self._axes.variant(tensors, loras)
        num_tokens, readable = self._check(tensors)
        executor, stream = self._executor, self._current_stream_handle()
        # The default stream, handle 0, is never captured.
        if stream and self._is_capturing():
            return executor.eager.run_inside_capture(tensors, num_tokens)
        # A signal's exception may come behind a call of acquire(), and not in a with statement.
        with self._lock:
            try:
                plan = executor.decide(num_tokens, num_reqs, uniform, loras, ceiling).plan
                result = plan.run(tensors, stream, readable)
                if result is AGAIN:
                    batch = (num_tokens, num_reqs, uniform, loras, ceiling)
                    return run_again(
                        executor.dispatcher, executor.eager, tensors, stream, readable, *batch
                    )
                return result
            except Exception:
                executor.counters.failed_steps += 1
                raise

    def run_in_place(
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
        executor, stream = self._executor, self._current_stream_handle()
        if stream and self._is_capturing():
            return executor.eager.run_inside_capture(None, num_tokens)
        with self._lock:
            try:
                plan = executor.decide(num_tokens, num_reqs, uniform, loras, ceiling).plan
                result = plan.run(None, stream)
                if result is AGAIN:
                    batch = (num_tokens, num_reqs, uniform, loras, ceiling)
                    return run_again(
                        executor.dispatcher, executor.eager, None, stream, False, *batch
                    )
                return result
            except Exception:
                executor.counters.failed_steps += 1
                raise

    # -- several lanes ------------------------------------------------------------------

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
        return self.lanes.submit(
            *args,
            num_reqs=num_reqs,
            uniform=uniform,
            loras=loras,
            ceiling=ceiling,
            priority=priority,
            **inputs,
        )

    # -- graphs -------------------------------------------------------------------------

    def capture(
        self,
        keys: Iterable[GraphKey] | None = None,
        *,
        progress: bool | Callable[[int, int, GraphKey | None], None] = False,
        again: bool = False,
    ) -> CaptureReport:
        """Capture the keys that have no graph yet, largest first; failures are contained.

        A policy that learns is then given the timed runs it asks for, see ``CalibrationRuns``.

        Args:
            keys: Which; all declared ones by default. Each lane captures those that have a
                home on it by its lane policy.
            progress: Show a progress bar on stderr, or call this with (done, total, key).
            again: Also those that failed so often that they are left alone: for when the
                cause has been mended.
        """
        return self.controls.capture(keys, progress=progress, again=again)

    def freeze(self, *, strict: bool | None = None) -> None:
        """Capture nothing from now on; a key without a graph runs eager, or raises if strict."""
        return self.controls.freeze(strict=strict)

    def unfreeze(self) -> None:
        """Allow captures again, lazy ones where the runner is lazy: to wake up after a sleep."""
        return self.controls.unfreeze()

    def evict(self, key: GraphKey) -> None:
        """Give up the graphs of a key.

        Raises:
            RegistryError: It has none.
        """
        return self.controls.evict(key)

    def clear(self) -> None:
        """Give up all graphs."""
        return self.controls.clear()

    def invalidate(self, reason: str = "weights") -> int:
        """Give up all graphs because what they read was replaced; capture them again after.

        Weights that are copied in place need none of this.

        Returns:
            How many graphs there were.
        """
        return self.controls.invalidate(reason)

    def drain(self, *, wait: bool = False) -> int:
        """Give the outcomes of measured steps that are done to the policy; how many."""
        return self.controls.drain(wait=wait)

    # -- reading ------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes that the graphs take: their pool, and the outputs they share."""
        return self.controls.num_bytes

    def stats(self) -> RunnerStats:
        """Return what has been done so far, on all lanes together."""
        return self.controls.stats()

    def explain(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        *,
        cost_model: CostModel | str | None = None,
        **axes: int,
    ) -> Explanation:
        """Say what would happen to a batch and why, without running or counting anything.

        It says what such steps took, where the policy had some timed and they were read
        (``drain`` does that too).

        Args:
            num_tokens: Tokens of the batch.
            num_reqs: Requests in it; 0 where they are not known.
            uniform: True for a uniform decode batch: every request is past its prompt and brings
                exactly ``query_len`` tokens. False for a mixed batch, as any with a chunk of a
                prompt is, the last one too, whatever its length.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.
            cost_model: Say what the step costs by this model too: an object, such as one that
                ``calibrate`` made of this runner. With dispatchkit-plan installed also the name
                of a model that it brings, or a file.
            axes: The value of each axis, by its name.

        Raises:
            DescriptorError: The batch is impossible.
            ConfigError: ``cost_model`` is not one.
            MissingDistributionError: It is a name or a file, and dispatchkit-plan is missing.
            UnknownNameError: There is no such cost model.
        """
        return self.controls.explain(
            num_tokens, num_reqs, uniform, loras, ceiling, cost_model=cost_model, **axes
        )

    @property
    def dispatcher(self) -> Dispatcher:
        """Decides; on the first lane."""
        return self._executor.dispatcher

    @property
    def registry(self) -> GraphRegistry:
        """The keys and their graphs; on the first lane."""
        return self._executor.registry

    @property
    def config(self) -> DispatchConfig:
        """Sizes, limits and modes in force; without PIECEWISE where the step is whole."""
        return self._executor.dispatcher.config

    @property
    def spec(self) -> RunnerSpec:
        """What it is asked to be: copies are made from it."""
        return self._executor.spec

    # -- while serving ------------------------------------------------------------------

    def swap(
        self,
        *,
        policy: str | Policy | None = None,
        policy_options: dict[str, Any] | None = None,
        config: DispatchConfig | None = None,
        sizes: Sequence[int] | None = None,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        mode: CUDAGraphMode | str | None = None,
        max_graphs: int | None = UNCHANGED,
        max_bytes: int | None = UNCHANGED,
        eviction: str | None = None,
        ahead: bool | None = None,
    ) -> SwapReport:
        """Change what decides, or its limits, while other threads run steps.

        Every step runs exactly once: those that have begun under what was in force, those that
        begin later under the new. Graphs that both use stay. While new graphs are captured,
        old and new together are held to the larger of the old and the new limits.

        Args:
            policy: Name of the policy, or an object that is in force nowhere; by default a copy
                of the one in force, with what it has learnt.
            policy_options: Options for a policy by name; alone, for the one in force.
            config: A whole configuration, in place of the next four.
            sizes: Capture sizes.
            max_num_tokens: Largest batch in tokens; sizes that were given stay as they are.
            max_num_seqs: Most requests of a batch.
            mode: Which runtime modes decode and mixed batches use.
            max_graphs: Most live graphs; None for no limit.
            max_bytes: Most bytes of graph memory; None for no limit.
            eviction: ``lru`` or ``benefit``.
            ahead: Capture new graphs before they can be chosen; by default unless the runner
                is lazy. False: their steps run eager until ``capture()``, or capture them
                where the runner is lazy.

        Returns:
            What changed.

        Raises:
            SwapError: A new graph could not be captured, or finds no room. As with all other
                errors here, what was in force stays so.
            ConfigError: A setting cannot be used, nothing is asked for, or a size is larger
                than the static inputs have room for.
            UnknownNameError: No policy goes by that name.
            PolicyError: The policy is refused.
            RegistryError: The runner is frozen, and new graphs would be needed.
        """
        return self.swapper.swap(
            policy=policy,
            policy_options=policy_options,
            config=config,
            sizes=sizes,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            mode=mode,
            max_graphs=max_graphs,
            max_bytes=max_bytes,
            eviction=eviction,
            ahead=ahead,
        )

    def start_recording(self, capacity: int = DEFAULT_CAPACITY) -> StepRecorder:
        """Record what each step is dispatched with, in place of an earlier recording.

        Args:
            capacity: Steps to keep; the oldest are overwritten, and counted.

        Returns:
            What is filled from now on: ``recorder.save(path)`` writes a step trace.

        Raises:
            ConfigError: ``capacity`` is not a whole number of at least 1.
        """
        return self.taps.start_recording(capacity)

    def stop_recording(self) -> None:
        """Record no more steps."""
        return self.taps.stop_recording()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, or send to another process: the same settings, own buffers and no graphs."""
        return _remake, (self._executor.spec,)

    def __str__(self) -> str:
        return ladder(self.lanes)

    def __repr__(self) -> str:
        return (
            f"<GraphRunner {self.dispatcher.policy_name} on {self.backend.name}, "
            f"{self._executor.lifecycle.num_graphs()} of {len(self.registry)} keys captured>"
        )
