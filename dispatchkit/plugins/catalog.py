"""What can be chosen by name, and how one is made.

A factory belongs to somebody else. Whatever it does wrong becomes an error that names the
thing asked for and the distribution it comes from.
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
from dispatchkit.plugins.records import PluginInfo, Registered

# Methods without which what a factory returned is certainly not what it should be.
_NEEDS = {
    "policy": ("declare", "decide"),
    "lane policy": ("choose",),
    "backend": ("warmup", "capture"),
    "command": ("__call__",),
}


class Catalog:
    """What plugins registered, by kind and name.

    Attributes:
        tables: Kind -> name -> what was registered.
        absent: Rows of plugins that are not loaded and might have brought a missing name.
    """

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Registered[Any]]] = {one.kind: {} for one in RECORDS}
        self.absent: tuple[PluginInfo, ...] = ()

    def add(self, spec: Spec, origin: Origin) -> None:
        """Add a record of a plugin."""
        self.tables[spec.kind][spec.name] = Registered(spec, origin)

    def get(self, kind: str, name: str) -> Registered[Any]:
        """Return what goes by a name.

        Raises:
            UnknownNameError: Nothing does; the message has the nearest names, the plugins that
                might have brought it and are not loaded, and what to install.
        """
        found = self.tables[kind].get(name)
        if found is None:
            raise UnknownNameError(kind, name, self.tables[kind], hint=self.hint(kind, name))
        return found

    def hint(self, kind: str, name: str) -> str:
        """Say where a missing name may be: plugins not loaded, or a distribution to install."""
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
        """Make one with a user's options.

        Raises:
            UnknownNameError: Nothing goes by that name.
            ConfigError: The factory does not take these options.
            PolicyError: The factory of a policy raised, or returned what is none.
            BackendUnavailableError: What a backend needs cannot be imported.
            PluginError: Another factory raised, or returned what is not such a thing.
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
            raise _made_wrong(kind, registered, problem, None) from error
        needs = _NEEDS.get(kind, ())
        has_all = all(callable(getattr(made, method, None)) for method in needs)
        if made is None or inspect.isclass(made) or not has_all:
            methods = f" with the methods {', '.join(needs)}" if needs else ""
            problem = (
                f"its factory returned {made!r:.60} ({type(made).__name__}); "
                f"it must return an instance{methods}."
            )
            raise _made_wrong(kind, registered, problem, made)
        return made


def check_options(what: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse options that a factory does not take, before it runs.

    Raises:
        ConfigError: Naming what was asked for, the options and the factory's signature.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # some callables written in C have none; calling shows
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"options of {what}", options, f"as in {signature}", f"It says: {error}."
        ) from error


def _made_wrong(
    kind: str, registered: Registered[Any], problem: str, value: Any
) -> PolicyError | PluginError:
    name, origin = registered.name, registered.origin
    if kind == "policy":
        return PolicyError(name, "factory", problem, origin=str(origin), value=value)
    return PluginError(origin, f"{kind} {name!r}: {problem}")
