"""Swaps while serving: another policy, other options, sizes or limits, without a lost step.

A swap has three parts. What is asked for is checked and tried, and nothing changes. New graphs
are captured ahead, one at a time between steps, unseen by the policy that is still in force.
Then, between two steps, the new policy with an empty table takes over, and what only the old
one used is let go of. Whatever fails before that leaves everything as it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs

from dispatchkit.dispatch import Policy, policy_name
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import SwapError
from dispatchkit.execute.capture.report import largest_first
from dispatchkit.execute.live.swap_requests import UNCHANGED, Change, SwapRequests, no_change
from dispatchkit.execute.replay.planner import Planner
from dispatchkit.execute.replay.timing import Timings
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.options import MemoryOptions
from dispatchkit.registry import KeyState

# How often what was captured ahead may be given up again (weights replaced, a byte budget)
# before the swap is.
_MAX_ROUNDS = 3


@attrs.frozen(kw_only=True)
class SwapReport:
    """What a swap did.

    Attributes:
        epoch: Number of the table in force.
        policy: Name of the policy in force.
        previous: Name of the policy before.
        added: Keys that are new.
        captured: Those of them that have a graph.
        removed: Keys that are gone, with their graphs.
        seconds: Time of the whole swap.
        paused_s: Time of it in which no step could run, but for captures.
        num_bytes: Bytes that the graphs take now.
    """

    epoch: int
    policy: str
    previous: str
    added: tuple[GraphKey, ...]
    captured: tuple[GraphKey, ...]
    removed: tuple[GraphKey, ...]
    seconds: float
    paused_s: float
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: policy {self.policy} (before: {self.previous}), "
            f"{len(self.added)} keys added ({len(self.captured)} captured ahead), "
            f"{len(self.removed)} removed"
        )


class Swapping(SwapRequests):
    """The part of GraphRunner that changes what decides, while steps run."""

    timings: Timings
    _planner: Planner

    def swap(
        self,
        *,
        policy: str | Policy | None = None,
        policy_options: dict[str, Any] | None = None,
        config: DispatchConfig | None = None,
        sizes: Sequence[int] | None = None,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        mode: CUDAGraphMode | str | None = None,
        max_graphs: int | None = UNCHANGED,
        max_bytes: int | None = UNCHANGED,
        eviction: str | None = None,
        ahead: bool | None = None,
    ) -> SwapReport:
        """Change what decides, or its limits, while other threads run steps.

        Every step runs exactly once: those that have begun under what was in force, those that
        begin later under the new. Graphs that both use stay. While new graphs are captured,
        old and new together are held to the larger of the old and the new limits.

        Args:
            policy: Name of the policy, or an object that is in force nowhere; by default a copy
                of the one in force, with what it has learnt.
            policy_options: Options for a policy by name; alone, for the one in force.
            config: A whole configuration, in place of the next four.
            sizes: Capture sizes.
            max_num_tokens: Largest batch in tokens; sizes stay as they are.
            max_num_seqs: Most requests of a batch.
            mode: Which runtime modes decode and mixed batches use.
            max_graphs: Most live graphs; None for no limit.
            max_bytes: Most bytes of graph memory; None for no limit.
            eviction: ``lru`` or ``benefit``.
            ahead: Capture new graphs before they can be chosen; by default unless the runner
                is lazy. False: their steps run eager until ``capture()``, or capture them
                where the runner is lazy.

        Returns:
            What changed.

        Raises:
            SwapError: A new graph could not be captured, or finds no room. As with all other
                errors here, what was in force stays so.
            ConfigError: A setting cannot be used, nothing is asked for, or a size is larger
                than the static inputs have room for.
            UnknownNameError: No policy goes by that name.
            PolicyError: The policy is refused.
            RegistryError: The runner is frozen, and new graphs would be needed.
        """
        with self._swap_lock:
            start = time.perf_counter()
            asked = self._asked_config(
                config,
                capture_sizes=sizes,
                max_num_tokens=max_num_tokens,
                max_num_seqs=max_num_seqs,
                mode=mode,
            )
            budget = self._budget(max_graphs, max_bytes, eviction)
            change = self._checked(policy, policy_options, asked, budget)
            if change.proposal is None and budget == self.lifecycle.budget:
                raise no_change()
            previous = self.dispatcher.policy_name
            added = self._capture_ahead(change, not self.lifecycle.lazy if ahead is None else ahead)
            with self._lock:
                begun = time.perf_counter()
                removed = self._switch(change)
            end = time.perf_counter()
            name, epoch = self.dispatcher.policy_name, self.dispatcher.epoch
        if change.proposal is not None:
            self._notices.policy_swapped(name, previous, epoch)
        return SwapReport(
            epoch=epoch,
            policy=name,
            previous=previous,
            added=tuple(added),
            captured=tuple(key for key in added if self._is_captured(key)),
            removed=tuple(removed),
            seconds=end - start,
            paused_s=end - begun,
            num_bytes=self._lane.num_bytes(),
        )

    # -- new graphs ---------------------------------------------------------------------

    def _capture_ahead(self, change: Change, ahead: bool) -> list[GraphKey]:
        """Declare the new keys and capture them, between steps; on failure undo both."""
        proposal, before = change.proposal, self.lifecycle.budget
        if proposal is None:
            return []
        with self._lock:
            new = sorted(self.dispatcher.reserve(proposal), key=largest_first)
            self.lifecycle.set_budget(_wider(before, change.budget))
        try:
            if ahead:
                self._capture_all_of(new, proposal)
            # What was measured so far is the old policy's.
            self.timings.drain()
        except BaseException:
            with self._lock:
                self.lifecycle.forget(new)
                self.dispatcher.show_all()
                self.lifecycle.set_budget(before)
            raise
        return new

    def _capture_all_of(self, keys: list[GraphKey], proposal: Proposal) -> None:
        for _ in range(_MAX_ROUNDS):
            missing = [key for key in keys if self.lifecycle.may_capture(key)]
            if not missing:
                return
            for key in missing:
                self._capture_one(key, proposal)
                _let_steps_run()
        raise self._refusal(proposal, {str(missing[0]): "was given up while others were captured"})

    def _capture_one(self, key: GraphKey, proposal: Proposal) -> None:
        with self._lock:
            report = self.lifecycle.capture_all([key])
            if problems := {**report.failed, **report.skipped}:
                raise self._refusal(proposal, {str(one): why for one, why in problems.items()})

    def _is_captured(self, key: GraphKey) -> bool:
        entry = self.registry.get(key)
        return entry is not None and entry.state is KeyState.CAPTURED

    def _refusal(self, proposal: Proposal, failed: dict[str, str]) -> SwapError:
        why = "; ".join(f"{key}: {reason}" for key, reason in failed.items())
        return SwapError(
            f"Swap to policy {policy_name(proposal.policy)!r} refused, and "
            f"{self.dispatcher.policy_name!r} stays in force as it was. No graph for {why}. "
            "Mend the step, leave the size out, widen max_graphs or max_bytes, or swap with "
            "ahead=False.",
            failed=failed,
        )

    # -- the switch ---------------------------------------------------------------------

    def _switch(self, change: Change) -> list[GraphKey]:
        """Put a change in force; the caller holds the runner's lock, so that no step runs."""
        removed: list[GraphKey] = []
        if change.proposal is not None:
            self.timings.clear()  # news of the old policy's steps are not the new one's
            removed = sorted(self.dispatcher.install(change.proposal), key=largest_first)
            self._planner.asked_mode = change.spec.options.config.mode
            self.config: DispatchConfig = change.proposal.config
            self.mode_reasons: tuple[str, ...] = change.mode_reasons
            self._lane.forget_plans()
            self.lifecycle.forget(removed)
            self.dispatcher.show_all()
        self.spec = change.spec
        self.lifecycle.set_budget(change.budget)
        return removed


def _let_steps_run() -> None:
    """Let threads that wait for the runner have it: who releases a lock would get it again."""
    time.sleep(0)


def _wider(one: MemoryOptions, other: MemoryOptions) -> MemoryOptions:
    """Return limits that hold wherever either does."""

    def larger(first: int | None, second: int | None) -> int | None:
        return None if first is None or second is None else max(first, second)

    return MemoryOptions(
        max_graphs=larger(one.max_graphs, other.max_graphs),
        max_bytes=larger(one.max_bytes, other.max_bytes),
        eviction=one.eviction,
    )
