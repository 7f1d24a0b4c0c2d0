"""Lifecycle: decide when the keys of a lane are captured, and manage their graphs.

All state changes go through the registry. Callers hold the lock that each step holds, so no step
runs during a call unless a background capture releases the lock. A graph is released only after the
work in flight has finished.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import torch

from dispatchkit.backends.capture_errors import clear_traceback
from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError, RegistryError, counted
from dispatchkit.execute.capture.background import BackgroundCapture
from dispatchkit.execute.capture.budget import MemoryBudget, OverBudgetError
from dispatchkit.execute.capture.capture import Capturer
from dispatchkit.execute.capture.captured import CapturedKey, RowProof
from dispatchkit.execute.capture.effects import named
from dispatchkit.execute.capture.live_graphs import FOR_BUDGET, LiveGraphs
from dispatchkit.execute.capture.report import CaptureReport, as_capture_error, largest_first
from dispatchkit.execute.capture.warmup import family_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import LongPause, Pacer, PoolMember
from dispatchkit.execute.step.reasons import MAX_GRAPHS_REACHED, NEXT_STEPS, REPLACED
from dispatchkit.execute.step.records import Entry
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.observe.counters import StepCounters
from dispatchkit.observe.events import CaptureEvent, CaptureFailedEvent
from dispatchkit.options import MemoryOptions
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState

_logger = logging.getLogger(__name__)

_WEIGHTS = (torch.Tensor, torch.nn.Module)


@attrs.frozen(eq=False)
class _Attempt:
    """The result of capturing one key.

    Attributes:
        captured: Captured key; None if the capture failed.
        problem: Error of the capture; None if it succeeded.
        lost: For each lane that shares the pool, the keys whose graphs were evicted to free memory.
    """

    captured: CapturedKey | None
    problem: CaptureError | None
    lost: Mapping[PoolMember, Iterable[GraphKey]]


def frozen_error() -> RegistryError:
    """Return the error for a capture in a frozen runner."""
    return RegistryError("The runner is frozen. Call unfreeze() before capturing graphs.")


def _failed_too_often(entry: GraphEntry) -> str:
    """Return the reason for skipping a key whose capture has failed too often."""
    times = counted(entry.attempts, "time")
    return f"failed {times} (runner.capture(again=True) retries it): {entry.reason}"


def _reason_of(changed: Iterable[Entry]) -> str:
    """Return why steps run eager if values built into a graph were replaced; empty if none were."""
    are_weights = [isinstance(one.before, _WEIGHTS) for one in changed]
    if not are_weights:
        return ""
    return Reason.WEIGHTS_REPLACED if any(are_weights) else Reason.VALUE_CHANGED


class Lifecycle:
    """The life cycle of a lane's keys, which are captured in advance or on demand.

    Args:
        capturer: Captures the keys of the lane.
        graphs: Live graphs of the lane.
        budget: Limits on the number and memory of graphs, and the evictions that enforce them.
        lane: Lane that the keys are captured on.
        registry: Registry in which all changes of state are recorded.
        modes: Runtime modes that can be captured.
        counters: Counters in which captures are counted.
        lazy: Whether to capture keys on demand.
        capture_after: Number N. A key is captured lazily at the Nth step that requests it.

    Attributes:
        graphs: Live graphs of the lane.
        lazy: Whether keys are captured on demand.
        is_frozen: Whether captures are forbidden.
    """

    def __init__(
        self,
        capturer: Capturer,
        graphs: LiveGraphs,
        budget: MemoryBudget,
        lane: Lane,
        registry: GraphRegistry,
        modes: frozenset[RuntimeMode],
        counters: StepCounters,
        *,
        lazy: bool,
        capture_after: int,
    ) -> None:
        self.lazy = lazy
        self.graphs: LiveGraphs = graphs
        self._budget = budget
        self.is_frozen = False
        #: The most recent background capture of the lane's keys.
        self.background: BackgroundCapture | None = None
        self._capturer, self._lane, self._registry = capturer, lane, registry
        self._modes, self._counters = modes, counters
        self._capture_after = capture_after
        self._seen: Counter[GraphKey] = Counter()
        self._retries = graphs.retries

    # -- reading ------------------------------------------------------------------------

    def live(self) -> dict[GraphKey, CapturedKey]:
        """Return the ``CapturedKey`` of each key that has a graph."""
        return self.graphs.by_key()

    def num_graphs(self) -> int:
        """Return the number of live graphs; a graph that serves several keys counts once."""
        return self.graphs.count()

    def may_capture(self, key: GraphKey) -> bool:
        """Return whether a key is enabled, has no graph and has a mode that can be captured."""
        is_live = self.graphs.entry(key).state is KeyState.CAPTURED
        return not is_live and key.mode in self._modes and self._registry.is_enabled(key)

    def is_under_way(self, key: GraphKey) -> bool:
        """Return whether a background capture that includes a key is in progress."""
        background = self.background
        return background is not None and key in background.keys and not background.is_done()

    def problem_of(self, key: GraphKey) -> str:
        """Return why a key has no graph, as ``reason: details``; empty if unknown."""
        entry = self._registry.get(key)
        return "" if entry is None else entry.reason

    def next_step(self, reason: str) -> str:
        """Return advice for users whose steps run eager for the given reason."""
        is_missing = reason in (Reason.NOT_CAPTURED, Reason.EVICTED)
        if is_missing and not self._budget.has_slot():
            return MAX_GRAPHS_REACHED
        return NEXT_STEPS[reason]

    # -- captures in advance ------------------------------------------------------------

    def capture_all(
        self,
        keys: Iterable[GraphKey] | None = None,
        progress: Callable[[int, int, GraphKey | None], None] | None = None,
        *,
        again: bool = False,
    ) -> CaptureReport:
        """Capture the keys that have no graph, largest first; failures are reported, not raised.

        Args:
            keys: Keys to capture; by default all declared keys.
            progress: Function called with (done, total, next key) before each capture, and with
                (total, total, None) at the end.
            again: Whether to retry keys that failed too often.

        Raises:
            RegistryError: The runner is frozen, the memory of the graphs is asleep, or a key is not
                declared.
        """
        self._check_not_frozen()
        start = time.perf_counter()
        wanted: list[GraphKey] = []
        failed: dict[GraphKey, str] = {}
        skipped: dict[GraphKey, str] = {}
        for key in tuple(self._registry) if keys is None else keys:
            entry = self.graphs.entry(key)
            if entry.state is KeyState.CAPTURED or key.mode not in self._modes:
                continue
            if not self._registry.is_enabled(key):
                skipped[key] = Reason.DISABLED
            elif entry.state is KeyState.FAILED and self._retries.is_over(entry) and not again:
                skipped[key] = _failed_too_often(entry)
            else:
                wanted.append(key)
        wanted.sort(key=largest_first)
        captured, total = 0, len(wanted)
        for done, key in enumerate(wanted):
            if progress is not None:
                progress(done, total, key)
            if not self._budget.has_slot():
                skipped[key] = self._budget.refusal
                continue
            problem = self._try(key, evict=False)
            if problem is None:
                captured += 1
            elif problem.reason == "over_budget":
                skipped[key] = str(problem)
            else:
                failed[key] = f"{problem.reason}: {problem}"
        if progress is not None:
            progress(total, total, None)
        seconds = time.perf_counter() - start
        return CaptureReport(captured, seconds, self._lane.num_bytes(), failed, skipped)

    def capture_in_turns(
        self, key: GraphKey, max_pause_us: float, *, between_operators: bool
    ) -> tuple[CaptureError | str | None, Sequence[LongPause]]:
        """Capture a key in the background; steps of other threads may run between phases.

        The caller must have acquired the lock of the lane's pool group exactly once. If no steps
        may run between the phases, the key is captured without interruption.

        Args:
            key: Key to capture.
            max_pause_us: Longest acceptable pause of steps, in microseconds.
            between_operators: Whether steps may run between operators of the captured step.

        Returns:
            The problem, and the pauses longer than ``max_pause_us``. The problem is the error of a
            failed capture, the reason for skipping the key, or None if the key was captured.
        """
        turns = self._lane.group.turns
        turns.wait()
        entry = self._registry.get(key)
        if entry is None:
            return "the key is no longer declared", ()
        if self.is_frozen:
            return "the runner is frozen; call unfreeze()", ()
        if self._lane.group.is_asleep:
            return "the memory of the graphs is asleep; call memory.wake()", ()
        if entry.state is KeyState.CAPTURED:
            return "the key already has a graph", ()
        if key.mode not in self._modes or not self._registry.is_enabled(key):
            return Reason.DISABLED, ()
        if entry.state is KeyState.FAILED and self._retries.is_over(entry):
            return _failed_too_often(entry), ()
        if not self._budget.has_slot():
            return self._budget.refusal, ()
        beside = self._lane.backend.capabilities.steps_during_captures
        pacer = Pacer(
            turns,
            str(key),
            max_pause_us,
            allows_turns=self._capturer.allows_turns(key),
            between_operators=between_operators and beside,
        )
        problem = turns.run(pacer, lambda: self._try(key, evict=False))
        self._lane.order()  # makes the next step, on any stream, wait for the work queued here
        self._counters.long_pauses.update(pause.part for pause in pacer.pauses)
        return problem, pacer.pauses

    def warm_up_family(self, key: GraphKey, max_pause_us: float) -> Sequence[LongPause]:
        """Warm up the smallest key of a family without interruption.

        The keys of a family differ only in size. Do nothing if one of them was warmed up before.
        Later captures let other steps run only if this warmup shows that the step has no effects
        besides its outputs.

        Returns:
            The pause that the warmup caused for steps, if it exceeded ``max_pause_us``.
        """
        turns = self._lane.group.turns
        turns.wait()
        if self.is_frozen or self._lane.group.is_asleep or self._capturer.is_known(key):
            return ()
        alike = [one for one in self._registry if family_of(one) == family_of(key)]
        smallest = min(alike or [key], key=lambda one: one.num_tokens)
        pacer = Pacer(turns, str(smallest), max_pause_us, allows_turns=False)
        with suppress(Exception):  # the capture will raise and report the same error
            turns.run(pacer, lambda: self._capturer.warm(smallest))
        self._counters.long_pauses.update(pause.part for pause in pacer.pauses)
        return pacer.pauses

    def warm_all(self) -> dict[GraphKey, str]:
        """Warm up each key that has no graph, largest first, but capture none of them.

        Graphs store the addresses of library workspaces, which may grow with the batch size. These
        warmups let the workspaces reach their full size before the first capture.

        Returns:
            The error of each key whose warmup raised. These keys are not marked as failed.
        """
        self._check_not_frozen()
        failed = {}
        for key in sorted(self._registry, key=largest_first):
            if self.graphs.entry(key).state is KeyState.CAPTURED or key.mode not in self._modes:
                continue
            try:
                self._capturer.warm(key)
            except Exception as error:  # noqa: BLE001 - an error in the step fails only this key
                problem = as_capture_error(error, key)
                failed[key] = f"{problem.reason}: {problem}"
        return failed

    def expect_bytes(self, keys: Iterable[GraphKey]) -> int:
        """Return the expected size, in bytes, of a separate pool for the graphs of some keys.

        Raises:
            CaptureError: The largest key cannot be warmed up or captured.
        """
        ordered = sorted(keys, key=largest_first)
        ordered = [key for key in ordered if key.mode in self._modes]
        return self._capturer.expect_bytes(ordered[0]) if ordered else 0

    def capture_next(self) -> GraphKey | None:
        """Capture the most requested key that has no graph; meant for idle times of a service.

        Returns:
            The key that was tried, or None if there is no such key. Keys whose capture failed are
            not tried again.
        """
        self._check_not_frozen()
        states = (KeyState.DECLARED, KeyState.EVICTED, KeyState.STALE)
        waiting = [
            key
            for key, _ in self._seen.most_common()
            if (entry := self._registry.get(key)) is not None
            and entry.state in states
            and self._registry.is_enabled(key)
        ]
        for key in waiting[:1]:
            self._try(key, evict=True)
        return waiting[0] if waiting else None

    # -- called by steps -----------------------------------------------------------

    def capture_if_due(self, key: GraphKey, sample: Sequence[Any] | None) -> str:
        """Capture a key that a step requests, if the key has been requested often enough.

        Args:
            key: Key that the step requests.
            sample: Inputs of the step.

        Returns:
            The reason why the step runs eager; empty if the batch must be dispatched again.
        """
        is_captured = self.graphs.entry(key).state is KeyState.CAPTURED
        reason = "" if is_captured else self.expected_wait(key)
        self._seen[key] += 1
        if is_captured or reason:  # the key may have been captured after the plan was created
            return reason
        self._try(key, evict=True, sample=sample, is_awaited=True)
        # Warn outside the capture, which must not fail if the warning is raised as an error.
        self._budget.warn_of_churn()
        return ""

    def expected_wait(self, key: GraphKey) -> str:
        """Return why the next step that requests a key would not capture it; empty if it would."""
        if self.is_frozen:
            return Reason.NOT_CAPTURED
        is_due = self._seen[key] + 1 >= self._capture_after and self._lane.group.may_capture()
        return "" if is_due else Reason.CAPTURE_PENDING

    def will_retry(self, key: GraphKey) -> bool:
        """Return whether the next step that would use a failed or stale key retries its capture."""
        entry = self._registry.get(key)
        if entry is None or self.is_frozen or not self._lane.group.may_capture():
            return False
        return entry.state is KeyState.STALE or self._retries.is_due(entry)

    def note_missed(self, key: GraphKey, num_steps: int = 1) -> None:
        """Count steps that would have used a key, to rank the keys for ``capture_next``."""
        self._seen[key] += num_steps

    def retry_key(self, reason: str, missed: Iterable[GraphKey]) -> GraphKey | None:
        """Return the first key whose capture an eager step may retry, or None.

        Args:
            reason: Reason why the step runs eager.
            missed: Keys that could have served the step but have no graph.
        """
        if self.is_frozen:
            return None
        for key in missed:
            entry = self._registry.get(key)
            if entry is None or not self._registry.is_enabled(key):
                continue
            if self._retries.waits_for_first_call(entry):
                # An earlier capture requested this key, so it is retried even if not lazy.
                return key
            if not self.lazy:
                continue
            if reason == Reason.STALE and entry.state is KeyState.STALE:
                return key
            if self._retries.may_try(entry):
                return key
        return None

    def retry_if_due(self, key: GraphKey, sample: Sequence[Any] | None) -> bool:
        """Retry a failed or stale key if it is due; otherwise count the step.

        Returns:
            Whether the key was tried.
        """
        if not self.will_retry(key):
            self.note_retry(key, 1)
            return False
        self._try(key, evict=True, sample=sample, is_awaited=True)
        return True

    def steps_until_retry(self, key: GraphKey) -> int:
        """Return the number of steps until a failed or stale key is retried."""
        entry = self._registry.get(key)
        return 0 if entry is None else self._retries.steps_left(entry)

    def note_retry(self, key: GraphKey, num_steps: int) -> None:
        """Count steps that would have used a failed key but did not retry it."""
        entry = self._registry.get(key)
        if entry is not None and self._retries.may_try(entry):
            self._retries.note_steps(key, num_steps)

    def prove_rows(self, step: CapturedKey, sample: Sequence[Any]) -> bool:
        """Prove, with the inputs of a padded step, that padding does not change its rows.

        Returns:
            Whether the batch must be dispatched again.
        """
        rows = self._proof(step, partial(self._capturer.prove, step, sample))
        if rows is None:
            return step.released
        step.rows = attrs.evolve(rows, open_calls=max(0, rows.open_calls - 1))
        return not step.rows.open_calls and self._empty_cells(step)

    def prove_independent(self, step: CapturedKey, sample: Sequence[Any]) -> bool:
        """Prove, with the inputs of a part of a split batch, that rows are independent.

        Returns:
            Whether the batch must be dispatched again.
        """
        rows = self._proof(step, partial(self._capturer.prove_independent, step, sample))
        if rows is None:
            return step.released
        step.rows = attrs.evolve(rows, open_parts=max(0, rows.open_parts - 1))
        return not step.rows.open_parts and self._empty_cells(step)

    def _proof(self, step: CapturedKey, prove: Callable[[], RowProof]) -> RowProof | None:
        """Run a proof and return its result, or None if the proof is skipped or raises.

        If the proof raises, the graph is released and its keys are marked as failed. The proof is
        skipped during a background capture, or if modes (autocast, training) or values built into
        the graph have changed since it was captured. A later call can run the proof.
        """
        if not self._lane.group.turns.may_capture() or not self._capturer.is_current(step):
            return None
        handled = sys.exception()
        try:
            return prove()
        except Exception as error:  # noqa: BLE001 - an error in the step fails only this key
            problem = as_capture_error(error, step.key)  # reads the line from the traceback
            clear_traceback(error, handled)
            self.graphs.fail_step(step, str(problem))
            return None

    def _empty_cells(self, step: CapturedKey) -> bool:
        """Empty the table cells that use a graph, to decide their batches again; return True."""
        for key, one in self.live().items():
            if one is step:  # cells of this key were decided before the proof
                self._registry.captured(key, step, num_bytes=self.graphs.entry(key).num_bytes)
        return True

    def expected_refusal(self, key: GraphKey, num_tokens: int) -> str:
        """Return why a batch would run eager even if a key had a graph; empty if it would not.

        The reason is taken from the graph of a key that differs only in size. If there is a reason,
        a lazy runner skips the capture.
        """
        if num_tokens == key.num_tokens:
            return ""
        alike = (one for one in self.live().values() if family_of(one.key) == family_of(key))
        return next((one.rows.reason for one in alike if one.rows.reason), "")

    # -- eviction and invalidation ------------------------------------------------------

    def evict(self, key: GraphKey, reason: str = "requested") -> None:
        """Evict the graph of a key, and release the graph once it is no longer in flight.

        Raises:
            RegistryError: The key is not declared or has no graph.
        """
        self.graphs.evict(key, reason)

    def invalidate(self, reason: str) -> int:
        """Mark all graphs stale and release them; the keys can be captured again.

        Returns:
            The number of keys that lost their graph.
        """
        number = self.graphs.invalidate(reason)
        self._budget.drop_pool()
        self._capturer.forget()
        return number

    def measure_values(self, captured: CapturedKey, num_tokens: int) -> None:
        """Measure the Python values that a step returns for a number of rows.

        If the step cannot run with this number of rows, the graph is released and its keys are
        marked as failed. Nothing is measured if modes (autocast, training) or values built into the
        graph have changed since it was captured, because steps then do not replay it.
        """
        if not self._capturer.is_current(captured):
            return
        try:
            captured.row_values[num_tokens] = self._capturer.values_at(captured, num_tokens)
        except Exception as error:  # noqa: BLE001 - an error in the step fails only this key
            problem = as_capture_error(error, captured.key)
            self.graphs.fail_step(captured, f"{problem.reason}: {problem}")

    def replaced(self, captured: CapturedKey) -> str:
        """Invalidate all graphs if a value built into the given graph was replaced.

        Returns:
            The reason why steps run eager; empty if no value was replaced.
        """
        changed = captured.values.changes()
        if not changed:
            return ""
        self._capturer.note_replaced(changed)
        self.invalidate(f"{REPLACED}: {named(changed)}")
        return _reason_of(changed)

    def expected_replacement(self, captured: CapturedKey) -> str:
        """Return the reason that ``replaced`` would return, without invalidating graphs."""
        return _reason_of(captured.values.differences())

    def adopt(self, key: GraphKey, step: CapturedKey) -> None:
        """Register an external graph; evict others if necessary to stay within ``max_graphs``."""
        self._registry.declare([key])
        if self.graphs.entry(key).state is KeyState.CAPTURED:
            self.graphs.evict(key, "replaced")
        self._budget.evict_until_fits()
        self._registry.captured(key, step)

    def forget(self, keys: Iterable[GraphKey]) -> None:
        """Remove keys, and release graphs that no other key uses."""
        gone = tuple(keys)
        self.graphs.forget(gone)
        for key in gone:
            self._seen.pop(key, None)

    @property
    def budget(self) -> MemoryOptions:
        """The current limits."""
        return self._budget.limits

    def set_budget(self, limits: MemoryOptions) -> None:
        """Change the limits, evict graphs until the rest fits, and recapture keys that fit."""
        self._capture_lost(self._budget.update(limits))

    def set_eviction(self, score: Callable[[CapturedKey], float] | None) -> None:
        """Set the score by which graphs are evicted; None restores the configured order.

        The graph with the lowest score is evicted first.
        """
        self._budget.score = score

    # -- as a member of a pool group -----------------------------------------------------

    def num_graphs_in_pool(self) -> int:
        """Return the number of the lane's keys that have a graph in the pool."""
        return sum(not step.is_external for step in self.live().values())

    def num_steps(self) -> int:
        """Return the number of steps that the lane has run."""
        return self._lane.tick

    def evict_all(self) -> list[GraphKey]:
        """Evict the lane's graphs in the pool and return their keys."""
        lost = [key for key, step in self.live().items() if not step.is_external]
        for key in lost:
            self.graphs.evict(key, FOR_BUDGET)
        self._lane.drop_outputs()
        return lost

    def capture_again(self, keys: Iterable[GraphKey]) -> None:
        """Recapture keys that lost their graph, unless the runner is lazy or frozen."""
        if self.lazy or self.is_frozen:
            return
        for key in sorted(keys, key=largest_first):
            if self._budget.has_slot() and self.may_capture(key):
                self._try(key, evict=False)

    # -- internals ----------------------------------------------------------------------

    def _check_not_frozen(self) -> None:
        if self.is_frozen:
            raise frozen_error()
        if self._lane.group.is_asleep:
            raise RegistryError("The memory of the graphs is asleep. Call memory.wake() first.")

    def _try(
        self,
        key: GraphKey,
        *,
        evict: bool,
        sample: Sequence[Any] | None = None,
        is_awaited: bool = False,
    ) -> CaptureError | None:
        """Capture a key; if the capture fails, record and return its error.

        Args:
            key: Key to capture.
            evict: Whether other graphs may be evicted.
            sample: Inputs of the step that requests the key.
            is_awaited: Whether a step waits for the capture. If so, the wait is logged.
        """
        start, before = time.perf_counter(), self._lane.num_bytes()
        attempt = self._attempt(key, sample, evict=evict)
        captured, problem = attempt.captured, attempt.problem
        elapsed = (time.perf_counter() - start) * 1e6
        if is_awaited:
            _logger.info(
                "A step waited %.1f ms for the capture of %s. Capture it in advance with "
                "runner.capture(), or with runner.controls.capture_in_background() while serving.",
                elapsed / 1e3,
                key,
            )
        if self._registry.get(key) is None:
            if captured is not None:
                captured.release()
            return CaptureError(
                f"{key} is no longer declared, because the step swapped the policy or "
                "configuration during the capture. Swap outside the step.",
                key=str(key),
                reason="error",
            )
        if captured is not None:
            grown = max(0, self._lane.num_bytes() - before)
            captured.last_used = self._lane.tick
            self._registry.captured(key, captured, num_bytes=grown)
            self._counters.captures += 1
            if captured.pieces is not None and captured.pieces.segments:
                self._counters.segments[key] = captured.pieces.segments
            self.graphs.report(CaptureEvent, key, elapsed_us=elapsed, num_bytes=grown)
        if problem is not None:
            if not self.num_graphs_in_pool():
                self._budget.drop_pool()  # allocated by the failed capture
            self._registry.failed(key, f"{problem.reason}: {problem}")
            self._retries.note_failure(key)
            self._counters.capture_failures += 1
            facts = {"reason": problem.reason, "message": str(problem), "elapsed_us": elapsed}
            self.graphs.report(CaptureFailedEvent, key, **facts)
        self._capture_lost(attempt.lost)
        return problem

    def _capture_lost(self, lost: Mapping[PoolMember, Iterable[GraphKey]]) -> None:
        """Recapture the keys whose graphs were released with a pool, each on its own lane."""
        for member, keys in lost.items():
            member.capture_again(keys)

    def _attempt(self, key: GraphKey, sample: Sequence[Any] | None, *, evict: bool) -> _Attempt:
        """Capture a key, evicting the other graphs of its pool if they use too much memory.

        Args:
            key: Key to capture.
            sample: Inputs of the step that requests the key.
            evict: Whether other graphs may be evicted.
        """
        handled = sys.exception()
        admission, others = (
            self._budget.admission(key, evict=evict),
            partial(self._other_sizes, key),
        )
        lost: Mapping[PoolMember, Iterable[GraphKey]] = {}
        try:
            if evict:
                self._budget.evict_until_fits()
            captured = None
            try:
                captured = self._capturer.capture(key, others, admission, sample)
            except OverBudgetError as error:
                if not (evict and error.fits_alone):
                    raise
                clear_traceback(error, handled)
            if captured is None:
                lost = self._lane.group.clear()
                captured = self._capturer.capture(key, others, admission, sample)
            self._budget.check(key, captured, evict=evict)
        except Exception as error:  # noqa: BLE001 - an error in the step fails only this key
            # Frames refer to tensors, so a stored error with its traceback would keep memory of
            # graphs alive. If such a frame refers to the error, only the garbage collector would
            # free that memory.
            problem = as_capture_error(error, key)  # reads the line from the traceback
            clear_traceback(error, handled)
            problem.__cause__ = problem.__context__ = None
            if problem.reason == Reason.GRADIENTS:
                self._capturer.note_gradients()
            return _Attempt(None, problem, lost)
        return _Attempt(captured, None, lost)

    def _other_sizes(self, key: GraphKey) -> list[int]:
        """Return the other sizes in the key's family.

        If the family has no other size, return the other sizes of all declared keys.
        """
        alike = {one.num_tokens for one in self._registry if family_of(one) == family_of(key)}
        alike.discard(key.num_tokens)
        return sorted(alike or {one.num_tokens for one in self._registry} - {key.num_tokens})
