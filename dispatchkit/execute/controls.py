"""What a runner's owner can do besides calling it: capture, freeze, evict, look."""

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
    KeyHomes,
    StepCost,
    find_cost_model,
)
from dispatchkit.dispatch import explain as explain_batch
from dispatchkit.errors import CaptureError, ConfigError, RegistryError
from dispatchkit.execute.capture.background import BackgroundCapture
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.external import external_step
from dispatchkit.execute.capture.lifecycle import frozen
from dispatchkit.execute.capture.report import CaptureReport, largest_first
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.memory import LongPause
from dispatchkit.execute.replay.direct import launch_path
from dispatchkit.execute.report import progress_shower
from dispatchkit.execute.step.reasons import PADDED_DRAWS
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.observe.counters import RunnerStats
from dispatchkit.registry import KeyState

#: Why a key has no graph, and the times that steps were held up for too long.
_Captured = tuple[CaptureError | str | None, Sequence[LongPause]]


class Controls:
    """Capture, freeze, evict and look at the graphs of a runner.

    What is done here is done to every lane, where not said otherwise.

    Args:
        executors: Those of all lanes.
        homes: On which lanes keys are captured.
        lock: Held by each step.
    """

    def __init__(
        self, executors: Sequence[Executor], homes: KeyHomes, lock: threading.RLock
    ) -> None:
        self._executors, self._homes, self._lock = executors, homes, lock
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
        """Capture the keys that have no graph yet, largest first; failures are contained.

        See ``GraphRunner.capture``.
        """
        chosen = self._homes.by_lane(None if keys is None else tuple(keys))
        with progress_shower(progress) as show, self._lock:
            self._turns.wait()
            report = CaptureReport.total(
                member.lifecycle.capture_all(own, show, again=again)
                for member, own in zip(self._executors, chosen, strict=True)
            )
            if report.num_graphs:
                for member in self._executors:
                    member.calibration.run()  # each lane learns for itself
            return report

    def capture_in_background(
        self,
        keys: Iterable[GraphKey] | None = None,
        *,
        max_pause_us: float = 2000.0,
        between_operators: bool = False,
    ) -> BackgroundCapture:
        """Capture the keys that have no graph yet in a thread, while others run steps.

        Steps that wait run between the parts of each capture: its warmup, the capture itself, the
        driver's end of it, each replay that proves its rows. What held them up for longer than
        ``max_pause_us`` is in ``pauses``, by name: one of these parts; or the whole warmup and
        capture of a step that changes state, draws random numbers, is made of pieces, calls
        functions of torch.compile, or belongs to one of several lanes. Where calls capture on
        demand, they run eager with reason ``capture_pending`` meanwhile.

        Args:
            keys: Which; all declared ones by default. As in ``capture``, the largest first, and
                only where there is room: nothing is evicted.
            max_pause_us: How long steps may be held up at a time, in microseconds.
            between_operators: Also let steps run in the middle of a warmup or capture, between two
                operators, after ``max_pause_us``. The step must bear that: it must not set, for
                the time of its own run, an attribute or a global that another run resets.

        Raises:
            ConfigError: ``max_pause_us`` is not a positive number, or results are views of memory
                that the proof of a new graph writes to at any time.
            RegistryError: The runner is frozen, or a key is not declared.
        """
        if isinstance(max_pause_us, bool) or not isinstance(max_pause_us, int | float):
            raise ConfigError("max_pause_us", max_pause_us, "a number of microseconds")
        if not max_pause_us > 0:
            raise ConfigError("max_pause_us", max_pause_us, "above 0")
        if self._first.spec.outputs == "view":
            raise ConfigError(
                "outputs",
                "view",
                "'owned' for captures in the background",
                "A view may be read while a new graph is proven in the same memory: capture().",
            )
        chosen = self._homes.by_lane(None if keys is None else tuple(keys))
        places: dict[GraphKey, list[int]] = {}
        for index, own in enumerate(chosen):
            lifecycle = self._executors[index].lifecycle
            if lifecycle.is_frozen:
                raise frozen()
            for key in tuple(self._executors[index].registry) if own is None else own:
                if lifecycle.graphs.entry(key).state is not KeyState.CAPTURED:
                    places.setdefault(key, []).append(index)
        itself = weakref.ref(self)

        def capture_one(key: GraphKey) -> _Captured | None:
            # Weakly between two keys: the last reference to a runner frees its graphs.
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
        """Capture a key on some lanes in turns with steps; called by the background's thread."""
        problem: CaptureError | str | None = None
        pauses: list[LongPause] = []
        for index in lanes:
            lifecycle = self._executors[index].lifecycle
            with self._lock:
                pauses += lifecycle.learn(key, max_pause_us)
            with self._lock:
                own, found = lifecycle.capture_in_turns(
                    key, max_pause_us, between_operators=between_operators
                )
            problem, pauses = problem or own, [*pauses, *found]
        return problem, pauses

    def ready(self, keys: Iterable[GraphKey] | None = None) -> bool:
        """Return whether keys have their graphs, on every lane that has a home for them.

        Args:
            keys: Which; by default all that are declared and not switched off.
        """
        chosen = self._homes.by_lane(None if keys is None else tuple(keys))
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
        """Warm all keys up before the first is captured; returns those whose warmup raised.

        For libraries whose scratch memory grows with the size: all of it is there before a
        graph reads its address.
        """
        failed: dict[GraphKey, str] = {}
        with self._lock:
            self._turns.wait()
            for member in self._executors:
                failed |= member.lifecycle.warm_all()
        return failed

    def capture_next(self) -> GraphKey | None:
        """Capture the key that was most asked for in vain; to be called in idle moments."""
        with self._lock:
            self._turns.wait()
            tried = (member.lifecycle.capture_next() for member in self._executors)
            return next((key for key in tried if key is not None), None)

    def freeze(self, *, strict: bool | None = None) -> None:
        """Capture nothing from now on; a key without a graph runs eager, or raises if strict."""
        with self._lock:
            self._turns.wait()
            for member in self._executors:
                member.lifecycle.is_frozen = True
                if strict is not None:
                    member.eager.strict = strict
                member.dispatcher.set_lazy(False)

    def unfreeze(self) -> None:
        """Allow captures again, lazy ones where the runner is lazy: to wake up after a sleep."""
        with self._lock:
            for member in self._executors:
                member.lifecycle.is_frozen = False
                member.dispatcher.set_lazy(member.lifecycle.lazy)

    def set_eviction(self, score: Callable[[CapturedKey], float] | None) -> None:
        """Choose by a function which graph is evicted first, on every lane.

        Args:
            score: Of a captured key; the lowest goes first. None: as
                ``MemoryOptions.eviction`` names it.
        """
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
        """Use a graph that was captured elsewhere for a key, on the first lane.

        Args:
            key: Its name; declared if it is not.
            graph: Anything with ``replay()``, launched on the current stream.
            inputs: The tensors it reads, of the key's size, by input name.
            outputs: What it writes, padded.
            output_batch_dims: Their batch dimension, as for the runner.
            has_effect: A replay changes more than its outputs.

        Raises:
            InputError: The tensors do not fit the declared inputs at the key's size.
        """
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
        """Return whether a key has a graph now, on any lane."""
        entries = (member.registry.get(key) for member in self._executors)
        return any(entry is not None and entry.state is KeyState.CAPTURED for entry in entries)

    def get(self, key: GraphKey) -> CapturedKey | None:
        """Return the captured step of a key on the first lane, None if it has none there."""
        return self._first.lifecycle.live().get(key)

    def evict(self, key: GraphKey) -> None:
        """Give up the graphs of a key.

        See ``GraphRunner.evict``.
        """
        with self._lock:
            self._turns.wait()
            holders = [member for member in self._executors if key in member.lifecycle.live()]
            for member in holders or self._executors[:1]:
                member.lifecycle.evict(key)

    def clear(self) -> None:
        """Give up all graphs."""
        with self._lock:
            self._turns.wait()
            for member in self._executors:
                member.lifecycle.graphs.clear()

    def invalidate(self, reason: str = "weights") -> int:
        """Give up all graphs because what they read was replaced; capture them again after.

        See ``GraphRunner.invalidate``.
        """
        with self._lock:
            self._turns.wait()
            return sum(member.lifecycle.invalidate(reason) for member in self._executors)

    def set_enabled(
        self, enabled: bool, *, mode: RuntimeMode | str | None = None, key: GraphKey | None = None
    ) -> None:
        """Switch a runtime mode, or one key, on or off while serving."""
        chosen = None if mode is None else RuntimeMode.parse(mode)
        for member in self._executors:
            member.registry.set_enabled(enabled, mode=chosen, key=key)

    def drain(self, *, wait: bool = False) -> int:
        """Give the outcomes of measured steps that are done to the policy; how many."""
        return sum(member.timings.drain(wait=wait) for member in self._executors)

    # -- reading ------------------------------------------------------------------------

    @property
    def can_split(self) -> bool:
        """Whether the step is pieces, so that PIECEWISE graphs can be captured."""
        return self._first.work.step.can_split

    @property
    def num_bytes(self) -> int:
        """Bytes that the graphs take: their pool, and the outputs they share."""
        return sum(member.lane.num_bytes() for member in self._executors)

    def stats(self) -> RunnerStats:
        """Return what has been done so far, on all lanes together."""
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
        """Say what would happen to a batch and why, without running or counting anything.

        See ``GraphRunner.explain``.
        """
        first, config = self._first, self._first.dispatcher.config
        if axes or config.axes:
            loras = config.variant(loras, **axes)
        found = explain_batch(first.dispatcher, num_tokens, num_reqs, uniform, loras, ceiling)
        missed = next((one.key for one in found.candidates), None)
        decision = first.planner.shown(found.decision, num_tokens, missed)
        model = None if cost_model is None else find_cost_model(cost_model)
        return attrs.evolve(
            found,
            decision=decision,
            cost=None if model is None else StepCost.of(model, decision, num_tokens),
            times=first.timings.of(decision, found.batch),
            note=" ".join(self._notes(decision, num_tokens)),
        )

    def _notes(self, decision: Decision, num_tokens: int) -> Iterator[str]:
        """Yield what else is to be known of a step, in words."""
        config = self._first.dispatcher.config
        may_split = self._first.spec.options.rows_independent
        if self._pads_draws(decision.key, num_tokens):
            yield PADDED_DRAWS
        elif may_split and not config.has_token_limit and num_tokens > config.max_num_tokens:
            yield (
                "No policy is asked about batches above the largest size. With max_num_tokens, the "
                "largest batch that comes, one may split them."
            )
        key = decision.key
        captured = None if key is None else self._first.lifecycle.live().get(key)
        if captured is not None and captured.pieces is not None and captured.pieces.segments:
            yield f"It is {captured.pieces}."

    def _pads_draws(self, key: GraphKey | None, num_tokens: int) -> bool:
        """Return whether a step would be padded in a graph that draws random numbers."""
        captured = None if key is None else self._first.lifecycle.live().get(key)
        return captured is not None and captured.pads_draws(num_tokens)

    # -- launches -----------------------------------------------------------------------

    def upload(self, key: GraphKey) -> bool:
        """Bring a key's graphs to the device ahead of their first launch, on their lanes.

        Returns:
            Whether that was queued; False without a graph, or where the backend cannot.
        """
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
        """Say how the graph of a key is launched: ``direct``, or by its graph and why.

        Raises:
            RegistryError: The key has no graph.
        """
        return launch_path(self._first.work.backend, self._captured(key))

    def input_path(self, key: GraphKey) -> str:
        """Say how inputs of a key come in: ``node``, or by torch's ``copy`` and why.

        With a node, device inputs that it is not for still go by a copy, step by step. Host
        inputs that it is not for are copied by the graph from pinned memory: ``staging``, and
        why, behind how device inputs come in.

        Raises:
            RegistryError: The key has no graph.
        """
        return str(self._captured(key).input_path)

    def _captured(self, key: GraphKey) -> CapturedKey:
        captured = self.get(key)
        if captured is None:
            raise RegistryError(f"{key} has no graph that could be launched.")
        return captured
