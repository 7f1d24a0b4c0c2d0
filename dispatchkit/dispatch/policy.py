"""The protocols of policies, and their read-only view of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import attrs

from dispatchkit.dispatch.decision import CalibrationRun, CellUpdate, Decision, Outcome, Reason
from dispatchkit.errors import PolicyError, format_value
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
    """The rule that determines which registry entries may be dispatched.

    Attributes:
        lazy: Whether keys without a graph may be dispatched, so that the executor captures them on
            first use.
    """

    def __init__(self, *, lazy: bool) -> None:
        self.lazy = lazy

    def allows(self, entry: GraphEntry) -> bool:
        """Return whether the key of an entry may be dispatched now."""
        return entry.state is KeyState.CAPTURED or (
            self.lazy and entry.state in (KeyState.DECLARED, KeyState.EVICTED)
        )


class GraphView:
    """A policy's read-only view: the declared keys, and whether each of them can run now.

    Attributes:
        config: The configuration in force.
        hidden: Registry keys that the view does not show. They were declared in advance for the
            next policy, or belong to the previous policy and will be removed.
        num_changes: Number of changes outside the registry that affect which keys can run, such as
            switching lazy capture on.
        may_split: Whether a mixed batch may be split over several graphs because its rows are
            independent. Graphs smaller than the batch can then be used, too.
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
        """Return the view itself, so that copying a policy does not copy graphs."""
        return self

    @property
    def revision(self) -> tuple[object, ...]:
        """A value that changes whenever the contents of the view change."""
        return self, self._registry.num_changes, self.hidden, self.num_changes

    def why_not(self, key: GraphKey) -> str | None:
        """Return the reason why a key cannot run now, or None if it can."""
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
        """Yield the keys that have a given mode and cover a batch, smallest first.

        Some of these keys may not be ready; check with ``is_ready`` or ``why_not``.
        """
        return (key for key in self._registry.covering(batch, mode) if key not in self.hidden)

    def why_no_key(self, batch: Batch) -> str:
        """Return why no key of an allowed mode covers a batch, as a ``Reason``."""
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


class Policy(Protocol):
    """An object that decides, without using the device, how batches run.

    ``decide`` is called once per cell of the dispatcher's table, on a cold path. The decision stays
    in the table until something changes that could affect it, such as the state of a graph. The
    decision must depend only on the batch, the view, and state learned by ``observe``.

    All other parts are optional and have their own protocols: ``DescribedPolicy``,
    ``LearningPolicy``, ``CalibratedPolicy``, ``PacedPolicy`` and ``ExplainingPolicy``.
    ``PolicyParts`` reads them when the policy is installed.
    """

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys to declare under a configuration."""
        ...

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the decision for a batch, or None to leave it to other policies.

        If no policy returns a decision, the batch runs eager with reason ``no_policy_answered``.
        """
        ...


class DescribedPolicy(Policy, Protocol):
    """A policy with a name and traits."""

    @property
    def name(self) -> str:
        """The name in counters and messages; by default the class name."""
        ...

    @property
    def traits(self) -> Collection[str]:
        """The properties the policy guarantees, from ``TRAITS``; the test kit checks them."""
        ...


class LearningPolicy(Policy, Protocol):
    """A policy that receives the outcomes of measured steps."""

    def observe(self, outcome: Outcome) -> Iterable[CellUpdate] | None:
        """Learn from an executed step; return updates for cells that change."""
        ...


class CalibratedPolicy(LearningPolicy, Protocol):
    """A learning policy that requests timed runs after ``GraphRunner.capture``."""

    def calibration_runs(self, graphs: GraphView) -> Iterable[CalibrationRun]:
        """Return the runs to time next; empty if no more runs are needed.

        The method is called after a capture, and again after ``observe`` has received the outcomes
        of the requested runs, until it returns no runs.
        """
        ...


class PacedPolicy(LearningPolicy, Protocol):
    """A learning policy that controls how many steps are measured."""

    @property
    def pace(self) -> int:
        """A divisor for the number of measured steps; 2 halves this number, 1 keeps it.

        The divisor must be a whole number of at least 1. The property is read at each measured
        step, so it may change while serving.
        """
        ...


class ExplainingPolicy(Policy, Protocol):
    """A policy that reports what it has learned."""

    def explain(self) -> Iterable[Any]:
        """Return attrs records, one per range of sizes; live reports show their fields."""
        ...


@attrs.frozen(eq=False)
class PolicyParts:
    """A policy and its optional parts, read when the policy is installed.

    Attributes:
        policy: The policy itself.
        name: The policy's ``name``, or its class name.
        traits: The traits that the policy claims.
        observe: The method ``observe``; None if the policy does not learn.
        calibration_runs: The method ``calibration_runs``; None if the policy does not define it.
        explain: The method ``explain``; None if the policy does not define it.
    """

    policy: Policy
    name: str
    traits: frozenset[str]
    observe: Callable[[Outcome], Iterable[CellUpdate] | None] | None
    calibration_runs: Callable[[GraphView], Iterable[CalibrationRun]] | None
    explain: Callable[[], Iterable[Any]] | None

    @classmethod
    def of(cls, policy: Policy, origin: str = "") -> PolicyParts:
        """Read and validate the parts of a policy.

        Args:
            policy: The policy whose parts are read.
            origin: Source of the policy, for error messages.

        Raises:
            PolicyError: An optional part is invalid.
        """
        name = policy_name(policy)
        methods: dict[str, Any] = {}
        for method in ("observe", "calibration_runs", "explain"):
            found = methods[method] = getattr(policy, method, None)
            if found is not None and not callable(found):
                problem = f"is {format_value(found)}; it must be a method, or be omitted."
                raise PolicyError(name, method, problem, origin=origin, value=found)
        traits = getattr(policy, "traits", ())
        if isinstance(traits, str) or not isinstance(traits, Collection):
            problem = (
                f"is {format_value(traits)}; it must be a set of names, such as "
                f"frozenset({{'monotone'}})."
            )
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
    """Return why a policy's ``pace`` is invalid; empty if it is valid."""
    number = whole_number(pace)
    if number is not None and number >= 1:
        return ""
    return f"is {format_value(pace)}; it must be a whole number of at least 1."


def policy_name(policy: object) -> str:
    """Return a policy's ``name``, or its class name."""
    return str(getattr(policy, "name", "") or type(policy).__name__)


def policy_traits(policy: object) -> frozenset[str]:
    """Return the traits that a policy claims."""
    return frozenset(getattr(policy, "traits", ()))
