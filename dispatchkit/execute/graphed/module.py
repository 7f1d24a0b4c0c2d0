"""A module whose calls run through graphs, otherwise identical to the original.

It is an instance of a subclass of the module's class and shares the module's ``__dict__``:
parameters, buffers, submodules, hooks and attributes are the same objects, read or written through
either. Saved state has the module's own names, and nothing has to be forwarded.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from dispatchkit.errors import ConfigError
from dispatchkit.execute.graphed.calls import GraphedCalls

OWN_NAME = "graphed"


class _Graphed:
    """Mixed in before a module's class."""

    __slots__ = ()
    _dispatchkit_calls: GraphedCalls

    @property
    def graphed(self) -> GraphedCalls:
        """The graphs: ``stats()``, ``capture()``, ``runners``, ``invalidate()``."""
        return self._dispatchkit_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The method, since calling the object would double the cost of the look-up.
        return self._dispatchkit_calls.__call__(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the module; release graphs that read its old memory."""
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]  # torch.nn.Module's
        self._dispatchkit_calls.invalidate()
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights; release graphs if weights were replaced."""
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("assign") or len(args) > 2:
            self._dispatchkit_calls.invalidate()
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy or pickle: a copy of the module, without graphs."""
        calls = self._dispatchkit_calls
        return _remake, (calls.target, calls.batch_dims, calls.settings)


def _remake(target: Any, batch_dims: Any, settings: dict[str, Any]) -> Any:
    return graphed_module(GraphedCalls(target, batch_dims, settings))


@functools.cache
def _class_of(kind: Any) -> type:
    # The only slot holds what is not part of the module, since __dict__ is shared.
    names = {
        "__slots__": ("_dispatchkit_calls",),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    # With new_class, since script modules have a metaclass.
    name = f"Graphed{kind.__name__}"
    return types.new_class(name, (_Graphed, kind), {}, lambda own: own.update(names))


def graphed_module(calls: GraphedCalls) -> Any:
    """Return the module of graphed calls.

    Raises:
        ConfigError: It is already graphed, has an attribute of the name that is added, or its
            ``__dict__`` cannot be shared.
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
            "Graph a function that calls it instead: graphed(lambda x: module(x)).",
        )
    made: Any = object.__new__(_class_of(kind))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "_dispatchkit_calls", calls)
    return made
