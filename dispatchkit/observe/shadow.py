"""A candidate that decides beside the policy in force, without effect, from recorded steps.

Recorded steps are looked at when there is time, never on their own path. Both sides are asked
what they would do with them now: the dispatcher in force foresees, and the candidate has a
table and a registry of its own, in which graphs that it needs and nobody has count as there.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import attrs

from dispatchkit.dispatch import CostModel, Decision, Dispatcher, Outcome, Policy
from dispatchkit.errors import DescriptorError
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.observe.shadow_prices import Arm, Prices, arm_of
from dispatchkit.registry import KeyState

__all__ = ["Difference", "Shadow", "ShadowReport"]

#: Tokens, requests, query class, adapters or variant, ceiling: the arguments of a dispatch.
Facts = tuple[int, int, int, int, int]
_KEPT_SAMPLES = 256
_SIGMAS = 1.96  # 95 of 100


@attrs.frozen(kw_only=True)
class Difference:
    """Steps of which the two sides would make something else.

    Attributes:
        active: What is run now, in words.
        candidate: What the candidate would run.
        steps: How many.
        min_tokens: Tokens of the smallest of them.
        max_tokens: Tokens of the largest.
        gain_us: What the candidate would save in all of them; None where that is not known.
    """

    active: str
    candidate: str
    steps: int
    min_tokens: int
    max_tokens: int
    gain_us: float | None


@attrs.frozen(kw_only=True)
class ShadowReport:
    """What a candidate would have made of the steps that were run.

    Attributes:
        active: Name of the policy in force.
        candidate: Name of the candidate.
        steps: Steps looked at.
        lost_steps: Steps that were overwritten before they were looked at.
        same_steps: Steps that both would run the same way.
        refused_steps: Steps outside the candidate's limits: they would raise.
        unpriced_steps: Steps of which a time is not known; the times leave them out.
        active_us: Time of the priced steps under the policy in force.
        candidate_us: Their time under the candidate.
        error_us: Half the width of the interval that holds the gain 95 times of 100, by the
            noise of what was measured. None where nothing was measured.
        differences: Where they differ, most steps first.
        faults: Steps on which the candidate raised or broke a hard constraint.
        fault: What it did, the last time.
        notes: What to know about the numbers.
    """

    active: str
    candidate: str
    steps: int
    lost_steps: int
    same_steps: int
    refused_steps: int
    unpriced_steps: int
    active_us: float
    candidate_us: float
    error_us: float | None
    differences: tuple[Difference, ...]
    faults: int = 0
    fault: str = ""
    notes: tuple[str, ...] = ()

    @property
    def gain_us(self) -> float:
        """What the candidate would have saved; negative where it costs."""
        return self.active_us - self.candidate_us

    @property
    def ratio(self) -> float:
        """The candidate's time as a share of the time now; below 1 it is faster."""
        return self.candidate_us / self.active_us if self.active_us else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**attrs.asdict(self), "gain_us": self.gain_us, "ratio": self.ratio}

    def __str__(self) -> str:
        error = "not known" if self.error_us is None else f"± {self.error_us / 1e3:.2f} ms"
        verb = "saves" if self.gain_us >= 0 else "costs"
        same = f"{self.steps} steps ({self.same_steps} the same)"
        change = f"{verb} {abs(self.gain_us) / 1e3:.2f} ms ({abs(1 - self.ratio):.1%}), {error}"
        lines = [
            f"{self.candidate} in place of {self.active}, over {same}",
            f"   time {self.candidate_us / 1e3:.2f} ms for {self.active_us / 1e3:.2f} ms: {change}",
        ]
        for one in self.differences[:10]:
            gain = "not known" if one.gain_us is None else f"{one.gain_us / 1e3:+.2f} ms"
            lines.append(
                f"   {one.steps} steps of {one.min_tokens} to {one.max_tokens} tokens: "
                f"{one.active} -> {one.candidate} ({gain})"
            )
        if len(self.differences) > 10:
            lines.append(f"   and {len(self.differences) - 10} more kinds of steps")
        lines += [f"   {note}" for note in self.notes]
        return "\n".join(lines)


@attrs.define
class _Tally:
    steps: int = 0
    min_tokens: int = 1 << 62
    max_tokens: int = 0


