"""Load plugins, and choose by name among what they bring.

Loading is explicit: each dispatcher has its own ``PluginSet``, and there is no global one::

    plugins = load_plugins()
    policy = plugins.create_policy("vllm")

A broken plugin is left out whole and reported with its distribution, entry point and reason;
with ``strict=True`` that is an error. Importing this module loads neither pluggy nor any plugin.
"""

from __future__ import annotations

import logging
import os
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from dispatchkit._plugin_catalog import Catalog
from dispatchkit._plugin_check import PluginFault
from dispatchkit._plugin_discovery import (
    Candidate,
    Filter,
    Misfit,
    built_in,
    discover,
    passed_in,
)
from dispatchkit._plugin_loading import (
    Loading,
    PluginInfo,
    PluginState,
    Staged,
    new_manager,
    relayed,
    stage,
    traced,
    without_event,
)
from dispatchkit._plugin_records import (
    BackendSpec,
    CommandSpec,
    LanePolicySpec,
    ObserverSpec,
    Origin,
    PlannerSpec,
    PolicySpec,
    Registered,
)
from dispatchkit.errors import ConfigError, PluginError, PluginLoadError, UnknownNameError
from dispatchkit.observe.events import (
    EVENTS,
    MAX_FAULTS,
    Notifier,
    PluginRegisteredEvent,
    Subscription,
)

if TYPE_CHECKING:
    from dispatchkit.dispatch.policy import Policy
    from dispatchkit.keys.config import DispatchConfig

__all__ = [
    "BackendSpec",
    "CommandSpec",
    "LanePolicySpec",
    "ObserverSpec",
    "Origin",
    "PlannerSpec",
    "PluginError",
    "PluginInfo",
    "PluginLoadError",
    "PluginSet",
    "PluginState",
    "PolicySpec",
    "Registered",
    "RegisteredPolicy",
    "load_plugins",
]

RegisteredPolicy = Registered[PolicySpec]

_log = logging.getLogger("dispatchkit.plugins")
_EVENT_TYPES = {one.hook: one for one in EVENTS}


