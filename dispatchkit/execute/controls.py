"""Controls: capture, freeze, evict and inspect a runner's graphs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.backends.optional import features_of
from dispatchkit.dispatch import (
    CostModel,
    Decision,
    Explanation,
    KeyPlacement,
    Reason,
    StepCost,
    find_cost_model,
)
from dispatchkit.dispatch import explain as explain_batch
from dispatchkit.errors import CaptureError, ConfigError, RegistryError, counted
from dispatchkit.execute.capture.background import BackgroundCapture
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.external import external_step
from dispatchkit.execute.capture.lifecycle import frozen_error
from dispatchkit.execute.capture.report import CaptureReport, largest_first
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.io.outputs import check_batch_dims
from dispatchkit.execute.memory import LongPause
from dispatchkit.execute.replay.direct import launch_path
from dispatchkit.execute.report import progress_display
from dispatchkit.execute.step.reasons import DOWNGRADES, NEXT_STEPS, PADDED_DRAWS
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import check_flag, check_instance
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.observe.counters import RunnerStats
from dispatchkit.registry import KeyState

_KEYS_HINT = "list(runner.registry) returns the runner's keys."
#: Why a key has no graph (None if it has one), and the pauses longer than ``max_pause_us``.
_Captured = tuple[CaptureError | str | None, Sequence[LongPause]]


def _checked(keys: Any) -> tuple[GraphKey, ...] | None:
    """Validate keys, and return them as a tuple.

    Raises:
        ConfigError: The value is not a list of keys.
    """
    if keys is None:
        return None
    if isinstance(keys, Iterable):
        found = tuple(keys)
        for index, key in enumerate(found):
            check_instance(key, GraphKey, f"keys[{index}]", _KEYS_HINT)
        return found
    raise ConfigError("keys", keys, "a list of GraphKeys", _KEYS_HINT)


def _check_key(key: Any) -> GraphKey:
    """Validate a key, and return it.

    Raises:
        ConfigError: The value is not a key.
    """
    return check_instance(key, GraphKey, "key", _KEYS_HINT)


class Controls:
    """The operations on a runner's graphs.

    Methods apply to all lanes unless stated otherwise.

    Args:
        executors: The executor of each lane.
        placement: The lanes on which each key is captured.
        lock: The lock that every step holds.
    """

    def __init__(
        self, executors: Sequence[Executor], placement: KeyPlacement, lock: threading.RLock
    ) -> None:
        self._executors, self._placement, self._lock = executors, placement, lock
        self._first = executors[0]
        self._turns = executors[0].lane.group.turns

    # -- graphs -------------------------------------------------------------------------

    def capture(
        self,
        keys: Iterable[GraphKey] | None = None,
        *,
        progress: bool | Callable[[int, int, GraphKey | None], None] = False,
        again: bool = False,
    ) -> CaptureReport:
        """Capture keys that have no graph, largest first.

        See ``GraphRunner.capture``.
        """
        check_flag(again, "again")
        chosen = self._placement.by_lane(_checked(keys))
        with progress_display(progress) as show, self._lock:
            self._turns.wait()
            report = CaptureReport.total(
                member.lifecycle.capture_all(own, show, again=again)
                for member, own in zip(self._executors, chosen, strict=True)
            )
            if report.num_graphs:
                for member in self._executors:
                    member.calibration.run()  # each lane learns separately
            return report

    def capture_in_background(
        self,
        keys: Iterable[GraphKey] | None = None,
        *,
        max_pause_us: float = 2000.0,
        between_operators: bool = False,
    ) -> BackgroundCapture:
        """Start a background capture of the keys that have no graph.

        Waiting steps run between the phases of each capture: the warmup, the memory measurement if
        there is a budget in bytes, the capture itself, the instantiation of the graph, and each
        replay of the row proof. A capture has only one phase if its mode is PIECEWISE, if the
        runner has several lanes, or if the step changes state, declares scratch, draws random
        numbers or calls functions wrapped in ``torch.compile``. The attribute ``pauses`` of the
        result lists the pauses longer than ``max_pause_us``, with their phases. During a capture,
        calls that would trigger a lazy capture run eager, with reason ``capture_pending``.

        Args:
            keys: Keys to capture; by default all declared keys. As in ``capture``, the largest is
                captured first, and no graph is evicted to free memory.
            max_pause_us: Longest acceptable delay of a step, in microseconds.
            between_operators: Whether to let steps run between two operators of a warmup or
                capture, once steps have waited for ``max_pause_us``. This is safe only if the step
                does not temporarily change attributes or globals.

        Returns:
            The capture in progress, which can be waited for or stopped.

        Raises:
            ConfigError: ``keys`` is not a list of keys, ``max_pause_us`` is not a positive number,
                or the runner returns views, which the proof of a new graph may overwrite.
            RegistryError: The runner is frozen, or a key is not declared.
        """
        given: Any = max_pause_us
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if not (is_number and given > 0):
            raise ConfigError("max_pause_us", given, "a positive number of microseconds")
        if self._first.spec.outputs == "view":
            raise ConfigError(
                "outputs",
                "view",
                "'owned' for background captures",
                "The row proof of a new graph may overwrite a view that is still in use. Call "
                "capture() instead.",
            )
        chosen = self._placement.by_lane(_checked(keys))
        places: dict[GraphKey, list[int]] = {}
        for index, own in enumerate(chosen):
            lifecycle = self._executors[index].lifecycle
            if lifecycle.is_frozen:
                raise frozen_error()
            for key in tuple(self._executors[index].registry) if own is None else own:
                if lifecycle.graphs.entry(key).state is not KeyState.CAPTURED:
                    places.setdefault(key, []).append(index)
        itself = weakref.ref(self)

        def capture_one(key: GraphKey) -> _Captured | None:
            # A weak reference, so that dropping the last reference to a runner frees its graphs.
            found = itself()
            if found is None:
                return None
            return found._capture_one(
                key, places[key], max_pause_us, between_operators=between_operators
            )

        def num_bytes() -> int:
            found = itself()
            return 0 if found is None else found.num_bytes

        background = BackgroundCapture(sorted(places, key=largest_first), capture_one, num_bytes)
        for member in self._executors:
            member.lifecycle.background = background
        return background

    def _capture_one(
        self,
        key: GraphKey,
        lanes: Sequence[int],
        max_pause_us: float,
        *,
        between_operators: bool,
    ) -> _Captured:
        """Capture a key on some lanes while steps run; return any problem and the long pauses."""
        problem: CaptureError | str | None = None
        pauses: list[LongPause] = []
        for index in lanes:
            lifecycle = self._executors[index].lifecycle
            with self._lock:
                pauses += lifecycle.warm_up_family(key, max_pause_us)
            with self._lock:
                own, found = lifecycle.capture_in_turns(
                    key, max_pause_us, between_operators=between_operators
                )
            problem, pauses = problem or own, [*pauses, *found]
        return problem, pauses

    def ready(self, keys: Iterable[GraphKey] | None = None) -> bool:
        """Return whether keys have graphs on all lanes assigned to them.

        Args:
            keys: Keys to check; by default all declared keys that are enabled.
        """
        chosen = self._placement.by_lane(_checked(keys))
        for member, own in zip(self._executors, chosen, strict=True):
            for key in tuple(member.registry) if own is None else own:
                entry = member.registry.get(key)
                if entry is None:
                    return False
                is_wanted = keys is not None or member.registry.is_enabled(key)
                if is_wanted and entry.state is not KeyState.CAPTURED:
                    return False
        return True

    def warm_up(self) -> dict[GraphKey, str]:
        """Warm up all keys that have no graph; return the error of each failed warmup.

        Call this method before the first capture if the step uses a library whose workspace grows
        with the batch size. Graphs then store the address of the workspace at its full size.
        """
        failed: dict[GraphKey, str] = {}
        with self._lock:
            self._turns.wait()
            for member in self._executors:
                failed |= member.lifecycle.warm_all()
        return failed

    def capture_next(self) -> GraphKey | None:
        """Try to capture the most requested key that has no graph; return the key, or None.

        Call this method while the service is idle. Each call tries one key, on the first
        lane that has such a key.
        """
        with self._lock:
            self._turns.wait()
            tried = (member.lifecycle.capture_next() for member in self._executors)
            return next((key for key in tried if key is not None), None)

    def freeze(self, *, strict: bool | None = None) -> None:
        """Stop capturing: batches without a graph run eager, or raise an error in strict mode.

        Args:
            strict: Whether to enable strict mode; None leaves it unchanged.

        Raises:
            ConfigError: ``strict`` is not True, False or None.
        """
        if strict is not None:
            check_flag(strict, "strict")
        with self._lock:
            self._turns.wait()
            for member in self._executors:
                member.lifecycle.is_frozen = True
                if strict is not None:
                    member.eager.strict = strict
                member.dispatcher.set_lazy(False)

    def unfreeze(self) -> None:
        """Allow captures again, including lazy captures in a lazy runner."""
        with self._lock:
            for member in self._executors:
                member.lifecycle.is_frozen = False
                member.dispatcher.set_lazy(member.lifecycle.lazy)

    def set_eviction(self, score: Callable[[CapturedKey], float] | None) -> None:
        """Set the function that chooses the graphs to evict.

        Args:
            score: Function that returns the score of a captured key; the graph with the lowest
                score is evicted first. None restores the order set by ``MemoryOptions.eviction``.

        Raises:
            ConfigError: ``score`` is neither a function nor None.
        """
        if score is not None and not callable(score):
            hint = "For a built-in order, call runner.swap(eviction=...) with 'lru' or 'benefit'."
            raise ConfigError("score", score, "a function that takes a captured key, or None", hint)
        with self._lock:
            for member in self._executors:
                member.lifecycle.set_eviction(score)

    def register(
        self,
        key: GraphKey,
        graph: Any,
        *,
        inputs: Mapping[str, torch.Tensor],
        outputs: Any,
        output_batch_dims: Any = 0,
        has_effect: bool = True,
    ) -> None:
        """Add an external graph, captured outside the runner, to the first lane.

        Args:
            key: The key of the graph; it is declared if necessary.
            graph: An object whose ``replay()`` launches the graph on the current stream.
            inputs: The tensors that the graph reads, by input name. The size of each batch
                dimension is the key's number of tokens.
            outputs: The padded outputs of the graph.
            output_batch_dims: The batch dimensions of the outputs. The allowed values are those of
                ``BufferOptions.output_batch_dims``, except ``derived``.
            has_effect: Whether a replay changes anything besides its outputs.

        Raises:
            InputError: The tensors do not match the declared inputs at the size of the key.
            CaptureError: ``output_batch_dims`` does not match the outputs, or ``max_graphs`` is 0.
            ConfigError: An argument is invalid.
        """
        _check_key(key)
        if not isinstance(inputs, Mapping):
            raise ConfigError("inputs", inputs, "a dictionary of tensors by input name")
        check_batch_dims(output_batch_dims)
        check_flag(has_effect, "has_effect")
        with self._lock:
            self._turns.wait()
            first = self._first
            step = external_step(
                key,
                graph,
                first.lane,
                first.lane.buffers_of(key).inputs,
                inputs,
                outputs,
                output_batch_dims,
                guard=first.work.guard.now(),
                has_effect=has_effect,
            )
            first.lifecycle.adopt(key, step)

    def has(self, key: GraphKey) -> bool:
        """Return whether a key has a graph on any lane."""
        _check_key(key)
        entries = (member.registry.get(key) for member in self._executors)
        return any(entry is not None and entry.state is KeyState.CAPTURED for entry in entries)

    def get(self, key: GraphKey) -> CapturedKey | None:
        """Return the ``CapturedKey`` of a key on the first lane, or None."""
        return self._first.lifecycle.live().get(_check_key(key))

    def evict(self, key: GraphKey) -> None:
        """Evict the graphs of a key.

        See ``GraphRunner.evict``.
        """
        _check_key(key)
        with self._lock:
            self._turns.wait()
            holders = [member for member in self._executors if key in member.lifecycle.live()]
            for member in holders or self._executors[:1]:
                member.lifecycle.evict(key)

    def clear(self) -> None:
        """Evict all graphs."""
        with self._lock:
            self._turns.wait()
            for member in self._executors:
                member.lifecycle.graphs.clear()

    def invalidate(self, reason: str = "weights") -> int:
        """Release all graphs because memory that they read was replaced.

        See ``GraphRunner.invalidate``.
        """
        given: Any = reason
        if not isinstance(given, str) or not given:
            hint = "Name the replaced memory, such as 'weights'."
            raise ConfigError("reason", given, "a non-empty string", hint)
        with self._lock:
            self._turns.wait()
            text = f"invalidate() was called ({reason})"
            return sum(member.lifecycle.invalidate(text) for member in self._executors)

    def set_enabled(
        self, enabled: bool, *, mode: RuntimeMode | str | None = None, key: GraphKey | None = None
    ) -> None:
        """Enable or disable a runtime mode or a key while serving.

        Raises:
            ConfigError: ``enabled`` is neither True nor False, or ``mode`` or ``key`` is invalid.
            RegistryError: Neither ``mode`` nor ``key`` is given, ``mode`` is NONE, or the key is
                not declared.
        """
        check_flag(enabled, "enabled")
        if key is not None:
            _check_key(key)
        chosen = None if mode is None else RuntimeMode.parse(mode)
        for member in self._executors:
            member.registry.set_enabled(enabled, mode=chosen, key=key)

    def drain(self, *, wait: bool = False) -> int:
        """Pass the outcomes of finished steps to the policy; return their number."""
        return sum(member.timings.drain(wait=wait) for member in self._executors)

    # -- reading ------------------------------------------------------------------------

    @property
    def can_split(self) -> bool:
        """Whether PIECEWISE graphs can be captured."""
        return self._first.work.step.can_split

    @property
    def num_bytes(self) -> int:
        """Bytes of the graphs, including their pools and shared outputs."""
        return sum(member.lane.num_bytes() for member in self._executors)

    def stats(self) -> RunnerStats:
        """Return the counters summed over all lanes."""
        return RunnerStats.total(member.counters.read() for member in self._executors)

    def explain(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        *,
        cost_model: CostModel | str | None = None,
        **axes: int,
    ) -> Explanation:
        """Explain the decision for a batch, without running or counting a step.

        See ``GraphRunner.explain``.
        """
        first, config = self._first, self._first.dispatcher.config
        planner = first.planner
        if axes or config.axes:
            loras = config.variant(loras, **axes)
        found = explain_batch(first.dispatcher, num_tokens, num_reqs, uniform, loras, ceiling)
        missed = next((one.key for one in found.candidates), None)
        if first.work.backend.is_capturing():
            decision = Decision.eager(Reason.INSIDE_CAPTURE)
            decision = attrs.evolve(decision, num_tokens=found.batch.num_tokens)
            found = attrs.evolve(found, error="")
        else:
            decision = planner.effective_decision(found.decision, num_tokens, missed)
        candidates = [
            attrs.evolve(
                one,
                chosen=one.key in decision.keys,
                why_not=one.why_not
                or planner.obstacle(Decision.replay(one.key), num_tokens)
                or None,
            )
            for one in found.candidates
        ]
        model = None if cost_model is None else find_cost_model(cost_model)
        return attrs.evolve(
            found,
            decision=decision,
            candidates=tuple(candidates),
            cost=None if model is None else StepCost.of(model, decision, num_tokens),
            times=first.timings.of(decision, found.batch),
            # An error of the batch itself already contains the next step.
            note=""
            if found.error
            else " ".join(self._notes(decision, num_tokens, [one.key for one in candidates])),
            error=found.error or self._error(decision),
        )

    def _error(self, decision: Decision) -> str:
        """Return the error that a step would raise; empty if it would run."""
        first, reason = self._first, decision.reason
        if decision.key is not None and first.lane.group.is_asleep:
            return "ReplayError: the GraphMemory of the runner is asleep; call its wake() method"
        if decision.key is None and first.eager.strict and reason in DOWNGRADES:
            return f"NoGraphError: the runner is strict, and no graph can run the batch ({reason})"
        return ""

    def _notes(
        self, decision: Decision, num_tokens: int, missed: Sequence[GraphKey]
    ) -> Iterator[str]:
        """Yield the notes of an explanation."""
        lifecycle = self._first.lifecycle
        if decision.key is None:
            retry = lifecycle.retry_key(decision.reason, missed)
            if retry is not None and lifecycle.will_retry(retry):
                yield f"The step first tries to capture {retry}, and then replays it if possible."
        elif missing := {str(key): None for key in decision.keys if key not in lifecycle.live()}:
            yield f"The step first captures {', '.join(missing)}."
        if decision.reason in (Reason.WEIGHTS_REPLACED, Reason.VALUE_CHANGED):
            yield (
                "Each replay checks only some of the values built into its graph, so a change may "
                "be detected several steps later."
            )
        if decision.reason in NEXT_STEPS:
            yield lifecycle.next_step(decision.reason)
        config = self._first.dispatcher.config
        may_split = self._first.spec.options.rows_independent
        if self._pads_draws(decision.key, num_tokens):
            yield PADDED_DRAWS
        elif may_split and not config.has_token_limit and num_tokens > config.max_num_tokens:
            yield (
                f"Batches of more than {counted(config.max_num_tokens, 'token')} run eager without "
                "a decision from the policy. To let a policy split them, set max_num_tokens to the "
                "number of tokens in the largest batch."
            )
        key = decision.key
        captured = None if key is None else self._first.lifecycle.live().get(key)
        if captured is not None and captured.pieces is not None and captured.pieces.segments:
            yield f"The graph has {captured.pieces}."

    def _pads_draws(self, key: GraphKey | None, num_tokens: int) -> bool:
        """Return whether the step would run padded in a graph that draws random numbers."""
        captured = None if key is None else self._first.lifecycle.live().get(key)
        return captured is not None and captured.pads_draws(num_tokens)

    # -- launches -----------------------------------------------------------------------

    def upload(self, key: GraphKey) -> bool:
        """Upload a key's graphs to the device, to make their first launch faster.

        Returns:
            Whether all graphs of the key were queued for upload. False if the key has no graph or
            the backend does not support uploads.
        """
        _check_key(key)
        uploads = features_of(self._first.work.backend).uploads
        if uploads is None:
            return False
        with self._lock:
            steps = [one for member in self._executors if (one := member.lifecycle.live().get(key))]
            done = [
                uploads.upload(graph, step.lane.stream) for step in steps for graph in step.graphs
            ]
        return bool(done) and all(done)

    def launch_path(self, key: GraphKey) -> str:
        """Return how a key's graph is launched: ``direct``, or ``replay:`` with the reason.

        If several lanes have the graph, the result is for the first of these lanes.

        Raises:
            RegistryError: The key has no graph.
        """
        return launch_path(self._first.work.backend, self._captured(key))

    def input_path(self, key: GraphKey) -> str:
        """Return how a key's inputs are copied.

        The result is ``node`` if a copy node of the graph copies inputs, or ``copy:`` with the
        reason why no copy node does. Before each launch, torch copies the device inputs that no
        node copies. If the graph copies the host inputs from pinned memory, the result ends with
        ``staging:`` and the reason; without device inputs, it has no other part. If several lanes
        have the graph, the result is for the first of these lanes.

        Raises:
            RegistryError: The key has no graph.
        """
        return str(self._captured(key).input_path)

    def _captured(self, key: GraphKey) -> CapturedKey:
        _check_key(key)
        for member in self._executors:
            captured = member.lifecycle.live().get(key)
            if captured is not None:
                return captured
        raise RegistryError(f"{key} has no graph. Capture the key with runner.capture([key]).")
