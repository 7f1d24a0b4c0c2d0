"""The policy ``adaptive``, which chooses between eager and graphs by measured time."""

from __future__ import annotations

import math
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

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
from dispatchkit.files import check_path, real_target
from dispatchkit.keys import check_count, check_instance
from dispatchkit.plugins import PluginSet, load_plugins

from dispatchkit_adaptive.arms import Arm, ArmId, Graphs, Regime, graphs_of, size_of
from dispatchkit_adaptive.buckets import PROBE, Bucket, band_of, bands
from dispatchkit_adaptive.estimates import FIRST_NOISE, Estimate, Watch
from dispatchkit_adaptive.host import HostLoad
from dispatchkit_adaptive.ledger import DRIFT, Ledger, Stakes
from dispatchkit_adaptive.report import BucketReport, describe
from dispatchkit_adaptive.state import StateError, read_state, write_state

__all__ = ["CALIBRATION", "AdaptivePolicy"]

#: Additional host time of a probe (creating a plan, events and an outcome), in microseconds.
PROBE_US = 25.0
# A regime states which clock measured a step, and whether other work was queued before it. Each arm
# has a separate estimate for each regime.
#: Regime of device times, for steps submitted ahead of the device. Used if host time is hidden.
ALONE: Regime = ("device alone", True)
#: Regime of times that include delays by the host, for steps queued behind earlier work. Used if
#: host time counts.
BUSY: Regime = ("device", True)
#: Reason of the decisions in calibration runs.
CALIBRATION = "calibration"
# Maximum number of batches whose bucket is remembered.
_MOST_ASKED = 65_536
# Number of outcomes without a change after which the pace becomes 2 (4 after twice as many, 8 after
# four times as many), and the largest pace.
_CALM, _SLOWEST_PACE = 24, 8
# If the base's arm is not in use, it is probed when more than this share of the account is at risk.
# The share applies to a probe that costs nothing; an expensive probe is sent later.
_PROOF_FROM = 0.8
# Share of the probe allowance that a single probe may cost.
_COST_AT_ONCE = 0.25
# Share of the account that a probe may cost if it verifies a jump that was seen in other arms.
_VERIFYING_COST = 0.01
# The pace stays 1 if, at that pace, fewer than this many steps pass from one measured step to the
# next.
_WORTH_SAVING = 8.0
# The pace is doubled only if the allowance is at least this many times the time at risk.
_AFFORDED = 3.0
_CALIBRATION_RUNS, _CALIBRATION_ROUNDS = 8, 3
# Number of consecutive outcomes in other regimes after which the latest regime becomes current.
_REGIME_CHANGE = 8
# Even if a single graph covers a batch, splitting the batch is considered if the parts compute at
# most this share of the graph's tokens.
_WORTH_SPLITTING = 0.75
# Assumed time of an arm with too few samples, relative to the arm in use.
_UNKNOWN_COST = 3.0


