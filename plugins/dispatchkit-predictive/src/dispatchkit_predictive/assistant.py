"""Foresight at work beside a runner: it listens, and acts in idle moments."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs

from dispatchkit import Decision, GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

from dispatchkit_predictive.foresight import Foresight
from dispatchkit_predictive.predictor import KeyPredictor

if TYPE_CHECKING:
    from dispatchkit import GraphRunner
    from dispatchkit.observe import EvictEvent


@attrs.frozen
class PredictiveStats:
    """What came of foresight so far.

    Attributes:
        is_on: Whether keys are captured ahead now; off when too few of them were used.
        hit_rate: Share of the key changes at which the expected key came.
        num_predicted: Changes that a key was expected for.
        num_ahead: Graphs captured ahead.
        num_used: Those that a step used before they were given up.
        num_wanted: Graphs captured in idle time that a step had asked for in vain.
        num_uploads: Graphs brought to the device ahead of a launch.
    """

    is_on: bool
    hit_rate: float
    num_predicted: int
    num_ahead: int
    num_used: int
    num_wanted: int
    num_uploads: int


class Predictive:
    """Captures in idle time what comes next, uploads it, and spares it.

    Attach it to a runner and call ``idle`` whenever there is time. Between calls it only
    listens; a step whose key is that of the step before pays one comparison.

    Args:
        order: Longest context of the prediction, in keys.
        decay: What an earlier count is worth beside a new one, 0 to 1.
        margin: How many times as much a key must be expected as the one that goes for it.
        least_used: Share of the captures ahead that must be used for it to stay on.

    Raises:
        ConfigError: A setting cannot be used.
    """

    def __init__(
        self, order: int = 2, decay: float = 0.98, margin: float = 1.3, least_used: float = 0.01
    ) -> None:
        self._order, self._decay = check_count(order, "order"), float(decay)
        self._margin, self._least_used = float(margin), float(least_used)
        KeyPredictor([], order=self._order, decay=self._decay)  # refuses what cannot be used
        self._lock = threading.RLock()
        self._runner: GraphRunner | None = None
        self._foresight: Foresight | None = None
        self._keys: dict[str, GraphKey] = {}
        self._uploaded: set[GraphKey] = set()
        self._last: GraphKey | None = None
        self._num_wanted = self._num_uploads = 0

    def attach(self, runner: GraphRunner, *, max_graphs: int | None = None) -> None:
        """Listen to a runner.

        Args:
            runner: Made with ``lazy=True``; a high ``capture_after`` leaves all captures to
                idle moments.
            max_graphs: Most graphs that it may hold, at most the runner's own limit; None
                where that has none.

        Raises:
            ConfigError: It is attached already, or the limit cannot be used.
        """
        if self._runner is not None:
            raise ConfigError("runner", runner, "the only one", "Make one for each runner.")
        keys = tuple(runner.registry)
        self._foresight = Foresight(
            KeyPredictor(keys, order=self._order, decay=self._decay),
            max_graphs=max_graphs,
            margin=self._margin,
            least_used=self._least_used,
        )
        self._keys = {str(key): key for key in keys}
        self._runner = runner
        runner.taps.on_decision(self._hear)

    def detach(self) -> None:
        """Listen no more; what was learnt is let go of."""
        runner, self._runner, self._foresight = self._runner, None, None
        if runner is not None:
            runner.taps.on_decision(None)

    def idle(self, max_captures: int = 1) -> list[GraphKey]:
        """Use an idle moment: capture what is wanted or expected, then upload what is next.

        Args:
            max_captures: Most captures; each may take a good part of a second.

        Returns:
            The keys that were captured.
        """
        runner, foresight = self._attached()
        done: list[GraphKey] = []
        for _ in range(max_captures):
            live = {key for key in self._keys.values() if runner.controls.has(key)}
            with self._lock:
                found = foresight.next_capture(live)
            if found is None:
                break
            key, victim = found
            if victim is not None:
                runner.evict(victim)
                self._forget(victim)
            before = foresight.num_ahead
            runner.capture([key])
            with self._lock:
                foresight.captured(key, ok=runner.controls.has(key))
            if not runner.controls.has(key):
                break  # it failed, or there is no room: the runner says why
            self._num_wanted += foresight.num_ahead == before
            done.append(key)
        self._upload_next(runner, foresight)
        return done

    def worth(self, step: Any) -> float:
        """Return how much the key of a captured step is expected.

        For ``runner.controls.set_eviction(predictive.worth)``: the least expected goes first,
        also where the runner itself makes room.
        """
        with self._lock:
            return 0.0 if self._foresight is None else self._foresight.worth(step.key)

    def on_evict(self, event: EvictEvent) -> None:
        """Hear that a graph was given up."""
        key = self._keys.get(event.key)
        if key is not None:
            self._forget(key)

    def stats(self) -> PredictiveStats:
        """Return what came of it so far.

        Raises:
            ConfigError: It is attached to no runner.
        """
        _, foresight = self._attached()
        with self._lock:
            predictor = foresight.predictor
            return PredictiveStats(
                is_on=foresight.is_on,
                hit_rate=predictor.hit_rate,
                num_predicted=predictor.num_predicted,
                num_ahead=foresight.num_ahead,
                num_used=foresight.num_used,
                num_wanted=self._num_wanted,
                num_uploads=self._num_uploads,
            )

    # -- inside -------------------------------------------------------------------------

    def _attached(self) -> tuple[GraphRunner, Foresight]:
        if self._runner is None or self._foresight is None:
            raise ConfigError("runner", None, "attached", "Call attach(runner) first.")
        return self._runner, self._foresight

    def _hear(self, decision: Decision) -> None:
        key = decision.key
        if key is None:
            return
        runner, foresight = self._runner, self._foresight
        if key is self._last or runner is None or foresight is None:
            return
        has_graph = runner.controls.has(key)
        # One without a graph is heard again: it is wanted until it has one.
        self._last = key if has_graph else None
        with self._lock:
            foresight.see(key, has_graph=has_graph)

    def _forget(self, key: GraphKey) -> None:
        with self._lock:
            self._uploaded.discard(key)
            if self._foresight is not None:
                self._foresight.evicted(key)
            if self._last == key:
                self._last = None

    def _upload_next(self, runner: GraphRunner, foresight: Foresight) -> None:
        with self._lock:
            key = foresight.predictor.expected()
        if key is None or key in self._uploaded or not runner.controls.has(key):
            return
        self._uploaded.add(key)
        self._num_uploads += runner.controls.upload(key)
