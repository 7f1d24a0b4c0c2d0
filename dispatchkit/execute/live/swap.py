"""Swapper: change policy, options, sizes or limits while serving.

A swap has three stages, and a failure before the last stage changes nothing. First, the request is
validated, and the new policy is tried without installing it. Second, new graphs are captured in
advance, one at a time between steps, and hidden from the policy in force. Last, between two steps,
the new policy is installed with an empty table, and keys that only the old policy used are removed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs

from dispatchkit.dispatch import Policy, policy_name
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import SwapError, counted
from dispatchkit.execute.capture.report import largest_first
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.live.swap_requests import UNCHANGED, Change, SwapRequests, no_change_error
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.setup import requested_mode
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import naming_unknown
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.options import MemoryOptions
from dispatchkit.registry import KeyState

# Number of rounds of captures before the swap fails. If weights are replaced or a byte budget is
# exceeded, a capture may destroy graphs of the same round. The next round captures them again.
_MAX_ROUNDS = 3


@attrs.frozen(kw_only=True)
class SwapReport:
    """The report of a swap.

    Attributes:
        epoch: Number of the epoch in force.
        policy: Name of the policy in force.
        previous: Name of the previous policy.
        added: Keys that the swap added.
        captured: Added keys that had a graph when the swap ended.
        removed: Keys that were removed together with their graphs.
        seconds: Duration of the swap, in seconds.
        paused_s: Duration in seconds of the last stage, during which no step could run. Captures
            are not included.
        num_bytes: Bytes of all graphs after the swap.
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
            f"{counted(len(self.added), 'key')} added ({len(self.captured)} captured ahead), "
            f"{len(self.removed)} removed"
        )


