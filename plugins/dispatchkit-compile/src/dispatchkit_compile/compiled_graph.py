"""One Dynamo graph, run by a GraphRunner.

Dynamo passes tensors of the exact batch size. The inputs go to the runner, which chooses a captured
graph, pads the inputs to its size, replays it, and returns the rows of the batch. If the Dynamo
graph cannot be captured, or does not fit the arguments, the step runs eager and is counted by
reason.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from dispatchkit.backends import GraphBackend
from dispatchkit.errors import ConfigError, InputError, NoGraphError, counted
from dispatchkit.execute import (
    EagerStepWarning,
    GraphRunner,
    InputSet,
    Piece,
    StaticInput,
    make_backend,
)
from dispatchkit.keys import CUDAGraphMode
from dispatchkit.once import Once

from dispatchkit_compile.compile_options import CompileOptions
from dispatchkit_compile.compiled_stats import CompiledStats
from dispatchkit_compile.facts import current_facts
from dispatchkit_compile.graph_arguments import PlainReason, read_arguments
from dispatchkit_compile.piece_compilers import piece_compiler
from dispatchkit_compile.split import SplitRules, split_graph
from dispatchkit_compile.stages import COMPILED_CODE
from dispatchkit_compile.tracing import example_of

__all__ = ["CompiledGraph"]

#: Number of times that held tensors (weights, buffers, caches) may be replaced. After further
#: replacements, steps run eager.
MAX_REBINDS = 8

_NEXT_STEPS = {
    PlainReason.GRADIENTS: "Graphs do not record gradients: call the model under "
    "torch.no_grad() or torch.inference_mode().",
    PlainReason.INPUT_CHANGED: "Compile the model separately for such arguments.",
    PlainReason.INPUT_WRITTEN: "Clone the argument before writing to it, or register it as a "
    "buffer of the module.",
    PlainReason.OUTPUT_IS_INPUT: "Return a copy of the argument (.clone()).",
    PlainReason.SEVERAL_DIMS: "Only the batch dimension may be dynamic: mark the others with "
    "torch._dynamo.mark_static(argument, dim) before each call.",
    PlainReason.NOTHING_TO_CAPTURE: "If the option `at` or eager_region blocks cover all "
    "operations, make them cover fewer.",
    PlainReason.FILL_UNKNOWN: "Set the option `fill` to argument values with which the "
    "writes of padding rows are harmless, such as fill={'slots': sink}, or to {} if padding rows "
    "write nothing.",
    PlainReason.HELD_MOVED: "Update weights, buffers and caches in place instead of replacing "
    "them.",
    PlainReason.LAYOUT: "Pass a contiguous tensor.",
    PlainReason.ODD_ARGUMENT: "Pass the argument as a tensor.",
    PlainReason.NO_BATCH: "If an argument has a batch, Dynamo compiled its first size, or a single "
    "row, as a fixed size. dispatchkit_compile.compile marks the batch dimension for you.",
}


class CompiledGraph:
    """The callable that the backend returns to Dynamo for one graph.

    Args:
        graph: Dynamo graph to run.
        options: The options of the backend.
        name: Name of the graph, unique in this process.

    Attributes:
        name: Name of the graph.
        options: The options of the backend.
        pieces: The pieces of the graph: one graph piece if the graph was not split, and none if
            ``plain`` is set.
        runner: The runner; None until a step needs it.
        plain: The reason why all steps run eager, as (reason, explanation); None if the graph can
            be captured.
        num_rebinds: Number of times that held tensors (weights, buffers, caches) were replaced.

    Thread safety: any thread may call it.
    """

    name: str
    options: CompileOptions

    def __init__(self, graph: fx.GraphModule, options: CompileOptions, name: str) -> None:
        self.name, self.options = name, options
        self.runner: GraphRunner | None = None
        self.num_rebinds: int = 0
        self._graph = graph
        self._arguments = read_arguments(graph)
        self.plain: tuple[str, str] | None = self._arguments.plain or self._fill_is_missing()
        self._held: list[torch.Tensor] = []
        self._plain_steps: Counter[str] = Counter()
        self._once = Once()
        self._lock = threading.RLock()
        self._inputs: InputSet | None = None
        self._needs_grad = False
        self._pick_inputs = _getter(self._arguments.input_positions)
        self._pick_held = _getter(self._arguments.held_positions)
        self._backend: GraphBackend | None = None
        self.pieces: list[Piece] = []
        if self.plain is None:
            self._backend = self._make_backend()
            self.pieces = self._split()

    # -- the step -----------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Run one step and return the results of the graph.

        Raises:
            NoGraphError: The step would run eager, and ``strict`` is set.
        """
        if self.plain is not None:
            return self._run_plainly(self.plain[0], args, self.plain[1])
        tensors = self._pick_inputs(args)
        if torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in tensors)
            or any(tensor.requires_grad for tensor in self._pick_held(args))
        ):
            return self._run_plainly(PlainReason.GRADIENTS, args)
        inputs = self._inputs
        # Compare by identity: replacing a weight creates a new object, but updating it does not.
        if inputs is None or not all(map(operator.is_, self._pick_held(args), self._held)):
            with self._lock:
                reason = self._bind(args)
            if reason:
                return self._run_plainly(reason, args)
            inputs = self._inputs
        runner = self.runner
        if inputs is None or runner is None:  # another thread is replacing the runner
            return self._run_plainly(PlainReason.HELD_MOVED, args)
        try:
            num_rows, _ = inputs.check(tensors)
        except InputError as error:
            # The rest of the error suggests changing a declaration, which users do not write here.
            problem = str(error).partition(". ")[0]
            return self._run_plainly(PlainReason.INPUT_CHANGED, args, problem)
        if self._arguments.num_rows not in (None, num_rows):
            return self._run_plainly(
                PlainReason.INPUT_CHANGED,
                args,
                f"it was compiled for {counted(self._arguments.num_rows, 'row')}, got {num_rows:,}",
            )
        if num_rows > runner.config.max_num_tokens:
            problem = self._too_large(num_rows, runner.config.max_num_tokens)
            return self._run_plainly("above_largest_size", args, problem)
        facts = current_facts()
        if facts is not None:
            return runner(*tensors, **facts.for_graph(num_rows))
        return runner(*tensors)

    def _run_plainly(self, reason: str, args: Sequence[Any], why: str = "") -> Any:
        """Run the Dynamo graph eager and count the step; warn once for each reason.

        Raises:
            NoGraphError: ``strict`` is set.
        """
        is_strict = self.options.options.strict
        if is_strict or self._once.first(reason):
            next_step = _NEXT_STEPS.get(reason, "")
            what = "has no graph to run" if is_strict else "runs eager"
            text = f"{self.name} {what} (reason: {reason})"
            text = f"{text}{f': {why}' if why else ''}".removesuffix(".") + f". {next_step}"
            text = text.strip()
            if is_strict:
                then = "Set strict=False in the RunnerOptions to run such steps eager."
                raise NoGraphError(f"{text} {then}", reason=reason)
            warnings.warn(f"{text} Warned once.", EagerStepWarning, stacklevel=3)
        self._plain_steps[reason] += 1
        return self._graph(*args)

    def _too_large(self, num_rows: int, limit: int) -> str:
        """Return the limit that a batch exceeds, and how to raise it."""
        more = ", and raise `max_num_tokens`" if self.options.max_num_tokens is not None else ""
        return (
            f"the batch has {counted(num_rows, 'row')}; the limit is {limit:,}. Pass a size of at "
            f"least {num_rows:,} in the option `sizes`{more}"
        )

    # -- setup --------------------------------------------------------------------------

    def _fill_is_missing(self) -> tuple[str, str] | None:
        """Return why the graph must not run on padding rows, or None if it may."""
        arguments = self._arguments
        if not arguments.written or self.options.fill is not None or arguments.num_rows is not None:
            return None
        return (
            PlainReason.FILL_UNKNOWN,
            "it writes to tensors that outlive the step (weights, buffers or caches)",
        )

    def _make_backend(self) -> GraphBackend:
        """Return the capture backend.

        Raises:
            ConfigError: The backend cannot capture the kernels of the piece compiler.
        """
        options = self.options
        nodes = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        lead = example_of(nodes[self._arguments.input_positions[0]])
        device = lead.device if options.device_backend == "auto" else None
        made = make_backend(options.device_backend, device, None)
        if (
            options.piece_compiler == "inductor"
            and made.torch_device == "cpu"
            and options.mode is not CUDAGraphMode.NONE
        ):
            raise ConfigError(
                "piece_compiler",
                "inductor",
                f"omitted with the {made.name} backend",
                "This backend records torch operators and would miss inductor's kernels. To run "
                "compiled pieces without graphs, pass mode='NONE'.",
            )
        return made

    def _split(self) -> list[Piece]:
        compile_piece = piece_compiler(self.options.piece_compiler)
        try:
            pieces = split_graph(
                self._arguments.traced,
                SplitRules(self.options.at),
                name=self.name,
                compile_piece=compile_piece,
                held=self._held,
            )
        except ConfigError as error:
            if error.setting != "at":
                raise
            self.plain = (PlainReason.NOTHING_TO_CAPTURE, "it has no operation to capture")
            return []
        level = self.options.support
        return [
            attrs.evolve(piece, support=level, limited_by="the option `support`")
            if level < piece.support
            else piece
            for piece in pieces
        ]

    def _bind(self, args: Sequence[Any]) -> str:
        """Create the runner for a call's held tensors; return "", or why the call runs eager."""
        held = self._pick_held(args)
        if self._inputs is not None and all(map(operator.is_, held, self._held)):
            return ""
        if self.num_rebinds >= MAX_REBINDS:
            return PlainReason.HELD_MOVED
        if self.runner is not None:
            self.num_rebinds += 1
            self.runner.clear()
            self.runner, self._inputs = None, None
        self._held[:] = held
        tensors = self._pick_inputs(args)
        specs = {
            name: StaticInput(
                tuple(None if i == dim else size for i, size in enumerate(tensor.shape)),
                tensor.dtype,
                fill=(self.options.fill or {}).get(name, 0),
            )
            for name, dim, tensor in zip(
                self._arguments.traced.inputs, self._arguments.batch_dims, tensors, strict=True
            )
        }
        self.runner = self._make_runner(specs)
        self._inputs = InputSet(specs, torch.device(self.runner.backend.torch_device))
        if not self.options.lazy:
            self.runner.capture()
        return ""

    def _make_runner(self, specs: dict[str, StaticInput]) -> GraphRunner:
        options = self.options
        sizes, most = options.sizes, options.max_num_tokens
        set_options = options.options
        if self._arguments.num_rows is not None:
            sizes, most = (self._arguments.num_rows,), None
            # A graph compiled for one size has no padding rows to check, and cannot run at a second
            # size to find the batch dimensions of its outputs.
            set_options = attrs.evolve(
                set_options,
                buffers=attrs.evolve(set_options.buffers, output_batch_dims=None),
                capture=attrs.evolve(set_options.capture, prove_rows=False),
            )
        return GraphRunner(
            self.pieces,
            specs,
            sizes=sizes,
            max_num_tokens=most,
            mode=options.mode,
            policy=options.policy,
            backend=self._backend or "auto",
            outputs=options.outputs,
            state=[self._held[index] for index in self._arguments.written],
            lazy=options.lazy,
            options=set_options,
        )

    # -- statistics ---------------------------------------------------------------------

    def stats(self) -> CompiledStats:
        """Return the statistics so far."""
        runner = None if self.runner is None else self.runner.stats()
        return CompiledStats(self.name, dict(self._plain_steps), runner)

    def explain(self, num_rows: int, **facts: Any) -> str:
        """Return a text that explains how a batch would run."""
        if self.plain is not None:
            return f"{self.name}: runs eager, {self.plain[0]}: {self.plain[1]}"
        if self.runner is None:
            return f"{self.name}: not called yet"
        return f"{self.name}: {self.runner.explain(num_rows, **facts)}"

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{piece.name.rpartition('.')[2]} {'graph' if piece.is_graph else 'eager'}"
            for piece in self.pieces
        )
        lines = [f"{self.name}: {kinds or 'not split'}"]
        if self.plain is not None:
            lines.append(f"runs eager, {self.plain[0]}: {self.plain[1]}")
        if self._arguments.num_rows is not None:
            lines.append(f"compiled for {counted(self._arguments.num_rows, 'row')} only")
        lines += [
            f"{counted(count, 'step')} eager, {why}" for why, count in self._plain_steps.items()
        ]
        for piece in self.pieces:
            failed_at = getattr(piece.fn, "failed_at", "")
            if failed_at == COMPILED_CODE:
                lines.append(
                    f"{piece.name} failed in {failed_at}; to see the operation, omit the option "
                    "`piece_compiler`"
                )
            elif failed_at:
                lines.append(
                    f"{piece.name} failed at {failed_at}; to run this operation eager and capture "
                    "the others, add it to the option `at`"
                )
        if self.runner is not None:
            lines.append(str(self.runner))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.name}, {counted(len(self.pieces), 'piece')}>"


def _getter(places: tuple[int, ...]) -> Callable[[Sequence[Any]], list[Any]]:
    if not places:
        return lambda args: []
    if len(places) == 1:
        (place,) = places
        return lambda args: [args[place]]
    pick = operator.itemgetter(*places)
    return lambda args: list(pick(args))