class Shadow:
    """Follows recorded steps of a dispatcher with a candidate.

    Args:
        active: The dispatcher in force. It is only read.
        policy: The candidate, in force nowhere.
        config: What the candidate decides under; that in force by default.
        origin: Where the candidate comes from, for messages.
        times: A cost model, for choices that are measured nowhere.

    Attributes:
        candidate: The candidate's own dispatcher.

    Raises:
        PolicyError: The candidate is refused.

    Thread safety: ``observe`` may be called from any thread; all else from one at a time.
    """

    lost: int
    steps: int
    refused: int
    faults: int

    def __init__(
        self,
        active: Dispatcher,
        policy: Policy,
        config: DispatchConfig | None = None,
        *,
        origin: str = "",
        times: CostModel | None = None,
    ) -> None:
        self._active, self._times = active, times
        self.candidate: Dispatcher = Dispatcher(
            policy,
            active.config if config is None else config,
            modes=active.modes,
            lazy=active.lazy,
            origin=origin,
        )
        self._lock = threading.Lock()
        self._samples: dict[bool, dict[Arm, deque[float]]] = {False: {}, True: {}}
        self._restart()

    def _restart(self) -> None:
        """Begin anew: the steps so far were those of another policy, or configuration."""
        self._epoch = self._active.epoch
        self._tallies: dict[tuple[Arm, Arm], _Tally] = defaultdict(_Tally)
        self._words: dict[tuple[Arm, Arm], tuple[str, str]] = {}
        self.steps = self.refused = self.faults = self.lost = 0
        self._fault = ""

    # -- what is fed in -----------------------------------------------------------------

    def follow(self, steps: Iterable[Sequence[int]], lost: int = 0) -> int:
        """Decide recorded steps on both sides; return how many there were.

        Args:
            steps: Tokens, requests, query class, adapters and ceiling of each.
            lost: Steps between these and those before that were not recorded.
        """
        if self._active.epoch != self._epoch:
            self._restart()
        self._mirror()
        self.lost += lost
        counts: Counter[Any] = Counter(map(tuple, steps))
        for facts, count in counts.items():
            if facts[0]:
                self._follow_one(facts, count)
        return sum(counts.values())

    def observe(self, outcome: Outcome) -> None:
        """Take the time of a measured step; the candidate is told that it was not its own."""
        if outcome.completed and outcome.elapsed_us is not None:
            arm = arm_of(outcome.decision, outcome.batch.num_tokens)
            with self._lock:
                kept = self._samples[outcome.queued].setdefault(arm, deque(maxlen=_KEPT_SAMPLES))
                kept.append(outcome.elapsed_us)
        self.candidate.observe(attrs.evolve(outcome, won=False))

    def sampling(self, every: int) -> Callable[..., Decision]:
        """Return a ``dispatch`` of the dispatcher in force that has one in so many steps timed."""
        dispatch, dispatch_timed = self._active.dispatch, self._active.dispatch_timed
        left = every

        def dispatch_and_time_some(
            num_tokens: int,
            num_reqs: int = 0,
            uniform: int = 0,
            loras: int = 0,
            ceiling: int = 2,
        ) -> Decision:
            nonlocal left
            left -= 1
            if left > 0:
                return dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
            left = every
            return dispatch_timed(num_tokens, num_reqs, uniform, loras, ceiling)

        return dispatch_and_time_some

    # -- what comes out -----------------------------------------------------------------

    def report(self) -> ShadowReport:
        """Return where the two sides differ, and what a switch would have gained or lost."""
        prices = self._prices()
        active_us = candidate_us = 0.0
        net: dict[Hashable, float] = defaultdict(float)
        differences, same, unpriced = [], 0, 0
        for (mine, theirs), tally in self._tallies.items():
            before, after = prices.of(mine), prices.of(theirs)
            gain = None
            if before is None or after is None:
                unpriced += tally.steps
            else:
                active_us += tally.steps * prices.value(before)
                candidate_us += tally.steps * prices.value(after)
                gain = tally.steps * (prices.value(before) - prices.value(after))
                for form, sign in ((before, 1), (after, -1)):
                    for base, weight in form.items():
                        net[base] += sign * weight * tally.steps
            if mine == theirs:
                same += tally.steps
                continue
            words = self._words[mine, theirs]
            differences.append(
                Difference(
                    active=words[0],
                    candidate=words[1],
                    steps=tally.steps,
                    min_tokens=tally.min_tokens,
                    max_tokens=tally.max_tokens,
                    gain_us=gain,
                )
            )
        differences.sort(key=lambda one: (-one.steps, one.min_tokens, one.active))
        unmeasured = not prices.is_measured
        return ShadowReport(
            active=self._active.policy_name,
            candidate=self.candidate.policy_name,
            steps=self.steps,
            lost_steps=self.lost,
            same_steps=same,
            refused_steps=self.refused,
            unpriced_steps=unpriced,
            active_us=active_us,
            candidate_us=candidate_us,
            error_us=None if unmeasured else _SIGMAS * prices.error(net),
            differences=tuple(differences),
            faults=self.faults,
            fault=self._fault,
            notes=tuple(self._notes(unpriced, unmeasured)),
        )

    # -- inside -------------------------------------------------------------------------

    def _mirror(self) -> None:
        """Bring the states of graphs that both sides know into the candidate's registry."""
        theirs, mine = self.candidate.registry, self._active.registry
        if self.candidate.lazy is not self._active.lazy:  # frozen since, or thawed
            self.candidate.set_lazy(self._active.lazy)
        for mode in self.candidate.modes:
            is_on = mode not in mine.disabled_modes
            if is_on is (mode in theirs.disabled_modes):
                theirs.set_enabled(is_on, mode=mode)
        for key in theirs:
            entry, known = theirs.get(key), mine.get(key)
            if entry is None:
                continue
            if known is not None and theirs.is_enabled(key) is not mine.is_enabled(key):
                theirs.set_enabled(mine.is_enabled(key), key=key)
            if known is None or key in self._active.graphs.hidden:
                if entry.state is KeyState.DECLARED and not self.candidate.lazy:
                    theirs.captured(key, None)  # a swap would capture it ahead
                continue
            if known.state is KeyState.CAPTURED and entry.state is not KeyState.CAPTURED:
                theirs.captured(key, None)
            elif known.state is KeyState.FAILED and entry.state is not KeyState.FAILED:
                theirs.failed(key, known.reason)
            elif known.state is KeyState.EVICTED and entry.state is KeyState.CAPTURED:
                theirs.evicted(key, known.reason)
            elif known.state is KeyState.STALE and entry.state is KeyState.CAPTURED:
                theirs.stale(key, known.reason)

    def _follow_one(self, facts: Facts, count: int) -> None:
        try:
            batch = self._active.batch(*facts)
            now, _ = self._active.foresee(batch)
        except DescriptorError:
            return  # recorded under limits that have changed since
        self.steps += count
        arm = arm_of(now, facts[0])
        try:
            then, fault = self.candidate.foresee(batch)
        except DescriptorError:
            self.refused += count
            return
        if fault is not None:
            self.faults += count
            self._fault = str(fault)
        pair = (arm, arm_of(then, facts[0]))
        tally = self._tallies[pair]
        tally.steps += count
        tally.min_tokens = min(tally.min_tokens, facts[0])
        tally.max_tokens = max(tally.max_tokens, facts[0])
        self._words[pair] = (str(now), str(then))

    def _prices(self) -> Prices:
        """Return prices from steps that began behind others or from those that did not.

        The two take different times, so that they are kept apart; the more frequent kind is
        the one that counts.
        """
        with self._lock:
            kinds = [
                {arm: list(kept) for arm, kept in samples.items()}
                for samples in self._samples.values()
            ]
        samples = max(kinds, key=lambda kind: sum(map(len, kind.values())))
        return Prices(samples, self._times)

    def _notes(self, unpriced: int, unmeasured: bool) -> Iterable[str]:
        if unpriced:
            yield (
                f"{unpriced} of {self.steps} steps have no known time on one side and are left "
                "out; give a cost model, or follow for longer."
            )
        if unmeasured and self._times is not None:
            yield "No step was measured yet: times are the cost model's own."
        if self.lost:
            yield f"{self.lost} steps were overwritten before they were read; poll more often."
        if self.refused:
            yield f"{self.refused} steps are outside the candidate's limits and would raise."
        if self.faults:
            yield f"On {self.faults} steps the candidate is at fault, and eager: {self._fault}"
        if self.candidate.policy_parts.learns:
            yield "The candidate learns; what it would learn from steps of its own is not in this."
