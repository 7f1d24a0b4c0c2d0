"""What can be chosen by name: tables of records with their origins, and how one is made.

A factory belongs to somebody else. Whatever it does wrong becomes an error that names the
thing asked for and the distribution it comes from.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from dispatchkit._plugin_loading import PluginInfo, PluginState
from dispatchkit._plugin_records import (
    KINDS,
    BackendSpec,
    CommandSpec,
    LanePolicySpec,
    ObserverSpec,
    PlannerSpec,
    PolicySpec,
    Registered,
)
from dispatchkit.errors import (
    BackendUnavailableError,
    ConfigError,
    DispatchkitError,
    PluginError,
    PolicyError,
    UnknownNameError,
    nearest_names,
)

if TYPE_CHECKING:
    from dispatchkit.backends.base import GraphBackend
    from dispatchkit.dispatch.lanes import LanePolicy
    from dispatchkit.dispatch.policy import Policy

#: Policies that dispatchkit's own plugins bring; named when one is asked for and not there.
_OWN_POLICIES = {"vllm", "adaptive", "composite", "threshold"}
_OWN_LANE_POLICIES = {"round-robin", "least-loaded", "by-key", "priority"}

# Methods without which what a factory returned is certainly not what it should be.
_NEEDS = {
    "policy": ("declare", "decide"),
    "lane policy": ("choose",),
    "backend": ("warmup", "capture"),
}


class Catalog:
    """Tables of what plugins registered, by kind and name."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, Registered[Any]]] = {kind: {} for kind in KINDS}
        self._infos: list[PluginInfo] = []

    # -- what there is --------------------------------------------------------------------

    def _table(self, kind: str) -> Mapping[str, Registered[Any]]:
        return types.MappingProxyType(self._tables[kind])

    @property
    def policies(self) -> Mapping[str, Registered[PolicySpec]]:
        """Policies by name."""
        return self._table("policy")

    @property
    def lane_policies(self) -> Mapping[str, Registered[LanePolicySpec]]:
        """Lane policies by name."""
        return self._table("lane policy")

    @property
    def backends(self) -> Mapping[str, Registered[BackendSpec]]:
        """Backends by name, the built-in ones included."""
        return self._table("backend")

    @property
    def planners(self) -> Mapping[str, Registered[PlannerSpec]]:
        """Planners by name."""
        return self._table("planner")

    @property
    def observers(self) -> Mapping[str, Registered[ObserverSpec]]:
        """Observers and exporters by name."""
        return self._table("observer")

    @property
    def commands(self) -> Mapping[str, Registered[CommandSpec]]:
        """Commands of the command line by name."""
        return self._table("command")

    # -- choosing by name -----------------------------------------------------------------

    def get_policy(self, name: str) -> Registered[PolicySpec]:
        """Return a policy's record and origin.

        Raises:
            UnknownNameError: There is none; the nearest names are in the message, and
                plugins that might have brought it but failed to load or are blocked.
        """
        return self._get("policy", name)

    def create_policy(self, name: str, /, **options: Any) -> Policy:
        """Make a new policy.

        Args:
            name: The policy's name.
            options: Given to its factory as keywords.

        Raises:
            UnknownNameError: There is no such policy.
            ConfigError: Its factory does not take these options.
            PolicyError: Its factory raised, or returned what is no policy.
        """
        return cast("Policy", self._create("policy", name, options))

    def create_lane_policy(self, name: str, /, **options: Any) -> LanePolicy:
        """Make a new lane policy; errors as in ``create_policy``, but PluginError."""
        return cast("LanePolicy", self._create("lane policy", name, options))

    def create_backend(self, name: str, /, **options: Any) -> GraphBackend:
        """Make a backend.

        Raises:
            UnknownNameError: There is no such backend.
            ConfigError: Its factory does not take these options.
            BackendUnavailableError: What it needs cannot be imported.
            PluginError: Its factory raised, or returned what is no backend.
        """
        return cast("GraphBackend", self._create("backend", name, options))

    def create_planner(self, name: str, /, **options: Any) -> Any:
        """Make a new planner; errors as in ``create_policy``, but PluginError."""
        return self._create("planner", name, options)

    def create_observer(self, name: str, /, **options: Any) -> Any:
        """Make a new observer; errors as in ``create_policy``, but PluginError."""
        return self._create("observer", name, options)

    def _get(self, kind: str, name: str) -> Registered[Any]:
        found = self._tables[kind].get(name)
        if found is None:
            raise UnknownNameError(kind, name, self._tables[kind], hint=self._hint(kind, name))
        return found

    def _hint(self, kind: str, name: str) -> str:
        """Say which plugins might have brought a missing name, nearest first."""
        absent = [info for info in self._infos if info.state is not PluginState.LOADED]
        near = nearest_names(name, {info.name for info in absent})
        absent.sort(key=lambda info: info.name not in near)
        parts = [
            f"It may be in plugin {info.name!r} ({info.origin}), {info.state}: {info.reason}"
            for info in absent[:3]
        ]
        if len(absent) > 3:
            parts.append(f"{len(absent) - 3} more plugins are not loaded; see `describe()`.")
        if kind == "policy" and name in _OWN_POLICIES and not near:
            parts.append(f"It is in the distribution dispatchkit-{name}, which must be installed.")
        if kind == "lane policy" and name in _OWN_LANE_POLICIES:
            parts.append("It is in the distribution dispatchkit-multistream: install that.")
        return " ".join(parts)

    def _create(self, kind: str, name: str, options: dict[str, Any]) -> Any:
        registered = self._get(kind, name)
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
                    f"{what} is not available here: {error}. The built-in ones need torch: "
                    "pip install 'dispatchkit[torch]'."
                ) from error
            raise _made_wrong(kind, registered, problem, None) from error
        needs = _NEEDS.get(kind, ())
        if (
            made is None
            or inspect.isclass(made)
            or not all(callable(getattr(made, method, None)) for method in needs)
        ):
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
    if kind == "policy":
        return PolicyError(
            registered.name, "factory", problem, origin=str(registered.origin), value=value
        )
    return PluginError(registered.origin, f"{kind} {registered.name!r}: {problem}")
