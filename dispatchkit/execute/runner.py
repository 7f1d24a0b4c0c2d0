"""GraphRunner: a step function, its graphs, and the policy that chooses among them."""

from __future__ import annotations

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
from dispatchkit.execute.report import ladder
from dispatchkit.execute.setup import RunnerSpec
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.state import StepState
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.batch import GraphKey
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
    """Runs a step through captured graphs, padded to the next size, or eager.

    A call returns what the step itself returns for the same inputs. Graphs do not support
    gradients: every step, including eager ones, runs under ``torch.no_grad()``. A padded step that
    draws random numbers also draws for padding rows: see docs/how-to/steps.md. Python effects of
    the step (appends, attribute writes, prints) happen in warmup and capture, not at replay.

    Args:
        step: A function of the named inputs, a module, or a list of ``graph_piece(fn)`` and
            ``eager_piece(fn)``.
        inputs: Static inputs by name. A ``SlotState`` among them is state of sessions: calls pass
            slots, and the step gets their rows.
        example: One tensor per input, instead of ``inputs``.
        sizes: Capture sizes in tokens, by default derived from ``max_num_tokens``.
        max_num_tokens: Largest batch in tokens.
        mode: Which runtime modes decode and mixed batches use.
        axes: User-defined axes that graphs are captured for; each call passes their values by name.
        policy: Name of the policy, or an object; by default the one that a plugin selects
            for the configuration, else ``vllm``. With your own plugins:
            ``plugins.with_policy("vllm")``.
        backend: ``auto``, a backend's name, or an object.
        outputs: ``owned``: each call returns fresh tensors. ``view``: results are valid until the
            runner's next call, and a lane's results until the lane's next step.
        state: Tensors the step changes, such as a KV cache, or a ``StepState`` of these,
            scratch tensors and generators. They are saved around warmups.
        lazy: Capture a key when a call needs it.
        lanes: Streams that ``submit`` spreads steps over, each with its own buffers, graphs, table
            and budget; ``Lanes(4, policy)`` for a lane policy object, ``Lanes(memory=memory)`` for
            a ``GraphMemory`` that runners share.
        options: All other settings.

    Attributes:
        backend: The device.
        buffers: The static inputs by name, for callers that write them themselves; see
            ``run_in_place``.
        controls: Capture, freeze, evict, and rarely used operations: warmup in advance, foreign
            graphs, switching keys off, how a graph is launched.
        lanes: The lanes, each an executor with its own dispatcher, graphs and counters.
        taps: Recordings, listeners and watchers of steps.
        decisions: Steps that are decided first and run later, as ranks do.
        swapper: Swaps policy, configuration or limits while steps run.

    Raises:
        ConfigError: A setting is invalid, or two contradict each other.
        UnknownNameError: There is no policy, backend, mode or dtype of a given name.

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
        # The specification, from which copies, lanes and swaps are made.
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
            raise ConfigError("step", step, "not a GraphRunner itself", "Wrap its step once.")
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
        # Looked up once, since each step needs them.
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
        """Run one step, exactly once, whatever fails.

        Args:
            args: Inputs in declared order, or
            inputs: Inputs, and values of axes, by name.
            num_reqs: Requests in the batch; 0 if unknown.
            uniform: True for a uniform decode batch: every request is past its prompt and has
                exactly ``query_len`` tokens. False for a mixed batch, which includes any batch with
                a chunk of a prompt, even the last chunk, whatever its length.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.

        Returns:
            The step's results for these inputs.

        Raises:
            InputError: An input is missing, unknown, or of another type, device or shape.
            DescriptorError: A property of the batch is impossible or above its limit.
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
        # A signal handler may raise after a call of acquire(), but not inside a with statement.
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
        """Run one step on the contents of ``buffers``: only decide and launch.

        Rows from ``num_tokens`` on need not be written: the runner refills those used by its
        earlier steps. Everything else is as in a call.

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
    ) -> StepFuture:
        """Queue one step on a lane and return immediately; it runs exactly once.

        The step waits for the work now queued on the current stream. Inputs on the device must not
        be written before the step is done: make the writing stream ``wait`` for the handle. Host
        inputs are copied before this returns.

        Args:
            args: Inputs in declared order, or
            inputs: Inputs by name.
            num_reqs: As in a call, like the next three.
            uniform: Kind of batch.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed.
            priority: Urgency of the step, for lane policies that use it.

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
        """Capture the keys without a graph, largest first; failures are recorded, not raised.

        A learning policy then gets the timed runs it requests, see ``CalibrationRuns``.

        Args:
            keys: The keys; by default all declared ones. Each lane captures those that the lane
                policy assigns to it.
            progress: Show a progress bar on stderr, or call this with (done, total, key).
            again: Also retry keys that failed too often, after the cause was fixed.

        Raises:
            ConfigError: ``keys`` are not a list of keys.
            RegistryError: A key is not declared, or the runner is frozen.
        """
        return self.controls.capture(keys, progress=progress, again=again)

    def freeze(self, *, strict: bool | None = None) -> None:
        """Stop capturing; keys without a graph run eager, or raise in strict mode."""
        return self.controls.freeze(strict=strict)

    def unfreeze(self) -> None:
        """Allow captures again, including lazy ones in a lazy runner."""
        return self.controls.unfreeze()

    def evict(self, key: GraphKey) -> None:
        """Evict the graphs of a key.

        Raises:
            RegistryError: It has no graph.
        """
        return self.controls.evict(key)

    def clear(self) -> None:
        """Evict all graphs."""
        return self.controls.clear()

    def invalidate(self, reason: str = "weights") -> int:
        """Release all graphs because memory they read was replaced, and allow recapturing them.

        Not needed for weights that are copied in place.

        Returns:
            The number of graphs released.
        """
        return self.controls.invalidate(reason)

    def drain(self, *, wait: bool = False) -> int:
        """Pass outcomes of finished measured steps to the policy; return their number."""
        return self.controls.drain(wait=wait)

    # -- reading ------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the graphs: their pool and their shared outputs."""
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
        """Explain what a step of a batch would do now, without running or counting anything.

        It is asked on the first lane, and under the modes of this thread (autocast), which a step
        compares with those of the capture. What only a run shows is not known, such as whether a
        replay fails. It includes times of equal steps, if the policy had some measured and they
        were read (``drain`` also reads them).

        Args:
            num_tokens: Tokens of the batch.
            num_reqs: Requests in it; 0 where they are not known.
            uniform: True for a uniform decode batch: every request is past its prompt and has
                exactly ``query_len`` tokens. False for a mixed batch, which includes any batch with
                a chunk of a prompt, even the last chunk, whatever its length.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.
            cost_model: Also show the step's cost by this model: an object, such as one created by
                ``calibrate`` from this runner. With dispatchkit-plan installed, also the name of
                one of its models, or a file.
            axes: The value of each axis, by name.

        Raises:
            DescriptorError: The batch is impossible. If it only has more tokens than
                ``max_num_tokens``, the explanation says so.
            ConfigError: ``cost_model`` is invalid.
            MissingDistributionError: It is a name or a file, and dispatchkit-plan is missing.
            UnknownNameError: There is no such cost model.
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
        """Sizes, limits and modes in force; without PIECEWISE if the step is not split."""
        return self._executor.dispatcher.config

    @property
    def spec(self) -> RunnerSpec:
        """The specification, from which copies are made."""
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
        """Swap policy, configuration or limits while other threads run steps.

        Every step runs exactly once: steps that have begun run under the old settings, later ones
        under the new. Graphs that both use stay. While new graphs are captured, old and new graphs
        together must satisfy the larger of the old and new limits.

        Args:
            policy: Name of the policy, or an object not in force anywhere; by default a copy of the
                current policy, including what it has learned.
            policy_options: Options for a policy given by name, or, without one, for the current
                policy.
            config: A complete configuration, instead of the next four arguments.
            sizes: Capture sizes.
            max_num_tokens: Largest batch in tokens; sizes that were given do not change.
            max_num_seqs: Most requests of a batch.
            mode: Which runtime modes decode and mixed batches use.
            max_graphs: Most live graphs; None for no limit.
            max_bytes: Most bytes of graph memory; None for no limit.
            eviction: ``lru`` or ``benefit``.
            ahead: Capture new graphs before they can be chosen; by default unless the runner is
                lazy. False: their steps run eager until ``capture()``, or capture them in a lazy
                runner.

        Returns:
            The report of the swap.

        Raises:
            SwapError: A new graph could not be captured or exceeds a budget. As with all errors
                here, the old settings stay in force.
            ConfigError: A setting is invalid, nothing would change, or a size is larger than the
                static inputs.
            UnknownNameError: There is no policy of that name.
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
        """Record the arguments of each step's dispatch, replacing an earlier recording.

        Args:
            capacity: Steps to keep; the oldest are overwritten, and counted.

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
        """Copy or pickle: the same settings, with new buffers and without graphs."""
        return _remake, (self._executor.spec,)

    def __str__(self) -> str:
        return ladder(self.lanes)

    def __repr__(self) -> str:
        return (
            f"<GraphRunner {self.dispatcher.policy_name} on {self.backend.name}, "
            f"{self._executor.lifecycle.num_graphs()} of {len(self.registry)} keys captured>"
        )
