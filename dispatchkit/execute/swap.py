"""Swaps while serving: another policy, other options, sizes or limits, without a lost step.

A swap has three parts. What is asked for is checked and tried, and nothing changes. New graphs
are captured ahead, one at a time between steps, unseen by the policy that is still in force.
Then, between two steps, the new policy with an empty table takes over, and what only the old
one used is let go of. Whatever fails before that leaves everything as it was.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher, Policy, policy_name
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import ConfigError, SwapError
from dispatchkit.execute.budget import Budget
from dispatchkit.execute.capture_report import largest_first
from dispatchkit.execute.lanes import Lane
from dispatchkit.execute.lifecycle import Lifecycle
from dispatchkit.execute.notices import Notices
from dispatchkit.execute.pieces import Step
from dispatchkit.execute.setup import honoured, make_policy
from dispatchkit.execute.timing import Timings
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.observe.recorder import StepRecorder
from dispatchkit.registry import GraphRegistry, KeyState

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet

#: Stands for a limit that stays as it is, since None means that there is none.
UNCHANGED: Final[Any] = object()

# Settings that hold as the runner was made, for good.
_FIXED = frozenset({"outputs", "warmups", "capture_after", "check", "sample_every"})

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


@attrs.frozen(kw_only=True)
class _Change:
    """What is asked for, checked; None for what stays."""

    asked: DispatchConfig
    mode_reasons: tuple[str, ...]
    proposal: Proposal | None
    budget: Budget
    made_from: dict[str, Any]


class Swapping:
    """The part of GraphRunner that changes what decides, while steps run."""

    dispatcher: Dispatcher
    registry: GraphRegistry
    strict: bool
    config: DispatchConfig
    asked_mode: CUDAGraphMode
    mode_reasons: tuple[str, ...]
    backend: GraphBackend
    lifecycle: Lifecycle
    timings: Timings
    lanes: tuple[Any, ...]
    _asked: DispatchConfig
    _lane: Lane
    _lock: threading.RLock
    _made_from: dict[str, Any]
    _notices: Notices
    _plugins: PluginSet | None
    _recorder: StepRecorder | None
    _shadow_dispatch: Callable[..., Decision] | None
    _step: Step
    _swap_lock: threading.Lock

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
                capture_sizes=None if sizes is None else tuple(sizes),
                max_num_tokens=max_num_tokens,
                max_num_seqs=max_num_seqs,
                mode=mode,
            )
            budget = self._budget(max_graphs, max_bytes, eviction)
            change = self._checked(policy, policy_options, asked, budget)
            if change.proposal is None and budget == self.lifecycle.budget:
                raise _no_change()
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
        """Return the policy and configuration that such a ``swap`` would install; it is not made.

        Raises:
            ConfigError, UnknownNameError, PolicyError: As in ``swap``.
        """
        asked = self._asked_config(
            config,
            capture_sizes=None if sizes is None else tuple(sizes),
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            mode=mode,
        )
        with self._swap_lock:
            change = self._checked(policy, policy_options, asked, self.lifecycle.budget)
        if change.proposal is None:
            raise _no_change()
        return change.proposal

    @property
    def asked_config(self) -> DispatchConfig:
        """The configuration that was asked for; its mode may be more than ``config`` has."""
        return self._asked

    def settings_in_force(self) -> dict[str, Any]:
        """Return the settings the runner goes by, by their names in a settings file.

        Those of plugins and costs are not its own. An object goes by its own name.
        """
        made_from = self._made_from
        backend = made_from["backend"]
        return {
            **attrs.asdict(self._asked, recurse=False),
            **attrs.asdict(self.lifecycle.budget),
            **{name: made_from[name] for name in _FIXED},
            "backend": backend if isinstance(backend, str) else self.backend.name,
            "lazy": self.lifecycle.lazy,
            "strict": self.strict,
            "policy": self._policy_name(),
            "policy_options": made_from["policy_options"] or {},
        }

    # -- what is asked for --------------------------------------------------------------

    def _budget(self, max_graphs: Any, max_bytes: Any, eviction: str | None) -> Budget:
        changes: dict[str, Any] = {"max_graphs": max_graphs, "max_bytes": max_bytes}
        changes = {name: value for name, value in changes.items() if value is not UNCHANGED}
        if eviction is not None:
            changes["eviction"] = eviction
        return attrs.evolve(self.lifecycle.budget, **changes)

    def _checked(
        self,
        policy: str | Policy | None,
        options: dict[str, Any] | None,
        asked: DispatchConfig,
        budget: Budget,
    ) -> _Change:
        if len(self.lanes) > 1:
            hint = "Each lane decides by itself; make the runner anew to change all of them."
            raise ConfigError("lanes", len(self.lanes), "1 for a swap or a shadow", hint)
        is_same = asked == self._asked and policy is None and options is None
        made_from = {
            **self._made_from,
            **dict.fromkeys(("sizes", "max_num_tokens", "max_num_seqs", "query_len", "mode")),
            **attrs.asdict(budget),
            "config": asked,
        }
        if is_same:
            return _Change(
                asked=asked,
                mode_reasons=self.mode_reasons,
                proposal=None,
                budget=budget,
                made_from=made_from,
            )
        in_force, reasons = self.config, self.mode_reasons
        if asked != self._asked:
            in_force, reasons = honoured(asked, self._step, self.backend)
        if policy is None and options is not None:
            named = self._made_from["policy"]
            policy = self._policy_name() if named is None else named
        if policy is None:
            chosen, origin = self._copied_policy(), self.dispatcher.policy_origin
        else:
            chosen, origin, self._plugins = make_policy(policy, options, in_force, self._plugins)
            if chosen is self.dispatcher.policy:
                hint = "Give a new one, or leave it out: then it is copied."
                raise ConfigError("policy", policy_name(chosen), "not the object in force", hint)
            made_from |= {"policy": policy, "policy_options": options}
        proposal = self.dispatcher.propose(chosen, in_force, origin)
        self._check_room(proposal.keys)
        return _Change(
            asked=asked,
            mode_reasons=reasons,
            proposal=proposal,
            budget=budget,
            made_from=made_from,
        )

    def _asked_config(self, config: DispatchConfig | None, **settings: Any) -> DispatchConfig:
        changes = {name: value for name, value in settings.items() if value is not None}
        if config is None:
            config = attrs.evolve(self._asked, **changes) if changes else self._asked
        elif changes:
            hint = "These settings are part of the config."
            raise ConfigError("config", sorted(changes), "given alone", hint)
        elif not isinstance(config, DispatchConfig):
            raise ConfigError("config", config, "a DispatchConfig")
        has_others = config.axes and config.max_loras != self._asked.max_loras
        if config.axes != self._asked.axes or has_others:
            hint = "The inputs are made for them; make a new runner."
            raise ConfigError("axes", config.axes, "as they are, and max_loras with them", hint)
        classes = [(one.query_lens, one.varlen_decode) for one in (config, self._asked)]
        is_followed = self._recorder is not None or self._shadow_dispatch is not None
        if classes[0] != classes[1] and is_followed:
            hint = (
                "Stop recording or end the shadow first: recorded query classes would mean others."
            )
            raise ConfigError("query_lens", config.query_lens, "as before while recording", hint)
        return config

    def _policy_name(self) -> str:
        """Return the name that the policy was asked for by, or else the one that it has."""
        named = self._made_from["policy"]
        return named if isinstance(named, str) else self.dispatcher.policy_name

    def _copied_policy(self) -> Policy:
        """Return a copy of the policy in force, which a swap that fails must not have changed."""
        current = self.dispatcher.policy
        try:
            with self.registry.lock:  # nothing is learnt meanwhile
                return copy.deepcopy(current)
        except Exception as error:
            hint = f"It cannot be copied: {type(error).__name__}: {error}"
            raise ConfigError(
                "policy", policy_name(current), "given too, as a new object", hint
            ) from error

    def _check_room(self, keys: Iterable[GraphKey]) -> None:
        room = self._lane.buffers.num_rows
        largest = max((key.num_tokens for key in keys), default=0)
        if largest > room:
            raise ConfigError(
                "sizes",
                largest,
                f"at most {room}, the rows of the static inputs",
                f"Make the runner with buffer_rows={largest} to have room for it later.",
            )

    # -- new graphs ---------------------------------------------------------------------

    def _capture_ahead(self, change: _Change, ahead: bool) -> list[GraphKey]:
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

    def _switch(self, change: _Change) -> list[GraphKey]:
        """Put a change in force; the caller holds the runner's lock, so that no step runs."""
        removed: list[GraphKey] = []
        if change.proposal is not None:
            self.timings.clear()  # news of the old policy's steps are not the new one's
            removed = sorted(self.dispatcher.install(change.proposal), key=largest_first)
            self._asked, self.asked_mode = change.asked, change.asked.mode
            self.config, self.mode_reasons = change.proposal.config, change.mode_reasons
            self._lane.forget_plans()
            self.lifecycle.forget(removed)
            self.dispatcher.show_all()
        self._made_from = change.made_from
        self.lifecycle.set_budget(change.budget)
        return removed


def _no_change() -> ConfigError:
    return ConfigError("swap", "no change", "asked for something that is not so already")


def _let_steps_run() -> None:
    """Let threads that wait for the runner have it: who releases a lock would get it again."""
    time.sleep(0)


def _wider(one: Budget, other: Budget) -> Budget:
    """Return limits that hold wherever either does."""

    def larger(first: int | None, second: int | None) -> int | None:
        return None if first is None or second is None else max(first, second)

    return Budget(
        max_graphs=larger(one.max_graphs, other.max_graphs),
        max_bytes=larger(one.max_bytes, other.max_bytes),
        eviction=one.eviction,
    )
