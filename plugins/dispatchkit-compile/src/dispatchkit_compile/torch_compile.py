"""A ``torch.compile`` backend that runs models with captured graphs.

An entry point in the group ``torch_dynamo_backends`` registers the backend for
``torch.compile(model, backend="dispatchkit", options={...})``. The function ``compile`` in this
module calls ``torch.compile`` with this backend, and marks the batch dimension so that one
compilation serves every size.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from dispatchkit.errors import ConfigError, InputError
from dispatchkit.keys import check_count, check_flag

from dispatchkit_compile.compile_options import CompileOptions
from dispatchkit_compile.compiled_graph import CompiledGraph
from dispatchkit_compile.compiled_stats import CompiledStats
from dispatchkit_compile.graph_arguments import PlainReason
from dispatchkit_compile.tracing import mark_batch

__all__ = [
    "Backend",
    "CompileOptions",
    "CompiledGraph",
    "CompiledModel",
    "CompiledStats",
    "PlainReason",
    "backend",
    "compile",
    "compiled_graphs",
]

_numbers = itertools.count()
_graphs: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()


def backend(
    graph: fx.GraphModule,
    example_inputs: Iterable[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: Any = None,
) -> CompiledGraph:
    """Compile one Dynamo graph; the function behind ``backend="dispatchkit"``.

    Args:
        graph: Dynamo graph to compile.
        example_inputs: Fake tensors and sizes; unused, because the graph also contains them.
        options: Fields of ``CompileOptions`` by name.
        mode: The ``mode`` of ``torch.compile``; sets the field ``mode`` of ``CompileOptions``.

    Raises:
        ConfigError: An option has an invalid value.
        UnknownNameError: No option has the given name; the error suggests similar names.
    """
    return _compile_graph(graph, CompileOptions.parse(options, mode))


def compiled_graphs() -> list[CompiledGraph]:
    """Return all live graphs compiled in this process, oldest first."""
    return sorted(_graphs, key=lambda one: int(one.name.rpartition("_")[2]))


def _compile_graph(graph: fx.GraphModule, options: CompileOptions) -> CompiledGraph:
    # The number makes the name unique: Dynamo may pass several graphs of one model, or the same
    # graph again.
    compiled = CompiledGraph(graph, options, f"{options.name}_{next(_numbers)}")
    _graphs.add(compiled)
    return compiled


class Backend:
    """A backend that stores the graphs it compiles, for inspection.

    Args:
        options: Fields of ``CompileOptions`` by name.

    Attributes:
        options: The parsed options.
        graphs: The graphs compiled so far, in order.

    Raises:
        ConfigError: An option has an invalid value.
        UnknownNameError: No option has the given name; the error suggests similar names.
    """

    def __init__(self, **options: Any) -> None:
        self.options: CompileOptions = CompileOptions.parse(options)
        self.graphs: list[CompiledGraph] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Iterable[Any]) -> CompiledGraph:
        """Compile one Dynamo graph."""
        compiled = _compile_graph(graph, self.options)
        self.graphs.append(compiled)
        return compiled


def compile(  # noqa: A001 - named like torch.compile
    model: Callable[..., Any],
    *,
    batch: Mapping[str, int | None] | None = None,
    fullgraph: bool = False,
    skip_guards: bool = False,
    **options: Any,
) -> CompiledModel:
    """Compile a model so that one compilation serves every batch size.

    Args:
        model: A module, or a function that takes tensors.
        batch: The batch dimension of each batched argument, by parameter name. Arguments that are
            not listed, or listed with None, are not batched. If ``batch`` is omitted, tensors with
            the same length as the first tensor are batched in dimension 0.
        fullgraph: Whether to raise an error if Dynamo cannot compile the model as a single graph.
        skip_guards: Whether to skip Dynamo's guards after the first call. Each call is still
            compared with the first call: the dtypes, devices and numbers of dimensions of tensors,
            all other arguments, the training mode of the model, and whether gradients are enabled.
            A call that differs runs the model uncompiled. Other values that the model's Python
            code reads, such as attributes and globals, must not change.
        **options: Fields of ``CompileOptions``.

    Raises:
        ConfigError: An argument or option has an invalid value.
        UnknownNameError: No option has the given name; the error suggests similar names.
    """
    return CompiledModel(model, Backend(**options), batch, fullgraph, skip_guards)


class CompiledModel:
    """A compiled model; call it like the model.

    Attributes:
        model: The original model.
        backend: The backend that compiles the model.
        num_uncompiled: Number of calls that ran the original model, which happens only with
            ``skip_guards``. A call runs the original model if it differs from the first call in
            more than the values and sizes of tensors, for example in the dtype of a tensor or in
            a numeric argument.
    """

    model: Callable[..., Any]
    backend: Backend

    def __init__(
        self,
        model: Callable[..., Any],
        backend: Backend,
        batch: Mapping[str, int | None] | None,
        fullgraph: bool,
        skip_guards: bool,
    ) -> None:
        if not callable(model):
            raise ConfigError("model", model, "a module or a function")
        if batch is not None and not isinstance(batch, Mapping):
            hint = "For example, pass {'x': 0}."
            raise ConfigError("batch", batch, "a dict of dimensions by parameter name", hint)
        batch = None if batch is None else {name: _dim(dim, name) for name, dim in batch.items()}
        check_flag(fullgraph, "fullgraph")
        check_flag(skip_guards, "skip_guards")
        self.model, self.backend = model, backend
        self.__wrapped__ = model  # read by ``inspect``, and by runners whose step calls this object
        self.num_uncompiled: int = 0
        self._batch = batch
        self._signature = inspect.Signature()
        fill = backend.options.fill
        if batch or fill:
            self._signature = inspect.signature(getattr(model, "forward", model))
            known = self._signature.parameters
            for setting, names in (("batch", batch), ("fill", fill)):
                unknown = sorted(set(names or ()) - set(known))
                if unknown:
                    raise ConfigError(
                        setting,
                        unknown,
                        "a dict whose keys are parameters of the model",
                        f"Its parameters are: {', '.join(known)}.",
                        message=f"{setting} contains {', '.join(map(repr, unknown))}, but the "
                        "model has no such parameter.",
                    )
        self._skip_guards = skip_guards
        self._first_facts: Any = None
        self._lock = threading.Lock()
        options: dict[str, Any] = {}
        if skip_guards:
            options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
        self._compiled = torch.compile(
            model, backend=backend, fullgraph=fullgraph, options=options or None
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model, or the original model (see ``num_uncompiled``)."""
        if self._skip_guards:
            facts = self._facts(args, kwargs)
            if self._first_facts is None:
                with self._lock:
                    self._first_facts = facts
            elif facts != self._first_facts:
                self.num_uncompiled += 1
                return self.model(*args, **kwargs)
            elif self.backend.graphs:
                return self._compiled(*args, **kwargs)
        self._mark(args, kwargs)
        return self._compiled(*args, **kwargs)

    def _mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the batch dimension of the arguments, in case Dynamo compiles this call."""
        if self._batch is None:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            rows = next((len(one) for one in tensors if one.dim()), None)
            for tensor in tensors:
                if tensor.dim() and len(tensor) == rows:
                    mark_batch(tensor, 0)
            return
        given = self._signature.bind(*args, **kwargs).arguments
        for name, dim in self._batch.items():
            value: Any = given.get(name)
            if dim is None or value is None:
                continue
            if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
                raise InputError(
                    name,
                    f"Argument {name!r} has no dimension {dim}, which `batch` declares as its "
                    f"batch dimension; got {_shape_or_type(value)}. Compile the model with another "
                    "dimension in `batch`, or None if the argument is not batched.",
                )
            mark_batch(value, dim % value.dim())

    def _facts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the properties of a call that are compared if guards are skipped."""
        return (
            tuple(map(_fact, args)),
            tuple((name, _fact(value)) for name, value in kwargs.items()),
            getattr(self.model, "training", None),
            torch.is_grad_enabled(),
        )

    # -- statistics ---------------------------------------------------------------------

    @property
    def graphs(self) -> list[CompiledGraph]:
        """The graphs compiled so far, in order."""
        return self.backend.graphs

    @property
    def num_compiles(self) -> int:
        """Number of graphs compiled so far."""
        return len(self.backend.graphs)

    def stats(self) -> list[CompiledStats]:
        """Return the statistics of each graph."""
        return [graph.stats() for graph in self.backend.graphs]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.backend.graphs)) or "not compiled yet"


_COMPARABLE = (int, float, str, bytes, type(None), torch.dtype, torch.device)


def _shape_or_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)}"
    return f"an object of type {type(value).__name__}"


def _dim(value: Any, name: str) -> int | None:
    return None if value is None else check_count(value, f"batch[{name!r}]", minimum=None)


def _fact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.device
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_fact, value))
    if isinstance(value, dict):
        return tuple((key, _fact(each)) for key, each in value.items())
    return value if isinstance(value, _COMPARABLE) else (type(value), id(value))
