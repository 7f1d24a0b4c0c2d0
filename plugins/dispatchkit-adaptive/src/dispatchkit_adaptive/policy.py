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
from statistics import median
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

from dispatchkit_adaptive.arms import OUTLIER, Arm
from dispatchkit_adaptive.buckets import (
    ArmId,
    Bucket,
    Graphs,
    Parts,
    Piece,
    Stakes,
    allows_eager,
    band_of,
    bands,
    graphs_of,
    mode_of,
    replay_of,
    size_of,
)
from dispatchkit_adaptive.ledger import DRIFT, Ledger
from dispatchkit_adaptive.report import BucketReport, describe
from dispatchkit_adaptive.state import StateError, read_state, write_state

__all__ = ["CALIBRATION", "PROBE", "AdaptivePolicy"]

#: Reasons of decisions that are there to be measured.
PROBE, CALIBRATION = "probe", "calibration"
#: Samples from which on an arm counts as known.
_KNOWN = 3
#: An arm this many times slower than the one in use is far off, and seldom tried.
_CLOSE = 1.5
# Outcomes after which a probe that never came back (its cell was not used) is given up.
_LOST = 4096
# Batches of a bucket that may wait for a probe at once: where sizes seldom come again, one alone
# would wait for ever.
_MOST_WAITING, _FEW_WAITING = 24, 2
# Batches whose bucket is remembered.
_MOST_ASKED = 65_536
# Samples that are learnt from together, and outcomes without a change from which on they are.
_MOST_PUT_OFF, _SETTLED = 12, 96
# How many times what it risks has to be there before fewer steps are measured.
_AFFORDED = 3.0
# Outcomes without a change after which half as many steps are measured, and how seldom at most.
_CALM, _SLOWEST_PACE = 24, 8
# Whoever measures more than one step in so many is taken to have nothing to save there.
_WORTH_SAVING = 8.0
# Samples since a change in which it is still news.
_JUST_CHANGED = 5
_CALIBRATION_RUNS, _CALIBRATION_ROUNDS = 8, 3
_REGIME_WINDOW, _REGIME_MAJORITY = 16, 12
# Parts are tried in place of one graph where they compute at most this share of its tokens.
_WORTH_SPLITTING = 0.75
# What an arm that was never measured is taken to cost, in times of the one in use.
_UNKNOWN_COST = 3.0
# The share of the promise that is planned with; the rest is for what is known wrongly.
_PLANNED = 0.75

_Regime = tuple[str, bool]  # the clock, and whether other work was ahead on the stream


