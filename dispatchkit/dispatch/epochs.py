"""Epochs: the policy, configuration and table in force, and their swaps.

An executor swaps in four stages: ``propose``, ``reserve``, ``install`` and ``show_all``. Between
``reserve`` and ``install``, it can capture graphs for the new keys. The new keys (before
``install``) and the keys about to be removed (after ``install``) are hidden from the policy in
force.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs

from dispatchkit.dispatch.acceptance import Proposal, trial_keys
from dispatchkit.dispatch.axes import declares_axes, expand_keys
from dispatchkit.dispatch.policy import GraphView, Policy, PolicyParts
from dispatchkit.dispatch.table import Table
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.registry import GraphEntry, GraphRegistry


@attrs.frozen(eq=False)
class Epoch:
    """The policy, keys and table in force between two swaps.

    Attributes:
        proposal: The policy, its configuration and its keys.
        graphs: The policy's view of the registry.
        table: The decisions made so far.
        first_revision: Decisions with smaller revisions are from earlier policies.
    """

    proposal: Proposal
    graphs: GraphView
    table: Table
    first_revision: int


class Epochs:
    """The sequence of policies and configurations that share one registry.

    Args:
        registry: The registry of the keys. Callers must hold its lock while they change epochs.
        modes: Runtime modes that the executor supports.
        is_dispatchable: Function that returns whether a declared key may run now.
        revisions: Iterator that supplies the revisions of decisions, in ascending order.
        may_split: Whether mixed batches may be split over several graphs.

    Attributes:
        current: The epoch in force; unset before the first ``install``.
        hidden: Keys of the registry that are hidden from the policy in force.
    """

    current: Epoch

    def __init__(
        self,
        registry: GraphRegistry,
        modes: frozenset[RuntimeMode],
        is_dispatchable: Callable[[GraphEntry], bool],
        revisions: itertools.count[int],
        *,
        may_split: bool = False,
    ) -> None:
        self.hidden: frozenset[GraphKey] = frozenset()
        self._registry, self._modes = registry, modes
        self._is_dispatchable, self._revisions = is_dispatchable, revisions
        self._may_split = may_split
        self._declared: frozenset[GraphKey] = frozenset()

    def propose(self, policy: Policy, config: DispatchConfig, origin: str = "") -> Proposal:
        """Try a policy and configuration; return a proposal to install.

        The trial calls ``declare`` and ``decide``. The policy in force is not affected if
        ``policy`` is a different object. To propose the policy in force again, hold the registry's
        lock, because other threads may call the policy.

        Raises:
            ConfigError: ``policy`` has neither ``declare`` nor ``decide``, or ``config`` is not a
                ``DispatchConfig``.
            PolicyError: The policy did not pass the trial.
        """
        keys = trial_keys(policy, config, origin, self._modes, may_split=self._may_split)
        adds_axes = bool(config.axes) and not declares_axes(keys)
        if adds_axes:
            keys = expand_keys(keys, config)
        parts = PolicyParts.of(policy, origin)
        return Proposal(parts, config, origin, tuple(dict.fromkeys(keys)), adds_axes)

    def reserve(self, proposal: Proposal) -> list[GraphKey]:
        """Declare the new keys of a proposal, hide them, and return them."""
        new = [key for key in proposal.keys if key not in self._registry]
        self._hide(self.hidden.union(new))
        self._registry.declare(new)
        return new

    def retire(self, proposal: Proposal) -> frozenset[GraphKey]:
        """Hide and return the keys of earlier policies that a proposal does not declare."""
        retired = self._declared.difference(proposal.keys)
        self.hidden |= retired
        self._declared -= retired
        return retired

    def install(self, proposal: Proposal, number: int) -> Epoch:
        """Install a proposal with an empty table and return its epoch."""
        first_revision = 0
        if number:
            first_revision = self.current.first_revision
            if proposal.policy is not self.current.proposal.policy:
                first_revision = next(self._revisions)
        self._registry.declare(proposal.keys)
        self._declared = self._declared.union(proposal.keys)
        self.hidden = self.hidden.difference(proposal.keys)
        view = GraphView(
            self._registry,
            proposal.config,
            modes=self._modes,
            dispatchable=self._is_dispatchable,
            hidden=self.hidden,
            may_split=self._may_split,
        )
        table = Table(proposal.config, number)
        self.current = Epoch(proposal, view, table, first_revision)
        return self.current

    def show_all(self) -> None:
        """Show all keys of the registry to the policy in force."""
        self._hide(frozenset())

    def _hide(self, keys: frozenset[GraphKey]) -> None:
        self.hidden = self.current.graphs.hidden = keys
