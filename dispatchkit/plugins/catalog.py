"""Look up what plugins registered by name, and create it.

Factories are code of plugins. Any fault of a factory becomes an error that names what was requested
and the distribution it comes from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dispatchkit.distributions import distribution_of, install_hint
from dispatchkit.errors import (
    BackendUnavailableError,
    ConfigError,
    DispatchkitError,
    Origin,
    PluginError,
    PolicyError,
    UnknownNameError,
    nearest_names,
)
from dispatchkit.hookspecs import RECORDS, Spec
from dispatchkit.plugins.records import PluginInfo, Registration

# Methods that the object returned by a factory must have.
_NEEDS = {
    "policy": ("declare", "decide"),
    "lane policy": ("choose",),
    "backend": ("warmup", "capture"),
    "command": ("__call__",),
}


class Catalog:
    """What plugins registered, by kind and name.

    Attributes:
        tables: Kind -> name -> the registered record.
        absent: Rows of plugins that are not loaded and might provide a missing name.
    """

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Registration[Any]]] = {one.kind: {} for one in RECORDS}
        self.absent: tuple[PluginInfo, ...] = ()

    def add(self, spec: Spec, origin: Origin) -> None:
        """Add a record of a plugin."""
        self.tables[spec.kind][spec.name] = Registration(spec, origin)

    def get(self, kind: str, name: str) -> Registration[Any]:
        """Return the record of a name.

        Raises:
            UnknownNameError: There is no such name; the message lists the closest names, the
                plugins that might provide it but are not loaded, and what to install.
        """
        found = self.tables[kind].get(name)
        if found is None:
            raise UnknownNameError(kind, name, self.tables[kind], hint=self.hint(kind, name))
        return found

    def hint(self, kind: str, name: str) -> str:
        """Suggest where a missing name may be: plugins not loaded, or what to install."""
        if (brings := distribution_of(kind, name)) is not None:
            found = [info for info in self.absent if info.distribution == brings]
            if not found:
                return install_hint(kind, name)
        else:
            near = nearest_names(name, {info.name for info in self.absent})
            found = sorted(self.absent, key=lambda info: info.name not in near)
        parts = [
            f"It may be in plugin {info.name!r} ({info.origin}), {info.state}: "
            f"{info.reason.removesuffix('.')}."
            for info in found[:3]
        ]
        if len(found) > 3:
            parts.append(f"{len(found) - 3} more plugins are not loaded; see `describe()`.")
        return " ".join(parts)

    def create(self, kind: str, name: str, options: dict[str, Any]) -> Any:
        """Create an object with a user's options.

        Raises:
            UnknownNameError: There is no such name.
            ConfigError: The factory does not take these options.
            PolicyError: The factory of a policy raised, or returned something else.
            BackendUnavailableError: A module that the backend needs cannot be imported.
            PluginError: Another factory raised, or returned the wrong kind of object.
        """
        registered = self.get(kind, name)
        factory, origin = registered.spec.factory, registered.origin
        what = f"{kind} {name!r} ({origin})"
        check_options(what, factory, options)
        try:
            made = factory(**options)
        except DispatchkitError as error:
            error.add_note(f"Raised by the factory of {what}.")
            raise
        except Exception as error:
            problem = f"its factory raised {type(error).__name__}: {error}"
            if kind == "backend" and isinstance(error, ImportError):
                raise BackendUnavailableError(
                    f"{what} is not available here: {error}. Built-in backends need torch: "
                    "pip install 'dispatchkit[torch]'."
                ) from error
            raise _factory_error(kind, registered, problem, None) from error
        needs = _NEEDS.get(kind, ())
        has_all = all(callable(getattr(made, method, None)) for method in needs)
        if made is None or inspect.isclass(made) or not has_all:
            methods = f" with the methods {', '.join(needs)}" if needs else ""
            problem = (
                f"its factory returned {made!r:.60} ({type(made).__name__}); "
                f"it must return an instance{methods}."
            )
            raise _factory_error(kind, registered, problem, made)
        return made


def check_options(what: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Reject options that a factory does not take, before calling it.

    Raises:
        ConfigError: Names the requested object, the options and the factory's signature.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # some C callables have none; calling will show
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"options of {what}", options, f"as in {signature}", f"It says: {error}."
        ) from error


def _factory_error(
    kind: str, registered: Registration[Any], problem: str, value: Any
) -> PolicyError | PluginError:
    name, origin = registered.name, registered.origin
    if kind == "policy":
        return PolicyError(name, "factory", problem, origin=str(origin), value=value)
    return PluginError(origin, f"{kind} {name!r}: {problem}")
