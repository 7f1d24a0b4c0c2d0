"""Load plugins one by one, each undone by itself if it is broken, and settle who has a name.

Nothing is committed here. A plugin is imported, examined and asked for its records in a relay
of its own; what came of that is handed over whole, or not at all. pluggy's own loader is not
used: it ends at the first plugin that raises, and the rest is never seen.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from dispatchkit._plugin_check import PROJECT, Implementation, PluginFault, implementations
from dispatchkit._plugin_discovery import Candidate, Filter, Misfit
from dispatchkit._plugin_records import KINDS, AnySpec, Origin
from dispatchkit.errors import PluginError, UnknownNameError
from dispatchkit.observe.events import Subscription

if TYPE_CHECKING:
    import pluggy


class PluginState(enum.StrEnum):
    """What became of a plugin that was found, passed in or asked for."""

    LOADED = "loaded"
    FAILED = "failed"
    DUPLICATE = "duplicate"
    BLOCKED = "blocked"
    MISSING = "missing"


@attrs.frozen
class PluginInfo:
    """One row of the list of plugins.

    Attributes:
        name: The plugin's name (its entry point's name).
        distribution: Distribution it comes from; None for an object passed in.
        version: Version of that distribution; None for an object passed in.
        origin: Where it comes from, in words.
        state: What became of it.
        reason: Why, in words; empty where there is nothing to say.
        registers: What it registered, as ``kind name`` (``policy vllm``).
    """

    name: str
    distribution: str | None
    version: str | None
    origin: str
    state: PluginState
    reason: str = ""
    registers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        origin: Origin,
        state: PluginState,
        reason: str = "",
        registers: tuple[str, ...] = (),
    ) -> PluginInfo:
        """Make a row for an origin."""
        return cls(
            origin.plugin,
            origin.distribution,
            origin.version,
            str(origin),
            state,
            reason,
            registers,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, ready for JSON."""
        return {**attrs.asdict(self), "state": str(self.state), "registers": list(self.registers)}


@attrs.frozen(eq=False)
class Staged:
    """A plugin that is fine, with all that it brings; nothing of it is in force yet.

    Attributes:
        candidate: Where it comes from.
        plugin: The object with the hooks.
        implementations: Its hooks.
        records: (kind, record) pairs, in the order of ``KINDS``.
    """

    candidate: Candidate
    plugin: object
    implementations: tuple[Implementation, ...]
    records: tuple[tuple[str, AnySpec], ...]

    @property
    def origin(self) -> Origin:
        """Where it comes from."""
        return self.candidate.origin

    def without(self, names: Collection[tuple[str, str]]) -> Staged:
        """Return it without some (kind, name) pairs."""
        kept = tuple((kind, spec) for kind, spec in self.records if (kind, spec.name) not in names)
        return attrs.evolve(self, records=kept)


def new_manager() -> pluggy.PluginManager:
    """Return a relay that knows the contract and nobody else."""
    import pluggy

    from dispatchkit import hookspecs

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


