"""Load plugins one by one, remove broken plugins, and resolve name conflicts.

pluggy's loader is not used, because it stops at the first plugin that raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from dispatchkit.errors import Origin, PluginError, UnknownNameError, describe_exception
from dispatchkit.hookspecs import Spec
from dispatchkit.plugins.discovery import (
    BLOCK_VARIABLE,
    BUILT_IN,
    PASSED_IN,
    Candidate,
    Filter,
    PluginFault,
)
from dispatchkit.plugins.manager import HookManager
from dispatchkit.plugins.records import PluginInfo, PluginState


@attrs.frozen(eq=False)
class LoadedPlugin:
    """A loaded plugin and its records.

    Attributes:
        candidate: The candidate that was loaded.
        plugin: The module or instance with the hooks.
        records: The records returned by the hooks.
    """

    candidate: Candidate
    plugin: object
    records: tuple[Spec, ...]

    @property
    def origin(self) -> Origin:
        """Name and distribution of the plugin."""
        return self.candidate.origin


class DuplicateFault(PluginFault):
    """A plugin, or another plugin with its name, is already loaded."""


def load(
    candidate: Candidate, present: Mapping[str, LoadedPlugin], manager: HookManager
) -> LoadedPlugin:
    """Import a plugin and add it to the manager.

    Args:
        candidate: The plugin to load.
        present: The plugins that are already loaded, by name.
        manager: The manager to which the plugin is added.

    Raises:
        PluginError: The plugin is broken, its name is taken, or it is already loaded under another
            name. The ``__cause__`` of the error is the original exception. The manager has not
            changed.
    """
    origin = candidate.origin
    doing = [f"importing {origin.entry_point or 'it'}"]
    try:
        if origin.plugin in present:
            other = present[origin.plugin]
            raise DuplicateFault(
                f"another plugin with this name ({other.origin}) is used instead. "
                f"{_next_step(candidate, 'Pass the object under a different name.')}"
            )
        plugin = candidate.load()
        for other in present.values():
            if other.plugin is plugin:
                raise DuplicateFault(
                    f"it is the same object as another plugin ({other.origin}), which is used "
                    "instead. Register it under a single name."
                )
        return LoadedPlugin(candidate, plugin, manager.add(origin.plugin, plugin, doing))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except PluginFault as fault:
        raise PluginError(origin, str(fault)) from fault
    # Any other exception that the plugin raises, even SystemExit, becomes a PluginError.
    except BaseException as error:
        text = f"{doing[-1]} {describe_exception(error)}"
        raise PluginError(origin, text) from error


class PluginLoader:
    """A plugin loader that reports skipped plugins.

    Args:
        candidates: Candidates in any order.
        names: Filter for the candidates.
        replace: Built-in names that plugins may replace.
        manager: The manager to which plugins are added.

    Attributes:
        loaded: Loaded plugins by name, in an order that does not depend on ``sys.path``.
            Records whose names another plugin provides are left out.
        infos: A ``PluginInfo`` for each plugin that is not loaded.
        problems: Errors to log, or to raise in strict mode.

    Raises:
        UnknownNameError: A name in ``replace`` is not the name of a built-in object.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        names: Filter,
        replace: Collection[str],
        manager: HookManager,
    ) -> None:
        self.loaded: dict[str, LoadedPlugin] = {}
        self.infos: list[PluginInfo] = []
        self.problems: list[PluginError] = []
        found = list(candidates)
        for one in sorted(
            self._permitted(found, names), key=lambda one: one.order(one.origin.plugin)
        ):
            try:
                self.loaded[one.origin.plugin] = load(one, self.loaded, manager)
            except PluginError as error:
                is_duplicate = isinstance(error.__cause__, DuplicateFault)
                self._fail(PluginState.DUPLICATE if is_duplicate else PluginState.FAILED, error)
        self._assign_names(replace)

    def _permitted(self, found: Sequence[Candidate], names: Filter) -> Iterator[Candidate]:
        # An entry point that is listed twice counts once. Objects passed in under the same name are
        # different plugins, and the second is reported.
        unique: dict[tuple[Origin, int], Candidate] = {}
        for at, one in enumerate(found):
            unique.setdefault((one.origin, at if one.rank == PASSED_IN else 0), one)
        for one in unique.values():
            refusal = names.refusal(one)
            if refusal:
                self.infos.append(PluginInfo.of(one.origin, PluginState.BLOCKED, refusal))
            else:
                yield one
        for origin, reason in names.unmatched(found):
            self._fail(PluginState.MISSING, PluginError(origin, reason))

    def _fail(self, state: PluginState, problem: PluginError) -> None:
        self.infos.append(PluginInfo.of(problem.origin, state, problem.reason))
        self.problems.append(problem)

    def _assign_names(self, replace: Collection[str]) -> None:
        """Assign each name to one plugin, and report other plugins that claim it."""
        plugins = self.loaded.values()
        built_in = {spec.name for one in plugins if _is_built_in(one) for spec in one.records}
        for name in replace:
            if name not in built_in:
                raise UnknownNameError("replace", name, built_in)
        claims: dict[tuple[str, str], list[LoadedPlugin]] = {}
        for one in plugins:
            for spec in one.records:
                claims.setdefault((spec.kind, spec.name), []).append(one)
        owners: dict[tuple[str, str], LoadedPlugin] = {}
        for (kind, name), claimants in claims.items():
            ranked = sorted(
                claimants,
                key=lambda one: (_is_built_in(one) and name in replace, one.candidate.order(name)),
            )
            owners[kind, name] = ranked[0]
            self.problems += [
                PluginError(loser.origin, _conflict(kind, name, loser, ranked[0]))
                for loser in ranked[1:]
                if not _is_built_in(loser)
            ]
        for name, one in self.loaded.items():
            own = tuple(spec for spec in one.records if owners[spec.kind, spec.name] is one)
            self.loaded[name] = attrs.evolve(one, records=own)


def _is_built_in(loaded: LoadedPlugin) -> bool:
    return loaded.candidate.rank == BUILT_IN


def _next_step(loser: Candidate, rename: str) -> str:
    """Return the next step for a plugin whose name is taken."""
    if loser.rank == PASSED_IN:  # without a distribution
        return rename
    return (
        "Block one of the two plugins by the name of its distribution (argument `block`, setting "
        f"`disable` or {BLOCK_VARIABLE})."
    )


def _conflict(kind: str, name: str, loser: LoadedPlugin, winner: LoadedPlugin) -> str:
    if _is_built_in(winner):
        return (
            f"{kind} {name!r} is built in, and the built-in {kind} is used; to replace it, pass "
            f"replace=[{name!r}] to load_plugins()."
        )
    return (
        f"{kind} {name!r} is also registered by another plugin ({winner.origin}), whose {kind} "
        "is used. "
        f"{_next_step(loser.candidate, f'Register the {kind} under a different name.')}"
    )
