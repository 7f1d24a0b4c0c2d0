"""The protocols of policies, and the read-only view of the graphs they decide from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import attrs

from dispatchkit.dispatch.decision import CalibrationRun, CellUpdate, Decision, Outcome, Reason
from dispatchkit.errors import PolicyError
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import whole_number
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState

TRAITS = frozenset({"smallest_bucket", "monotone", "order", "stateless", "all_keys_reachable"})

_WHY_NOT = {
    KeyState.DECLARED: Reason.NOT_CAPTURED,
    KeyState.FAILED: Reason.CAPTURE_FAILED,
    KeyState.EVICTED: Reason.EVICTED,
    KeyState.STALE: Reason.STALE,
}


class Readiness:
    """Determine which entries of the registry may be dispatched.

    Attributes:
        lazy: Keys without a graph may be dispatched, too: the executor captures them on first use.
    """

    def __init__(self, *, lazy: bool) -> None:
        self.lazy = lazy

    def allows(self, entry: GraphEntry) -> bool:
        """Return whether a key may be dispatched now."""
        return entry.state is KeyState.CAPTURED or (
            self.lazy and entry.state in (KeyState.DECLARED, KeyState.EVICTED)
        )


class GraphView:
    """A policy's view of the graphs: which keys exist and which can run now.

    Attributes:
        config: The configuration in force.
        hidden: Keys of the registry that it does not show: those captured ahead for the next
            policy, and those of the previous policy that are about to be removed.
        num_changes: How often the set of runnable keys changed other than by changes of the
            registry.
        may_split: A mixed batch may be split over several graphs, since its rows are independent.
            Graphs that are too small for a batch can then be used, too.
    """

    def __init__(
        self,
        registry: GraphRegistry,
        config: DispatchConfig,
        *,
        modes: frozenset[RuntimeMode],
        dispatchable: Callable[[GraphEntry], bool],
        hidden: frozenset[GraphKey] = frozenset(),
        may_split: bool = False,
    ) -> None:
        self.config = config
        self.may_split: bool = may_split
        self.hidden = hidden
        self.num_changes: int = 0
        self._registry = registry
        self._modes = modes
        self._dispatchable = dispatchable

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphView:
        """Return itself: a copy of a policy that holds the view must not copy the graphs."""
        return self

    @property
    def revision(self) -> tuple[object, ...]:
        """A value that stays equal as long as the view's contents do not change."""
        return self, self._registry.num_changes, self.hidden, self.num_changes

    def why_not(self, key: GraphKey) -> str | None:
        """Return why a key cannot run now, as a reason to count; None if it can."""
        entry = self._registry.get(key)
        if entry is None or key in self.hidden:
            return Reason.NO_KEY
        if key.mode not in self._modes:
            return Reason.PIECEWISE_UNSUPPORTED
        if not self._registry.is_enabled(key):
            return Reason.DISABLED
        if self._dispatchable(entry):
            return None
        return _WHY_NOT.get(entry.state, Reason.NOT_CAPTURED)

    def is_ready(self, key: GraphKey) -> bool:
        """Return whether a key can run now."""
        return self.why_not(key) is None

    def covering(self, batch: Batch, mode: RuntimeMode) -> Iterator[GraphKey]:
        """Yield the known keys of a mode that can compute the batch, smallest first.

        They may not be ready; check with ``is_ready`` or ``why_not``.
        """
        return (key for key in self._registry.covering(batch, mode) if key not in self.hidden)

    def why_no_key(self, batch: Batch) -> str:
        """Return why no key of an allowed mode covers a batch, as a reason to count."""
        mode = self.config.mode
        kind = mode.decode_mode() if batch.uniform else mode.mixed_mode()
        if not kind or not self.config.sizes:
            return Reason.MODE_NONE
        for other in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if not batch.allows(other) and any(self.covering(batch, other)):
                return Reason.CEILING
        is_above = batch.num_tokens > self.config.max_capture_size
        return Reason.ABOVE_LARGEST if is_above else Reason.NO_KEY

    def __iter__(self) -> Iterator[GraphKey]:
        return (key for key in self._registry if key not in self.hidden)

    def __contains__(self, key: object) -> bool:
        return key in self._registry and key not in self.hidden

    def __len__(self) -> int:
        return sum(1 for _ in self)


