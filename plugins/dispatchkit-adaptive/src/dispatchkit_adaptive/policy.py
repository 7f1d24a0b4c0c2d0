"""The policy ``adaptive``."""

from __future__ import annotations

import math
import os
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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
from dispatchkit.dispatch import CalibrationRun, greedy_parts
from dispatchkit.errors import ConfigError
from dispatchkit.files import real_target
from dispatchkit.keys import check_count
from dispatchkit.plugins import PluginSet, load_plugins

from dispatchkit_adaptive.arms import FIRST_NOISE, Arm, Watch
from dispatchkit_adaptive.buckets import (
    ArmId,
    Bucket,
    Graphs,
    arm_of,
    band_of,
    bands,
    mode_of,
    replay_of,
    size_of,
)
from dispatchkit_adaptive.ledger import DRIFT, Ledger, Stakes
from dispatchkit_adaptive.report import BucketReport, describe
from dispatchkit_adaptive.state import Regime, StateError, read_state, write_state

__all__ = ["CALIBRATION", "PROBE", "AdaptivePolicy"]

#: What a probe takes the host beyond another step (a plan, events, an outcome), microseconds.
PROBE_US = 25.0
#: Reasons of decisions that are there to be measured.
PROBE, CALIBRATION = "probe", "calibration"
# Batches whose bucket is remembered.
_MOST_ASKED = 65_536
# Outcomes without a change after which half as many steps are measured, and how seldom at most.
_CALM, _SLOWEST_PACE = 24, 8
# Buckets chosen again after one outcome, beside its own.
_CHOSEN_AT_ONCE = 2
# Share of the account from which on a base that is not used is tried where that costs nothing.
_PROOF_FROM = 0.8
# Share of what probes may cost that one of them may.
_COST_AT_ONCE = 0.25
# Whoever measures more than one step in so many is taken to have nothing to save there.
_WORTH_SAVING = 8.0
# How many times what it risks has to be there before fewer steps are measured.
_AFFORDED = 3.0
_CALIBRATION_RUNS, _CALIBRATION_ROUNDS = 8, 3
# Of the latest outcomes in a row, so many in a state of the stream that make it the usual one.
_REGIME_CHANGE = 8
# Parts are tried in place of one graph where they compute at most this share of its tokens.
_WORTH_SPLITTING = 0.75
# What an arm that was never measured is taken to cost, in times of the one in use.
_UNKNOWN_COST = 3.0


