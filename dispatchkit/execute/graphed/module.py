"""A module whose calls run through graphs, and which is the module in everything else.

It is an object of a subclass of the module's own class that shares the module's ``__dict__``:
parameters, buffers, submodules, hooks and attributes are one and the same, read or written
through either. Saved state has the module's own names, and nothing has to be forwarded.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from dispatchkit.errors import ConfigError
from dispatchkit.execute.graphed.calls import GraphedCalls

OWN_NAME = "graphed"


class _Graphed:
    """What is put in front of a module's class."""

    __slots__ = ()
    _dispatchkit_calls: GraphedCalls

    @property
    def graphed(self) -> GraphedCalls:
        """The graphs: ``stats()``, ``capture()``, ``runners``, ``invalidate()``."""
        return self._dispatchkit_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The method, since a call of the object costs as much again as finding it.
        return self._dispatchkit_calls.__call__(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the module; graphs that read it where it was are given up."""
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]  # torch.nn.Module's
        self._dispatchkit_calls.invalidate()
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights; where they are put in place of the old, graphs are given up."""
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("assign") or len(args) > 2:
            self._dispatchkit_calls.invalidate()
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy, or send to another process: a copy of the module, and no graphs."""
        calls = self._dispatchkit_calls
        return _remake, (calls.target, calls.batch_dims, calls.settings)


def _remake(target: Any, batch_dims: Any, settings: dict[str, Any]) -> Any:
    return graphed_module(GraphedCalls(target, batch_dims, settings))


@functools.cache
def _class_of(kind: Any) -> type:
    # The one slot holds what is not the module's: its __dict__ is shared.
    names = {
        "__slots__": ("_dispatchkit_calls",),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    # By new_class: script modules have a metaclass.
    name = f"Graphed{kind.__name__}"
    return types.new_class(name, (_Graphed, kind), {}, lambda own: own.update(names))


def graphed_module(calls: GraphedCalls) -> Any:
    """Return the module of graphed calls.

    Raises:
        ConfigError: It is graphed already, has an attribute of the one name that is added, or
            is of a kind whose ``__dict__`` cannot be shared.
    """
    module = calls.target
    kind: Any = type(module)
    if isinstance(module, _Graphed):
        raise ConfigError("module", kind.__name__, "not graphed already")
    if hasattr(module, OWN_NAME):
        raise ConfigError(
            "module",
            f"{kind.__name__} with an attribute {OWN_NAME!r}",
            "without an attribute of that name",
            "Graph a function that calls it: graphed(lambda x: module(x)).",
        )
    made: Any = object.__new__(_class_of(kind))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "_dispatchkit_calls", calls)
    return made
