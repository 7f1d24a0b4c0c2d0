"""GraphRunner: a step function, the graphs of it, and the policy that chooses among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher, LanePolicy, Policy
from dispatchkit.errors import ConfigError
from dispatchkit.execute.capture.budget import Budget
from dispatchkit.execute.capture.capture import Capturer
from dispatchkit.execute.capture.captured import CapturedStep
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.capture.warmup import Warmups
from dispatchkit.execute.controls import Controls
from dispatchkit.execute.io.axes import AxisCut, AxisInputs
from dispatchkit.execute.io.buffers import StaticBuffers
from dispatchkit.execute.io.inputs import InputSet, StaticInput, inputs_from_example
from dispatchkit.execute.io.outputs import DERIVED
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
from dispatchkit.execute.replay.timing import SAMPLE_EVERY, Timings
from dispatchkit.execute.report import ladder
from dispatchkit.execute.setup import honoured, make_backend, make_config, make_policy
from dispatchkit.execute.step.guard import Guard
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.state import DEFAULT_STATE_LIMIT
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.checks import check_count
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode, RuntimeMode
from dispatchkit.observe.counters import StepCounters
from dispatchkit.registry import GraphRegistry

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet


_NOT_ARGUMENTS = ("self", "__class__")


def _each(name: str, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return a list of tensors as a tuple; one tensor alone would be its rows."""
    if isinstance(tensors, torch.Tensor):
        hint = f"Put it into one: {name}=[cache]."
        raise ConfigError(name, type(tensors).__name__, "a list of tensors", hint)
    return tuple(tensors)


