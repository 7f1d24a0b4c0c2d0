"""The plugins of one dispatcher, and what they provide by name."""

from __future__ import annotations

import logging
import os
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import attrs

from dispatchkit._version import __version__
from dispatchkit.errors import ConfigError, Origin, PluginError, PluginLoadError, UnknownNameError
from dispatchkit.hookspecs import (
    BackendSpec,
    CommandSpec,
    LanePolicySpec,
    ObserverSpec,
    PolicySpec,
    hookimpl,
)
from dispatchkit.observe.events import MAX_FAULTS, Notifier, Subscription
from dispatchkit.plugins.catalog import Catalog
from dispatchkit.plugins.discovery import BUILT_IN, PASSED_IN, Candidate, Filter, discover
from dispatchkit.plugins.loading import LoadedPlugin, PluginLoader, load
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
    """A policy, with the plugins that provide it, backends and lane policies.

    Made by ``PluginSet.with_policy``.

    Attributes:
        plugins: The plugins; their observers are notified of the runner's events.
        policy: Its name, or an object; None for the one that the plugins select.
    """

    plugins: PluginSet
    policy: str | Policy | None = None


class PluginSet:
    """The plugins of one dispatcher, and what they provide by name.

    Made by ``load_plugins``. Thread safety: reading from any thread; ``register`` and
    ``register_policy`` hold a lock.

    Args:
        candidates: The plugins found, in any order; if empty, the set has no built-in backends
            either.
        names: Which of them may be loaded; by default all.
        replace: Built-in names that plugins may take over.
        max_faults: Faults in a row after which an observer's callback is switched off.

    Attributes:
        notifier: Calls observers with events.
        problems: Problems found while loading, one error each.
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
            reasons = [it.reason for it in loader.problems if it.origin == one.origin]
            self._commit(one, reason=" ".join(reasons))
        self._catalog.absent = tuple(loader.infos)
        self._infos += loader.infos

    def __repr__(self) -> str:
        tables = self._catalog.tables
        counts = ", ".join(f"{kind}: {len(table)}" for kind, table in tables.items() if table)
        return f"<PluginSet of {len(self._loaded)} plugins, {counts or 'nothing registered'}>"

    # -- what there is --------------------------------------------------------------------

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
        """Backends by name, including the built-in ones."""
        return types.MappingProxyType(self._catalog.tables["backend"])

    @property
    def observers(self) -> Mapping[str, Registration[ObserverSpec]]:
        """Observers by name."""
        return types.MappingProxyType(self._catalog.tables["observer"])

    @property
    def commands(self) -> Mapping[str, Registration[CommandSpec]]:
        """Commands of the command line by name."""
        return types.MappingProxyType(self._catalog.tables["command"])

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origins of the loaded plugins, in the order of loading."""
        return tuple(one.origin for one in self._loaded.values())

    def describe(self) -> tuple[PluginInfo, ...]:
        """Return a row for every plugin found, passed in or requested, whatever its state.

        A row's reason also names observer callbacks that were switched off.
        """
        return tuple(self._with_faults(info) for info in self._infos)

    def _with_faults(self, info: PluginInfo) -> PluginInfo:
        switched_off = [
            f"{one.event_type.callback} is switched off; it last raised {one.last_fault}"
            for origin, one in self._subscriptions
            if str(origin) == info.origin and not one.is_active
        ]
        return attrs.evolve(info, reason="; ".join(filter(None, (info.reason, *switched_off))))

    # -- choosing -------------------------------------------------------------------------

    def get_policy(self, name: str) -> Registration[PolicySpec]:
        """Return a policy's record and origin.

        Raises:
            UnknownNameError: There is no such policy; the message lists the closest names, plugins
                that might provide it but failed to load or are blocked, and what to install.
        """
        return self._catalog.get("policy", name)

    def create_policy(self, name: str, /, **options: Any) -> Policy:
        """Create a policy.

        Args:
            name: The policy's name.
            options: Keyword arguments for its factory.

        Raises:
            UnknownNameError: There is no such policy.
            ConfigError: Its factory does not take these options.
            PolicyError: Its factory raised, or returned something other than a policy.
        """
        return cast("Policy", self._catalog.create("policy", name, options))

    def create_lane_policy(self, name: str, /, **options: Any) -> LanePolicy:
        """Create a lane policy; errors as in ``create_policy``, but PluginError."""
        return cast("LanePolicy", self._catalog.create("lane policy", name, options))

    def create_backend(self, name: str, /, **options: Any) -> GraphBackend:
        """Create a backend; errors as in ``create_policy``, but PluginError.

        Raises:
            BackendUnavailableError: A module it needs cannot be imported.
        """
        return cast("GraphBackend", self._catalog.create("backend", name, options))

    def create_observer(self, name: str, /, **options: Any) -> Any:
        """Create an observer and attach it to the notifier.

        From then on its methods named after events are called; exceptions they raise are logged.
        Errors are those of ``create_policy``, but PluginError.
        """
        observer = self._catalog.create("observer", name, options)
        origin = self.observers[name].origin
        attached = self.notifier.attach(observer, f"{name!r} ({origin})")
        self._subscriptions += [(origin, one) for one in attached]
        return observer

    def create_command(self, name: str, /) -> Callable[..., Any]:
        """Return the function of a command; errors as in ``create_policy``, but PluginError."""
        return cast("Callable[..., Any]", self._catalog.create("command", name, {}))

    def hint(self, kind: str, name: str) -> str:
        """Suggest where a missing name may be: in plugins not loaded, or what to install.

        Args:
            kind: ``policy``, ``lane policy``, ``backend``, ``observer`` or ``command``.
            name: The missing name.

        Returns:
            Sentences; empty if nothing is known.
        """
        return self._catalog.hint(kind, name)

    def select_policy(self, config: DispatchConfig) -> str | None:
        """Return the policy that a plugin chooses for a configuration, None if none does.

        Raises:
            PluginError: A ``dispatchkit_select_policy`` hook raised or answered with
                something other than a name; the plugin is named.
            UnknownNameError: It chose an unknown policy.
        """
        hook = "dispatchkit_select_policy"
        # Not called through pluggy, which does not report whose hook answered or raised.
        for one in reversed(self._manager.hook.dispatchkit_select_policy.get_hookimpls()):
            loaded = self._loaded.get(one.plugin_name)
            if loaded is None:
                continue  # it is being added and may still be refused
            origin = loaded.origin
            try:
                name = one.function(*[config][: len(one.argnames)])
            except (Exception, SystemExit) as error:
                text = f"{hook} raised {type(error).__name__}: {error}"
                raise PluginError(origin, text) from error
            if name is None:
                continue
            if not isinstance(name, str):
                raise PluginError(
                    origin,
                    f"{hook} returned {name!r:.60} ({type(name).__name__}); return a policy's "
                    "name or None.",
                )
            try:
                return self.get_policy(name).name
            except UnknownNameError as error:
                error.add_note(f"Chosen by {hook} of {origin}.")
                raise
        return None

    def with_policy(self, policy: str | Policy | None = None) -> PolicyWithPlugins:
        """Return a ``policy`` argument for a runner that uses these plugins.

        Backends and lane policies given by name also come from these plugins, and their observers
        are notified of the runner's events.

        Args:
            policy: Name of the policy, or an object; None for the one that a plugin selects for the
                configuration, or else the default.
        """
        return PolicyWithPlugins(self, policy)

    # -- adding ---------------------------------------------------------------------------

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin object, completely or not at all.

        Args:
            name: The plugin's name.
            plugin: A module or an instance with functions marked ``@hookimpl``.

        Raises:
            PluginError: It is broken, already loaded, or claims a taken name.
        """
        with self._lock:
            loaded = load(_passed_in(name, plugin), self._loaded, self._manager)
            for spec in loaded.records:
                taken = self._catalog.tables[spec.kind].get(spec.name)
                if taken is not None:
                    self._manager.unregister(name=name)
                    raise PluginError(
                        loaded.origin,
                        f"{spec.kind} {spec.name!r} already comes from {taken.origin}; choose "
                        "another name, or load without that plugin (`block`).",
                    )
            self._commit(loaded)
            self._loaded[name] = loaded

    def register_policy(
        self, name: str, factory: Callable[..., Policy], summary: str = ""
    ) -> Registration[PolicySpec]:
        """Add one policy without writing a plugin.

        Args:
            name: Its name.
            factory: A class or function, called with the user's options as keyword arguments.
            summary: One line for listings.

        Raises:
            PluginError: The name is taken.
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
        """Make everything that a plugin registers available."""
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

    Lists name plugins by their entry point or distribution, and can only exclude: a plugin is
    loaded if every list in force allows it and none blocks it. Excluded plugins are not imported.
    Loading twice returns two equal, independent sets.

    Args:
        allow: Load only these; an empty list loads none. The environment variable
            DISPATCHKIT_PLUGINS (comma-separated names; empty: none) does the same.
        block: Do not load these; so does DISPATCHKIT_DISABLE.
        extra: (name, object) pairs to load as well; ``allow`` does not apply to them.
        replace: Built-in names that plugins may have instead of dispatchkit.
        strict: Raise on any problem, rather than leave plugins out with a warning.
        environ: Where the variables are read; by default the process's environment.

    Raises:
        PluginLoadError: In strict mode: all problems, as a group.
        ConfigError: ``allow``, ``block`` or ``replace`` is not a list of names, or ``extra`` is not
            a list of pairs.
        UnknownNameError: A name to replace is not built in.
    """
    for setting, value in (("allow", allow), ("block", block), ("replace", replace)):
        _check_names(setting, value)
    given = [_passed_in(*_pair(one)) for one in extra]
    names = Filter.of(allow, block, os.environ if environ is None else environ)
    plugins = PluginSet((_built_in(), *given, *discover()), names=names, replace=replace)
    for problem in plugins.problems:
        _log.warning("%s", problem)
    if strict and plugins.problems:
        raise PluginLoadError(plugins.problems)
    _log.info("Plugins loaded: %s", "; ".join(map(str, plugins.origins)))
    return plugins


def _built_in() -> Candidate:
    """Return the built-in plugin, which uses the same hooks."""

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
        raise ConfigError(setting, value, "a list of names", f"Write [{value!r}].")
    if not isinstance(value, Collection) or not all(isinstance(name, str) for name in value):
        raise ConfigError(setting, value, "a list of names")


def _pair(one: Any) -> tuple[str, object]:
    if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], str):
        raise ConfigError("extra", one, "pairs of a name and a module or an instance")
    return one