class AdaptivePolicy:
    """Choose between eager and each graph by measured time, never far behind a base policy.

    Args:
        base: The policy to start from and to be measured against, or the name of one.
        base_options: Options for a base chosen by name.
        history_size: Samples kept of each arm.
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
        self.ledger = Ledger(_PLANNED * self.promise, _share(explore, "explore"))
        self._random = random.Random(seed)
        self._arms: dict[tuple[_Regime, ArmId], Arm] = {}
        self._regime: _Regime = ("device", False)
        self._seen: list[_Regime] = []
        self._regimes: deque[_Regime] = deque(maxlen=_REGIME_WINDOW)
        self._buckets: dict[Any, Bucket] = {}
        self._of_cell: dict[Batch, Bucket] = {}
        # What was answered for batches while the graphs stay as they are; what was learnt
        # changes the choice of a bucket, and neither it nor the base.
        self._revision: tuple[object, ...] = ()
        self._asked: dict[Batch, tuple[Decision | None, Bucket | None]] = {}
        self._eager_news: deque[tuple[Arm, float, float, float]] = deque(maxlen=8)
        self._outcomes = 0
        self._backlog: list[tuple[Arm, Bucket, float, float]] = []
        self._calm = 0
        self._plain_spacing = 1.0
        self.pace: int = 1
        self._calibration_rounds = 0
        self._calibrated: set[tuple[Batch, GraphKey | None]] = set()
        self._step = 0
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
        self._of_cell.clear()
        self._asked.clear()
        self._catch_up()
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
            bucket = None if base is None else self._bucket(batch, graphs, base)
            found = self._asked[batch] = (base, bucket)
        base, bucket = found
        if bucket is None:
            return base
        bucket.served[batch] = None
        return bucket.answer(batch.num_tokens)

    def _bucket(self, batch: Batch, graphs: GraphView, base: Decision) -> Bucket | None:
        """Return the bucket of a batch, None where there is nothing to choose."""
        keys: dict[Graphs, None] = {}
        top = most = 0
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if not batch.allows(mode):
                continue
            smallest = next(graphs.covering(batch, mode), None)
            if smallest is not None:
                top = min(top or smallest.num_tokens, smallest.num_tokens)
            ready = [*islice(filter(graphs.is_ready, graphs.covering(batch, mode)), self.max_sizes)]
            keys.update(dict.fromkeys(ready))
            parts = Parts.of(greedy_parts(batch, graphs, mode))
            if parts is not None and (
                not ready or parts.num_tokens <= _WORTH_SPLITTING * ready[0].num_tokens
            ):
                keys[parts] = None
                most = max(most, parts.num_tokens)
        own = graphs_of(base)
        if own is not None:
            keys[own] = None
        top = top or most  # where no graph alone is large enough, parts are
        where = Piece.of(batch, band_of(batch.num_tokens, top, graphs.config.sizes))
        piece = where if allows_eager(batch) else None
        old = self._of_cell.get(batch)
        # What splits in a way of its own has no arm.
        has_arm = piece is not None if base.key is None else own is not None
        if len(keys) + (piece is not None) < 2 or not has_arm:
            bucket = None
        else:
            kind = attrs.evolve(base, parts=()) if base.parts else base
            ident = (batch.allowed, kind, own, tuple(keys), where)
            bucket = self._buckets.get(ident)
            if bucket is None:
                bucket = self._buckets[ident] = Bucket(base, tuple(keys), piece, where.top)
                self._choose_anew([bucket])
            bucket.cells[batch] = None
            self._of_cell[batch] = bucket
        if old is not None and old is not bucket:
            old.cells.pop(batch, None)
            old.served.pop(batch, None)
            if bucket is None:
                del self._of_cell[batch]
        return bucket

    # -- learning -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> list[CellUpdate]:
        """Learn from a step that ran to its end; return the cells whose answer changes."""
        us = outcome.elapsed_us
        bucket = self._of_cell.get(outcome.batch)
        if bucket is not None and outcome.decision.reason == PROBE:
            bucket.waiting.pop(outcome.batch, None)
        if not outcome.completed or us is None or not math.isfinite(us) or us <= 0.0:
            return []
        ran: ArmId | None = graphs_of(outcome.decision)
        if outcome.decision.key is None:
            ran = None if bucket is None else bucket.piece
        if ran is None:
            return []
        if self._put_off(bucket, outcome, ran, us):
            return []
        late = self._catch_up()
        is_calibration = outcome.decision.reason == CALIBRATION
        regime = (outcome.clock, outcome.queued)
        if not is_calibration:
            self._outcomes += 1
            self._step = outcome.step or self._step + 1
        changed = self._note_regime(regime) if outcome.won and not is_calibration else False
        num_tokens = outcome.batch.num_tokens
        arm = self._arm(regime, ran)
        expected = arm.expect(num_tokens)
        arm.last_step = self._step
        if is_calibration:
            arm.add(num_tokens, us, watch=False)
        else:
            changed |= self._learn(arm, ran, regime, num_tokens, us)
        if bucket is None or is_calibration or not outcome.won:
            concerned = {**late, **dict.fromkeys(self._buckets_with(ran))}
            return self._choose_anew(self._buckets.values() if changed else concerned)
        self._account(bucket, outcome, ran, expected, us)
        self._calm = 0 if changed else self._calm + 1
        self.pace = self._next_pace(arm)
        if changed:
            updates = self._choose_anew(self._buckets.values())
        else:
            updates = self._choose_anew({**late, bucket: None})
        return updates + self._probe(bucket, outcome.batch, ran)

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
            arm, num_tokens = key, key.num_tokens
            if key.mode is not mode:
                raise ConfigError("mode", str(mode), f"the mode of the key, {key.mode}")
        else:
            if mode is not RuntimeMode.NONE:
                raise ConfigError("key", key, f"a GraphKey in mode {mode}")
            bucket = self._of_cell.get(key)
            arm, num_tokens = (None if bucket is None else bucket.piece), key.num_tokens
            if arm is None:
                raise ConfigError("key", key, "a batch that was decided and may run eager")
        self._learn(self._arm((clock, queued), arm), arm, (clock, queued), num_tokens, latency_us)
        self._choose_anew(self._buckets_with(arm))

    def calibration_runs(self, graphs: GraphView) -> list[CalibrationRun]:
        """Return timed runs that spare serving the first mistakes; none when it has enough.

        Ask after a capture, and again when all of them have been told. First comes each
        graph at its size, and eager at both ends of the range that each size serves; then
        more of those that are too close to tell apart.
        """
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
        bucket = self._of_cell.get(batch)
        known = {} if bucket is None else self._known(bucket)
        base = known.get(bucket.base_arm) if bucket and bucket.base_arm else None
        if bucket is None or base is None:
            return False
        base_us = base.expect(batch.num_tokens) or math.inf
        return any(
            abs((arm.expect(batch.num_tokens) or math.inf) / base_us - 1.0)
            < 2.0 * math.hypot(arm.error(batch.num_tokens), base.error(batch.num_tokens))
            for ident, arm in known.items()
            if arm is not base and not bucket.is_detour(ident)
        )

    # -- reading ------------------------------------------------------------------------

    def explain(self, batch: Batch | None = None) -> tuple[BucketReport, ...]:
        """Return what is known of each bucket, or of that of one batch; print it."""
        if batch is None:
            buckets: Iterable[Bucket] = self._buckets.values()
        else:
            found = self._of_cell.get(batch)
            buckets = () if found is None else (found,)
        return tuple(describe(one, self._shown(one), self._step) for one in buckets if one.cells)

    # -- keeping ------------------------------------------------------------------------

    def save(self, path: str | Path | None = None) -> Path:
        """Write what was learnt; the file has its name only once it is whole.

        Raises:
            ConfigError: No path is given here, nor was one to the policy; or the file cannot be
                written.
        """
        target = self.state_path if path is None else Path(path)
        if target is None:
            raise ConfigError("path", None, "given, where the policy has no state file")
        # What was put off is left out: steps may be learnt from meanwhile by another thread.
        write_state(target, self.fingerprint, self._arms)
        return target

    def load(self, path: str | Path) -> None:
        """Replace what was learnt by what a file has.

        Raises:
            StateError: The file is torn, foreign, of another version or fingerprint; what
                was learnt stays as it was.
        """
        self._arms = read_state(Path(path), self.fingerprint, self.history_size)
        self._seen = sorted({regime for regime, _ in self._arms})
        self._backlog.clear()
        self._choose_anew(self._buckets.values())

    def __repr__(self) -> str:
        return f"AdaptivePolicy(base={self.base!r}, buckets={len(self._buckets)})"

    # -- inside -------------------------------------------------------------------------

    def _arm(self, regime: _Regime, ident: ArmId) -> Arm:
        arm = self._arms.get((regime, ident))
        if arm is None:
            arm = Arm(self.history_size, over_tokens=isinstance(ident, Piece))
            self._arms[regime, ident] = arm
            self._seen = sorted({regime, *self._seen})
        return arm

    def _known(self, bucket: Bucket) -> dict[ArmId, Arm]:
        """Return the arms of a bucket to compare: all of one regime, today's if it is known."""
        for regime in self._known_regimes():
            known = {
                ident: arm
                for ident in bucket.arms
                if (arm := self._arms.get((regime, ident))) is not None
                and len(arm.samples) >= _KNOWN
            }
            if len(known) > 1 and bucket.base_arm in known:
                return known
        return {}

    def _shown(self, bucket: Bucket) -> dict[ArmId, Arm]:
        """Return the arms that are compared; where none can be, what today's regime has of them."""
        known = self._known(bucket)
        for ident in bucket.arms if not known else ():
            arm = self._arms.get((self._regime, ident))
            if arm is not None and arm.samples:
                known[ident] = arm
        return known

    def _known_regimes(self) -> list[_Regime]:
        """Return regimes with any samples, today's first."""
        return [self._regime, *(each for each in self._seen if each != self._regime)]

    def _stakes(self, bucket: Bucket, known: dict[ArmId, Arm]) -> Stakes:
        base = None if bucket.base_arm is None else known.get(bucket.base_arm)
        typical = 0.0 if base is None else base.expect(bucket.top) or 0.0
        ledger = self.ledger
        account = ledger.allowance(typical) - bucket.at_risk_us
        return Stakes(self.margin, account, ledger.lead_us, ledger.horizon)

    def _buckets_with(self, ident: ArmId) -> Iterator[Bucket]:
        return (bucket for bucket in self._buckets.values() if ident in bucket.arms)

    def _note_regime(self, regime: _Regime) -> bool:
        """Follow the state the stream is mostly found in; return whether it changed."""
        self._regimes.append(regime)
        if regime == self._regime or self._regimes.count(regime) < min(
            _REGIME_MAJORITY, self._outcomes
        ):
            return False
        self._regime = regime
        return True

    def _learn(self, arm: Arm, ident: ArmId, regime: _Regime, num_tokens: int, us: float) -> bool:
        """Add a sample; return whether it shows a change that concerns other buckets."""
        expected = arm.expect(num_tokens)
        line = arm.line
        was_known = arm.fresh >= 4 and line is not None and line.low <= num_tokens <= line.high
        factor = arm.add(num_tokens, us)
        if not isinstance(ident, Piece):
            return factor is not None
        if factor is None:
            if expected is None or not was_known or not 1 / OUTLIER < us / expected < OUTLIER:
                return False
            self._eager_news.append((arm, num_tokens, us, us / expected))
            factor = self._eager_change()
            if factor is None:
                return False
            arms = {id(one): one for one, *_ in self._eager_news}
            for one in arms.values():
                one.shift(factor, [(n, t) for who, n, t, _ in self._eager_news if who is one])
        else:
            arms = {id(arm): arm}
        # What slows eager in one bucket (a busier host, a lower clock) slows it in all.
        for (where, other), one in self._arms.items():
            if where == regime and isinstance(other, Piece) and id(one) not in arms:
                one.borrow(factor)
        self._eager_news.clear()
        return True

    def _eager_change(self) -> float | None:
        """Return the factor by which eager has changed over all buckets, if it has."""
        for window, errors in ((3, 4.5), (4, 4.6), (8, 5.0)):
            news = list(self._eager_news)[-window:]
            if len(news) < window:
                return None
            factor = median(ratio for *_, ratio in news)
            noise = max(arm.noise for arm, *_ in news)
            if factor > 0 and abs(math.log(factor)) > errors * 1.2533 * noise / math.sqrt(window):
                while len(self._eager_news) > window:
                    self._eager_news.popleft()
                return factor
        return None

    def _account(
        self, bucket: Bucket, outcome: Outcome, ran: ArmId, expected: float | None, us: float
    ) -> None:
        """Enter the steps that an outcome stands for into the account against the base."""
        ledger, num_tokens = self.ledger, outcome.batch.num_tokens
        is_one_shot = outcome.decision.one_shot
        steps = ledger.steps_told(outcome.step, one_shot=is_one_shot)
        if outcome.decision.reason == PROBE:
            bucket.last_probe = self._step
        if ran == bucket.base_arm:
            self._prove(bucket, self._arm((outcome.clock, outcome.queued), ran), expected, us)
            ledger.account(steps, expected or us, expected or us)
            return
        base = None
        if bucket.base_arm is not None:
            base = self._arms.get((self._regime, bucket.base_arm))
            base = self._known(bucket).get(bucket.base_arm, base)
        base_us = None if base is None else base.expect(num_tokens)
        if base is None or base_us is None:
            # Nothing is known to compare with: taken for a loss of all it took.
            ledger.account(steps, us, 2.0 * us)
            return
        cost = us
        if expected is not None and not 0.4 < us / expected < 2.5:
            cost = expected  # an outlier, which would have come under the base as well
        cautious = base_us * (1.0 - base.error(num_tokens))
        ledger.account(steps, cautious, cost)
        bucket.unproven_us += steps * base_us

    def _put_off(self, bucket: Bucket | None, outcome: Outcome, ran: ArmId, us: float) -> bool:
        """Account for a step that says nothing new; learn from it later, with others like it.

        Learning takes the host longer than many a step. Where every step is measured nobody
        can mind that, and it goes on as it is.
        """
        regime, num_tokens = (outcome.clock, outcome.queued), outcome.batch.num_tokens
        if (
            bucket is None
            or outcome.decision.one_shot
            or not outcome.won
            or regime != self._regime
            or self.ledger.spacing < _WORTH_SAVING
            or self._calm < _SETTLED
            or len(self._backlog) >= _MOST_PUT_OFF
        ):
            return False
        arm = self._arms.get((regime, ran))
        if arm is None or not arm.is_usual(num_tokens, us):
            return False
        expected = arm.expect(num_tokens) or us
        self._outcomes += 1
        self._step = arm.last_step = outcome.step or self._step + 1
        self._regimes.append(regime)
        self._backlog.append((arm, bucket, num_tokens, us))
        if isinstance(ran, Piece):
            self._eager_news.append((arm, num_tokens, us, us / expected))
        self._account(bucket, outcome, ran, expected, us)
        self._calm += 1
        return True

    def _catch_up(self) -> dict[Bucket, None]:
        """Learn from what was put off; return the buckets it concerns."""
        samples: dict[Arm, list[tuple[float, float]]] = {}
        buckets: dict[Bucket, None] = {}
        for arm, bucket, num_tokens, us in self._backlog:
            samples.setdefault(arm, []).append((num_tokens, us))
            buckets[bucket] = None
        self._backlog.clear()
        for arm, own in samples.items():
            arm.add_usual(own)
        return buckets

    def _next_pace(self, arm: Arm) -> int:
        """Return how seldom steps are to be measured from now on."""
        ledger = self.ledger
        if self.pace == 1:
            self._plain_spacing = ledger.spacing
        if arm.is_suspicious or self._plain_spacing < _WORTH_SAVING or not ledger.steps:
            return 1  # an odd time: look again soon
        pace, mean_us = 1, ledger.base_us / ledger.steps
        while pace < _SLOWEST_PACE and self._calm >= _CALM * pace:
            risk_us = ledger.horizon_at(2 * pace * self._plain_spacing) * mean_us * (DRIFT - 1.0)
            if ledger.allowance(mean_us) < _AFFORDED * risk_us:
                break
            pace *= 2
        return pace

    def _prove(self, bucket: Bucket, base: Arm, before_us: float | None, us: float) -> None:
        """Settle what was unproven when the base's arm has been measured."""
        now_us = base.expect(bucket.top) if before_us is None else before_us
        if base.is_suspicious or now_us is None:
            return  # the next sample tells
        # If it has become faster, when is not known: taken for right after the last sample.
        faster = 1.0 - min(base.latest(), us / now_us if base.fresh < _JUST_CHANGED else 1.0)
        self.ledger.lead_us -= bucket.unproven_us * max(0.0, faster)
        bucket.unproven_us = 0.0

    def _choose_anew(self, buckets: Iterable[Bucket]) -> list[CellUpdate]:
        """Choose again in some buckets; return the cells that get another answer."""
        updates = []
        for bucket in buckets:
            key, limit = bucket.key, bucket.limit
            known = self._known(bucket)
            if not bucket.choose(known, self._stakes(bucket, known)):
                continue
            low, high = sorted((limit, bucket.limit))
            if bucket.key != key:
                high = math.inf
            updates += [CellUpdate(batch, None) for batch in bucket.outdated(low, high)]
        return updates

    # -- probes -------------------------------------------------------------------------

    def _probe(self, bucket: Bucket, batch: Batch, ran: ArmId) -> list[CellUpdate]:
        """Perhaps try another arm, once, when this batch comes again."""
        if len(bucket.waiting) >= _MOST_WAITING:
            if self._outcomes - min(bucket.waiting.values()) < _LOST:
                return []
            bucket.waiting.clear()
        if batch in bucket.waiting:
            return []
        current = bucket.choice(batch.num_tokens)
        now = None if current is None else self._arms.get((self._regime, current))
        now_us = None if now is None else now.expect(batch.num_tokens)
        if current is None or now_us is None:
            return []
        tried = self._arms.get((self._regime, ran))
        if ran != current and tried is not None and tried.is_suspicious and bucket.follow_ups < 3:
            bucket.follow_ups += 1  # an odd time: look again, rather than wait
            return self._send(bucket, batch, ran)
        bucket.follow_ups = 0
        account = self.ledger.allowance(now_us)
        soon = bucket.at_risk_us + self.ledger.horizon * now_us * (1.0 - 1.0 / DRIFT)
        if soon > account and bucket.base_arm not in (None, current):
            return self._send(bucket, batch, bucket.base_arm)
        best: tuple[float, bool, ArmId] | None = None
        for ident in bucket.arms:
            if ident == current:
                continue
            arm = self._arms.get((self._regime, ident))
            if arm is None or len(arm.samples) < _KNOWN:
                cost = max(0.0, self._guess(ident, current, batch.num_tokens) - 1) * now_us
                if cost <= account and not bucket.is_detour(ident):
                    return self._send(bucket, batch, ident)
                continue
            us = arm.expect(batch.num_tokens) or 0.0
            age = self._step - arm.last_step
            error = arm.error(batch.num_tokens)
            undecided = us < now_us * (1.0 + error)
            if bucket.is_detour(ident):
                undecided = us * (1.0 + 3.0 * error) < now_us
            # What many samples could not decide is a tie, and one more will not decide it.
            wait = arm.fresh // 4 if undecided else 16
            if age < max(2, min(wait, 16) + self._random.randrange(2 + wait // 2)):
                continue
            if len(bucket.waiting) >= _FEW_WAITING and not undecided:
                continue
            cost = max(0.0, us - now_us)
            far = us > _CLOSE * now_us or (bucket.is_detour(ident) and not undecided)
            if cost <= self.ledger.probe_allowance(far=far) * (1.0 if far else 0.25):
                best = min(best or (math.inf, False, ident), (cost / age, far, ident), key=_first)
        if best is None:
            return []
        cost = best[0] * (self._step - self._arms[self._regime, best[2]].last_step)
        self.ledger.pay_probe(cost, far=best[1])
        return self._send(bucket, batch, best[2])

    def _guess(self, ident: ArmId, current: ArmId, num_tokens: int) -> float:
        """Return how many times as long an arm may take of which little is known.

        What is known of the arm itself in another regime says most, then what is known of the
        arm that is most like it.
        """
        for find in (self._arms.get, self._most_like):
            for regime in self._known_regimes():
                one, other = find((regime, ident)), self._arms.get((regime, current))
                us = None if one is None else one.expect(num_tokens)
                now_us = None if other is None else other.expect(num_tokens)
                if us is not None and now_us:
                    return 1.2 * us / now_us
        return _UNKNOWN_COST

    def _most_like(self, where: tuple[_Regime, ArmId]) -> Arm | None:
        """Return the measured arm of the same mode whose size is nearest."""
        regime, ident = where
        near, found = math.inf, None
        for (measured_in, other), arm in self._arms.items():
            if measured_in != regime or mode_of(other) is not mode_of(ident) or not arm.samples:
                continue
            distance = abs(math.log(size_of(other) / size_of(ident)))
            if distance < near:
                near, found = distance, arm
        return found

    def _send(self, bucket: Bucket, batch: Batch, ident: ArmId | None) -> list[CellUpdate]:
        bucket.waiting[batch] = self._outcomes
        if ident is None or isinstance(ident, Piece):
            decision = Decision.eager(PROBE, timed=True)
        else:
            decision = replay_of(ident, batch.num_tokens, PROBE)
        return [CellUpdate(batch, decision, one_shot=True)]


def _first(item: tuple[float, bool, ArmId]) -> float:
    return item[0]


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
