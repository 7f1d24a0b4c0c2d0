"""Capture, upload and evict the graphs of a runner in idle time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from dispatchkit import Decision, GraphKey
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

from dispatchkit_predictive.capture_planner import CapturePlanner
from dispatchkit_predictive.predictor import KeyPredictor

if TYPE_CHECKING:
    from dispatchkit import GraphRunner
    from dispatchkit.observe import EvictEvent


@attrs.frozen
class PredictiveStats:
    """Counters of ``Predictive``.

    Attributes:
        is_on: Whether prefetching is active. Prefetching means capturing a graph before a step has
            missed it. Prefetching pauses if steps use too few of the prefetched graphs.
        hit_rate: Share of predictions of the next key that were correct.
        num_predicted: Number of key changes, from one step to the next, for which there was a
            prediction.
        num_ahead: Number of prefetched graphs.
        num_used: Number of prefetched graphs that a step used before they were evicted.
        num_wanted: Number of graphs captured in idle time after a step had missed them.
        num_uploads: Number of uploads of graphs to the device in idle time.
    """

    is_on: bool
    hit_rate: float
    num_predicted: int
    num_ahead: int
    num_used: int
    num_wanted: int
    num_uploads: int


class Predictive:
    """An assistant that captures and uploads the graphs of a runner in idle time.

    Attach it to a runner and call ``idle`` whenever there is time. Between these calls, it only
    records keys. For a step that replays the same graph as the previous step, this costs one
    comparison.

    Args:
        order: Maximum number of preceding keys from which the next key is predicted.
        decay: Factor, above 0 and at most 1, by which earlier counts of key sequences are
            multiplied at each new count.
        margin: Factor, at least 1, by which the score of a prefetched key must exceed the score of
            the key evicted for it.
        least_used: Minimum share (0 to 1) of the last 100 prefetched graphs that steps must have
            used. If the share is lower, prefetching pauses.

    Raises:
        ConfigError: A setting is invalid.
    """

    def __init__(
        self, order: int = 2, decay: float = 0.98, margin: float = 1.3, least_used: float = 0.01
    ) -> None:
        self._order, self._decay = check_count(order, "order"), decay
        self._margin, self._least_used = margin, least_used
        self._make_planner((), None)  # raises for invalid settings
        self._lock = threading.RLock()
        self._runner: GraphRunner | None = None
        self._planner: CapturePlanner | None = None
        self._keys: dict[str, GraphKey] = {}
        self._uploaded: set[GraphKey] = set()
        self._last: GraphKey | None = None
        self._num_wanted = self._num_uploads = 0

    def attach(self, runner: GraphRunner, *, max_graphs: int | None = None) -> None:
        """Start recording the decisions of a runner.

        Args:
            runner: A runner created with ``lazy=True``. With a high ``capture_after``, graphs are
                captured only in idle time.
            max_graphs: Maximum number of live graphs, at most the limit of the runner. Pass None
                only if the runner has no limit.

        Raises:
            ConfigError: A runner is already attached, ``runner`` is not a ``GraphRunner``, or the
                limit is invalid.
        """
        if self._runner is not None:
            hint = "Create one Predictive for each runner."
            message = "This Predictive is already attached to a runner."
            raise ConfigError(
                "runner", runner, "attached to a new Predictive", hint, message=message
            )
        if not hasattr(runner, "taps"):
            raise ConfigError("runner", runner, "a GraphRunner")
        keys = tuple(runner.registry)
        self._planner = self._make_planner(keys, max_graphs)
        self._keys = {str(key): key for key in keys}
        self._runner = runner
        runner.taps.on_decision(self._on_decision)

    def _make_planner(self, keys: Sequence[GraphKey], max_graphs: int | None) -> CapturePlanner:
        """Return a planner of captures for the given keys.

        Raises:
            ConfigError: A setting or the limit is invalid.
        """
        return CapturePlanner(
            KeyPredictor(keys, order=self._order, decay=self._decay),
            max_graphs=max_graphs,
            margin=self._margin,
            least_used=self._least_used,
        )

    def detach(self) -> None:
        """Stop recording, and discard the learned predictions."""
        runner, self._runner, self._planner = self._runner, None, None
        if runner is not None:
            runner.taps.on_decision(None)

    def idle(self, max_captures: int = 1) -> list[GraphKey]:
        """Capture missed or expected keys in idle time, then upload the graph expected next.

        Args:
            max_captures: Maximum number of captures. A single capture may take several hundred
                milliseconds.

        Returns:
            The keys that were captured.

        Raises:
            ConfigError: No runner is attached.
        """
        runner, planner = self._attached()
        done: list[GraphKey] = []
        for _ in range(max_captures):
            live = {key for key in self._keys.values() if runner.controls.has(key)}
            with self._lock:
                found = planner.next_capture(live)
            if found is None:
                break
            key, victim = found
            if victim is not None:
                runner.evict(victim)
                self._forget(victim)
            before = planner.num_ahead
            runner.capture([key])
            with self._lock:
                planner.record_capture(key, ok=runner.controls.has(key))
            if not runner.controls.has(key):
                break  # the capture failed or did not fit in memory; the runner reports why
            self._num_wanted += planner.num_ahead == before
            done.append(key)
        self._upload_next(runner, planner)
        return done

    def score(self, step: Any) -> float:
        """Return the score of a captured key; higher means more likely to be needed.

        With ``runner.controls.set_eviction(predictive.score)``, the runner evicts the least likely
        graph first when a capture needs room. Only the order of scores is meaningful.
        """
        with self._lock:
            return 0.0 if self._planner is None else self._planner.score(step.key)

    def on_evict(self, event: EvictEvent) -> None:
        """Record that a graph was evicted."""
        key = self._keys.get(event.key)
        if key is not None:
            self._forget(key)

    def stats(self) -> PredictiveStats:
        """Return the counters of this assistant.

        Raises:
            ConfigError: No runner is attached.
        """
        _, planner = self._attached()
        with self._lock:
            predictor = planner.predictor
            return PredictiveStats(
                is_on=planner.is_on,
                hit_rate=predictor.hit_rate,
                num_predicted=predictor.num_predicted,
                num_ahead=planner.num_ahead,
                num_used=planner.num_used,
                num_wanted=self._num_wanted,
                num_uploads=self._num_uploads,
            )

    # -- internals ----------------------------------------------------------------------

    def _attached(self) -> tuple[GraphRunner, CapturePlanner]:
        if self._runner is None or self._planner is None:
            raise ConfigError(
                "runner",
                None,
                "attached",
                "Call attach(runner) first.",
                message="This Predictive is not attached to a runner.",
            )
        return self._runner, self._planner

    def _on_decision(self, decision: Decision) -> None:
        key = decision.key
        if key is None:
            return
        runner, planner = self._runner, self._planner
        if key is self._last or runner is None or planner is None:
            return
        has_graph = runner.controls.has(key)
        # A key without a graph is recorded at each step, because each such step missed the graph.
        self._last = key if has_graph else None
        with self._lock:
            planner.record_use(key, has_graph=has_graph)

    def _forget(self, key: GraphKey) -> None:
        with self._lock:
            self._uploaded.discard(key)
            if self._planner is not None:
                self._planner.record_eviction(key)
            if self._last == key:
                self._last = None

    def _upload_next(self, runner: GraphRunner, planner: CapturePlanner) -> None:
        with self._lock:
            key = planner.predictor.expected()
        if key is None or key in self._uploaded or not runner.controls.has(key):
            return
        self._uploaded.add(key)
        self._num_uploads += runner.controls.upload(key)
