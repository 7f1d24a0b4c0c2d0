"""Split a step into graph and eager pieces, at given operations and at marks in its code.

The traced operations are cut into consecutive parts. Operations that match a rule or are in a
marked region form eager parts; the others form graph parts. Each part becomes a piece for
``GraphRunner``. A piece receives inputs and weights directly, and a tuple of the earlier results
that it or later pieces need. Results of a graph piece stay in the memory that its graph wrote.
Results of an eager piece are copied to fixed addresses only if the piece allocated them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import fx

from dispatchkit.errors import ConfigError
from dispatchkit.execute import Piece, StaticInput, inputs_from_example
from dispatchkit.keys import AttentionSupport

from dispatchkit_compile.markers import BREAK, REGION_BEGIN, REGION_END
from dispatchkit_compile.rules import SplitRules, function_name, node_support, op_name
from dispatchkit_compile.stages import Stage, source_of
from dispatchkit_compile.tracing import (
    Constant,
    HeldTensor,
    Input,
    Result,
    Role,
    TracedStep,
    batch_dims_of,
    example_of,
    trace,
)

__all__ = ["SplitRules", "split_graph", "split_module"]

# Operations that launch no kernels. A graph of only these operations would be empty.
_WITHOUT_LAUNCH = frozenset(
    "getitem _assert_scalar _check sym_size sym_stride size stride dim numel view view_as unbind "
    "squeeze unsqueeze transpose permute expand split chunk detach empty empty_like "
    "new_empty".split()
)
_SIZE_ARITHMETIC = frozenset("eq ge gt le lt ne mul add sub floordiv mod".split())
_SIZES = (int, torch.SymInt, torch.SymBool, torch.SymFloat)


def split_module(
    step: Callable[..., Any],
    example: Mapping[str, torch.Tensor | StaticInput],
    *,
    at: Iterable[Any] = (),
    device: torch.device | str | None = None,
) -> list[Piece]:
    """Split a model or a function into pieces for ``GraphRunner``.

    The step is traced once for all batch sizes, without running an operation. The trace fixes
    all Python values and branches, such as the training mode of a module. Values of tensors,
    including weights, are read in every step.

    Args:
        step: A function or module, called with the inputs as keyword arguments.
        example: A tensor or a ``StaticInput`` for each input. A StaticInput declares its batch
            dimension. Tensors with the same length as the first tensor are batched in
            dimension 0.
        at: Operations that run eager between graphs, in addition to ``eager_region`` blocks and
            operators that cannot be captured for every batch. Entries are operators (objects, or
            names such as ``"vllm::attention"``), modules (paths, path patterns, classes or class
            names), and functions or tensor methods (objects or names).
        device: Device of inputs declared by a StaticInput. By default, the device of the first
            tensor in ``example``; without such a tensor, the device of the weights, or else the
            CPU.

    Raises:
        UnknownNameError: A name in ``at`` is unknown; the error suggests similar names.
        ConfigError: An argument is invalid, an entry of ``at`` does not occur in the step, or no
            operation is left to capture.
        CaptureError: The step cannot be traced as one graph for all sizes.
    """
    rules = SplitRules(at)
    if not isinstance(example, Mapping):
        hint = "For example, pass {'x': torch.zeros(4, 16)}."
        allowed = "a dict of tensors or StaticInputs by input name"
        raise ConfigError("example", example, allowed, hint)
    given = dict(example)
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
    specs = {name: one for name, one in given.items() if isinstance(one, StaticInput)}
    other = [name for name in given if name not in tensors and name not in specs]
    if other:
        raise ConfigError(f"example[{other[0]!r}]", given[other[0]], "a tensor or a StaticInput")
    try:
        given_device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", device, "a torch device, such as 'cuda:0'") from error
    place = given_device or _device_of(step, tensors)
    tensors |= {name: spec.full(4, place) for name, spec in specs.items()}
    specs = {**inputs_from_example({n: t for n, t in tensors.items() if n not in specs}), **specs}
    ordered = {name: tensors[name] for name in given}
    traced = trace(step, ordered, batch_dims_of(specs))
    name = getattr(step, "__name__", type(step).__name__)
    pieces = split_graph(traced, rules, name=name)
    rules.require_all_used(traced.graph)
    return pieces


def split_graph(
    traced: TracedStep,
    rules: SplitRules,
    *,
    name: str = "step",
    compile_piece: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]] | None = None,
    held: list[torch.Tensor] | None = None,
) -> list[Piece]:
    """Return the pieces of a traced step.

    Args:
        traced: Step to split, traced into a graph.
        rules: The operations to split at.
        name: Name of the step. Pieces are named ``NAME.piece_0``, ``NAME.piece_1`` and so on.
        compile_piece: Function that compiles a graph piece, given the fake values of its arguments.
        held: List from which the pieces read weights, buffers and caches in each step; by default,
            a copy of ``traced.held``.

    Raises:
        ConfigError: All operations would run eager.
    """
    parts = _parts(traced.graph.graph, rules)
    if not any(part.is_graph for part in parts):
        message = f"With the rules in `at`, all operations of {name!r} would run eager."
        hint = "Remove a rule, so that some operations are captured."
        if not rules.given:
            message = f"{name!r} has no operation that can be captured in a piece."
            hint = (
                "Keep at least one kernel-launching operation outside of eager_region blocks, or "
                "run the step without splitting it."
            )
        raise ConfigError(
            "at",
            [str(rule) for rule in rules.given],
            "a list of rules that leaves at least one operation to capture",
            hint,
            message=message,
        )
    return list(_Builder(traced, name, compile_piece, held).pieces(parts))


# -- cutting ------------------------------------------------------------------------------


@attrs.define
class _Part:
    """Consecutive nodes that become one piece."""

    is_graph: bool
    nodes: list[fx.Node] = attrs.Factory(list)


def _launches(node: fx.Node) -> bool:
    """Return whether a node may launch a kernel."""
    name = op_name(node)
    if name is not None and not name.startswith("aten::"):
        return True
    name = (name or function_name(node)).rpartition("::")[2]
    if name in _SIZE_ARITHMETIC:
        # Arithmetic on sizes runs on the host; arithmetic on tensors runs on the device.
        return not isinstance(example_of(node), _SIZES)
    return name not in _WITHOUT_LAUNCH


def _parts(graph: fx.Graph, rules: SplitRules) -> list[_Part]:
    """Return the parts of a graph, in order.

    Consecutive operations form one part if all of them are captured or all of them run eager. A
    break mark ends a part that is captured, but not a part that runs eager.
    """
    parts: list[_Part] = []
    depth = 0
    is_broken = True
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        name = op_name(node)
        if name == BREAK:
            is_broken = True
            continue
        if name in (REGION_BEGIN, REGION_END):
            depth += 1 if name == REGION_BEGIN else -1
            continue
        is_graph = not rules.match(node) and depth == 0
        if is_broken or parts[-1].is_graph is not is_graph:
            parts.append(_Part(is_graph))
            is_broken = False
        parts[-1].nodes.append(node)
    merged: list[_Part] = []
    for part in parts:
        before = merged[-1] if merged else None
        if before is not None and before.is_graph:
            # Move the leading allocations and views of a part into the graph before it. Results
            # that eager operators write to this memory then have fixed addresses and need no copy.
            while part.nodes and not _launches(part.nodes[0]):
                before.nodes.append(part.nodes.pop(0))
            if not part.nodes:
                continue
        elif before is not None and not any(map(_launches, before.nodes)):
            # The previous part launches no kernels, so join the two parts.
            before.is_graph = part.is_graph
            before.nodes += part.nodes
            continue
        if not any(map(_launches, part.nodes)):
            part.is_graph = False  # a graph of a part without launches would be empty
        if before is not None and not part.is_graph and not before.is_graph:
            before.nodes += part.nodes
        else:
            merged.append(part)
    return merged


class _Builder:
    """Builder of the pieces of a split step."""

    def __init__(
        self,
        traced: TracedStep,
        name: str,
        compile_piece: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]] | None,
        held: list[torch.Tensor] | None,
    ) -> None:
        self._traced, self._name, self._compile = traced, name, compile_piece
        self._held = list(traced.held) if held is None else held
        nodes = list(traced.graph.graph.nodes)
        arguments = [node for node in nodes if node.op == "placeholder"]
        self._roles: dict[fx.Node, Role] = dict(zip(arguments, traced.roles, strict=True))
        self._results: list[Any] = list(nodes[-1].args[0])

    def pieces(self, parts: list[_Part]) -> Iterator[Piece]:
        """Yield a piece for each part, in order."""
        stages = []
        carried: list[fx.Node] = []
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            later = [node for behind in parts[index + 1 :] for node in behind.nodes]
            needed = self._needed_by(later)
            known = {*carried, *part.nodes}
            kept = [node for node in (*carried, *part.nodes) if node in needed and node in known]
            final = [self._results[leaf.index] for leaf in self._leaves(Result)] if is_last else []
            made = [node for node in part.nodes if node in needed or node in final]
            stages.append(self._stage(index, part, carried, made, None if is_last else kept))
            carried = kept
        self._accept_unused_inputs(stages)
        for part, stage in zip(parts, stages, strict=True):
            limits = [node_support(node) for node in part.nodes]
            level, limited_by = min(limits, default=(AttentionSupport.ALWAYS, ""))
            yield Piece(
                stage.set_signature(), is_graph=part.is_graph, support=level, limited_by=limited_by
            )

    def _leaves(self, kind: type) -> Iterator[Any]:
        return (leaf for leaf in self._traced.leaves if isinstance(leaf, kind))

    def _needed_by(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes read by ``nodes`` or returned by the step."""
        needed = {taken for node in nodes for taken in node.all_input_nodes}
        return needed | {one for one in self._results if isinstance(one, fx.Node)}

    def _stage(
        self,
        index: int,
        part: _Part,
        carried: list[fx.Node],
        made: list[fx.Node],
        kept: list[fx.Node] | None,
    ) -> Stage:
        own = set(part.nodes)
        outside: dict[fx.Node, None] = {}
        constants: dict[fx.Node, None] = {}
        for node in part.nodes:
            for taken in node.all_input_nodes:
                if taken.op == "get_attr":
                    constants[taken] = None
                elif taken not in own:
                    outside[taken] = None
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in outside:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in (*constants, *part.nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in made))
        name = f"{self._name}.piece_{index}"
        module = fx.GraphModule(self._traced.graph, graph, class_name=f"piece_{index}")
        run: Callable[..., Any] = module.forward
        if self._compile is not None and part.is_graph:
            fakes = [example_of(node) for node in outside]
            run = self._compile(module, fakes)
        places = {node: position for position, node in enumerate(carried)}
        stage = Stage(name, module, run, self._held, is_first=index == 0)
        stage.arguments = [self._source(node, places) for node in outside]
        made_at = {node: position for position, node in enumerate(made)}
        if kept is not None:
            stage.returns = [
                ("made", made_at[node]) if node in made_at else ("carried", places[node])
                for node in kept
            ]
        else:
            stage.returns = [self._final(leaf, places, made_at) for leaf in self._traced.leaves]
            stage.spec = self._traced.spec
        return stage

    def _source(self, node: fx.Node, places: Mapping[fx.Node, int]) -> tuple[str, Any]:
        """Return the source of a value that a piece reads but does not compute."""
        role = self._roles.get(node)
        if role is None:
            return "carried", places[node]
        return source_of(role)

    def _final(
        self,
        leaf: Input | HeldTensor | Result | Constant,
        places: Mapping[fx.Node, int],
        made_at: Mapping[fx.Node, int],
    ) -> tuple[str, Any]:
        """Return the source from which the last piece reads a leaf of the step's result."""
        if isinstance(leaf, Constant):
            return "constant", leaf.value
        if not isinstance(leaf, Result):
            return source_of(leaf)
        node = self._results[leaf.index]
        if not isinstance(node, fx.Node):
            return "constant", node
        if node.op == "get_attr":
            return "constant", operator.attrgetter(str(node.target))(self._traced.graph)
        if node in made_at:
            return "made", made_at[node]
        return self._source(node, places)

    def _accept_unused_inputs(self, stages: list[Stage]) -> None:
        """Make the first piece accept the inputs that no piece reads."""
        wanted = {name for stage in stages for name in stage.inputs()}
        idle = [name for name in self._traced.inputs if name not in wanted]
        stages[0].unused_inputs = tuple(idle)


def _device_of(step: Any, tensors: Mapping[str, torch.Tensor]) -> torch.device:
    for tensor in tensors.values():
        return tensor.device
    if isinstance(step, torch.nn.Module):
        for tensor in (*step.parameters(), *step.buffers()):
            return tensor.device
    return torch.device("cpu")