def _remake(settings: dict[str, Any]) -> GraphRunner:
    return GraphRunner(**settings)


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
        max_num_seqs: Most requests of a batch.
        query_len: Tokens per request of a uniform decode batch.
        mode: Which runtime modes decode and mixed batches use.
        axes: Further facts that graphs are made for; each call gives their values by name.
        config: All of these settings, in place of the single ones.
        policy: Name of the policy, or an object; by default the one that a plugin selects
            for the configuration, else ``vllm``.
        policy_options: Options for a policy chosen by name.
        backend: ``auto``, a backend's name, or an object.
        device: Where the tensors of a call are.
        outputs: ``owned``: each call returns fresh tensors. ``view``: what it returns is
            valid until the runner's next call.
        output_batch_dims: Index of the batch dimension of the outputs (None: none), for all
            of them or as a structure; by default measured at two sizes.
        row_count: Name of an input that the runner itself gives: the true number of rows,
            a 0-d int64 tensor on the device.
        state: Tensors the step changes, such as a KV cache. They are saved around warmups.
        scratch: Tensors the step may write in a warmup without harm: rows of fill write to
            a place that is never read. They are not saved.
        state_limit_bytes: Most bytes of undeclared state to save around warmups.
        generators: Random generators of the step, beside the default ones.
        warmups: Eager runs before each capture.
        buffer_rows: Rows that the static inputs have room for at least, where a swap may bring
            larger sizes than the first; by default those of the largest size.
        share_outputs: Where there are several, graphs write their outputs to one memory, by a
            copy inside the graph; False saves the copy and spends memory for each graph.
        lazy: Capture a key when a call asks for it.
        capture_after: How often a key must be asked for before it is captured lazily.
        max_graphs: Most live graphs.
        max_bytes: Most bytes of graph memory.
        eviction: Who goes first: ``lru``, ``benefit``, or a function of a captured step; the
            lowest value goes first.
        strict: A downgrade to eager raises.
        check: Compare each so many replays with eager (slow, for tests and doubts); 0 off.
            ``first``: the first replay of each graph, and its first padded one.
            Nothing is measured then.
        sample_every: Of the steps that a learning policy wants timed as a rule, measure one
            in so many; those of its one-shot decisions are all measured.
        lanes: Streams that ``submit`` spreads steps over, each with buffers, graphs, table and
            budget of its own.
        lane_policy: Chooses the lane of each submitted step: a name, by default
            ``round-robin``, or an object. One lane needs none.
        lane_policy_options: Options for a lane policy chosen by name.
        disjoint_state: Steps in flight at a time change different parts of the state, such
            as other rows of a KV cache. Otherwise steps that change state run one after
            another, whatever the lane.
        plugins: Loaded plugins; by default they are loaded when a name must be found.

    Attributes:
        dispatcher: Decides.
        registry: The keys and their graphs.
        config: Sizes, limits and modes in force; without PIECEWISE where the step is whole.
        mode_reasons: Why the mode in force is less than what was asked for, where a piece or
            the backend says that it supports less.
        backend: The device.
        known_axis_cuts: Says for values of the axes, and a key, which dimensions of outputs
            follow an axis: indices of output, dimension and axis. None if not measured yet.
        buffers: The static inputs by name, for callers that write them themselves; see
            ``step``.

    Raises:
        ConfigError: A setting cannot be used, or two contradict each other.
        UnknownNameError: No policy, backend, mode or dtype goes by a given name.

    Thread safety: any thread may call it; steps run one at a time.
    """

    def __init__(
        self,
        step: Any,
        inputs: Mapping[str, StaticInput] | None = None,
        *,
        example: Mapping[str, torch.Tensor] | None = None,
        sizes: Sequence[int] | None = None,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        query_len: int | Sequence[int] | None = None,
        mode: CUDAGraphMode | str | None = None,
        axes: Sequence[Axis] | None = None,
        config: DispatchConfig | None = None,
        policy: str | Policy | None = None,
        policy_options: dict[str, Any] | None = None,
        backend: str | GraphBackend = "auto",
        device: str | torch.device | None = None,
        outputs: str = "owned",
        output_batch_dims: Any = DERIVED,
        row_count: str | None = None,
        state: Iterable[torch.Tensor] = (),
        scratch: Iterable[torch.Tensor] = (),
        state_limit_bytes: int = DEFAULT_STATE_LIMIT,
        generators: Iterable[torch.Generator] = (),
        warmups: int = 1,
        buffer_rows: int | None = None,
        share_outputs: bool = True,
        lazy: bool = False,
        capture_after: int = 1,
        max_graphs: int | None = None,
        max_bytes: int | None = None,
        eviction: str | Callable[[CapturedStep], float] = "lru",
        strict: bool = False,
        check: int | str = 0,
        lanes: int = 1,
        lane_policy: str | LanePolicy | None = None,
        lane_policy_options: dict[str, Any] | None = None,
        disjoint_state: bool = False,
        sample_every: int = SAMPLE_EVERY,
        plugins: PluginSet | None = None,
    ) -> None:
        state, scratch = _each("state", state), _each("scratch", scratch)
        generators = tuple(generators)
        # Every argument, for copies: they are made anew, without graphs.
        given = {name: value for name, value in locals().items() if name not in _NOT_ARGUMENTS}
        if isinstance(step, GraphRunner):
            raise ConfigError("step", step, "not a GraphRunner itself", "Wrap its step once.")
        if (inputs is None) == (example is None):
            raise ConfigError("inputs", inputs, "given, or an example of them, and not both")
        for name, by_name in (("inputs", inputs), ("example", example)):
            if by_name is not None and not isinstance(by_name, Mapping):
                allowed = "a dictionary by the names of the step's parameters"
                raise ConfigError(name, type(by_name).__name__, allowed)
        flags = {"lazy": lazy, "strict": strict, "share_outputs": share_outputs}
        for name, flag in flags.items():
            if not isinstance(flag, bool):  # a word would count as true, "no" as well
                raise ConfigError(name, flag, "True or False")
        if outputs not in ("owned", "view"):
            raise ConfigError("outputs", outputs, "'owned' or 'view'")
        asked = make_config(
            config,
            capture_sizes=sizes,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            query_lens=query_len,
            mode=mode,
            axes=axes,
        )
        if sizes is not None:
            given["sizes"] = asked.capture_sizes  # a generator gives them once
        check_lanes(lanes, policy=policy, outputs=outputs, check=check)
        self._made_from, self._asked = given, asked
        self.owned_outputs: bool = outputs == "owned"
        self.backend: GraphBackend = make_backend(backend, device, plugins)
        specs = inputs if inputs is not None else inputs_from_example(example or {})
        device = torch.device(self.backend.torch_device)
        self._axes = AxisInputs(specs, asked, device) if asked.axes else None
        self._inputs = InputSet(specs, device) if self._axes is None else self._axes.smallest
        self._step = Step(step, self._inputs.names, row_count, [axis.name for axis in asked.axes])
        self._row_count = row_count
        self.asked_mode: CUDAGraphMode = asked.mode
        self.mode_reasons: tuple[str, ...]
        self.config: DispatchConfig
        self.config, self.mode_reasons = honoured(asked, self._step, self.backend)
        self.guard: Guard = Guard(self._inputs.device.type, self._step.modules)
        self.counters: StepCounters = StepCounters()
        self._lock = threading.RLock()
        self._swap_lock = threading.Lock()

        chosen, origin, plugins = make_policy(policy, policy_options, self.config, plugins)
        self._plugins, self._notices = plugins, Notices(plugins)
        modes = frozenset({RuntimeMode.FULL, *([RuntimeMode.PIECEWISE] * self._step.can_split)})
        self.dispatcher: Dispatcher = Dispatcher(
            chosen,
            self.config,
            modes=modes,
            lazy=lazy,
            strict=strict,
            origin=origin,
            on_swap=self._notices.policy_swapped,
            on_fault=self._notices.policy_at_fault,
        )
        self.registry: GraphRegistry = self.dispatcher.registry
        # Room for the largest bucket, which is what is cut, whatever batches may come; also for
        # one of a size that only a later policy declares.
        largest = max((key.num_tokens for key in self.registry), default=1)
        num_rows = max(largest, self.config.max_capture_size)
        if buffer_rows is not None:
            num_rows = max(num_rows, check_count(buffer_rows, "buffer_rows"))
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
        self.timings: Timings = Timings(self.backend, self.dispatcher, self._lane, sample_every)
        warm = Warmups(
            self._step,
            self._inputs,
            self.backend,
            row_count=row_count,
            axes=self._axes,
            state=state,
            scratch=scratch,
            state_limit_bytes=state_limit_bytes,
            output_batch_dims=output_batch_dims,
            warmups=warmups,
            generators=generators,
        )
        self._snapshot = warm.snapshot
        registry = self.registry
        self.known_axis_cuts: Callable[..., tuple[AxisCut, ...] | None] = warm.known_axis_cuts
        capturer = Capturer(
            warm,
            self.backend,
            self.guard,
            # An only graph has nobody to share with, and needs no copy.
            share_outputs=lambda: share_outputs and len(registry) > 1,
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
            budget=Budget(max_graphs=max_graphs, max_bytes=max_bytes, eviction=eviction),
            lazy=lazy,
            capture_after=capture_after,
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
            strict=strict,
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
            axes=tuple(axis.name for axis in asked.axes),
            asked_mode=asked.mode,
            is_owned=self.owned_outputs,
        )
        self.dispatcher.bind = self._planner.plan
        if lanes > 1:
            add_lanes(self, given, asked, plugins)

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
        return _remake, (self._made_from,)

    def __str__(self) -> str:
        return ladder(self)

    def __repr__(self) -> str:
        return (
            f"<GraphRunner {self.dispatcher.policy_name} on {self.backend.name}, "
            f"{self.lifecycle.num_graphs()} of {len(self.registry)} keys captured>"
        )