class Loading:
    """The work of loading one set of plugins: rows and problems gather as it goes on.

    Attributes:
        infos: A row for each plugin that is not staged.
        problems: What is wrong, for the log and for strict mode.
    """

    def __init__(self) -> None:
        self.infos: list[PluginInfo] = []
        self.problems: list[PluginError] = []

    def permitted(
        self, candidates: Iterable[Candidate | Misfit], names: Filter | None
    ) -> list[Candidate | Misfit]:
        """Return those that may be loaded; note those that may not, and lists that fit none."""
        found = list(candidates)
        if names is None:
            return found
        permitted = []
        for one in found:
            is_found = isinstance(one, Misfit) or one.rank == 2
            refusal = names.refusal(one.origin, is_found=is_found)
            if refusal:
                self.infos.append(PluginInfo.of(one.origin, PluginState.BLOCKED, refusal))
            else:
                permitted.append(one)
        for origin, reason in names.unmatched([one.origin for one in found]):
            self.fail(PluginState.MISSING, PluginError(origin, reason))
        return permitted

    def stage_all(self, candidates: Iterable[Candidate | Misfit]) -> list[Staged]:
        """Return those plugins that are fine, in an order that no path decides."""
        fit: list[Candidate] = []
        for one in candidates:
            if isinstance(one, Misfit):
                self.fail(PluginState.FAILED, PluginError(one.origin, one.reason))
            elif one.origin not in [other.origin for other in fit]:
                fit.append(one)
        staged: list[Staged] = []
        for candidate in sorted(fit, key=lambda one: one.order(one.origin.plugin)):
            try:
                staged.append(stage(candidate, staged))
            except PluginError as error:
                is_duplicate = isinstance(error.__cause__, _DuplicateFault)
                self.fail(PluginState.DUPLICATE if is_duplicate else PluginState.FAILED, error)
        return staged

    def fail(self, state: PluginState, problem: PluginError) -> None:
        """Add a row and a problem."""
        self.infos.append(PluginInfo.of(problem.origin, state, problem.reason))
        self.problems.append(problem)

    def settle(self, staged: Sequence[Staged], replace: Collection[str]) -> list[Staged]:
        """Return the plugins without the names that another of them has.

        Args:
            staged: The plugins.
            replace: Built-in names that others may have.

        Raises:
            UnknownNameError: A name to replace is not built in.
        """
        built_in = {spec.name for one in staged if _is_built_in(one) for _, spec in one.records}
        for name in replace:
            if name not in built_in:
                raise UnknownNameError("name to replace", name, built_in)
        claims: dict[tuple[str, str], list[Staged]] = {}
        for one in staged:
            for kind, spec in one.records:
                claims.setdefault((kind, spec.name), []).append(one)
        lost: dict[Origin, set[tuple[str, str]]] = {}
        for (kind, name), claimants in claims.items():
            ranked = sorted(
                claimants,
                key=lambda one: (_is_built_in(one) and name in replace, one.candidate.order(name)),
            )
            winner = ranked[0]
            for loser in ranked[1:]:
                lost.setdefault(loser.origin, set()).add((kind, name))
                if not _is_built_in(loser):
                    self.problems.append(PluginError(loser.origin, _taken(kind, name, winner)))
        return [one.without(lost.get(one.origin, ())) for one in staged]


def stage(candidate: Candidate, present: Sequence[Staged]) -> Staged:
    """Import a plugin, examine it and collect its records; commit nothing.

    Args:
        candidate: The plugin.
        present: Plugins that are there already.

    Raises:
        PluginError: It is broken, or there already under this or another name. The reason
            is in words; the cause is what the plugin raised.
    """
    origin = candidate.origin
    doing = [f"importing {origin.entry_point or 'it'}"]
    try:
        return _examine(candidate, present, doing)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except PluginFault as fault:
        raise PluginError(origin, str(fault)) from fault
    # An import may raise anything, and exit too; it is reported with its origin.
    except BaseException as error:
        text = f"{doing[-1]} raised {type(error).__name__}: {error}"
        raise PluginError(origin, text) from error


def _examine(candidate: Candidate, present: Sequence[Staged], doing: list[str]) -> Staged:
    for other in present:
        if other.origin.plugin == candidate.origin.plugin:
            raise _DuplicateFault(f"its name is taken by {other.origin}, which is used.{_HOW}")
    plugin = candidate.load()
    for other in present:
        if other.plugin is plugin:
            raise _DuplicateFault(
                f"it is the same object as {other.origin}, which is used. Name it once."
            )
    doing.append("examining its hooks")
    found = implementations(plugin)
    relay = new_manager()
    relay.register(types.SimpleNamespace(**{one.hook.name: one.function for one in found}))
    records: list[tuple[str, AnySpec]] = []
    for kind, (hook, record) in KINDS.items():
        doing.append(f"running {hook}")
        if any(one.hook.name == hook for one in found):
            records += [(kind, spec) for spec in _collect(relay, hook, record)]
    return Staged(candidate, plugin, found, tuple(records))