class PluginSet(Catalog):
    """The plugins of one dispatcher and all that can be chosen by name.

    Made by ``load_plugins``. Thread safety: reading and ``notify`` from any thread;
    ``register`` and ``register_policy`` hold a lock.

    Attributes:
        notifier: Tells hooks and attached observers of events.
        problems: What was wrong at loading, one error each; empty when all was well.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate | Misfit] = (),
        *,
        names: Filter | None = None,
        replace: Collection[str] = (),
        max_faults: int = MAX_FAULTS,
    ) -> None:
        """Load candidates; without any the set is empty, and has no built-in backends either.

        Args:
            candidates: What was found, in any order.
            names: Which of them may be loaded; all of them if not given.
            replace: Built-in names that plugins may have instead.
            max_faults: Faults in a row after which an observing hook is switched off.
        """
        super().__init__()
        self.notifier: Notifier = Notifier(max_faults=max_faults)
        self._manager = new_manager()
        self._staged: list[Staged] = []
        self._subscriptions: dict[str, list[Subscription]] = {}
        self._outcomes: list[tuple[object, Origin]] = []
        self._lock = threading.RLock()
        loading = Loading()
        staged = loading.stage_all(loading.permitted(candidates, names))
        for one in loading.settle(staged, replace):
            reasons = [it.reason for it in loading.problems if it.origin == one.origin]
            self._commit(one, reason=" ".join(reasons))
        self._infos += loading.infos
        self.problems: tuple[PluginError, ...] = tuple(loading.problems)

    def __repr__(self) -> str:
        counts = ", ".join(f"{kind}: {len(table)}" for kind, table in self._tables.items() if table)
        return f"<PluginSet of {len(self._staged)} plugins, {counts or 'nothing registered'}>"

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where the loaded plugins come from, in the order in which they were loaded."""
        return tuple(one.origin for one in self._staged)

    def describe(self) -> tuple[PluginInfo, ...]:
        """Return a row for every plugin found, passed in or asked for, whatever its state.

        A row's reason also tells which observing hooks have been switched off since.
        """
        return tuple(self._with_faults(info) for info in self._infos)

    def _with_faults(self, info: PluginInfo) -> PluginInfo:
        if info.state is not PluginState.LOADED:
            return info
        switched_off = [
            f"{one.event_type.hook} is switched off; it last raised {one.last_fault}"
            for one in self._subscriptions.get(info.name, ())
            if not one.is_active
        ]
        reason = "; ".join(filter(None, (info.reason, *switched_off)))
        return attrs.evolve(info, reason=reason)

    # -- choosing -------------------------------------------------------------------------

    def select_policy(self, config: DispatchConfig) -> str | None:
        """Return the policy that a plugin chooses for a configuration, None if none does.

        Raises:
            PluginError: A ``dispatchkit_select_policy`` hook raised or answered with
                something other than a name; the plugin is named.
            UnknownNameError: It chose a policy that is not there.
        """
        with self._lock:
            self._outcomes.clear()
            try:
                name = self._manager.hook.dispatchkit_select_policy(config=config)
            except PluginFault as fault:
                raise PluginError(
                    self._source_of(fault), f"dispatchkit_select_policy cannot be asked: {fault}"
                ) from fault
            except (Exception, SystemExit) as error:
                raise PluginError(
                    self._source_of(error),
                    f"dispatchkit_select_policy raised {type(error).__name__}: {error}",
                ) from error
            if name is None:
                return None
            source = self._source_of(name)
        if not isinstance(name, str):
            raise PluginError(
                source,
                f"dispatchkit_select_policy answered {name!r:.60} ({type(name).__name__}); "
                "answer with a policy's name or None.",
            )
        try:
            self.get_policy(name)
        except UnknownNameError as error:
            error.add_note(f"Chosen by dispatchkit_select_policy of {source}.")
            raise
        return name

    def _source_of(self, outcome: object) -> Origin:
        """Return the plugin whose hook came out with a value or an exception first."""
        return next(origin for one, origin in self._outcomes if one is outcome)

    # -- adding ---------------------------------------------------------------------------

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin object by hand; all of it, or nothing.

        Args:
            name: The plugin's name.
            plugin: A module or an instance with functions marked ``@hookimpl``.

        Raises:
            PluginError: It is broken, is there already, or claims a name that is taken.
        """
        with self._lock:
            staged = stage(passed_in(name, plugin), self._staged)
            for kind, spec in staged.records:
                taken = self._tables[kind].get(spec.name)
                if taken is not None:
                    raise PluginError(
                        staged.origin,
                        f"{kind} {spec.name!r} comes from {taken.origin} already; choose another "
                        "name, or load without that plugin (`block`).",
                    )
            self._commit(staged)

    def register_policy(
        self, name: str, factory: Callable[..., Policy], summary: str = ""
    ) -> Registered[PolicySpec]:
        """Add one policy without writing a plugin.

        Args:
            name: The name to choose it by.
            factory: A class or function; called with the user's options as keywords.
            summary: One line for listings.

        Raises:
            PluginError: The name is taken.
            ConfigError: The name or the factory cannot be used.
        """
        from dispatchkit.hookspecs import hookimpl

        spec = PolicySpec(name, factory, summary)

        @hookimpl
        def dispatchkit_register_policies() -> list[PolicySpec]:
            return [spec]

        hooks = {"dispatchkit_register_policies": dispatchkit_register_policies}
        self.register(name, types.SimpleNamespace(**hooks))
        return self.policies[name]

    def _commit(self, staged: Staged, reason: str = "") -> None:
        """Put all of a checked plugin in force, then tell the plugins of it."""
        origin = staged.origin
        functions = {}
        subscriptions = []
        for one in staged.implementations:
            name, function = one.hook.name, one.function
            functions[name] = function
            if name == "dispatchkit_select_policy":
                functions[name] = traced(one, origin, self._outcomes)
            if name in _EVENT_TYPES:
                subscription = self.notifier.subscribe(
                    _EVENT_TYPES[name],
                    function if one.takes else without_event(function),
                    f"{name} of plugin {origin.plugin!r} ({origin})",
                )
                subscriptions.append(subscription)
                functions[name] = relayed(subscription)
        for kind, spec in staged.records:
            self._tables[kind][spec.name] = Registered(spec, origin)
        registers = tuple(f"{kind} {spec.name}" for kind, spec in staged.records)
        self._staged.append(staged)
        self._subscriptions[origin.plugin] = subscriptions
        self._infos.append(PluginInfo.of(origin, PluginState.LOADED, reason, registers))
        self._manager.register(types.SimpleNamespace(**functions), name=origin.plugin)
        event = PluginRegisteredEvent(
            name=origin.plugin,
            distribution=origin.distribution,
            version=origin.version,
            registers=registers,
        )
        # The one event that goes through pluggy: it replays this to plugins that come later.
        self._manager.hook.dispatchkit_on_plugin_registered.call_historic(kwargs={"event": event})

    # -- telling --------------------------------------------------------------------------

    def listens(self, event_type: type[Any]) -> bool:
        """Return whether anyone would be told of a kind of event."""
        return self.notifier.listens(event_type)

    def notify(self, event: object) -> None:
        """Tell hooks and attached observers of an event; what they raise is contained."""
        self.notifier.notify(event)

    def create_observer(self, name: str, /, **options: Any) -> Any:
        """Make a new observer and attach it to the notifier.

        Its methods named after events are called from now on; what they raise is contained.

        Raises:
            UnknownNameError: There is no such observer.
            ConfigError: Its factory does not take these options.
            PluginError: Its factory raised, or returned nothing.
        """
        observer = super().create_observer(name, **options)
        origin = self.observers[name].origin
        self.notifier.attach(observer, f"{name!r} ({origin})")
        return observer


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

    Lists name plugins by their entry point or by their distribution, and only take away: a
    plugin is loaded if every list that is in force allows it and none blocks it. One that is
    left out is not imported. Loading twice gives two equal sets, independent of each other.

    Args:
        allow: Load only these; an empty list loads none. The environment variable
            DISPATCHKIT_PLUGINS (names with commas; empty: none) does the same.
        block: Do not load these; so does DISPATCHKIT_DISABLE.
        extra: (name, object) pairs to load besides; ``allow`` does not concern them.
        replace: Built-in names that plugins may have instead of dispatchkit.
        strict: Raise if anything is wrong, rather than leave it out with a warning.
        environ: Where the variables are read; the process's environment by default.

    Raises:
        PluginLoadError: In strict mode: all problems, as a group.
        ConfigError: ``allow``, ``block`` or ``replace`` is not a list of names, or ``extra``
            not one of pairs.
        UnknownNameError: A name to replace is not built in.
    """
    for setting, value in (("allow", allow), ("block", block), ("replace", replace)):
        _check_names(setting, value)
    given = [passed_in(*_pair(one)) for one in extra]
    names = Filter.of(allow, block, os.environ if environ is None else environ)
    plugins = PluginSet((built_in(), *given, *discover()), names=names, replace=replace)
    for problem in plugins.problems:
        _log.warning("%s", problem)
    if strict and plugins.problems:
        raise PluginLoadError(plugins.problems)
    _log.info("Plugins loaded: %s", "; ".join(map(str, plugins.origins)))
    return plugins


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
