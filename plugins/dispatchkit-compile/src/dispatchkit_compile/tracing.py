"""Trace a Python step into one graph that is valid for every batch size.

Dynamo traces the step once, with an unknown batch size and without running the step. Code that
cannot be traced this way (a branch on data or on the size, an unsupported call) raises an error
that names the line, because a graph specialized to one size would be wrong at any other size.
"""

from __future__ import annotations

import inspect
import itertools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch._dynamo.decorators
import torch._dynamo.exc
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten

from dispatchkit.errors import CaptureError, ConfigError, format_value

# First of the integers that represent unknown sizes in the traced step's result. User code is
# unlikely to contain these integers.
_FIRST_STAND_IN = 0x5D15_7A7C_0000


@attrs.frozen
class Input:
    """A graph argument that is an input of the step."""

    name: str


@attrs.frozen
class Size:
    """A graph argument that is the size of a dimension of an input."""

    name: str
    dim: int


@attrs.frozen
class HeldTensor:
    """A graph argument that is the same tensor in every step, such as a weight or a cache."""

    index: int


@attrs.frozen
class Result:
    """A value computed by the graph, identified by its index in the graph's results."""

    index: int


@attrs.frozen
class Constant:
    """A Python value that does not depend on the inputs."""

    value: Any


Role = Input | Size | HeldTensor


@attrs.frozen
class TracedStep:
    """A step traced into a graph.

    Attributes:
        graph: The graph, whose arguments include the parameters of the model.
        inputs: Names of the step's inputs.
        roles: The role of each argument of the graph.
        held: Weights, buffers and caches, in the order of ``HeldTensor.index``.
        leaves: The leaves of the step's result, in pytree order.
        spec: The structure of the step's result, as a pytree specification.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    roles: tuple[Role, ...]
    held: tuple[torch.Tensor, ...]
    leaves: tuple[Input | HeldTensor | Result | Constant, ...]
    spec: TreeSpec


def trace(
    step: Callable[..., Any], example: Mapping[str, torch.Tensor], batch_dims: Mapping[str, int]
) -> TracedStep:
    """Trace a step once for all sizes of its batch.

    Args:
        step: A function or module, called with the inputs as keyword arguments.
        example: One tensor for each input, with any values.
        batch_dims: The batch dimension of each batched input.

    Raises:
        CaptureError: The step cannot be traced as one graph (reason ``not_traceable``), or it
            has side effects in Python that a replay would omit (``python_effects``).
    """
    # Mark aliases of the tensors, so that the caller's tensors stay unmarked.
    inputs = {name: tensor.detach() for name, tensor in example.items()}
    for name, dim in batch_dims.items():
        mark_batch(inputs[name], dim)
    seen: list[tuple[fx.GraphModule, tuple[Any, ...], list[Any]]] = []

    def keep(graph: fx.GraphModule, _: Sequence[Any], **options: Any) -> Callable[..., Any]:
        def stand_in(*args: Any) -> tuple[Any, ...]:
            results = _stand_ins(graph)
            seen.append((graph, args, results))
            return tuple(results)

        return stand_in

    before = _python_state(step)
    try:
        with torch.no_grad():
            returned = torch.compile(_fresh_caller(step), backend=keep, fullgraph=True)(inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise _not_traceable(error) from error
    changed = _restore_python_state(before)
    if changed:
        raise CaptureError(
            f"The step sets {', '.join(changed)}, but a replay would not do so, because it runs no "
            "Python code. Instead, update a tensor in place, or return the value.",
            reason="python_effects",
        )
    if not seen:
        raise CaptureError(
            "The step has no tensor operations to capture. Compute its results from its inputs, or "
            "run it without a graph.",
            reason="not_traceable",
        )
    graph, args, results = seen[0]
    roles, held = _roles(graph, args, inputs)
    flat, spec = tree_flatten(returned)
    leaves = tuple(_leaf(leaf, results, inputs, held) for leaf in flat)
    lost = set(range(len(results))) - {leaf.index for leaf in leaves if isinstance(leaf, Result)}
    if lost:
        raise CaptureError(
            f"The step returns an object of type {type(returned).__name__}, which torch cannot "
            "flatten completely. Return tensors, lists, tuples or dicts, or register other types "
            "with torch.utils._pytree.register_dataclass.",
            reason="not_traceable",
        )
    return TracedStep(graph, tuple(inputs), roles, held, leaves, spec)


def mark_batch(tensor: torch.Tensor, dim: int) -> None:
    """Mark the size of a dimension as unknown, so that one graph serves every size, even 1."""
    mark = torch._dynamo.decorators.mark_unbacked
    if _MARK_TAKES_ID:
        mark(tensor, dim, shape_id="batch")
    else:
        mark(tensor, dim)


_MARK_TAKES_ID = "shape_id" in inspect.signature(torch._dynamo.decorators.mark_unbacked).parameters


def size_source(size: Any, tensors: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the (tensor name, dimension) of a size, or None if no tensor has this size."""
    expression = _expression(size)
    for name, tensor in tensors.items():
        for dim, length in enumerate(tensor.shape):
            if isinstance(length, torch.SymInt) and _expression(length) == expression:
                return name, dim
    return None


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def example_of(node: fx.Node) -> Any:
    """Return the fake value that the tracer assigned to a node."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


# -- internals ----------------------------------------------------------------------------


def _fresh_caller(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the step and has a new code object.

    Dynamo stores compilations per code object. The compilations of a new code object are released
    after tracing, and do not count toward the recompile limits of the user's compilations.
    """

    def call(inputs: dict[str, torch.Tensor]) -> Any:
        return step(**inputs)

    return types.FunctionType(
        call.__code__.replace(), call.__globals__, "call", None, call.__closure__
    )