class _DuplicateFault(PluginFault):
    """There is this plugin, or one of its name, already."""


_HOW = " Block one of them by its distribution's name (`block` or DISPATCHKIT_DISABLE)."


def _is_built_in(staged: Staged) -> bool:
    return staged.candidate.rank == 0


def _taken(kind: str, name: str, winner: Staged) -> str:
    if _is_built_in(winner):
        return f"{kind} {name!r} is built in and kept; ask for it with replace=[{name!r}]."
    return f"{kind} {name!r} comes from {winner.origin} too, and that one is used.{_HOW}"


def _collect(relay: pluggy.PluginManager, hook: str, record: type[Any]) -> Sequence[AnySpec]:
    """Return what the one plugin of a relay registers, if it is a sequence of records."""
    # pluggy drops None from the results.
    results = getattr(relay.hook, hook)()
    result = results[0] if results else None
    if not isinstance(result, (list, tuple)):
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that it was never awaited
        raise PluginFault(
            f"{hook} returned {result!r:.60} ({type(result).__name__}); return a list of "
            f"{record.__name__}, [] for none."
        )
    names = set()
    for one in result:
        if not isinstance(one, record):
            raise PluginFault(
                f"{hook} returned {one!r:.60} ({type(one).__name__}) in its list; return "
                f"{record.__name__} records (from dispatchkit.hookspecs)."
            )
        if one.name in names:
            raise PluginFault(f"{hook} returned the name {one.name!r} twice; return each once.")
        names.add(one.name)
    return result


# --- what pluggy gets to see ---------------------------------------------------------------------
# It calls hooks; it neither contains what an observer raises nor tells whose hook answered. The
# functions made here do.


def without_event(function: Callable[[], object]) -> Callable[[Any], object]:
    """Return an observing hook that takes no event as one that may be given it."""
    return lambda _event: function()


def relayed(subscription: Subscription) -> Callable[..., Any]:
    """Return a hook implementation that tells a subscription, with its containment."""
    from dispatchkit.hookspecs import hookimpl

    @hookimpl
    def tell(event: Any) -> None:
        subscription(event)

    return tell


def traced(
    implementation: Implementation, origin: Origin, outcomes: list[tuple[object, Origin]]
) -> Callable[..., Any]:
    """Return a select_policy hook that notes what it came out with, as pluggy does not tell whose.

    Exceptions pass as they are, so that a wrapper can still catch them by their class.
    """
    function, takes = implementation.function, bool(implementation.takes)

    def answer(config: Any) -> Any:
        try:
            result = function(config) if takes else function()
        except (Exception, SystemExit) as error:
            outcomes.append((error, origin))
            raise
        outcomes.append((result, origin))
        return result

    def wrap(config: Any) -> Any:
        # pluggy has words for a wrapper that does not yield just once, and not whose it is.
        inner = function(config) if takes else function()
        try:
            try:
                next(inner)
            except StopIteration:
                raise PluginFault("it is a wrapper and did not yield; yield once.") from None
            try:
                answered = yield
            except BaseException as error:  # noqa: BLE001 - the wrapper's to handle, whatever it is
                inner.throw(error)
            else:
                inner.send(answered)
            inner.close()
            raise PluginFault("it is a wrapper and yielded twice; yield once.")
        except StopIteration as done:
            outcomes.append((done.value, origin))
            return done.value
        except (Exception, SystemExit) as error:
            outcomes.append((error, origin))
            raise

    function_seen: Any = wrap if implementation.options.get("wrapper") else answer
    function_seen.dispatchkit_impl = implementation.options
    return cast("Callable[..., Any]", function_seen)
