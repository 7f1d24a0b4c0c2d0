"""GraphRunner: a step, its captured graphs, and the policy that chooses a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
from dispatchkit.execute.lanes.lane_set import LaneSet, StepFuture
from dispatchkit.execute.live.decisions import DecisionRunner
from dispatchkit.execute.live.swap import Swapper, SwapReport
from dispatchkit.execute.live.swap_requests import UNCHANGED
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.report import format_runner
from dispatchkit.execute.setup import RunnerSpec
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.state import StepState
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import naming_unknown
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
    """A runner that replays captured graphs of a step, or runs the step eager.

    A call returns the same results as the step itself. All steps run under ``torch.no_grad()``,
    including eager steps, because graphs do not support gradients. The exception is a step that is
    found to need gradients: it always runs eager, in the caller's grad mode. A padded step that
    draws random numbers also draws for padding rows (see docs/how-to/steps.md). Output that the
    step prints appears in warmups and captures, not in replays. A step that changes Python state,
    such as an attribute or a list, runs eager if the change is detected.

    Args:
        step: A function of the named inputs, a module, or a list of ``graph_piece(fn)`` and
            ``eager_piece(fn)``.
        inputs: Static inputs by name. If an input is a ``SlotState`` (the state of sessions), calls
            pass slots, and the step receives their rows.
        example: One tensor per input, instead of ``inputs``.
        sizes: Capture sizes in tokens, by default derived from ``max_num_tokens``.
        max_num_tokens: Largest batch in tokens; a larger batch raises DescriptorError. If omitted,
            batches above the largest capture size run eager.
        mode: Runtime modes of decode and mixed batches, as a ``CUDAGraphMode`` or its name.
        axes: Axes in addition to the batch, such as a sequence length; each call passes their
            values by name.
        policy: Name of a policy, or a policy object. By default, the policy that a plugin selects
            for the configuration, or else ``vllm``. To use your own plugin set, pass
            ``plugins.with_policy("vllm")``.
        backend: ``auto``, the name of a backend, or a backend object.
        outputs: ``owned`` returns new tensors from each call. ``view`` returns results that are
            valid until the runner's next call or, for submitted steps, until the lane's next step.
        state: Tensors that the step changes, such as a KV cache, or a ``StepState`` with tensors,
            scratch tensors and generators. Warmups may change scratch tensors; all other
            state is restored after warmups.
        lazy: Whether to capture a key when a call first needs it.
        lanes: Number of lanes for ``submit``: streams with separate buffers, graphs, tables and
            budgets. ``Lanes(4, policy)`` also sets a lane policy, and ``Lanes(memory=memory)`` sets
            a ``GraphMemory`` that several runners share.
        options: All other settings, as ``RunnerOptions``.

    Attributes:
        backend: The backend on which steps run.
        buffers: The static inputs by name, for callers that write to them; see ``run_in_place``.
        controls: Operations on graphs, such as capture, freeze and evict.
        lanes: The lanes; each is an executor with its own dispatcher, graphs and counters.
        taps: The recorder, the listener and the watcher that observe steps.
        decisions: Steps that are decided first and run later, so that ranks can agree on the
            decisions.
        swapper: Swaps of the policy, configuration or limits while steps run.

    Raises:
        ConfigError: A setting is invalid, or two settings contradict each other.
        UnknownNameError: No policy, backend, mode or dtype has the given name.
        BackendUnavailableError: The backend cannot run here.
        PolicyError: The runner tried the policy on sample batches, and the policy raised or
            returned an invalid value.

    Thread safety: any thread may call the runner; calls run one at a time.
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
        spec = RunnerSpec.of(
            step=step,
            inputs=inputs,
            example=example,
            sizes=sizes,
            max_num_tokens=max_num_tokens,
            mode=mode,
            axes=axes,
            policy=policy,
            backend=backend,
            outputs=outputs,
            state=state,
            lazy=lazy,
            lanes=lanes,
            options=options,
        )
        if isinstance(step, GraphRunner):
            hint = "Pass the step of that runner: runner.spec.step."
            raise ConfigError("step", step, "a function, a module or a list of pieces", hint)
        check_lanes(spec)
        work = make_workload(spec)
        executors = make_executors(work)
        lock = executors[0].lane.group.lock
        free_in_children(lock, *(executor.registry.lock for executor in executors))
        chooser, placement = join_lanes(executors)
        self._executor = executors[0]
        self.backend: GraphBackend = work.backend
        self.buffers: StaticBuffers = StaticBuffers(self._executor.lane.buffers)
        reader = CallReader(work.inputs, work.axes)
        self.controls: Controls = Controls(executors, placement, lock)
        self.lanes: LaneSet = LaneSet(executors, chooser, placement, reader, lock)
        self.taps: StepTaps = StepTaps(executors, lock)
        self.decisions: DecisionRunner = DecisionRunner(self._executor, reader, self.taps, lock)
        self.swapper: Swapper = Swapper(self._executor, self.taps, len(executors), lock)
        # Attributes that every step needs, looked up once.
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
        """Run a step: replay a graph, or run eager.

        The step takes effect only once. If a replay fails before it can have changed state, the
        step runs eager.

        Args:
            args: Inputs in the order of their declaration.
            inputs: Inputs and values of axes, by name.
            num_reqs: Number of requests in the batch; 0 if unknown.
            uniform: True for a uniform decode batch, in which every request is past its prompt and
                has exactly ``query_len`` tokens; with several query lengths, the 1-based index of
                the batch's query length in ``query_lens``. False for a mixed batch. A batch with a
                chunk of a prompt is mixed, even if the prompt ends with this chunk.
            loras: Number of active adapters.
            ceiling: Highest runtime mode allowed, or the result of ``allowed_modes_code``.

        Returns:
            The results of the step.

        Raises:
            InputError: An input is missing or unknown, or has the wrong dtype, device or shape.
            DescriptorError: A property of the batch is invalid or above its limit, or a slot does
                not belong to a session.
            NoGraphError: No graph can serve the batch, and either ``ceiling`` excludes eager steps
                or the runner is strict.
            ReplayError: A replay failed and may have changed state.
            PolicyError: The runner is strict, and the policy raised or returned an invalid value.
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
        # ``with``, not acquire() before try: a signal handler may raise between the two.
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
        """Run a step on the contents of ``buffers``.

        The caller writes the first ``num_tokens`` rows. If an earlier step used rows beyond these,
        the runner resets them to the fill value. The other arguments, the results and the errors
        are those of a call.

        Raises:
            InputError: The runner has axes; or no graph serves the batch, and the batch is larger
                than the buffers.
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
    ) -> StepFuture:
        """Submit a step to a lane and return without waiting for it.

        The step runs exactly once, after the work that is already queued on the current stream. Do
        not write to device inputs before the step has finished: make the writing stream wait with
        ``StepFuture.wait``. Host inputs are copied before ``submit`` returns.

        Args:
            args: Inputs in the order of their declaration.
            inputs: Inputs and values of axes, by name.
            num_reqs: As in a call.
            uniform: As in a call.
            loras: As in a call.
            ceiling: As in a call.
            priority: Priority for lane policies that support it. 0 is normal, and larger numbers
                are more urgent.

        Returns:
            The future of the step.

        Raises:
            InputError, DescriptorError, NoGraphError: As in a call.
            ReplayError: As in a call, or the current stream is capturing.
            PolicyError: As in a call; or the runner is strict and the lane policy raised or
                returned an invalid lane.
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
        """Capture keys that have no graph, largest first.

        Failed keys are reported, and the other keys are still captured. If any key was captured,
        the runner then performs the calibration runs that the policy requests.

        Args:
            keys: Keys to capture; by default all declared keys. Each lane captures the keys that
                the lane policy assigns to it.
            progress: True to show progress on stderr, or a function that is called with ``(done,
                total, key)``, where ``key`` is the next key, or None at the end.
            again: Whether to also capture keys that have failed too often to be retried otherwise.

        Returns:
            The report of captured, failed and skipped keys.

        Raises:
            ConfigError: ``keys`` is not a list of keys, or another argument is invalid.
            RegistryError: A key is not declared, the runner is frozen, or its memory is asleep.
        """
        return self.controls.capture(keys, progress=progress, again=again)

    def freeze(self, *, strict: bool | None = None) -> None:
        """Stop capturing: batches without a graph run eager, or raise in strict mode.

        Args:
            strict: Whether the runner is strict from now on; None keeps the current setting.
        """
        return self.controls.freeze(strict=strict)

    def unfreeze(self) -> None:
        """Allow captures again, including lazy captures in a lazy runner."""
        return self.controls.unfreeze()

    def evict(self, key: GraphKey) -> None:
        """Evict the graphs of a key.

        Raises:
            RegistryError: The key is not declared or has no graph.
        """
        return self.controls.evict(key)

    def clear(self) -> None:
        """Evict all graphs."""
        return self.controls.clear()

    def invalidate(self, reason: str = "weights") -> int:
        """Release all graphs because memory that they read was replaced.

        Their keys can be captured again. Calling this method is unnecessary if the weights were
        updated in place.

        Args:
            reason: Name of the replaced memory, for statistics and explanations.

        Returns:
            The number of keys that lost their graph, summed over all lanes.
        """
        return self.controls.invalidate(reason)

    def drain(self, *, wait: bool = False) -> int:
        """Pass the outcomes of finished steps to the policy; return their number.

        Args:
            wait: Whether to wait for steps that are still running.
        """
        return self.controls.drain(wait=wait)

    # -- reading ------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the graphs, including their pools and shared outputs."""
        return self.controls.num_bytes

    def stats(self) -> RunnerStats:
        """Return the counters of all lanes together."""
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
        """Explain how a batch would run now, without running it.

        The explanation is for the first lane. It assumes the current state of this thread, such as
        autocast, because a graph serves only steps that run in the state of its capture. The
        explanation cannot predict failures that occur only when the step runs, such as a failed
        replay. It includes the times of earlier steps with this decision if the policy requested
        measurements. Call ``drain`` first to include the latest times.

        Args:
            num_tokens: Number of tokens in the batch.
            num_reqs: Number of requests in the batch; 0 if unknown.
            uniform: As in a call.
            loras: Number of active adapters.
            ceiling: Highest runtime mode allowed, or the result of ``allowed_modes_code``.
            cost_model: Model that estimates the cost of the step: an object, such as the result of
                ``calibrate`` for this runner. If dispatchkit-plan is installed, a file or the
                name of one of the models in dispatchkit-plan is also allowed.
            axes: The value of each axis, by name.

        Returns:
            The explanation; ``print`` shows its text.

        Raises:
            DescriptorError: The batch is invalid. Exceeding ``max_num_tokens`` is not an error
                here.
            ConfigError: ``cost_model`` is invalid.
            MissingDistributionError: ``cost_model`` is a name or a file, and dispatchkit-plan is
                not installed.
            UnknownNameError: No cost model has the given name.
        """
        return self.controls.explain(
            num_tokens, num_reqs, uniform, loras, ceiling, cost_model=cost_model, **axes
        )

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the first lane."""
        return self._executor.dispatcher

    @property
    def registry(self) -> GraphRegistry:
        """The keys and their graphs, on the first lane."""
        return self._executor.registry

    @property
    def config(self) -> DispatchConfig:
        """The sizes, limits and modes in force; the requested mode may have been downgraded."""
        return self._executor.dispatcher.config

    @property
    def spec(self) -> RunnerSpec:
        """The arguments that create an equivalent runner."""
        return self._executor.spec

    # -- while serving ------------------------------------------------------------------

    @functools.partial(naming_unknown, owner="swap")
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
        """Swap the policy, configuration or limits while other threads run steps.

        Every step runs exactly once. Steps that have begun use the old settings; later steps use
        the new settings. Graphs that both the old and the new settings need are kept. While new
        graphs are captured, old and new graphs together must fit within the larger of the old and
        new limits.

        Args:
            policy: Name of a policy, or a policy object that no runner uses; by default a copy of
                the current policy, including everything it has learned.
            policy_options: Options for the policy given by name, or for the current policy if
                ``policy`` is None.
            config: A complete configuration, instead of the next four arguments.
            sizes: Capture sizes.
            max_num_tokens: Largest batch in tokens. Default capture sizes are derived from it
                again; explicitly given sizes do not change.
            max_num_seqs: Largest number of requests in a batch.
            mode: Runtime modes of decode and mixed batches.
            max_graphs: Largest number of live graphs per lane; None for no limit.
            max_bytes: Largest size of graph memory per lane in bytes; None for no limit.
            eviction: Graph to evict first: the least recently used (``lru``), or the graph with the
                fewest replays relative to its capture size (``benefit``).
            ahead: Whether to capture new graphs before the swap; by default True unless the runner
                is lazy. If False, a lazy runner captures a new graph when a step needs it. In other
                runners, steps that need a new graph run eager until ``capture()`` is called.

        Returns:
            The report of the swap.

        Raises:
            SwapError: A new graph could not be captured or exceeds a budget. After any error, the
                old settings stay in force.
            ConfigError: A setting is invalid, no setting changes, a size is larger than the static
                inputs, or the runner has several lanes.
            UnknownNameError: No policy has the given name.
            PolicyError: The runner tried the policy on sample batches, and the policy raised or
                returned an invalid value.
            RegistryError: The runner is frozen, and new graphs are needed.
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
        """Start recording the batch of each step; this replaces an earlier recording.

        The recorder stores ``num_tokens``, ``num_reqs``, ``uniform``, ``loras`` and ``ceiling`` of
        each step, but no tensors.

        Args:
            capacity: Number of steps to keep. Older steps are overwritten, and the recorder counts
                them.

        Returns:
            The recorder; ``recorder.save(path)`` writes a step trace.

        Raises:
            ConfigError: ``capacity`` is not a whole number of at least 1.
        """
        return self.taps.start_recording(capacity)

    def stop_recording(self) -> None:
        """Stop recording steps."""
        return self.taps.stop_recording()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the runner: its settings, but no buffers or graphs."""
        return _remake, (self._executor.spec,)

    def __str__(self) -> str:
        return format_runner(self.lanes)

    def __repr__(self) -> str:
        return (
            f"<GraphRunner {self.dispatcher.policy_name} on {self.backend.name}, "
            f"{len(self._executor.lifecycle.live())} of {len(self.registry)} keys captured>"
        )
