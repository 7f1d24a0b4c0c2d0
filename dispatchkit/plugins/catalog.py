"""Look up registrations of plugins by name, and create objects from them.

Factories are plugin code. If a factory fails, the error contains the requested name and the
distribution of the plugin.
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
    counted,
    describe_exception,
    format_value,
    nearest_names,
)
from dispatchkit.hookspecs import RECORDS, Spec
from dispatchkit.plugins.records import PluginInfo, Registration

_REQUIRED_METHODS = {
    "policy": ("declare", "decide"),
    "lane policy": ("choose",),
    "backend": ("warmup", "capture"),
    "command": ("__call__",),
}


class Catalog:
    """Registrations of plugins, by kind and name.

    Attributes:
        tables: For each kind, the registrations by name.
        absent: Plugins that are not loaded; they may provide a missing name.
    """

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Registration[Any]]] = {one.kind: {} for one in RECORDS}
        self.absent: tuple[PluginInfo, ...] = ()

    def add(self, spec: Spec, origin: Origin) -> None:
        """Add a registration of a plugin."""
        self.tables[spec.kind][spec.name] = Registration(spec, origin)

    def get(self, kind: str, name: str) -> Registration[Any]:
        """Return the registration of a name.

        Raises:
            UnknownNameError: The name is not registered. The message lists similar names, plugins
                that may provide the name but are not loaded, and the distribution to install.
        """
        if not isinstance(name, str):
            raise UnknownNameError(kind, name, self.tables[kind])
        found = self.tables[kind].get(name)
        if found is None:
            raise UnknownNameError(kind, name, self.tables[kind], hint=self.hint(kind, name))
        return found

    def hint(self, kind: str, name: str) -> str:
        """Return a suggestion for a missing name: a skipped plugin, or what to install."""
        if (brings := distribution_of(kind, name)) is not None:
            found = [info for info in self.absent if info.distribution == brings]
            if not found:
                return install_hint(kind, name)
        else:
            near = nearest_names(name, {info.name for info in self.absent})
            found = sorted(self.absent, key=lambda info: info.name not in near)
        parts = [
            f"Plugin {info.name!r} ({info.origin}), which may provide {name!r}, is not loaded: "
            f"{info.reason}" + "." * (not info.reason.endswith((".", "?")))
            for info in found[:3]
        ]
        if len(found) > 3:
            more = counted(len(found) - 3, "more plugin")
            parts.append(f"Also not loaded: {more}. To list them, run `dispatchkit plugins`.")
        return " ".join(parts)

    def create(self, kind: str, name: str, options: dict[str, Any]) -> Any:
        """Create an object by calling its factory with the given options.

        Raises:
            UnknownNameError: The name is not registered.
            ConfigError: The factory does not accept these options.
            PolicyError: A policy's factory raised or did not return a policy.
            BackendUnavailableError: A module that the backend needs cannot be imported.
            PluginError: The factory of an object other than a policy raised, or returned an invalid
                object.
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
            problem = describe_exception(error)
            if kind == "backend" and isinstance(error, ImportError):
                hint = "Install its dependencies."
                if (error.name or "").partition(".")[0] == "torch":
                    hint = "Run: pip install 'dispatchkit[torch]'."
                text = str(error).removesuffix(".")
                raise BackendUnavailableError(
                    f"The {what} is not available here: {text}. {hint}"
                ) from error
            raise _factory_error(kind, registered, problem, None) from error
        needs = _REQUIRED_METHODS.get(kind, ())
        missing = [method for method in needs if not callable(getattr(made, method, None))]
        if made is None or inspect.isclass(made) or missing:
            methods = f" with the methods {', '.join(needs)}" if needs else ""
            lack = f", which lacks {', '.join(missing)}" if missing else ""
            problem = (
                f"returned {format_value(made)} ({type(made).__name__}){lack}; "
                f"it must return an instance{methods}."
            )
            raise _factory_error(kind, registered, problem, made)
        return made


def check_options(what: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """Reject options that a factory does not accept, without calling it.

    Raises:
        ConfigError: The factory does not accept these options. The message shows its signature.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # some C callables have no signature; the call itself reports bad options
    try:
        signature.bind(**options)
    except TypeError as error:
        # Omit annotations: they may be quoted strings (`from __future__ import annotations`).
        plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        raise ConfigError(
            f"options of {what}",
            options,
            f"valid for the signature {inspect.Signature(plain)}",
            f"Python reports: {error}.",
        ) from error


def _factory_error(
    kind: str, registered: Registration[Any], problem: str, value: Any
) -> PolicyError | PluginError:
    name, origin = registered.name, registered.origin
    if kind == "policy":
        return PolicyError(name, "the factory", problem, origin=str(origin), value=value)
    return PluginError(origin, f"the factory of {kind} {name!r} {problem}")