class AdaptivePolicy:
    """Choose between eager and each graph by measured time, never far behind a base policy.

    Args:
        base: The policy to start from and to be measured against, or the name of one.
        base_options: Options for a base chosen by name.
        history_size: About how many of its latest samples make the level of an arm.
        margin: Least relative gain for which the base's choice is left.
        promise: Largest share of time that may be lost against the base.
        explore: Share of time that probes may cost.
        max_sizes: Graphs of each mode that are considered for a batch.
        seed: Of the small changes to the spacing of probes.
        state: File that what was learnt is kept in. It is read now, if it exists; a file
            that cannot be used is reported, and learning starts anew. ``save`` writes it.
        fingerprint: What the times are true for (see ``device_fingerprint``); state of
            another fingerprint is not used.
        plugins: Where the base is found by name; by default plugins are loaded.

    Attributes:
        ledger: The account kept against the base.
        pace: How many times as seldom as usual it needs steps measured now: more than 1 where
            nothing has changed for long, and what was won pays for noticing a change later.

    Raises:
        ConfigError: An option cannot be used.
        UnknownNameError: No policy goes by the name of the base.
    """

    name = "adaptive"
    traits: frozenset[str] = frozenset()

    def __init__(
        self,
        base: str | Policy = "vllm",
        *,
        base_options: Mapping[str, Any] | None = None,
        history_size: int = 192,
        margin: float = 0.02,
        promise: float = 0.01,
        explore: float = 0.0005,
        max_sizes: int = 2,
        seed: int = 0,
        state: str | Path | None = None,
        fingerprint: Mapping[str, str] | None = None,
        plugins: PluginSet | None = None,
    ) -> None:
        self.history_size = check_count(history_size, "history_size", minimum=8)
        self.max_sizes = check_count(max_sizes, "max_sizes")
        self.margin = _share(margin, "margin")
        self.promise = _share(promise, "promise")
        if isinstance(base, str):
            plugins = load_plugins() if plugins is None else plugins
            base = plugins.create_policy(base, **(base_options or {}))
        elif base_options:
            raise ConfigError("base_options", base_options, "left out where base is an object")
        self.base: Policy = base
        self.fingerprint = dict(fingerprint or {})
        self.ledger = Ledger(self.promise, _share(explore, "explore"))
        self.pace: int = 1
        self._random = random.Random(seed)
        self._regime: Regime = ("device", False)
        self._other_regime = 0
        self._arms: dict[Regime, dict[ArmId, Arm]] = {}
        self._eager_watches: dict[Regime, Watch] = {}
        self._arm_ids: dict[ArmId, ArmId] = {}
        self._buckets: dict[Any, Bucket] = {}
        self._bucket_of: dict[Batch, Bucket] = {}
        # What was answered for batches while the graphs stay as they are; what was learnt
        # changes the choice of a bucket, and neither it nor the base.
        self._revision: tuple[object, ...] = ()
        self._asked: dict[Batch, tuple[Decision | None, Bucket | None]] = {}
        self._to_choose: deque[Bucket] = deque()
        self._step = self._calm = 0
        self._calibration_rounds = 0
        self._calibrated: set[tuple[Batch, GraphKey | None]] = set()
        # As it is meant now, whatever folder the program changes to before it saves.
        self.state_path = None if state is None else _state_path(state)
        if self.state_path is not None and os.path.lexists(self.state_path):
            try:
                self.load(self.state_path)
            except StateError as error:
                warnings.warn(f"{error} Learning starts anew.", RuntimeWarning, stacklevel=2)

    # -- deciding -----------------------------------------------------------------------

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the base policy."""
        self._buckets.clear()
        self._bucket_of.clear()
        self._asked.clear()
        self._to_choose.clear()
        self._calibrated.clear()
        return self.base.declare(config)

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return what is in use for the batch's bucket; at first what the base answers."""
        revision = graphs.revision
        if revision != self._revision or len(self._asked) >= _MOST_ASKED:
            self._revision = revision
            self._asked.clear()
        found = self._asked.get(batch)
        if found is None:
            base = self.base.decide(batch, graphs)
            bucket = None if base is None else self._find_bucket(batch, graphs, base)
            found = self._asked[batch] = (base, bucket)
        base, bucket = found
        return base if bucket is None else bucket.answer(batch)

    def _find_bucket(self, batch: Batch, graphs: GraphView, base: Decision) -> Bucket | None:
        """Return the bucket of a batch, None where there is nothing to choose."""
        if None in batch.axes:
            return None  # outside of an axis nothing is captured
        arms: dict[Graphs, None] = {}
        top = most = 0
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if not batch.allows(mode):
                continue
            smallest = next(graphs.covering(batch, mode), None)
            if smallest is not None:
                top = min(top or smallest.num_tokens, smallest.num_tokens)
            ready = filter(graphs.is_ready, graphs.covering(batch, mode))
            single = [(key,) for key in islice(ready, self.max_sizes)]
            arms.update(dict.fromkeys(single))
            parts = tuple(part.key for part in greedy_parts(batch, graphs, mode))
            if parts and (
                not single or size_of(parts) <= _WORTH_SPLITTING * single[0][0].num_tokens
            ):
                arms[parts] = None
                most = max(most, size_of(parts))
        own = arm_of(base)
        if own is not None:
            arms[own] = None
        # Where no graph alone is large enough, parts are.
        where = band_of(batch, top or most, graphs.config.sizes)
        band = where if batch.allows(RuntimeMode.NONE) else None
        base_arm: ArmId | None = band if base.key is None else own
        # What splits in a way of its own has no arm.
        bucket = None
        if len(arms) + (band is not None) > 1 and base_arm is not None:
            kind = attrs.evolve(base, parts=()) if base.parts else base
            ident = (batch.allowed, kind, own, tuple(arms), where)
            bucket = self._buckets.get(ident)
            if bucket is None:
                # One object for each arm: looking it up then compares no descriptors.
                one = self._arm_ids.setdefault
                graphs_of_it = tuple(one(arm, arm) for arm in arms)
                band = None if band is None else one(band, band)  # type: ignore[assignment]
                bucket = Bucket(base, one(base_arm, base_arm), graphs_of_it, band, batch)  # type: ignore[arg-type]
                self._buckets[ident] = bucket
                self._choose(bucket)
        old = self._bucket_of.pop(batch, None)
        if old is not None and old is not bucket:
            old.waiting.pop(batch, None)
        if bucket is not None:
            self._bucket_of[batch] = bucket
        return bucket

    # -- learning -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> list[CellUpdate]:
        """Learn from a step that ran to its end; return the cells whose answer changes."""
        batch, decision, us = outcome.batch, outcome.decision, outcome.elapsed_us
        bucket = self._bucket_of.get(batch)
        if bucket is not None and decision.reason == PROBE:
            bucket.end_probe(batch)
        if not outcome.completed or us is None or not math.isfinite(us) or us <= 0.0:
            return []
        if outcome.is_first:
            return []  # says what a size takes once, and nothing of what it takes from now on
        ran: ArmId | None = arm_of(decision)
        if decision.key is None and bucket is not None:
            ran = bucket.band
        if ran is None:
            return []
        regime = (outcome.clock, outcome.queued)
        arm = self._arm(regime, ran)
        expected = arm.expect(batch.num_tokens)
        if decision.reason == CALIBRATION:
            arm.add(batch.num_tokens, us)
            arm.last_step = self._step
            self._to_choose.extend(
                one for one in self._buckets_with(ran) if one not in self._to_choose
            )
            return self._choose_some()
        self._step = arm.last_step = outcome.step or self._step + 1
        changed = self._learn(arm, ran, regime, batch.num_tokens, us)
        if outcome.won:
            changed |= self._note_regime(regime)
        self._calm = 0 if changed else self._calm + 1
        if changed:
            latest = sorted(self._buckets.values(), key=lambda one: -one.last_step)
            self._to_choose = deque(latest)
        if bucket is None or not outcome.won:
            self._to_choose.extend(
                one for one in self._buckets_with(ran) if one not in self._to_choose
            )
            return self._choose_some()
        bucket.last_step = self._step
        self._account(bucket, outcome, arm, expected, us, is_base=ran == bucket.base_arm)
        self.pace = self._next_pace(arm)
        # A step waits for this: what is left is done at later outcomes.
        updates = self._choose(bucket) + self._probe(bucket, batch, ran)
        return updates or bucket.drop_probes() or self._choose_some()

    def record(
        self,
        key: GraphKey | Batch,
        mode: RuntimeMode,
        latency_us: float,
        *,
        queued: bool = False,
        clock: str = "device",
    ) -> None:
        """Teach one time by hand: from calibration, or an executor of one's own.

        Args:
            key: The graph that was replayed; for eager (mode NONE) the batch that ran, which
                must have been decided before.
            mode: The runtime mode it ran in.
            latency_us: Microseconds.
            queued: Other work was ahead of it on its stream.
            clock: ``device`` or ``host``; times of different clocks are never compared.

        Raises:
            ConfigError: The time is no time, or key and mode do not belong together.
        """
        if not math.isfinite(latency_us) or latency_us <= 0.0:
            raise ConfigError("latency_us", latency_us, "a number of microseconds above 0")
        arm: ArmId | None
        if isinstance(key, GraphKey):
            arm = (key,)
            if key.mode is not mode:
                raise ConfigError("mode", str(mode), f"the mode of the key, {key.mode}")
        else:
            if mode is not RuntimeMode.NONE:
                raise ConfigError("key", key, f"a GraphKey in mode {mode}")
            bucket = self._bucket_of.get(key)
            arm = None if bucket is None else bucket.band
            if arm is None:
                raise ConfigError("key", key, "a batch that was decided and may run eager")
        regime = (clock, queued)
        self._learn(self._arm(regime, arm), arm, regime, key.num_tokens, latency_us)
        for bucket in self._buckets_with(arm):
            self._choose(bucket)

    def calibration_runs(self, graphs: GraphView) -> list[CalibrationRun]:
        """Return timed runs that spare serving the first mistakes; none when it has enough.

        Ask after a capture, and again when all of them have been told. First comes each
        graph at its size, and eager at both ends of the range that each size serves; then
        more of those that are too close to tell apart.
        """
        while self._to_choose:
            self._choose(self._to_choose.popleft())
        self._calibration_rounds += 1
        times = _CALIBRATION_RUNS * 2 ** (self._calibration_rounds - 1)
        places = self._calibration_places(graphs)
        if self._calibration_rounds == 1:
            # After a further capture only what is new.
            places = [
                (batch, how) for batch, how in places if (batch, how.key) not in self._calibrated
            ]
            self._calibrated.update((batch, how.key) for batch, how in places)
        elif self._calibration_rounds > _CALIBRATION_ROUNDS:
            places = []
        else:
            places = [(batch, how) for batch, how in places if self._is_close_call(batch)]
        if not places:
            self._calibration_rounds = 0
        return [CalibrationRun(batch, how, times) for batch, how in places]

    def _calibration_places(self, graphs: GraphView) -> list[tuple[Batch, Decision]]:
        places: dict[tuple[Batch, GraphKey | None], Decision] = {}
        below: dict[Any, int] = {}
        for key in sorted(graphs, key=lambda key: key.num_tokens):
            if not graphs.is_ready(key):
                continue
            own = key.descriptor
            kind = (own.uniform, own.query_len, own.max_query_len, own.num_active_loras, own.axes)
            low = below.get((key.mode, kind), 0) + 1
            below[key.mode, kind] = key.num_tokens
            high = min(key.num_tokens, graphs.config.max_num_tokens)
            edges = {edge for band in bands(low, high) for edge in band} if low <= high else set()
            for num_tokens in sorted(edges, reverse=True):
                if num_tokens < own.query_len:
                    continue
                batch = Batch(
                    num_tokens,
                    uniform=own.uniform,
                    query_len=own.query_len,
                    max_query_len=own.query_len if own.uniform else own.max_query_len,
                    num_active_loras=own.num_active_loras,
                    axes=own.axes,
                )
                self.decide(batch, graphs)  # so that the batch has its bucket
                if num_tokens == high:
                    places[batch, key] = Decision.replay(key, CALIBRATION, timed=True)
                places.setdefault((batch, None), Decision.eager(CALIBRATION, timed=True))
        return [(batch, how) for (batch, _), how in places.items()]

    def _is_close_call(self, batch: Batch) -> bool:
        """Tell whether the base's arm and another one are too close to tell apart."""
        bucket = self._bucket_of.get(batch)
        known = {} if bucket is None else self._known(bucket)
        base = known.get(bucket.base_arm) if bucket else None
        if bucket is None or base is None:
            return False
        size = batch.num_tokens
        return any(
            abs(arm.log_us(size) - base.log_us(size))
            < 2.0 * math.hypot(arm.error(size), base.error(size))
            for arm in known.values()
            if arm is not base
        )

    # -- reading and keeping ------------------------------------------------------------

    def explain(self, batch: Batch | None = None) -> tuple[BucketReport, ...]:
        """Return what is known of each bucket, or of that of one batch; print it."""
        found = self._buckets.values() if batch is None else [self._bucket_of.get(batch)]
        buckets = [bucket for bucket in found if bucket is not None and bucket.sizes[0]]
        return tuple(
            describe(bucket, self._known(bucket) or self._measured(bucket), self._step)
            for bucket in buckets
        )

    def save(self, path: str | Path | None = None) -> Path:
        """Write what was learnt; the file has its name only once it is whole.

        Raises:
            ConfigError: No path is given here, nor was one to the policy; or the file cannot be
                written.
        """
        target = self.state_path if path is None else Path(path)
        if target is None:
            raise ConfigError("path", None, "given, where the policy has no state file")
        write_state(target, self.fingerprint, self._arms)
        return target

    def load(self, path: str | Path) -> None:
        """Replace what was learnt by what a file has.

        Raises:
            StateError: The file is torn, foreign, of another version or fingerprint; what
                was learnt stays as it was.
        """
        self._arms = read_state(Path(path), self.fingerprint, self.history_size)
        self._forget_measured()
        for bucket in self._buckets.values():
            self._choose(bucket)

    def __repr__(self) -> str:
        return f"AdaptivePolicy(base={self.base!r}, buckets={len(self._buckets)})"

    # -- what is known ------------------------------------------------------------------

    def _arm(self, regime: Regime, ident: ArmId) -> Arm:
        arms = self._arms.setdefault(regime, {})
        arm = arms.get(ident)
        if arm is None:
            is_eager = not isinstance(ident, tuple)
            arm = arms[ident] = Arm(size_of(ident), self.history_size, over_tokens=is_eager)
            self._forget_measured()
        return arm

    def _measured(self, bucket: Bucket) -> dict[ArmId, Arm]:
        """Return the arms of a bucket that today's regime has samples of."""
        if bucket.measured is None:
            arms = self._arms.get(self._regime, {})
            bucket.measured = {ident: arms[ident] for ident in bucket.arms if ident in arms}
        return bucket.measured

    def _forget_measured(self) -> None:
        for bucket in self._buckets.values():
            bucket.measured = None

    def _known(self, bucket: Bucket) -> dict[ArmId, Arm]:
        """Return the arms of a bucket to compare: all of one regime, today's if it is known."""
        known = _known_of(self._measured(bucket))
        if len(known) > 1 and bucket.base_arm in known:
            return known
        for regime in self._regimes()[1:]:
            arms = self._arms.get(regime, {})
            known = _known_of({ident: arms[ident] for ident in bucket.arms if ident in arms})
            if len(known) > 1 and bucket.base_arm in known:
                return known
        return {}

    def _regimes(self) -> list[Regime]:
        """Return the regimes that may have samples, today's first."""
        return [self._regime, *(each for each in self._arms if each != self._regime)]

    def _buckets_with(self, ident: ArmId) -> Iterator[Bucket]:
        return (bucket for bucket in self._buckets.values() if ident in bucket.arms)

    def _note_regime(self, regime: Regime) -> bool:
        """Follow the state the stream is mostly found in; return whether it changed."""
        self._other_regime = 0 if regime == self._regime else self._other_regime + 1
        if self._other_regime < _REGIME_CHANGE:
            return False
        self._regime, self._other_regime = regime, 0
        self._forget_measured()
        return True

    def _learn(self, arm: Arm, ident: ArmId, regime: Regime, num_tokens: int, us: float) -> bool:
        """Add a sample; return whether it shows a change."""
        jump = arm.add(num_tokens, us)
        if isinstance(ident, tuple):
            return jump != 0.0
        # What slows eager in one bucket (a busier host, a lower clock) slows it in all. Small
        # changes, of the size that noise has at first, concern one band alone.
        watch = self._eager_watches.setdefault(regime, Watch())
        shared, count = watch.add(arm.evidence(FIRST_NOISE), arm.surprise)
        if not count:
            return jump != 0.0
        for other, one in self._arms[regime].items():
            if not isinstance(other, tuple) and (one is not arm or not jump):
                one.borrow(shared)
        return True

    # -- choosing -----------------------------------------------------------------------

    def _choose(self, bucket: Bucket) -> list[CellUpdate]:
        """Choose again in a bucket; return the cells whose answer changes."""
        known, ledger = self._known(bucket), self.ledger
        base = known.get(bucket.base_arm)
        typical = 0.0 if base is None else base.expect(size_of(bucket.base_arm)) or 0.0
        room = ledger.allowance(typical) - _at_risk_us(bucket)
        horizon = ledger.horizon()
        return bucket.choose(known, Stakes(self.margin, room / horizon, ledger.lead_us / horizon))

    def _choose_some(self) -> list[CellUpdate]:
        """Choose again in a few of the buckets that wait for it."""
        updates: list[CellUpdate] = []
        for _ in range(min(_CHOSEN_AT_ONCE, len(self._to_choose))):
            updates += self._choose(self._to_choose.popleft())
        return updates

    def _account(
        self,
        bucket: Bucket,
        outcome: Outcome,
        arm: Arm,
        before: float | None,
        us: float,
        *,
        is_base: bool,
    ) -> None:
        """Enter the steps that an outcome stands for into the account against the base."""
        ledger, size = self.ledger, outcome.batch.num_tokens
        one_shot = outcome.decision.one_shot
        steps = ledger.steps_for(outcome.step, one_shot=one_shot, is_base=is_base)
        if outcome.decision.reason == PROBE:
            bucket.last_probe = self._step
        if is_base:
            ledger.account(steps, before or us, before or us)
            if arm.is_known and not arm.watch.is_suspicious:
                # If it has become faster, when is not known: taken for right after its last sample.
                faster = 1.0 - min(1.0, (arm.expect(size) or us) / (before or us))
                ledger.lead_us -= bucket.unproven_us * faster
                bucket.unproven_us = 0.0
            return
        base = self._known(bucket).get(bucket.base_arm) or self._measured(bucket).get(
            bucket.base_arm
        )
        if base is None:
            # Nothing is known to compare with: taken for a loss of all it took.
            ledger.account(steps, us, 2.0 * us)
            return
        base_us = base.expect(size) or us
        if before is not None and not 0.4 < us / before < 2.5:
            us = before  # an outlier, which would have come under the base as well
        ledger.account(steps, base_us * (1.0 - base.error(size)), us)
        bucket.unproven_us += steps * base_us

    def _next_pace(self, arm: Arm) -> int:
        """Return how seldom steps are to be measured from now on."""
        ledger, plain = self.ledger, self.ledger.spacing / self.pace
        if arm.watch.is_suspicious or plain < _WORTH_SAVING or not ledger.steps:
            return 1  # an odd time: look again soon
        pace, mean_us = 1, ledger.base_us / ledger.steps
        while pace < _SLOWEST_PACE and self._calm >= _CALM * pace:
            risk_us = ledger.horizon(2 * pace * plain) * mean_us * (DRIFT - 1.0) * ledger.differing
            if ledger.allowance(mean_us) < _AFFORDED * risk_us:
                break
            pace *= 2
        return pace

    # -- probing ------------------------------------------------------------------------

    def _probe(self, bucket: Bucket, batch: Batch, ran: ArmId) -> list[CellUpdate]:
        """Perhaps try another arm, once, when this batch comes again."""
        if batch in bucket.waiting:
            return []
        size = batch.num_tokens
        current = bucket.choice(size)
        arms = self._measured(bucket)
        now = arms.get(current)
        if now is None:
            return []
        now_us = now.expect(size) or 0.0
        tried = arms.get(ran)
        if ran != current and tried is not None and tried.watch.is_suspicious:
            return self._send(bucket, batch, ran)  # an odd time: look again, rather than wait
        account = self.ledger.allowance(now_us)
        soon = _at_risk_us(bucket) + self.ledger.horizon() * now_us * (1.0 - 1.0 / DRIFT)
        base = arms.get(bucket.base_arm)
        if base is not None and bucket.base_arm != current:
            # Somewhat before the account is used up where it costs little, and else at the last.
            behind = math.expm1(base.log_us(size) - now.log_us(size))
            if soon > account * min(1.0, _PROOF_FROM + behind):
                return self._send(bucket, batch, bucket.base_arm)
        for ident in bucket.arms:
            if ident == current:
                continue
            arm = arms.get(ident)
            if arm is None or not arm.is_known:
                cost = max(0.0, self._guess(ident, current, size) - 1.0) * now_us
                if cost <= account:
                    return self._send(bucket, batch, ident)
                continue
            # The better it is known, the longer it is not tried; each probe that has not come
            # back makes the next one wait longer.
            wait = max(2.0, arm.weight(size)) * (1 + len(bucket.waiting))
            if self._step - arm.last_step < wait * self._random.uniform(1.0, 1.5):
                continue
            cost = PROBE_US + max(0.0, (arm.expect(size) or 0.0) - now_us)
            if cost <= _COST_AT_ONCE * self.ledger.probe_allowance():
                self.ledger.probes_us += cost
                return self._send(bucket, batch, ident)
        return []

    def _guess(self, ident: ArmId, current: ArmId, num_tokens: int) -> float:
        """Return how many times as long an arm may take of which little is known.

        What is known of the arm itself in another regime says most, then what is known of the
        arm that is most like it.
        """
        for is_like in (False, True):
            for regime in self._regimes():
                arms = self._arms.get(regime, {})
                one, other = arms.get(ident), arms.get(current)
                if is_like:
                    one, other = _most_like(ident, arms), _most_like(current, arms)
                if one is not None and other is not None:
                    return 1.2 * math.exp(one.log_us(num_tokens) - other.log_us(num_tokens))
        return _UNKNOWN_COST

    def _send(self, bucket: Bucket, batch: Batch, ident: ArmId) -> list[CellUpdate]:
        bucket.waiting[batch] = ident
        if isinstance(ident, tuple):
            decision = replay_of(ident, batch.num_tokens, PROBE)
        else:
            decision = Decision.eager(PROBE, timed=True)
        return [CellUpdate(batch, decision, one_shot=True)]


def _at_risk_us(bucket: Bucket) -> float:
    """Return what was lost unnoticed, had the base become faster right after its last sample."""
    return bucket.unproven_us * (1.0 - 1.0 / DRIFT)


def _known_of(measured: Mapping[ArmId, Arm]) -> dict[ArmId, Arm]:
    return {ident: arm for ident, arm in measured.items() if arm.is_known}


def _most_like(ident: ArmId, arms: Mapping[ArmId, Arm]) -> Arm | None:
    """Return the arm of the same mode whose size is nearest."""
    alike = [other for other in arms if mode_of(other) is mode_of(ident)]
    size = size_of(ident)
    near = min(alike, key=lambda other: abs(math.log(size_of(other) / size)), default=None)
    return None if near is None else arms[near]


def _state_path(state: str | Path) -> Path:
    try:
        return real_target(state)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError("state", state, f"the path of a file ({error})") from error


def _share(value: Any, setting: str) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(value, bool) or not 0.0 <= share < 1.0:
        raise ConfigError(setting, value, "a share from 0 to below 1")
    return share