def _stand_ins(graph: fx.GraphModule) -> list[Any]:
    """Return a recognizable placeholder for each result of a graph."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    numbers = itertools.count(_FIRST_STAND_IN)
    return [
        next(numbers)
        if isinstance(result, int) or isinstance(example_of(result), (torch.SymInt, int))
        else torch.empty(0)
        for result in output.args[0]
    ]


def _roles(
    graph: fx.GraphModule, args: tuple[Any, ...], inputs: Mapping[str, torch.Tensor]
) -> tuple[tuple[Role, ...], tuple[torch.Tensor, ...]]:
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = {id(tensor): name for name, tensor in inputs.items()}
    fakes = {
        names[id(arg)]: example_of(node)
        for node, arg in zip(nodes, args, strict=True)
        if id(arg) in names
    }
    roles: list[Role] = []
    held: list[torch.Tensor] = []
    for node, arg in zip(nodes, args, strict=True):
        if isinstance(arg, torch.Tensor):
            if id(arg) in names:
                roles.append(Input(names[id(arg)]))
            else:
                roles.append(HeldTensor(len(held)))
                held.append(arg)
            continue
        source = size_source(example_of(node), fakes)
        if source is None:
            raise CaptureError(
                f"The step reads {node.name!r} = {format_value(arg)}, which is neither a tensor "
                "nor the size of an input. Pass it as a tensor, or bind it with functools.partial.",
                reason="not_traceable",
            )
        roles.append(Size(*source))
    return tuple(roles), tuple(held)


def _leaf(
    leaf: Any,
    results: Sequence[Any],
    inputs: Mapping[str, torch.Tensor],
    held: Sequence[torch.Tensor],
) -> Input | HeldTensor | Result | Constant:
    for index, result in enumerate(results):
        if leaf is result or (isinstance(result, int) and type(leaf) is int and leaf == result):
            return Result(index)
    for name, tensor in inputs.items():
        if leaf is tensor:
            return Input(name)
    for index, tensor in enumerate(held):
        if leaf is tensor:
            return HeldTensor(index)
    return Constant(leaf)


def _not_traceable(error: Exception) -> CaptureError:
    text = str(error)
    problem = text.strip().splitlines()[0].rstrip(".")
    where = re.findall(r'File "([^"]+)", line (\d+)', text) or re.findall(r"# (\S+):(\d+) in", text)
    place = f" ({where[-1][0]}:{where[-1][1]})" if where else ""
    return CaptureError(
        f"The step cannot be traced as one graph for all sizes: {problem}{place}. Wrap that code "
        "in a custom operator (torch.library.custom_op) and split at it, or define the pieces "
        "with graph_piece and eager_piece. torch.compile(backend='dispatchkit') without "
        "fullgraph=True compiles such steps into several graphs.",
        reason="not_traceable",
    )


_ModuleState = list[tuple[torch.nn.Module, dict[str, Any], tuple[dict[str, Any], ...]]]
_TABLES = ("_parameters", "_buffers", "_modules")


def _python_state(step: Callable[..., Any]) -> _ModuleState:
    """Return the attributes of the step's modules, to detect changes made by tracing."""
    if not isinstance(step, torch.nn.Module):
        step = getattr(step, "__self__", step)  # the module of a bound method
    if not isinstance(step, torch.nn.Module):
        return []
    return [
        (module, dict(vars(module)), tuple(dict(vars(module)[name]) for name in _TABLES))
        for module in step.modules()
    ]


def _restore_python_state(before: _ModuleState) -> list[str]:
    """Restore the changed attributes, and return their names."""
    changed = []
    for module, attributes, tables in before:
        now = vars(module)
        pairs = [(attributes, now)]
        pairs += [(old, attributes[name]) for name, old in zip(_TABLES, tables, strict=True)]
        for old, new in pairs:
            names = [
                name
                for name in {*old, *new}
                if old.get(name, _ABSENT) is not new.get(name, _ABSENT)
            ]
            if names:
                new.clear()
                new.update(old)
                changed += [f"{type(module).__name__}.{name}" for name in names]
    return sorted(changed)


_ABSENT = object()


def batch_dims_of(specs: Mapping[str, Any]) -> dict[str, int]:
    """Return the batch dimension of each batched input.

    Raises:
        ConfigError: No input is batched.
    """
    dims = {name: spec.batch_dim for name, spec in specs.items() if spec.batch_dim is not None}
    if not dims:
        names = ", ".join(sorted(specs))
        message = f"No input in example ({names}) has a batch dimension."
        raise ConfigError(
            "example",
            sorted(specs),
            "a dict with at least one input that has a batch dimension",
            "Declare the batch dimension of an input with StaticInput."
            if specs
            else "For example, pass {'x': torch.zeros(4, 16)}.",
            message=message if specs else "example contains no inputs.",
        )
    return dims
