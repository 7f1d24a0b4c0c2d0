"""Create a module that runs its calls through graphs and otherwise behaves like the original.

The new module is an instance of a subclass of the original's class. It shares the original's
``__dict__``, so both modules have the same parameters, buffers, submodules, hooks and attributes,
and the same names in ``state_dict``. No attribute access needs to be forwarded.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from dispatchkit.errors import ConfigError
from dispatchkit.execute.graphed.calls import GraphedCalls

OWN_NAME = "graphed"


class _Graphed:
    """Mixin that comes before the original class in the bases of the new class."""

    __slots__ = ()
    _dispatchkit_calls: GraphedCalls

    @property
    def graphed(self) -> GraphedCalls:
        """The calls and their graphs."""
        return self._dispatchkit_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Naming __call__ explicitly halves the cost of the lookup.
        return self._dispatchkit_calls.__call__(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the module, and release graphs that read its old memory."""
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]  # defined by torch.nn.Module
        self._dispatchkit_calls.invalidate()
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, and release the graphs if the weights were replaced."""
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("assign") or len(args) > 2:
            self._dispatchkit_calls.invalidate()
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy or pickle the module, without graphs."""
        calls = self._dispatchkit_calls
        return _remake, (calls.target, calls.batch_dims, calls.settings)


def _remake(target: Any, batch_dims: Any, settings: dict[str, Any]) -> Any:
    return graphed_module(GraphedCalls(target, batch_dims, settings))


@functools.cache
def _class_of(kind: Any) -> type:
    # A slot, because __dict__ is shared with the module.
    names = {
        "__slots__": ("_dispatchkit_calls",),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    # new_class supports script modules, which have a metaclass.
    name = f"Graphed{kind.__name__}"
    return types.new_class(name, (_Graphed, kind), {}, lambda own: own.update(names))


def graphed_module(calls: GraphedCalls) -> Any:
    """Return a module that runs its calls through graphs.

    Args:
        calls: Calls of the original module.

    Raises:
        ConfigError: The module is already graphed, or has an attribute ``graphed``.
    """
    module = calls.target
    kind: Any = type(module)
    if isinstance(module, _Graphed):
        hint = "Use the graphed module as it is, or pass the original module to graphed()."
        problem = "The module is already graphed."
        raise ConfigError("module", module, "not graphed yet", hint, message=problem)
    if hasattr(module, OWN_NAME):
        raise ConfigError(
            "module",
            f"{kind.__name__} with an attribute {OWN_NAME!r}",
            f"a module without an attribute {OWN_NAME!r}",
            "Pass a function that calls the module: graphed(lambda x: module(x)).",
            message=f"{kind.__name__} already has an attribute {OWN_NAME!r}.",
        )
    made: Any = object.__new__(_class_of(kind))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "_dispatchkit_calls", calls)
    return made
