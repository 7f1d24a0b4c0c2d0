"""graphed: run a module or a function through graphs, with one line of code.

Properties that are derived from calls are guesses, so each capture checks them. If padding changes
the results of a graph, the graph serves only batches that fill it.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dispatchkit.dispatch import Lanes, Policy
from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.execute.graphed.calls import GraphedCalls
from dispatchkit.execute.graphed.module import graphed_module
from dispatchkit.execute.lanes.build import check_lanes
from dispatchkit.execute.memory import GraphMemory, MemoryGroup
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.execute.setup import RunnerSpec, check_names
from dispatchkit.keys.capture_sizes import CaptureSizeWarning
from dispatchkit.keys.checks import check_flag, check_instance, whole_number
from dispatchkit.keys.records import changed_settings
from dispatchkit.options import DERIVED, RunnerOptions, refuse_moved


class GraphedFunction:
    """A function whose calls run through graphs; created by ``graphed``.

    Attributes:
        graphed: Calls and their graphs, with ``stats()``, ``capture()``, ``runners`` and
            ``invalidate()``.
    """

    def __init__(self, calls: GraphedCalls) -> None:
        functools.update_wrapper(self, calls.target)
        self.graphed = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call through graphs, or run it eager and count the reason."""
        return self.graphed(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind the function to an instance if it is defined in a class."""
        return self if owner is None else types.MethodType(self, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the function and its settings, without graphs."""
        calls = self.graphed
        return _remake_function, (calls.target, calls.batch_dims, calls.settings)


def _remake_function(target: Any, batch_dims: Any, settings: dict[str, Any]) -> GraphedFunction:
    return GraphedFunction(GraphedCalls(target, batch_dims, settings))


def graphed(
    module_or_function: Any = None,
    *,
    sizes: Sequence[int] | None = None,
    policy: str | Policy | None = None,
    lanes: int | Lanes | None = None,
    outputs: str = "owned",
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    batch_dims: int | Mapping[str, int | None] | str | None = "derived",
    memory: GraphMemory | MemoryGroup | None = None,
    pieces: bool = False,
    **settings: Any,
) -> Any:
    """Run a module or a function through graphs; also a decorator.

    No option is required. Inputs and batch dimensions are derived from calls, and graphs are
    captured on demand. The capture sizes grow with the batches. Each capture checks whether padding
    changes results. Calls that need gradients run eager. With gradients enabled, a call needs
    gradients if one of its tensors requires them, if the module is in training mode, or if the
    results of a function require them.

    Args:
        module_or_function: Module or function; if omitted, a decorator is returned.
        sizes: Batch sizes to capture; larger batches run eager.
        policy: Policy object, or the name of a policy.
        lanes: Number of streams that ``.graphed.submit`` distributes calls over, or ``Lanes``.
        outputs: ``owned`` returns results that the caller owns; ``view`` returns results that are
            valid until the next call.
        example: Arguments of a call, as a tuple, a list, or a dictionary by name. Graphs for this
            form of call are captured immediately, at all sizes.
        batch_dims: Batch dimension of all tensors, or a dictionary by parameter name, with None for
            unbatched tensors. Tensors of a nested argument are named ``name_0``, ``name_1`` and so
            on. By default, dimension 0 is the batch dimension of the first tensor, and of all
            tensors that always have the same size in dimension 0 as the first. For recurrent states
            and time-first sequences, the default is dimension 1.
        memory: ``GraphMemory``, or one of its groups, to share with other runners. By default, the
            graphs of all forms share a pool and the budget ``MemoryOptions.max_bytes``. This budget
            counts the same memory as the budget of a ``GraphMemory``.
        pieces: Whether to capture in segments around eager calls: calls of functions marked with
            ``eager_region``, and operators declared as not capturable.
        settings: Further settings of ``GraphRunner``.

    Returns:
        For a module, a new module that shares the parameters, attributes and hooks of the given
        module; for a function, a new function. The attribute ``graphed`` of the result provides
        counters, runners, and methods such as ``capture``.

    Raises:
        ConfigError: A setting is invalid, or ``module_or_function`` is neither a module nor a
            function.
        InputError: The call described by ``example`` cannot run through graphs.
    """
    refuse_moved(settings)
    _check_settings(settings)
    _check_example(example)
    options = check_instance(settings.pop("options", RunnerOptions()), RunnerOptions, "options")
    if check_flag(pieces, "pieces"):
        if "mode" in settings or "mode" in changed_settings(options.config):
            hint = "pieces=True selects mode='PIECEWISE'. Omit pieces or the mode."
            raise ConfigError("pieces", pieces, "False if a mode is given", hint)
        settings["mode"] = "PIECEWISE"
    if isinstance(sizes, Iterable) and not isinstance(sizes, str):
        sizes = tuple(sizes)
    given = {
        "lazy": True,
        **settings,
        "options": options,
        "outputs": outputs,
        **({} if sizes is None else {"sizes": sizes}),
        **({} if policy is None else {"policy": policy}),
        **({} if lanes is None else {"lanes": lanes}),
        **({} if memory is None else {"memory": memory}),
    }
    _check_values(given, batch_dims)
    if module_or_function is None:
        given.pop("outputs")
        return functools.partial(
            graphed, outputs=outputs, example=example, batch_dims=batch_dims, **given
        )
    calls = GraphedCalls(module_or_function, batch_dims, given)
    made = GraphedFunction(calls) if calls.module is None else graphed_module(calls)
    if example is not None:
        args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
        made.graphed.capture(*args, **kwargs)
    return made


#: Arguments of GraphRunner that ``graphed`` handles itself.
_OWN_ARGUMENTS = frozenset({"step", "inputs", "example"})


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = set(inspect.signature(GraphRunner).parameters) - _OWN_ARGUMENTS
    for name in settings:
        if name in _OWN_ARGUMENTS:
            allowed = "omitted in graphed()"
            hint = (
                "Inputs are derived from calls. To capture in advance, pass the arguments of a "
                "call as example=."
            )
            if name == "step":
                hint = "Pass the module or function as the first argument."
            raise ConfigError(name, settings[name], allowed, hint)
        if name not in known:
            own = inspect.signature(graphed).parameters
            names = known.union(own) - {"settings"}
            raise UnknownNameError("setting", name, names, owner="graphed()")


def _check_values(settings: Mapping[str, Any], batch_dims: Any) -> None:
    """Reject values that every runner of the calls would reject.

    Raises:
        ConfigError: A value is invalid.
    """
    arguments = {name: value for name, value in settings.items() if name != "memory"}
    bound = inspect.signature(GraphRunner).bind(None, {}, **arguments)
    bound.apply_defaults()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)  # each runner warns when it is created
        spec = RunnerSpec.of(**bound.arguments)
    check_lanes(spec)
    check_names(spec)
    MemoryGroup.of(settings.get("memory"))
    dims = batch_dims.values() if isinstance(batch_dims, Mapping) else [batch_dims]
    for dim in dims:
        if dim is None or whole_number(dim) is not None or (dim is batch_dims and dim == DERIVED):
            continue
        allowed = (
            f"the index of a dimension, None, {DERIVED!r}, or a dictionary that maps tensor names "
            "to indices or None"
        )
        hint = "For example, pass {'x': 0, 'mask': None}."
        raise ConfigError("batch_dims", batch_dims, allowed, hint)


def _check_example(example: Any) -> None:
    # Sequence would accept a string.
    if example is not None and not isinstance(example, tuple | list | Mapping):
        allowed = "a tuple or list of the arguments of a call, or a dictionary of them by name"
        raise ConfigError("example", example, allowed, "For a single argument, pass (x,).")
