"""Analyze the arguments of a Dynamo graph before it runs.

Dynamo passes inputs, sizes, weights and buffers as arguments. Tensors that are the same in every
step, such as weights and buffers, are held tensors. Whether the graph can be captured depends on
which arguments are batched, held or written, and on whether a result aliases an argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import attrs
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_structure

from dispatchkit.execute import RESERVED_NAMES, DispatchMode, storage_of

from dispatchkit_compile.tracing import (
    HeldTensor,
    Input,
    Result,
    Role,
    Size,
    TracedStep,
    example_of,
    size_source,
)

__all__ = ["GraphArguments", "PlainReason", "read_arguments"]


class PlainReason:
    """Reasons why a graph, or one of its steps, runs eager."""

    GRADIENTS = "gradients"
    INPUT_CHANGED = "input_changed"
    INPUT_WRITTEN = "input_written"
    OUTPUT_IS_INPUT = "output_aliases_input"
    SEVERAL_DIMS = "several_dynamic_dims"
    NO_BATCH = "no_batched_input"
    ODD_ARGUMENT = "unsupported_argument"
    LAYOUT = "input_layout"
    HELD_MOVED = "held_tensor_moved"
    FILL_UNKNOWN = "fill_not_declared"
    NOTHING_TO_CAPTURE = "nothing_to_capture"


@attrs.frozen
class GraphArguments:
    """The arguments of a graph and their roles.

    Attributes:
        traced: The graph with the role of each argument.
        batch_dims: The batch dimension of each input; None if it is not batched.
        input_positions: Positions of the inputs in the argument list.
        held_positions: Positions of the held tensors in the argument list.
        written: Indices of the held tensors that the graph writes.
        num_rows: Number of rows that the graph was compiled for; None if it serves any number.
        plain: The reason why the graph cannot be captured, as (reason, explanation); None if it
            can be captured.
    """

    traced: TracedStep
    batch_dims: tuple[int | None, ...]
    input_positions: tuple[int, ...]
    held_positions: tuple[int, ...]
    written: tuple[int, ...]
    num_rows: int | None
    plain: tuple[str, str] | None


def read_arguments(graph: fx.GraphModule) -> GraphArguments:
    """Return the role of each argument, and whether the graph can be captured."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    fakes = [example_of(node) for node in nodes]
    writes, aliases = _effects(graph, fakes)
    tensors = {
        node.name: fake
        for node, fake in zip(nodes, fakes, strict=True)
        if isinstance(fake, torch.Tensor)
    }
    labels = _labels(nodes)
    direct = {node.name for node in nodes if _is_argument(node)}
    dynamic = {name: _dynamic_dims(fake) for name, fake in tensors.items()}
    lead = next((name for name in tensors if name in direct and tensors[name].dim()), None)
    num_rows: int | None = None
    if not any(dynamic.values()) and lead is not None:
        num_rows = int(tensors[lead].shape[0])

    plain: list[tuple[str, str]] = []
    roles: list[Role] = []
    names: list[str] = []
    batch_dims: list[int | None] = []
    places: tuple[list[int], list[int]] = ([], [])
    written: list[int] = []
    for place, (node, fake) in enumerate(zip(nodes, fakes, strict=True)):
        name = node.name
        if not isinstance(fake, torch.Tensor):
            source = size_source(fake, tensors)
            name = labels[name]
            if source is None:
                kind = type(fake).__name__
                what = f"argument {name!r} ({kind}) is neither a tensor nor the size of a tensor"
                plain.append((PlainReason.ODD_ARGUMENT, what))
                source = (name, 0)
            roles.append(Size(labels.get(source[0], source[0]), source[1]))
            continue
        dims = dynamic[name]
        if num_rows is not None and name in direct and fake.dim() and fake.shape[0] == num_rows:
            dims = (0,)
        if len(dims) > 1:
            shape = tuple(fake.shape)
            what = f"{labels[name]!r} has several dynamic dimensions; its shape is {shape}"
            plain.append((PlainReason.SEVERAL_DIMS, what))
        if not dims and (name not in direct or place in writes):
            if place in writes:
                written.append(len(places[1]))
            roles.append(HeldTensor(len(places[1])))
            places[1].append(place)
            continue
        name = labels[name]
        if place in writes:
            plain.append((PlainReason.INPUT_WRITTEN, f"{name!r} is written in place"))
        if place in aliases:
            plain.append((PlainReason.OUTPUT_IS_INPUT, f"a result shares memory with {name!r}"))
        if not fake.is_contiguous():
            plain.append((PlainReason.LAYOUT, f"{name!r} is not contiguous"))
        roles.append(Input(name))
        names.append(name)
        batch_dims.append(dims[0] if dims else None)
        places[0].append(place)
    if all(dim is None for dim in batch_dims):
        plain.append((PlainReason.NO_BATCH, "no argument has a dynamic batch dimension"))
    num_results = len(_results(graph))
    traced = TracedStep(
        graph,
        tuple(names),
        tuple(roles),
        (),
        tuple(map(Result, range(num_results))),
        tree_structure((0,) * num_results),
    )
    return GraphArguments(
        traced,
        tuple(batch_dims),
        tuple(places[0]),
        tuple(places[1]),
        tuple(written),
        num_rows,
        plain[0] if plain else None,
    )


def _labels(nodes: Sequence[fx.Node]) -> dict[str, str]:
    """Return a name for each argument: where possible, the function's parameter name."""
    labels: dict[str, str] = {}
    for node in nodes:
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "local_name", None) if _is_argument(node) else None
        usable = str(name).isidentifier() and name not in (None, *RESERVED_NAMES)
        is_free = name not in labels.values()
        labels[node.name] = str(name) if usable and is_free else node.name
    return labels


def _results(graph: fx.GraphModule) -> Sequence[Any]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results: Sequence[Any] = output.args[0]
    return results


def _is_argument(node: fx.Node) -> bool:
    """Return whether a graph's argument is an argument of the compiled function.

    Other arguments, such as weights, come from attributes or globals.
    """
    if (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
        return False
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is None or bool(getattr(source, "is_input", False))


def _dynamic_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        dim
        for dim, size in enumerate(cast("tuple[Any, ...]", tensor.shape))
        if isinstance(size, torch.SymInt) and not size.node.is_constant()
    )


def _effects(graph: fx.GraphModule, fakes: Sequence[Any]) -> tuple[set[int], set[int]]:
    """Return the positions of written arguments, and of arguments that results alias.

    The graph runs once on fake tensors, which have shapes and storages but no data.
    """
    # Use the mode that created the fake tensors, because Dynamo sets a different mode when it
    # calls a backend.
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
    if mode is None:
        return set(), set()
    watch = _WriteRecorder()
    with torch.no_grad(), mode, watch:
        results = graph(*fakes)
    places = {
        storage_of(fake): place
        for place, fake in enumerate(fakes)
        if isinstance(fake, torch.Tensor)
    }
    returned = {storage_of(leaf) for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)}
    return (
        {place for storage, place in places.items() if storage in watch.storages},
        {place for storage, place in places.items() if storage in returned},
    )


class _WriteRecorder(DispatchMode):
    """A dispatch mode that records the storages that operations write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self.storages |= {storage_of(tensor) for tensor in _written(func, args, kwargs)}
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    values = itertools.chain(args, itertools.repeat(None))
    for argument, value in zip(func._schema.arguments, values, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_leaves(kwargs.get(argument.name, value)):
                if isinstance(leaf, torch.Tensor):
                    yield leaf
