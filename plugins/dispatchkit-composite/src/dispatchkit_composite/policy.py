"""The policy ``composite``, which asks several policies in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from dispatchkit import (
    Batch,
    CellUpdate,
    Decision,
    DispatchConfig,
    GraphKey,
    GraphView,
    Outcome,
    Policy,
    RuntimeMode,
)
from dispatchkit.dispatch import broken_constraint, policy_name, policy_traits
from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import check_count, check_instance
from dispatchkit.plugins import PluginSet, load_plugins

from dispatchkit_composite.members import (
    Member,
    MemberReport,
    MemberState,
    member_state,
    members_from_pyproject,
    read_members,
)

__all__ = ["CompositePolicy"]

_log = logging.getLogger("dispatchkit.composite")


class CompositePolicy:
    """A policy that asks its members in order of priority; the first answer decides.

    If a member raises or violates a hard constraint, the fault is counted, and the next member is
    asked. After ``max_faults`` consecutive faults in one method, the member is suspended. A warning
    is logged for the first fault of a member, and when it is suspended. Decisions contain the name
    of the member that made them.

    Args:
        members: List of members: ``Member`` records, dicts with the attributes of ``Member``, or
            strings of the form ``name[=policy][:priority]``. A single string may list members
            separated by commas. By default, the only member is ``vllm``.
        pyproject: Path of a TOML file that lists the members, instead of ``members``.
        max_faults: Number of consecutive faults in one method after which a member is suspended.
        plugins: Plugins that provide policies by name; by default, the installed plugins.

    Raises:
        ConfigError: A member is invalid, two members have the same name, ``members`` and
            ``pyproject`` are both given, or the file is invalid.
        UnknownNameError: A member refers to a policy that does not exist.
    """

    name = "composite"

    def __init__(
        self,
        members: str | Iterable[Member | str | Mapping[str, Any]] | None = None,
        *,
        pyproject: str | Path | None = None,
        max_faults: int = 3,
        plugins: PluginSet | None = None,
    ) -> None:
        if members is not None and pyproject is not None:
            raise ConfigError("pyproject", pyproject, "omitted if `members` is given")
        self.max_faults = check_count(max_faults, "max_faults")
        if plugins is not None:
            check_instance(plugins, PluginSet, "plugins", "Pass the result of load_plugins().")
        self._members: tuple[MemberState, ...] = ()
        self._graphs: GraphView | None = None
        if pyproject is not None:
            listed = members_from_pyproject(pyproject)
        else:
            listed = read_members("vllm" if members is None else members)
        if plugins is None and any(isinstance(member.policy, str) for member in listed):
            plugins = load_plugins()
        for member in listed:
            self._insert(member_state(member, plugins))

    # -- members ------------------------------------------------------------------------

    @property
    def members(self) -> tuple[MemberReport, ...]:
        """The members in the order in which they are asked."""
        return tuple(
            MemberReport(
                one.name,
                one.priority,
                policy_name(one.policy),
                one.faults,
                one.last_fault,
                one.suspended,
            )
            for one in self._members
        )

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the composite.

        With one member, these are the member's traits. With several members, the only trait is
        ``stateless``, if all members have it.
        """
        claimed = [policy_traits(one.policy) for one in self._members]
        if len(claimed) == 1:
            return claimed[0]
        return frozenset({"stateless"}).intersection(*claimed) if claimed else frozenset()

    def add(self, name: str, policy: Policy | str = "", priority: int = 0, **options: Any) -> None:
        """Add a member. Call ``dispatcher.swap()`` afterwards to empty the table.

        Raises:
            ConfigError: An argument is invalid, or the name is already used.
            UnknownNameError: ``policy`` (by default, ``name``) is not the name of a policy.
        """
        self._insert(member_state(Member(name, policy, priority, options)))

    def remove(self, name: str) -> None:
        """Remove a member. Call ``dispatcher.swap()`` afterwards to empty the table.

        Raises:
            UnknownNameError: No member has this name.
        """
        gone = self._find(name)
        self._members = tuple(one for one in self._members if one is not gone)

    def resume(self, name: str) -> None:
        """Resume a suspended member. Existing decisions remain until the next swap.

        Raises:
            UnknownNameError: No member has this name.
        """
        one = self._find(name)
        one.suspended = False
        one.faults_in_a_row.clear()

    def _insert(self, new: MemberState) -> None:
        if new.policy is self:
            allowed = "a policy other than the composite itself"
            raise ConfigError(
                f"member {new.name!r}",
                new.policy,
                allowed,
                "Pass a different policy.",
                message=f"Member {new.name!r} is the composite itself.",
            )
        if any(one.name == new.name for one in self._members):
            raise ConfigError(
                "member name",
                new.name,
                "a name that no other member has",
                "Pass a different name.",
                message=f"There is already a member named {new.name!r}.",
            )
        # Sorting is stable, so members of equal priority stay in the order in which they were
        # added.
        self._members = tuple(sorted((*self._members, new), key=lambda one: -one.priority))

    def _find(self, name: str) -> MemberState:
        for one in self._members:
            if one.name == name:
                return one
        raise UnknownNameError("member", name, [one.name for one in self._members])

    # -- the policy ---------------------------------------------------------------------

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of all members that are not suspended, in order of priority."""
        keys: dict[GraphKey, None] = {}
        for one in self._active():
            keys.update(dict.fromkeys(self._guarded(one, "declare", _checked_keys, config) or ()))
        return list(keys)

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the members' first answer that satisfies the hard constraints.

        If a batch must not run eager, an eager answer is returned only if no member chooses a
        graph.
        """
        self._graphs = graphs
        refused: Decision | None = None
        for one in self._active():
            answer = self._ask(one, batch, graphs)
            if answer is None:
                continue
            if answer.key is not None or batch.allows(RuntimeMode.NONE):
                return answer
            # The member chose eager, which the batch does not allow. This is not a fault: a later
            # member may choose a graph.
            refused = refused or answer
        return refused

    @property
    def observe(self) -> Callable[[Outcome], list[CellUpdate]] | None:
        """Function that receives outcomes; None if no member learns."""
        return self._observe if any(_learns(one) for one in self._members) else None

    def _observe(self, outcome: Outcome) -> list[CellUpdate]:
        """Return the table updates that learning members request after an outcome.

        For all members except the deciding member, the outcome has ``won`` set to False.
        """
        who, _, rest = outcome.decision.policy.partition("/")
        updates = []
        for one in self._active():
            if not _learns(one):
                continue
            passed = attrs.evolve(outcome, won=outcome.won and who == one.name)
            if passed.won:
                label = rest or policy_name(one.policy)
                passed = attrs.evolve(passed, decision=attrs.evolve(passed.decision, policy=label))
            answer = self._guarded(one, "observe", _checked_updates, passed)
            updates += [kept for update in answer or () if (kept := self._permitted(one, update))]
        return updates

    def calibration_runs(self, graphs: GraphView) -> list[Any]:
        """Return the calibration runs that members request after a capture."""
        runs: list[Any] = []
        for one in self._active():
            if hasattr(one.policy, "calibration_runs"):
                asked = self._guarded(one, "calibration_runs", _requested_runs, graphs)
                runs += [run for run in asked or () if run not in runs]
        return runs

    def __repr__(self) -> str:
        listed = ", ".join(f"{one.name}:{one.priority}" for one in self._members)
        return f"CompositePolicy({listed!r})"

    # -- internals ----------------------------------------------------------------------

    def _active(self) -> Iterator[MemberState]:
        return (one for one in self._members if not one.suspended)

    def _ask(self, one: MemberState, batch: Batch, graphs: GraphView) -> Decision | None:
        answer: Decision | None = self._guarded(one, "decide", _checked_decision, batch, graphs)
        return None if answer is None else attrs.evolve(answer, policy=_label(one, answer))

    def _permitted(self, one: MemberState, update: CellUpdate) -> CellUpdate | None:
        """Return the update if the member may make it, otherwise None.

        A member may change the cells that it decides, and may empty any range of cells.
        """
        answer, graphs = update.decision, self._graphs
        if answer is None and update.up_to:
            return update  # harmless, because the deciding member makes the same decision again
        if graphs is None:
            return None
        for other in self._active():
            if other is one:
                break
            if self._ask(other, update.batch, graphs) is not None:
                return None
        if answer is None:
            return update
        return attrs.evolve(update, decision=attrs.evolve(answer, policy=_label(one, answer)))

    def _guarded(self, one: MemberState, method: str, ask: Callable[..., Any], *args: Any) -> Any:
        try:
            answer = ask(one.policy, *args)
        except Exception as error:  # noqa: BLE001 - any exception of a member is a fault
            self._record_fault(one, method, f"{type(error).__name__}: {error}")
            return None
        one.faults_in_a_row[method] = 0
        return answer

    def _record_fault(self, one: MemberState, method: str, problem: str) -> None:
        one.faults += 1
        one.faults_in_a_row[method] += 1
        one.last_fault = f"{method}: {problem}"
        one.suspended = one.faults_in_a_row[method] >= self.max_faults
        if one.faults == 1 or one.suspended:
            end = (
                f" The member is suspended until you call resume({one.name!r})."
                if one.suspended
                else ""
            )
            fault = one.last_fault.removesuffix(".")
            _log.warning("Composite member %r failed in %s.%s", one.name, fault, end)


def _learns(one: MemberState) -> bool:
    return callable(getattr(one.policy, "observe", None))


def _checked_keys(policy: Policy, config: DispatchConfig) -> list[GraphKey]:
    keys = list(policy.declare(config))
    for key in keys:
        if not isinstance(key, GraphKey):
            raise TypeError(f"declare() must return GraphKeys, got {key!r}")
    return keys


def _checked_decision(policy: Policy, batch: Batch, graphs: GraphView) -> Decision | None:
    answer = policy.decide(batch, graphs)
    problem = None if answer is None else broken_constraint(answer, batch, graphs)
    if problem is not None:
        raise ValueError(problem)
    return answer


def _checked_updates(policy: Any, outcome: Outcome) -> list[CellUpdate]:
    updates = list(policy.observe(outcome) or ())
    for update in updates:
        if not isinstance(update, CellUpdate):
            raise TypeError(f"observe() must return CellUpdates, got {update!r}")
    return updates


def _requested_runs(policy: Any, graphs: GraphView) -> list[Any]:
    return list(policy.calibration_runs(graphs))


def _label(one: MemberState, answer: Decision) -> str:
    return f"{one.name}/{answer.policy}" if answer.policy else one.name