class Swapper:
    """The part of a runner that performs swaps.

    Args:
        executor: The executor whose policy and limits are swapped.
        taps: Recorder, listener and watcher of steps.
        num_lanes: Number of lanes of the runner; a swap requires a single lane.
        lock: The lock that every step holds.
    """

    def __init__(
        self, executor: Executor, taps: StepTaps, num_lanes: int, lock: threading.RLock
    ) -> None:
        self._executor, self._lock = executor, lock
        self._turns = executor.lane.group.turns
        self._requests = SwapRequests(executor, taps, num_lanes)
        self._swap_lock = threading.Lock()

    @property
    def requested_config(self) -> DispatchConfig:
        """The requested configuration; the mode in effect may be a downgrade."""
        return self._requests.requested_config

    def settings_in_force(self) -> dict[str, Any]:
        """Return the runner's settings, keyed as in a settings file.

        Plugin settings and costs are not included. Objects are represented by their names.
        """
        return self._requests.settings_in_force()

    @functools.partial(naming_unknown, owner="swap")
    def proposed(
        self,
        *,
        policy: str | Policy | None = None,
        policy_options: dict[str, Any] | None = None,
        config: DispatchConfig | None = None,
        sizes: Sequence[int] | None = None,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        mode: CUDAGraphMode | str | None = None,
    ) -> Proposal:
        """Return the policy and configuration that ``swap`` would install.

        Raises:
            ConfigError, UnknownNameError, PolicyError: As in ``swap``.
        """
        requests = self._requests
        asked = requests.config(
            config,
            sizes=sizes,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            mode=mode,
        )
        with self._swap_lock:
            budget = self._executor.lifecycle.budget
            change = requests.change(policy, policy_options, asked, budget)
        if change.proposal is None:
            raise no_change_error()
        return change.proposal

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
        """Swap policy, configuration or limits while other threads run steps.

        See ``GraphRunner.swap``.
        """
        executor, requests = self._executor, self._requests
        dispatcher, lifecycle = executor.dispatcher, executor.lifecycle
        with self._swap_lock:
            start = time.perf_counter()
            asked = requests.config(
                config,
                sizes=sizes,
                max_num_tokens=max_num_tokens,
                max_num_seqs=max_num_seqs,
                mode=mode,
            )
            budget = requests.budget(max_graphs, max_bytes, eviction)
            change = requests.change(policy, policy_options, asked, budget)
            if change.proposal is None and budget == lifecycle.budget:
                raise no_change_error()
            previous = dispatcher.policy_name
            added = self._capture_ahead(change, not lifecycle.lazy if ahead is None else ahead)
            with self._lock:
                self._turns.wait()
                begun = time.perf_counter()
                removed = self._switch(change)
            end = time.perf_counter()
            name, epoch = dispatcher.policy_name, dispatcher.epoch
        if change.proposal is not None:
            executor.notices.policy_swapped(name, previous, epoch)
        return SwapReport(
            epoch=epoch,
            policy=name,
            previous=previous,
            added=tuple(added),
            captured=tuple(key for key in added if self._is_captured(key)),
            removed=tuple(removed),
            seconds=end - start,
            paused_s=end - begun,
            num_bytes=executor.lane.num_bytes(),
        )

    # -- new graphs ---------------------------------------------------------------------

    def _capture_ahead(self, change: Change, ahead: bool) -> list[GraphKey]:
        """Declare and capture new keys between steps, and return them; remove them on failure."""
        executor, lifecycle = self._executor, self._executor.lifecycle
        proposal, before = change.proposal, lifecycle.budget
        if proposal is None:
            return []
        with self._lock:
            self._turns.wait()
            new = sorted(executor.dispatcher.reserve(proposal), key=largest_first)
            lifecycle.set_budget(_larger_limits(before, change.budget))
        try:
            if ahead:
                self._capture_all_of(new, proposal)
            # Pass the outcomes so far to the old policy.
            executor.timings.drain()
        except BaseException:
            with self._lock:
                self._turns.wait()
                lifecycle.forget(new)
                executor.dispatcher.show_all()
                lifecycle.set_budget(before)
            raise
        return new

    def _capture_all_of(self, keys: list[GraphKey], proposal: Proposal) -> None:
        for _ in range(_MAX_ROUNDS):
            missing = [key for key in keys if self._executor.lifecycle.may_capture(key)]
            if not missing:
                return
            for key in missing:
                self._capture_one(key, proposal)
                _let_steps_run()
        raise self._refusal(proposal, {str(missing[0]): "evicted while other keys were captured"})

    def _capture_one(self, key: GraphKey, proposal: Proposal) -> None:
        with self._lock:
            self._turns.wait()
            report = self._executor.lifecycle.capture_all([key])
            if problems := {**report.failed, **report.skipped}:
                raise self._refusal(proposal, {str(one): why for one, why in problems.items()})

    def _is_captured(self, key: GraphKey) -> bool:
        entry = self._executor.registry.get(key)
        return entry is not None and entry.state is KeyState.CAPTURED

    def _refusal(self, proposal: Proposal, failed: dict[str, str]) -> SwapError:
        why = "; ".join(f"{key}: {reason}" for key, reason in failed.items())
        new, in_force = policy_name(proposal.policy), self._executor.dispatcher.policy_name
        swap = "The swap" if new == in_force else f"The swap to policy {new!r}"
        return SwapError(
            f"{swap} failed, because not all new keys could be captured. Policy {in_force!r} and "
            "its configuration stay in force. Fix the step, omit the sizes of the keys without a "
            "graph, increase max_graphs or max_bytes, or swap with ahead=False. Keys without a "
            f"graph: {why}",
            failed=failed,
        )

    # -- installation -------------------------------------------------------------------

    def _switch(self, change: Change) -> list[GraphKey]:
        """Install a change, and return the removed keys; the caller holds the steps' lock."""
        executor = self._executor
        removed: list[GraphKey] = []
        if change.proposal is not None:
            executor.timings.clear()  # the new policy does not learn from steps of the old policy
            removed = sorted(executor.dispatcher.install(change.proposal), key=largest_first)
            executor.mode_reasons = change.mode_reasons
            asked = change.spec.options.config
            executor.planner.requested_mode = requested_mode(asked, executor.work.step)
            executor.lane.forget_plans()
            executor.lifecycle.forget(removed)
            executor.dispatcher.show_all()
        executor.spec = change.spec
        executor.lifecycle.set_budget(change.budget)
        return removed


def _let_steps_run() -> None:
    """Let waiting threads acquire the lock before this thread acquires it again."""
    time.sleep(0)


def _larger_limits(one: MemoryOptions, other: MemoryOptions) -> MemoryOptions:
    """Return the larger of the two values of each limit."""

    def larger(first: int | None, second: int | None) -> int | None:
        return None if first is None or second is None else max(first, second)

    return MemoryOptions(
        max_graphs=larger(one.max_graphs, other.max_graphs),
        max_bytes=larger(one.max_bytes, other.max_bytes),
        eviction=one.eviction,
    )
