"""The protocol of a policy, and the read-only view of the registry it decides from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from dispatchkit.dispatch.decision import CellUpdate, Decision, Outcome, Reason
from dispatchkit.keys.batch import Batch, GraphKey
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


class GraphView:
    """What a policy may know of the graphs: which keys exist and which can run now.

    Attributes:
        config: The configuration in force.
        hidden: Keys of the registry that it does not show: those captured ahead for the next
            policy, and those of the last one that are about to go.
        num_changes: How often what may run has changed apart from the registry.
    """

    def __init__(
        self,
        registry: GraphRegistry,
        config: DispatchConfig,
        *,
        modes: frozenset[RuntimeMode],
        dispatchable: Callable[[GraphEntry], bool],
        hidden: frozenset[GraphKey] = frozenset(),
    ) -> None:
        self.config = config
        self.hidden = hidden
        self.num_changes: int = 0
        self._registry = registry
        self._modes = modes
        self._dispatchable = dispatchable

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphView:
        """Copy a policy that keeps it, not the graphs that it shows."""
        return self

    @property
    def revision(self) -> tuple[object, ...]:
        """What stays equal as long as everything that it shows stays as it is."""
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

        They need not be ready; ask ``is_ready`` or ``why_not``.
        """
        return (key for key in self._registry.covering(batch, mode) if key not in self.hidden)

    def __iter__(self) -> Iterator[GraphKey]:
        return (key for key in self._registry if key not in self.hidden)

    def __contains__(self, key: object) -> bool:
        return key in self._registry and key not in self.hidden

    def __len__(self) -> int:
        return sum(1 for _ in self)


@runtime_checkable
class Policy(Protocol):
    """A rule that decides. It never touches a device.

    ``decide`` is asked once for each cell of the dispatcher's table, on a cold path, and
    its answer is then served until something that could change it happens. It must be a
    function of the batch, the view and what ``observe`` has taught.

    A policy that learns also has ``observe(outcome)``, and one with lasting properties to
    be tested names them in ``traits``: ``smallest_bucket``, ``monotone``, ``order``,
    ``stateless``, ``all_keys_reachable``.
    """

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys that may exist under a configuration."""
        ...

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the decision for a batch, or None for "not mine"."""
        ...


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that is told what came of its decisions."""

    def observe(self, outcome: Outcome) -> Iterable[CellUpdate] | None:
        """Learn from an executed step; return the cells whose answer changes."""
        ...


def policy_name(policy: object) -> str:
    """Return the name a policy goes by: its ``name``, or that of its class."""
    return str(getattr(policy, "name", "") or type(policy).__name__)


def policy_traits(policy: object) -> frozenset[str]:
    """Return the traits a policy claims."""
    return frozenset(getattr(policy, "traits", ()))