class AdaptivePolicy:
    """A policy that chooses eager or a graph by measured time, with a limit on lost time.

    Args:
        base: The policy to start from and compare with: an object or a registered name.
        base_options: Options for a base that is given by name.
        history_size: Approximate number of recent samples that determine an arm's estimate, at
            least 8.
        margin: Smallest relative gain for which a choice is changed.
        promise: Largest share of time that may be lost compared with the base.
        explore: Share of time that probes may cost.
        max_sizes: Maximum number of single graphs of each mode that are considered for a batch, the
            smallest first.
        seed: Seed of the random variation in the spacing of probes.
        state: File of learned estimates, which ``save`` writes. An existing file is read when the
            policy is created; if the file is unusable, the policy warns and learns from scratch.
        fingerprint: Properties that the times depend on (see ``device_fingerprint``). A state file
            with a different fingerprint is not used.
        plugins: Plugins to search for a base that is given by name. By default, the installed
            plugins are searched.

    Attributes:
        ledger: The account of time saved and lost relative to the base.
        pace: Factor by which the interval between measured steps is currently longer than usual.
            It exceeds 1 only while two conditions hold: times have not changed for a while, and
            the account covers the time that a slowdown could cost before it is noticed.

    Raises:
        ConfigError: An option is invalid.
        UnknownNameError: ``base`` is not the name of a policy.
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
            raise ConfigError(
                "base_options",
                base_options,
                "omitted if base is an object",
                "Pass the options to the base policy when you create it.",
            )
        allowed = "a policy object or the name of a policy"
        self.base: Policy = check_instance(base, Policy, "base", allowed=allowed)
        self.fingerprint = dict(fingerprint or {})
        self.ledger = Ledger(self.promise, _share(explore, "explore"))
        self.pace: int = 1
        self._random = random.Random(seed)
        # Regimes with samples, the current one first; and the number of consecutive outcomes in
        # other regimes.
        self._regimes: list[Regime] = [("device", False)]
        self._other_regime = 0
        self._host = HostLoad()
        self._arms: dict[ArmId, Arm] = {}
        self._eager_watches: dict[Regime, Watch] = {}
        self._buckets: dict[Any, Bucket] = {}
        # For each batch: the revision of the graphs for which the entry is valid, the base's
        # decision, and the bucket. Learning changes the choice of a bucket, but not these entries.
        self._places: dict[Batch, tuple[object, Decision | None, Bucket | None]] = {}
        # All buckets, the most recently used last; and the buckets whose choice must be updated,
        # the next one to update last.
        self._by_use: dict[Bucket, None] = {}
        self._to_choose: dict[Bucket, None] = {}
        self._with_arm: defaultdict[Arm, list[Bucket]] = defaultdict(list)
        self._step = self._calm = 0
        self._calibration_rounds = 0
        self._calibrated: set[tuple[Batch, GraphKey | None]] = set()
        # Resolved now because the program may change its working directory before saving.
        self.state_path = None if state is None else _state_path(state)
        if self.state_path is not None and os.path.lexists(self.state_path):
            try:
                self.load(self.state_path)
            except StateError as error:
                text = f"{error} Learning starts from scratch."
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    # -- deciding -----------------------------------------------------------------------

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the base policy."""
        self._buckets.clear()
        self._places.clear()
        self._to_choose.clear()
        self._by_use.clear()
        self._with_arm.clear()
        self._calibrated.clear()
        return self.base.declare(config)

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the decision of the batch's bucket, initially the base's decision."""
        revision, base, bucket = self._places.get(batch, (None, None, None))
        if revision != graphs.revision:
            if len(self._places) >= _MOST_ASKED:
                self._places.clear()
            base, old = self.base.decide(batch, graphs), bucket
            bucket = None if base is None else self._find_bucket(batch, graphs, base)
            if old is not None and old is not bucket:
                old.waiting.pop(batch.num_tokens, None)
            self._places[batch] = (graphs.revision, base, bucket)
        return base if bucket is None else bucket.answer(batch)

    def _find_bucket(self, batch: Batch, graphs: GraphView, base: Decision) -> Bucket | None:
        """Return the bucket of a batch; None if there is nothing to choose."""
        if None in batch.axes:
            return None  # no graph covers a batch outside the range of an axis
        found: dict[Graphs, None] = {}
        top = most = 0
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if not batch.allows(mode):
                continue
            smallest = next(graphs.covering(batch, mode), None)
            if smallest is not None:
                top = min(top or smallest.num_tokens, smallest.num_tokens)
            ready = filter(graphs.is_ready, graphs.covering(batch, mode))
            single = [(key,) for key in islice(ready, self.max_sizes)]
            found.update(dict.fromkeys(single))
            parts = tuple(part.key for part in greedy_parts(batch, graphs, mode))
            if parts and (
                not single or size_of(parts) <= _WORTH_SPLITTING * single[0][0].num_tokens
            ):
                found[parts] = None
                most = max(most, size_of(parts))
        own = graphs_of(base)
        if own:
            found[own] = None
        # If no single graph is large enough, the parts determine the band.
        band = band_of(batch, top or most, graphs.config.sizes)
        may_be_eager = batch.allows(RuntimeMode.NONE)
        if len(found) + may_be_eager < 2:
            return None
        if not own and not (base.key is None and may_be_eager):
            # The base has no arm: its split pads a graph before the last, or it runs eager although
            # eager is not allowed.
            return None
        kind = attrs.evolve(base, parts=()) if base.parts else base
        ident = (batch.allowed, kind, own, tuple(found), band)
        bucket = self._buckets.get(ident)
        if bucket is None:
            arms = [self._arm(graphs) for graphs in found]
            eager = self._arm(band) if may_be_eager else None
            base_arm = self._arm(own or band)
            arms = arms if eager is None else [*arms, eager]
            bucket = self._buckets[ident] = Bucket(base, base_arm, tuple(arms), eager, batch)
            self._by_use[bucket] = None
            for arm in bucket.arms:
                self._with_arm[arm].append(bucket)
            self._choose(bucket)
        return bucket

    # -- learning -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> list[CellUpdate]:
        """Learn from a completed step; return updates of the dispatcher's table.

        A step waits for this method, so each call does little. It updates the estimates of one arm
        and the choice of the batch's bucket. It then does one more thing: renew the cells of that
        bucket, send or withdraw a probe, or update the choice and cells of another bucket. A jump
        in eager times moves the estimates of all eager arms.
        """
        batch, decision, us = outcome.batch, outcome.decision, outcome.elapsed_us
        _, _, bucket = self._places.get(batch, (None, None, None))
        if bucket is not None and decision.reason == PROBE:
            bucket.end_probe(batch.num_tokens)
        if not outcome.completed or not _is_time(us):
            return []
        if outcome.is_first:
            return []  # the first step of a size includes one-time costs
        arm = bucket.eager if bucket is not None and decision.key is None else None
        if decision.key is not None and (graphs := graphs_of(decision)):
            arm = self._arm(graphs)
        if arm is None:
            return []
        host_us, device_us = outcome.host_us, outcome.device_us
        regime, was_ahead = (outcome.clock, outcome.queued), _is_time(device_us)
        if _is_time(host_us):
            self._host.add_submission(host_us, is_eager=arm.is_eager)
        if _is_time(device_us):
            other, other_us = ALONE, device_us
            if self._host.is_hidden:
                regime, us, other, other_us = other, other_us, regime, us
            arm.estimate(other).add(batch.num_tokens, other_us)
        estimate = arm.estimate(regime)
        if decision.reason == CALIBRATION:
            estimate.add(batch.num_tokens, us)
            estimate.last_step = self._step
            self._choose_later(arm)
            return self._choose_next()
        expected = estimate.expect(batch.num_tokens)
        self._step = estimate.last_step = outcome.step or self._step + 1
        changed = self._learn(arm, regime, batch.num_tokens, us)
        if outcome.won:
            changed |= self._note_regime(regime)
            if bucket is not None and not decision.one_shot and _is_time(host_us):
                changed |= self._note_host(bucket, batch.num_tokens, was_ahead)
        self._calm = 0 if changed else self._calm + 1
        if bucket is None or not outcome.won:
            self._choose_later(arm)
            return self._choose_next()
        self._by_use[bucket] = self._by_use.pop(bucket)
        self._to_choose.pop(bucket, None)
        self._account(bucket, outcome, arm, estimate, expected, us)
        self.pace = self._next_pace(estimate)
        self._choose(bucket)
        updates = bucket.renew()
        if not updates and not changed:
            updates = self._probe(bucket, batch, arm)
        return updates or bucket.drop_probes() or self._choose_next()

    def record(
        self,
        key: GraphKey | Batch,
        mode: RuntimeMode,
        latency_us: float,
        *,
        queued: bool = False,
        clock: str = "device",
    ) -> None:
        """Record a measured time, for example from a calibration or a custom executor.

        Args:
            key: The graph that was replayed. For eager (mode NONE), the batch that ran, which
                must have been dispatched before.
            mode: The runtime mode of the measured step.
            latency_us: The measured time in microseconds.
            queued: Whether earlier work was still running on the stream.
            clock: ``device`` or ``host``; times of different clocks are never compared.

        Raises:
            ConfigError: The time is invalid, key and mode do not match, the batch was not
                dispatched before, or it cannot run both eager and with a graph.
        """
        if not math.isfinite(latency_us) or latency_us <= 0.0:
            raise ConfigError("latency_us", latency_us, "a finite number of microseconds above 0")
        arm: Arm | None
        if isinstance(key, GraphKey):
            arm = self._arm((key,))
            if key.mode is not mode:
                raise ConfigError("mode", str(mode), f"the mode of the key ({key.mode})")
        else:
            if mode is not RuntimeMode.NONE:
                raise ConfigError("key", key, f"a GraphKey if mode is {mode}")
            _, _, bucket = self._places.get(key, (None, None, None))
            arm = None if bucket is None else bucket.eager
            if arm is None:
                if key not in self._places:
                    hint = "Dispatch the batch first, then record its times."
                    raise ConfigError("key", key, "a batch that was dispatched before", hint)
                hint = "There is nothing to choose for this batch, so do not record its times."
                allowed = "a batch that may run both eager and with a graph"
                raise ConfigError("key", key, allowed, hint)
        self._learn(arm, (clock, queued), key.num_tokens, latency_us)
        self._choose_later(arm)
        self._choose_all()

    def calibration_runs(self, graphs: GraphView) -> list[CalibrationRun]:
        """Return the runs to time before serving; empty when no more are needed.

        Call this method after a capture, and again after the outcomes of all runs have been
        observed. The first call returns a run of each graph at its size, and eager runs at both
        ends of each band of sizes. If an arm and the base's arm are too close to tell which is
        faster, later calls repeat the runs of both.
        """
        self._choose_all()
        self._calibration_rounds += 1
        times = _CALIBRATION_RUNS * 2 ** (self._calibration_rounds - 1)
        places = self._calibration_places(graphs)
        if self._calibration_rounds == 1:
            # After a further capture, return only new runs.
            places = [
                (batch, how) for batch, how in places if (batch, how.key) not in self._calibrated
            ]
            self._calibrated.update((batch, how.key) for batch, how in places)
        elif self._calibration_rounds > _CALIBRATION_ROUNDS:
            places = []
        else:
            places = [(batch, how) for batch, how in places if self._is_close_call(batch, how.key)]
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
                self.decide(batch, graphs)  # assigns the batch to a bucket
                if num_tokens == high:
                    places[batch, key] = Decision.replay(key, CALIBRATION, timed=True)
                places.setdefault((batch, None), Decision.eager(CALIBRATION, timed=True))
        return [(batch, how) for (batch, _), how in places.items()]

    def _is_close_call(self, batch: Batch, key: GraphKey | None) -> bool:
        """Return whether an arm needs more runs to be compared with the base's arm."""
        _, _, bucket = self._places[batch]
        if bucket is None:
            return False
        known, size = self._known(bucket), batch.num_tokens
        base = known.get(bucket.base_arm)
        ran = bucket.eager if key is None else self._arm((key,))
        return base is not None and any(
            abs(one.log_us(size) - base.log_us(size))
            < 2.0 * math.hypot(one.error(size), base.error(size))
            for arm, one in known.items()
            if one is not base and ran in (arm, bucket.base_arm)
        )

    # -- reading and keeping ------------------------------------------------------------

    def explain(self, batch: Batch | None = None) -> tuple[BucketReport, ...]:
        """Return printable reports on all buckets, or on the bucket of one batch."""
        found = list(self._buckets.values())
        if batch is not None:
            found = [bucket for _, _, bucket in [self._places.get(batch, (0, 0, None))] if bucket]
        return tuple(
            describe(bucket, self._known(bucket) or self._measured(bucket), self._step)
            for bucket in found
            if bucket.sizes[0]
        )

    def save(self, path: str | Path | None = None) -> Path:
        """Write the learned estimates to a file, completely or not at all, and return its path.

        Raises:
            ConfigError: No path was given to this call or to the policy, or the file cannot be
                written.
        """
        target = self.state_path if path is None else Path(check_path(path, "path"))
        if target is None:
            raise ConfigError(
                "path",
                None,
                "given if the policy has no state file",
                "Pass a path, or create the policy with state=PATH.",
            )
        write_state(target, self.fingerprint, self._arms.values())
        return target

    def load(self, path: str | Path) -> None:
        """Replace the learned estimates with the estimates in a file.

        Raises:
            ConfigError: ``path`` is not a valid file path.
            StateError: The file cannot be read, is incomplete or not a state file, or has a
                different version or fingerprint. The current estimates are kept.
        """
        read = read_state(Path(check_path(path, "path")), self.fingerprint, self.history_size)
        for arm in self._arms.values():
            arm.estimates.clear()
        for ident, regime, estimate in read:
            self._arm(ident).estimates[regime] = estimate
            if regime not in self._regimes:
                self._regimes.append(regime)
        self._to_choose = self._by_use.copy()
        self._choose_all()

    def __repr__(self) -> str:
        return f"AdaptivePolicy(base={self.base!r}, buckets={len(self._buckets)})"

    # -- what is known ------------------------------------------------------------------

    def _arm(self, ident: ArmId) -> Arm:
        arm = self._arms.get(ident)
        if arm is None:
            arm = self._arms[ident] = Arm(ident, self.history_size)
        return arm

    def _known(self, bucket: Bucket) -> dict[Arm, Estimate]:
        """Return the known arms of the first regime in which arms can be compared."""
        for regime in self._regimes:
            known = bucket.known(regime)
            if known:
                return known
        return {}

    def _measured(self, bucket: Bucket) -> dict[Arm, Estimate]:
        """Return the arms of a bucket that have samples in the current regime."""
        regime = self._regimes[0]
        return {arm: arm.estimates[regime] for arm in bucket.arms if regime in arm.estimates}

    def _latest(self, arm: Arm) -> Estimate | None:
        """Return the estimate of an arm in the current or the most recent other regime, if any."""
        for regime in self._regimes:
            if regime in arm.estimates:
                return arm.estimates[regime]
        return None

    def _note_regime(self, regime: Regime) -> bool:
        """Record the regime of an outcome; return whether the current regime changed."""
        self._other_regime = 0 if regime == self._regimes[0] else self._other_regime + 1
        if self._other_regime < _REGIME_CHANGE:
            return False
        self._lead(regime)
        return True

    def _lead(self, regime: Regime) -> None:
        """Make a regime the current one, in which arms are compared."""
        self._regimes = [regime, *(other for other in self._regimes if other != regime)]
        self._other_regime = 0
        self._to_choose = self._by_use.copy()

    def _note_host(self, bucket: Bucket, num_tokens: int, was_ahead: bool) -> bool:
        """Record whether the host was ahead of the device; return whether the regime changed."""
        known = bucket.known(ALONE)
        if len(known) < max(2, len(bucket.known(BUSY))):
            return False  # an arm not yet known in ALONE may be the fastest on the device
        arm = min(known, key=lambda one: known[one].log_us(num_tokens))
        device_us = math.exp(known[arm].log_us(num_tokens))
        if not self._host.add_step(device_us, is_eager=arm.is_eager, was_ahead=was_ahead):
            return False
        self._lead(ALONE if self._host.is_hidden else BUSY)
        return True

    def _learn(self, arm: Arm, regime: Regime, num_tokens: int, us: float) -> bool:
        """Add a sample to an arm's estimate; return whether it shows a jump."""
        if regime not in self._regimes:
            self._regimes.append(regime)
        estimate = arm.estimate(regime)
        jump = estimate.add(num_tokens, us)
        if jump:
            self._choose_later(arm)
        if not arm.is_eager:
            return jump != 0.0
        # A cause that slows eager in one bucket (a busier host, a lower clock) slows eager in all
        # buckets. Small changes, within the initial noise, are attributed to one band only.
        watch = self._eager_watches.setdefault(regime, Watch())
        shared, count = watch.add(estimate.evidence(FIRST_NOISE), estimate.surprise)
        if not count:
            return jump != 0.0
        for other in self._arms.values():
            one = other.estimates.get(regime) if other.is_eager else None
            if one is not None and (one is not estimate or not jump):
                one.borrow(shared)
        self._to_choose = self._by_use.copy()
        return True

    # -- choosing -----------------------------------------------------------------------

    def _choose(self, bucket: Bucket) -> None:
        """Update the choice of a bucket; a change makes cells of the bucket stale."""
        known, ledger = self._known(bucket), self.ledger
        base = known.get(bucket.base_arm)
        typical = 0.0 if base is None else base.expect(bucket.base_arm.size) or 0.0
        room = ledger.allowance(typical)
        horizon = ledger.horizon()
        bucket.choose(known, Stakes(self.margin, room / horizon, ledger.lead_us / horizon))

    def _choose_later(self, arm: Arm) -> None:
        """Schedule a new choice for all buckets that have this arm."""
        self._to_choose.update(dict.fromkeys(self._with_arm[arm]))

    def _choose_next(self) -> list[CellUpdate]:
        """Update the choice of the next scheduled bucket; return the update of its stale cells."""
        if not self._to_choose:
            return []
        bucket, _ = self._to_choose.popitem()
        self._choose(bucket)
        return bucket.renew()

    def _choose_all(self) -> None:
        """Update the choices of all scheduled buckets; buckets with stale cells stay scheduled."""
        for bucket in list(self._to_choose):
            self._choose(bucket)
            if not bucket.stale:
                del self._to_choose[bucket]

    def _account(
        self,
        bucket: Bucket,
        outcome: Outcome,
        arm: Arm,
        estimate: Estimate,
        before: float | None,
        us: float,
    ) -> None:
        """Account for the steps that an outcome represents."""
        ledger, size, is_base = self.ledger, outcome.batch.num_tokens, arm is bucket.base_arm
        steps = ledger.steps_for(outcome.step, one_shot=outcome.decision.one_shot, is_base=is_base)
        if outcome.decision.reason == PROBE:
            bucket.last_probe = self._step
        if is_base:
            ledger.account(steps, before or us, before or us)
            if estimate.is_known and not estimate.is_odd:
                # If the base became faster, assume that it did so right after its previous sample.
                faster = 1.0 - min(1.0, (estimate.expect(size) or us) / (before or us))
                ledger.lead_us -= bucket.unproven_us * faster
                bucket.unproven_us = 0.0
            return
        base = self._latest(bucket.base_arm)
        if base is None:
            # Without an estimate for the base, count the whole time as lost.
            ledger.account(steps, us, 2.0 * us)
            return
        base_us = base.expect(size) or us
        if before is not None and not 0.4 < us / before < 2.5:
            us = before  # replace an outlier, which would also have occurred with the base
        ledger.account(steps, base_us * (1.0 - base.error(size)), us)
        bucket.unproven_us += steps * base_us

    def _next_pace(self, estimate: Estimate) -> int:
        """Return the pace at which steps are to be measured from now on."""
        ledger, plain = self.ledger, self.ledger.spacing / self.pace
        if estimate.is_odd or plain < _WORTH_SAVING or not ledger.steps:
            return 1  # after an unusual time, measure again soon
        pace, mean_us = 1, ledger.base_us / ledger.steps
        while pace < _SLOWEST_PACE and self._calm >= _CALM * pace:
            risk_us = ledger.horizon(2 * pace * plain) * mean_us * (DRIFT - 1.0) * ledger.differing
            if ledger.allowance(mean_us) < _AFFORDED * risk_us:
                break
            pace *= 2
        return pace

    # -- probing ------------------------------------------------------------------------

    def _probe(self, bucket: Bucket, batch: Batch, ran: Arm) -> list[CellUpdate]:
        """Return an update that probes another arm in this batch's next step, if a probe is due."""
        if batch.num_tokens in bucket.waiting:
            return []
        size, regime = batch.num_tokens, self._regimes[0]
        current = bucket.choice(size)
        now = current.estimates.get(regime)
        if now is None:
            return []
        now_us = now.expect(size) or 0.0
        tried = ran.estimates.get(regime)
        if ran is not current and tried is not None and tried.is_odd:
            return bucket.send_probe(batch, ran)  # repeat a probe with an unusual time
        account = self.ledger.allowance(now_us)
        soon = _at_risk_us(bucket) + self.ledger.horizon() * now_us * (1.0 - 1.0 / DRIFT)
        base = bucket.base_arm.estimates.get(regime)
        if base is not None and bucket.base_arm is not current:
            # Probe the base before the account is used up: earlier at sizes where the probe is
            # cheap, later at sizes where it is expensive.
            behind = math.expm1(base.log_us(size) - now.log_us(size))
            if soon > account * min(1.0, _PROOF_FROM + behind):
                return bucket.send_probe(batch, bucket.base_arm)
        for arm in bucket.arms:
            if arm is current:
                continue
            estimate = arm.estimates.get(regime)
            if regime == ALONE and (estimate is None or not estimate.is_known):
                # Perhaps the host can never submit a step of this arm ahead of the device.
                estimate = arm.estimates.get(BUSY)
            if estimate is None or not estimate.is_known:
                if (_UNKNOWN_COST - 1.0) * now_us <= account:
                    return bucket.send_probe(batch, arm)
                continue
            # The wait between probes grows with the precision of the arm's estimate, and with the
            # number of probes that have no outcome yet.
            wait = max(2.0, estimate.weight(size)) * (1 + len(bucket.waiting))
            if self._step - estimate.last_step < wait * self._random.uniform(1.0, 1.5):
                continue
            cost = PROBE_US + max(0.0, (estimate.expect(size) or 0.0) - now_us)
            limit = _COST_AT_ONCE * self.ledger.probe_allowance()
            if estimate.is_borrowed:
                limit = max(limit, _VERIFYING_COST * account)
            if cost <= limit:
                self.ledger.probes_us += cost
                return bucket.send_probe(batch, arm)
        return []


def _is_time(us: float | None) -> TypeGuard[float]:
    """Return whether a number of microseconds is finite and above 0."""
    return us is not None and math.isfinite(us) and us > 0.0


def _at_risk_us(bucket: Bucket) -> float:
    """Return the possible loss in microseconds since the last sample of the base's arm."""
    return bucket.unproven_us * (1.0 - 1.0 / DRIFT)


def _state_path(state: str | Path) -> Path:
    path = check_path(state, "state")
    try:
        return real_target(path)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            "state", state, "a file path that can be resolved", f"The error is: {error}."
        ) from error


def _share(value: Any, setting: str) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(value, bool) or not 0.0 <= share < 1.0:
        raise ConfigError(setting, value, "a non-negative number less than 1")
    return share
