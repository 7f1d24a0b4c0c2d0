"""What is in force in a dispatcher, and how another policy or configuration takes its place.

An executor swaps in parts, so that it can capture the new graphs in between: propose, reserve,
install, show all. What is captured ahead, or about to go, is hidden from the policy in force.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from dispatchkit.dispatch.acceptance import Proposal, accepted_keys
from dispatchkit.dispatch.axes import expanded, knows_axes
from dispatchkit.dispatch.policy import GraphView, Policy, policy_name
from dispatchkit.dispatch.table import Table
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.registry import GraphEntry, GraphRegistry


class Epochs:
    """The part of Dispatcher that puts policies and configurations in force."""

    config: DispatchConfig
    registry: GraphRegistry
    graphs: GraphView
    _lock: threading.RLock
    _modes: frozenset[RuntimeMode]
    _on_swap: Callable[[str, str | None, int], None] | None
    _policy: Policy
    _origin: str
    _adds_axes: bool
    _hidden: frozenset[GraphKey]
    _revisions: itertools.count[int]
    _since: int
    _declared: frozenset[GraphKey]
    _table: Table
    _is_dispatchable: Callable[[GraphEntry], bool]

    def swap(
        self, policy: Policy | None = None, config: DispatchConfig | None = None, origin: str = ""
    ) -> int:
        """Install another policy or configuration with an empty table: a new epoch.

        Steps that already have their decision finish under it. If the new policy is
        refused, the old one stays as it was.

        Returns:
            The number of the new epoch.
        """
        with self._lock:
            origin = self._origin if policy is None else origin
            new_policy = self._policy if policy is None else policy
            new_config = self.config if config is None else config
            proposal = self.propose(new_policy, new_config, origin)
            previous, epoch = policy_name(self._policy), self._table.epoch + 1
            self._install(proposal, epoch)
        if self._on_swap is not None:
            self._on_swap(policy_name(new_policy), previous, epoch)
        return epoch

    # -- a swap in parts ----------------------------------------------------------------

    def propose(self, policy: Policy, config: DispatchConfig, origin: str = "") -> Proposal:
        """Return a policy and configuration that may be installed, after a trial.

        Nothing changes here; the policy must be another object than the one in force, which
        declares and decides in the trial.

        Raises:
            PolicyError: The policy is refused.
        """
        keys = accepted_keys(policy, config, origin, self._modes)
        adds_axes = bool(config.axes) and not knows_axes(keys)
        if adds_axes:
            keys = expanded(keys, config)
        return Proposal(policy, config, origin, tuple(dict.fromkeys(keys)), adds_axes)

    def reserve(self, proposal: Proposal) -> list[GraphKey]:
        """Declare a proposal's keys, unseen by the policy in force; return those that are new.

        They can be captured from now on, and are neither chosen nor answered about.
        """
        with self._lock:
            new = [key for key in proposal.keys if key not in self.registry]
            self._hide(self._hidden.union(new))
            self.registry.declare(new)
        return new

    def install(self, proposal: Proposal) -> list[GraphKey]:
        """Put a proposal in force, at once and with an empty table: a new epoch.

        ``on_swap`` is not told; the caller does that once it holds no lock.

        Returns:
            The keys that policies before had declared and this one does not. They are in the
            registry still, unseen; the caller is to forget them.
        """
        with self._lock:
            retired = self._declared.difference(proposal.keys)
            self._hidden |= retired
            self._declared -= retired
            self._install(proposal, self._table.epoch + 1)
        return [key for key in retired if key in self.registry]

    def show_all(self) -> None:
        """Hide no key any more: a proposal was given up, or what retired is forgotten."""
        with self._lock:
            self._hide(frozenset())

    # -- inside -------------------------------------------------------------------------

    def _install(self, proposal: Proposal, epoch: int) -> None:
        if epoch and proposal.policy is not self._policy:
            self._since = next(self._revisions)  # decisions made earlier were another policy's
        self._adds_axes = proposal.adds_axes
        self.registry.declare(proposal.keys)
        table = Table(proposal.config, epoch)
        self._policy, self._origin = proposal.policy, proposal.origin
        self.config = proposal.config
        self._declared = self._declared.union(proposal.keys)
        self._hidden = self._hidden.difference(proposal.keys)
        self.graphs = GraphView(
            self.registry,
            self.config,
            modes=self._modes,
            dispatchable=self._is_dispatchable,
            hidden=self._hidden,
        )
        self._table = table
        self._by_reqs = table.by_reqs
        self._rows = table.rows  # last, and at once: readers see the old epoch or the new

    def _hide(self, keys: frozenset[GraphKey]) -> None:
        self._hidden = self.graphs.hidden = keys
