"""PluginSet: load plugins, and create the objects that they provide."""

from __future__ import annotations

import logging
import os
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import attrs

from dispatchkit._version import __version__
from dispatchkit.errors import (
    ConfigError,
    Origin,
    PluginError,
    PluginLoadError,
    UnknownNameError,
    counted,
    describe_exception,
    format_value,
)
from dispatchkit.hookspecs import (
    BackendSpec,
    CommandSpec,
    LanePolicySpec,
    ObserverSpec,
    PolicySpec,
    hookimpl,
)
from dispatchkit.keys.checks import check_flag
from dispatchkit.observe.events import MAX_FAULTS, Notifier, Subscription
from dispatchkit.plugins.catalog import Catalog
from dispatchkit.plugins.discovery import BUILT_IN, PASSED_IN, Candidate, Filter, discover
from dispatchkit.plugins.loading import DuplicateFault, LoadedPlugin, PluginLoader, load
from dispatchkit.plugins.manager import HookManager
from dispatchkit.plugins.records import PluginInfo, PluginState, Registration

if TYPE_CHECKING:
    from dispatchkit.backends.base import GraphBackend
    from dispatchkit.dispatch.lanes import LanePolicy
    from dispatchkit.dispatch.policy import Policy
    from dispatchkit.keys.config import DispatchConfig

_log = logging.getLogger("dispatchkit.plugins")


@attrs.frozen(eq=False)
class PolicyWithPlugins:
    """A policy and a set of plugins, passed to a runner as its ``policy`` argument.

    Created by ``PluginSet.with_policy``.

    Attributes:
        plugins: Plugins in which the runner looks up policies, backends and lane policies by name.
            The observers of these plugins receive the runner's events.
        policy: Name of the policy, or a policy object; None for the policy that a plugin selects,
            or else the default policy.
    """

    plugins: PluginSet
    policy: str | Policy | None = None