@runtime_checkable
class Policy(Protocol):
    """A rule that decides how batches run. It never touches a device.

    ``decide`` is called once per cell of the dispatcher's table, on a cold path. Its answer is
    served until something happens that could change it. It must depend only on the batch, the view
    and what ``observe`` has learned.

    Everything else is optional, and each part has its own protocol: ``DescribedPolicy``,
    ``LearningPolicy``, ``CalibratedPolicy``, ``PacedPolicy`` and ``ExplainingPolicy``.
    ``PolicyParts`` reads them when the policy is installed.
    """

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys that may exist under a configuration."""
        ...

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the decision for a batch, or None to leave it to others."""
        ...


@runtime_checkable
class DescribedPolicy(Policy, Protocol):
    """A policy that states its name, or properties it guarantees."""

    @property
    def name(self) -> str:
        """The name in counters and messages; by default the name of the class."""
        ...

    @property
    def traits(self) -> Collection[str]:
        """Properties it guarantees, from ``TRAITS``; the test kit checks them."""
        ...


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that receives the outcomes of measured steps."""

    def observe(self, outcome: Outcome) -> Iterable[CellUpdate] | None:
        """Learn from an executed step; return updates for the cells whose answers change."""
        ...


@runtime_checkable
class CalibratedPolicy(LearningPolicy, Protocol):
    """A learning policy that requests timed runs before the first batch is served."""

    def calibration_runs(self, graphs: GraphView) -> Iterable[CalibrationRun]:
        """Return the runs to time now; empty once it has learned enough.

        It is called after a capture, and again each time ``observe`` has received the outcomes of
        the requested runs, until it returns no runs.
        """
        ...


@runtime_checkable
class PacedPolicy(LearningPolicy, Protocol):
    """A learning policy that adjusts how many steps are measured."""

    @property
    def pace(self) -> int:
        """Factor, at least 1, by which fewer steps than usual are measured.

        It is read at each measured step, so it may change while serving.
        """
        ...


@runtime_checkable
class ExplainingPolicy(Policy, Protocol):
    """A policy that reports what it has learned."""

    def explain(self) -> Iterable[Any]:
        """Return one attrs record for each range of sizes; live reports show their fields."""
        ...


@attrs.frozen(eq=False)
class PolicyParts:
    """The optional parts of a policy, read when it is installed.

    Attributes:
        policy: The policy.
        name: Its ``name``, or the name of its class.
        traits: The traits it claims.
        observe: Its method of that name; None if it does not learn.
        calibration_runs: Its method of that name; None if it requests no runs.
        explain: Its method of that name; None if it has nothing to report.
    """

    policy: Policy
    name: str
    traits: frozenset[str]
    observe: Callable[[Outcome], Iterable[CellUpdate] | None] | None
    calibration_runs: Callable[[GraphView], Iterable[CalibrationRun]] | None
    explain: Callable[[], Iterable[Any]] | None

    @classmethod
    def of(cls, policy: Policy, origin: str = "") -> PolicyParts:
        """Read the parts of a policy.

        Args:
            policy: The policy.
            origin: Where it comes from, for error messages.

        Raises:
            PolicyError: An optional part is invalid.
        """
        name = policy_name(policy)
        methods: dict[str, Any] = {}
        for method in ("observe", "calibration_runs", "explain"):
            found = methods[method] = getattr(policy, method, None)
            if found is not None and not callable(found):
                problem = f"is {found!r:.60}; make it a method, or leave it out."
                raise PolicyError(name, method, problem, origin=origin, value=found)
        traits = getattr(policy, "traits", ())
        if isinstance(traits, str) or not isinstance(traits, Collection):
            problem = f"is {traits!r:.60}; give a set of names, such as frozenset({{'monotone'}})."
            raise PolicyError(name, "traits", problem, origin=origin, value=traits)
        parts = cls(policy, name, frozenset(traits), **methods)
        fault = pace_fault(parts.pace)
        if fault:
            raise PolicyError(name, "pace", fault, origin=origin, value=parts.pace)
        return parts

    @property
    def learns(self) -> bool:
        """Whether the policy receives outcomes."""
        return self.observe is not None

    @property
    def pace(self) -> Any:
        """The policy's current ``pace``, not validated; 1 if it has none."""
        return getattr(self.policy, "pace", 1)


def pace_fault(pace: object) -> str:
    """Describe what is wrong with a policy's ``pace``; empty if it is valid."""
    number = whole_number(pace)
    if number is not None and number >= 1:
        return ""
    return f"is {pace!r:.60}; it must be a whole number of 1 or more."


def policy_name(policy: object) -> str:
    """Return a policy's ``name``, or the name of its class."""
    return str(getattr(policy, "name", "") or type(policy).__name__)


def policy_traits(policy: object) -> frozenset[str]:
    """Return the traits a policy claims."""
    return frozenset(getattr(policy, "traits", ()))