class PluginSet:
    """A set of loaded plugins; its methods create the objects that the plugins provide.

    Created by ``load_plugins``. Thread safety: any thread may read; ``register`` and
    ``register_policy`` hold a lock.

    Args:
        candidates: Plugins that may be loaded, in any order. The built-in backends are available
            only if the plugin that registers them is a candidate.
        names: Filter for the candidates; by default, it admits all.
        replace: Built-in names that plugins may replace.
        max_faults: Number of consecutive exceptions after which an observer's callback is disabled.

    Attributes:
        notifier: Notifier that passes events to the observers.
        problems: Errors that occurred while plugins were loaded.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate] = (),
        *,
        names: Filter | None = None,
        replace: Collection[str] = (),
        max_faults: int = MAX_FAULTS,
    ) -> None:
        self.notifier: Notifier = Notifier(max_faults=max_faults)
        self._catalog = Catalog()
        self._manager = HookManager()
        self._subscriptions: list[tuple[Origin, Subscription]] = []
        self._lock = threading.RLock()
        loader = PluginLoader(candidates, names or Filter(), replace, self._manager)
        self._loaded = loader.loaded
        self.problems: tuple[PluginError, ...] = tuple(loader.problems)
        self._infos: list[PluginInfo] = []
        for one in self._loaded.values():
            reasons = [
                it.reason
                for it in loader.problems
                if it.origin == one.origin and not isinstance(it.__cause__, DuplicateFault)
            ]
            self._commit(one, reason=" ".join(reasons))
        self._catalog.absent = tuple(loader.infos)
        self._infos += loader.infos

    def __repr__(self) -> str:
        tables = self._catalog.tables
        counts = ", ".join(f"{kind}: {len(table)}" for kind, table in tables.items() if table)
        number = counted(len(self._loaded), "plugin")
        return f"<PluginSet of {number}, {counts or 'nothing registered'}>"

    # -- contents -------------------------------------------------------------------------

    @property
    def policies(self) -> Mapping[str, Registration[PolicySpec]]:
        """Policies by name."""
        return types.MappingProxyType(self._catalog.tables["policy"])

    @property
    def lane_policies(self) -> Mapping[str, Registration[LanePolicySpec]]:
        """Lane policies by name."""
        return types.MappingProxyType(self._catalog.tables["lane policy"])

    @property
    def backends(self) -> Mapping[str, Registration[BackendSpec]]:
        """Backends by name, including the built-in backends."""
        return types.MappingProxyType(self._catalog.tables["backend"])

    @property
    def observers(self) -> Mapping[str, Registration[ObserverSpec]]:
        """Observers by name."""
        return types.MappingProxyType(self._catalog.tables["observer"])

    @property
    def commands(self) -> Mapping[str, Registration[CommandSpec]]:
        """Subcommands of the command line, by name."""
        return types.MappingProxyType(self._catalog.tables["command"])

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origins of the loaded plugins, in loading order."""
        return tuple(one.origin for one in self._loaded.values())

    def describe(self) -> tuple[PluginInfo, ...]:
        """Return a row for every plugin that was found, passed in or requested.

        The ``reason`` of a row also lists disabled observer callbacks.
        """
        return tuple(self._with_faults(info) for info in self._infos)

    def _with_faults(self, info: PluginInfo) -> PluginInfo:
        disabled = [
            f"{one.event_type.callback} is disabled; it last raised {one.last_fault}"
            for origin, one in self._subscriptions
            if str(origin) == info.origin and not one.is_active
        ]
        return attrs.evolve(info, reason="; ".join(filter(None, (info.reason, *disabled))))

    # -- choosing -------------------------------------------------------------------------

    def get_policy(self, name: str) -> Registration[PolicySpec]:
        """Return the registration of a policy.

        Raises:
            UnknownNameError: No policy has this name. The message lists similar names, plugins that
                may provide the name but are blocked or failed to load, and the distribution to
                install.
        """
        return self._catalog.get("policy", name)

    def create_policy(self, name: str, /, **options: Any) -> Policy:
        """Create a policy.

        Args:
            name: Name under which the policy is registered.
            options: Keyword arguments for the policy's factory.

        Raises:
            UnknownNameError: No policy has this name.
            ConfigError: The factory does not accept these options.
            PolicyError: The factory raised or did not return a policy.
        """
        return cast("Policy", self._catalog.create("policy", name, options))

    def create_lane_policy(self, name: str, /, **options: Any) -> LanePolicy:
        """Create a lane policy.

        Arguments and errors are those of ``create_policy``, with PluginError instead of
        PolicyError.
        """
        return cast("LanePolicy", self._catalog.create("lane policy", name, options))

    def create_backend(self, name: str, /, **options: Any) -> GraphBackend:
        """Create a backend.

        Arguments and errors are those of ``create_policy``, with PluginError instead of
        PolicyError.

        Raises:
            BackendUnavailableError: A module that the backend needs cannot be imported.
        """
        return cast("GraphBackend", self._catalog.create("backend", name, options))

    def create_observer(self, name: str, /, **options: Any) -> Any:
        """Create an observer and attach it to the notifier.

        Each event calls the observer's method that is named after the event, such as
        ``on_capture``. Exceptions raised by these methods are logged. Arguments and errors are
        those of ``create_policy``, with PluginError instead of PolicyError.
        """
        observer = self._catalog.create("observer", name, options)
        origin = self.observers[name].origin
        attached = self.notifier.attach(observer, f"{name!r} ({origin})")
        self._subscriptions += [(origin, one) for one in attached]
        return observer

    def create_command(self, name: str, /) -> Callable[..., Any]:
        """Return the function of a command.

        Errors are those of ``create_policy``, with PluginError instead of PolicyError.
        """
        return cast("Callable[..., Any]", self._catalog.create("command", name, {}))

    def hint(self, kind: str, name: str) -> str:
        """Return a suggestion for a missing name: a skipped plugin, or what to install.

        Args:
            kind: ``policy``, ``lane policy``, ``backend``, ``observer`` or ``command``.
            name: The missing name.

        Returns:
            The suggestion as one or more sentences; may be empty.
        """
        return self._catalog.hint(kind, name)

    def select_policy(self, config: DispatchConfig) -> str | None:
        """Return the name of the policy that a plugin selects for a configuration, or None.

        Raises:
            PluginError: A ``dispatchkit_select_policy`` hook raised, or returned something other
                than a name or None. The message names the plugin.
            UnknownNameError: The selected policy does not exist.
        """
        hook = "dispatchkit_select_policy"
        # The hooks are called without pluggy, because it does not report which plugin returned a
        # value or raised.
        for one in reversed(self._manager.hook.dispatchkit_select_policy.get_hookimpls()):
            loaded = self._loaded.get(one.plugin_name)
            if loaded is None:
                continue  # the plugin is still being added and may be rejected
            origin = loaded.origin
            try:
                name = one.function(*[config][: len(one.argnames)])
            except (Exception, SystemExit) as error:
                text = f"{hook} {describe_exception(error)}"
                raise PluginError(origin, text) from error
            if name is None:
                continue
            if not isinstance(name, str):
                raise PluginError(
                    origin,
                    f"{hook} returned {format_value(name)} ({type(name).__name__}); it must "
                    "return the name of a policy, or None.",
                )
            try:
                return self.get_policy(name).name
            except UnknownNameError as error:
                error.add_note(f"Selected by {hook} of plugin {origin.plugin!r} ({origin}).")
                raise
        return None

    def with_policy(self, policy: str | Policy | None = None) -> PolicyWithPlugins:
        """Return a ``policy`` argument that makes a runner use these plugins.

        Backends and lane policies given by name also come from these plugins. The observers of
        these plugins receive the runner's events.

        Args:
            policy: Name of the policy, or a policy object. None selects the policy that a plugin
                chooses for the configuration, or else the default policy.
        """
        return PolicyWithPlugins(self, policy)

    # -- adding ---------------------------------------------------------------------------

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin object, completely or not at all.

        Args:
            name: Name under which the plugin is listed.
            plugin: A module or an instance with functions marked ``@hookimpl``.

        Raises:
            PluginError: The plugin is broken or already loaded, or registers a name that is in use.
        """
        with self._lock:
            loaded = load(_passed_in(name, plugin), self._loaded, self._manager)
            for spec in loaded.records:
                taken = self._catalog.tables[spec.kind].get(spec.name)
                if taken is not None:
                    self._manager.unregister(name=name)
                    raise PluginError(
                        loaded.origin,
                        f"{spec.kind} {spec.name!r} is already registered by another plugin "
                        f"({taken.origin}). Choose another name, or exclude the other plugin, "
                        f"for example with load_plugins(block=[{taken.origin.plugin!r}]).",
                    )
            self._commit(loaded)
            self._loaded[name] = loaded

    def register_policy(
        self, name: str, factory: Callable[..., Policy], summary: str = ""
    ) -> Registration[PolicySpec]:
        """Register a policy without writing a plugin.

        Args:
            name: Name by which users select the policy.
            factory: A class or function, called with the user's options as keyword arguments.
            summary: One-line description for listings.

        Raises:
            PluginError: The name is in use.
            ConfigError: The name or the factory is invalid.
        """
        spec = PolicySpec(name, factory, summary)

        @hookimpl
        def dispatchkit_register_policies() -> list[PolicySpec]:
            return [spec]

        hooks = {"dispatchkit_register_policies": dispatchkit_register_policies}
        self.register(name, types.SimpleNamespace(**hooks))
        return self.policies[name]

    def _commit(self, loaded: LoadedPlugin, reason: str = "") -> None:
        """Make the records of a plugin available."""
        for spec in loaded.records:
            self._catalog.add(spec, loaded.origin)
        registers = tuple(f"{spec.kind} {spec.name}" for spec in loaded.records)
        self._infos.append(PluginInfo.of(loaded.origin, PluginState.LOADED, reason, registers))


def load_plugins(
    *,
    allow: Collection[str] | None = None,
    block: Collection[str] | None = None,
    extra: Iterable[tuple[str, object]] = (),
    replace: Collection[str] = (),
    strict: bool = False,
    environ: Mapping[str, str] | None = None,
) -> PluginSet:
    """Load the installed plugins into a new set.

    ``allow`` and ``block`` contain names of entry points or distributions. An installed plugin is
    loaded only if the arguments and the environment both allow it and neither blocks it; otherwise
    it is not imported. Each call returns an independent set.

    Args:
        allow: The only installed plugins to load; None, the default, allows all, and an empty list
            allows none. The environment variable DISPATCHKIT_PLUGINS (comma-separated names, may be
            empty) has the same effect.
        block: Plugins to skip, in addition to the plugins in DISPATCHKIT_DISABLE.
        extra: Additional plugins as tuples (name, object); ``allow`` does not apply to them.
        replace: Built-in names that plugins may replace.
        strict: Whether to raise the problems that occurred while plugins were loaded, after logging
            them. Such problems include failed imports, missing plugins and conflicts of names. If
            False, they are only logged.
        environ: Environment variables; by default ``os.environ``.

    Raises:
        PluginLoadError: A plugin has a problem, and ``strict`` is True. The exception group
            contains all problems.
        ConfigError: ``allow``, ``block`` or ``replace`` is not a list of names, or ``extra`` is not
            a list of tuples.
        UnknownNameError: A name in ``replace`` is not the name of a built-in object.
    """
    for setting, value in (("allow", allow), ("block", block), ("replace", replace)):
        _check_names(setting, value)
    if not isinstance(extra, Iterable):
        raise ConfigError("extra", extra, "a list of tuples (name, module or instance)")
    if environ is not None and not isinstance(environ, Mapping):
        raise ConfigError("environ", environ, "a dictionary of values by name, or None")
    check_flag(strict, "strict")
    given = [_passed_in(*_pair(one, at)) for at, one in enumerate(extra)]
    names = Filter.of(allow, block, os.environ if environ is None else environ)
    plugins = PluginSet((_built_in(), *given, *discover()), names=names, replace=replace)
    for problem in plugins.problems:
        _log.warning("%s", problem)
    if strict and plugins.problems:
        raise PluginLoadError(plugins.problems)
    _log.info("Plugins loaded: %s", "; ".join(map(str, plugins.origins)))
    return plugins


def _built_in() -> Candidate:
    """Return the plugin that registers the built-in backends."""

    def load() -> object:
        from dispatchkit.plugins import builtin

        return builtin

    return Candidate(Origin("dispatchkit", "dispatchkit", __version__), BUILT_IN, load)


def _passed_in(name: str, plugin: object) -> Candidate:
    return Candidate(Origin(name), PASSED_IN, lambda: plugin)


def _check_names(setting: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        names = [name.strip() for name in value.split(",")]
        raise ConfigError(setting, value, "a list of names", f"Write {names!r}.")
    if not isinstance(value, Collection):
        raise ConfigError(setting, value, "a list of names")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"each name in {setting}", name, "text")


def _pair(one: Any, at: int) -> tuple[str, object]:
    if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], str):
        raise ConfigError(f"extra[{at}]", one, "a tuple (name, module or instance)")
    return one
