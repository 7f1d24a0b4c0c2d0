"""What a runner's owner can do besides calling it: capture, freeze, evict, look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from dispatchkit.dispatch import Dispatcher, Explanation
from dispatchkit.dispatch import explain as explain_batch
from dispatchkit.execute.capture.captured import CapturedStep
from dispatchkit.execute.capture.external import external_step
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.capture.report import CaptureReport
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.planner import Planner
from dispatchkit.execute.replay.timing import Timings
from dispatchkit.execute.report import progress_shower
from dispatchkit.execute.step.guard import Guard
from dispatchkit.execute.step.pieces import Step
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode, RuntimeMode
from dispatchkit.observe.counters import RunnerStats, StepCounters
from dispatchkit.plan.costs import CostModel, load_cost_model
from dispatchkit.registry import GraphRegistry, KeyState

if TYPE_CHECKING:
    from dispatchkit.execute.runner import GraphRunner


class Controls:
    """The part of GraphRunner that is not the step.

    What is done here is done to every lane, where not said otherwise.
    """

    dispatcher: Dispatcher
    registry: GraphRegistry
    config: DispatchConfig
    asked_mode: CUDAGraphMode
    eager: EagerRunner
    _planner: Planner
    guard: Guard
    lifecycle: Lifecycle
    counters: StepCounters
    timings: Timings
    _lock: threading.RLock
    _lane: Lane
    _inputs: InputSet
    _step: Step
    lanes: tuple[GraphRunner, ...]
    _keys_of_lanes: Callable[[Sequence[GraphKey] | None], list[Sequence[GraphKey] | None]]

    # -- graphs -------------------------------------------------------------------------

    def capture(
        self,
        keys: Iterable[GraphKey] | None = None,
        *,
        progress: bool | Callable[[int, int, GraphKey | None], None] = False,
        again: bool = False,
    ) -> CaptureReport:
        """Capture the keys that have no graph yet, largest first; failures are contained.

        A policy that learns is then given the timed runs it asks for, see ``run_calibration``.

        Args:
            keys: Which; all declared ones by default. Each lane captures those that have a
                home on it by its lane policy.
            progress: Show a progress bar on stderr, or call this with (done, total, key).
            again: Also those that failed so often that they are left alone: for when the
                cause has been mended.
        """
        chosen = self._keys_of_lanes(None if keys is None else tuple(keys))
        with progress_shower(progress) as show, self._lock:
            report = CaptureReport.total(
                member.lifecycle.capture_all(own, show, again=again)
                for member, own in zip(self.lanes, chosen, strict=True)
            )
            if report.num_graphs:
                for member in self.lanes:
                    member.run_calibration()  # each lane learns for itself
            return report

    def warm_up(self) -> dict[GraphKey, str]:
        """Warm all keys up before the first is captured; returns those whose warmup raised.

        For libraries whose scratch memory grows with the size: all of it is there before a
        graph reads its address.
        """
        failed: dict[GraphKey, str] = {}
        with self._lock:
            for member in self.lanes:
                failed |= member.lifecycle.warm_all()
        return failed

    def capture_next(self) -> GraphKey | None:
        """Capture the key that was most asked for in vain; to be called in idle moments."""
        with self._lock:
            tried = (member.lifecycle.capture_next() for member in self.lanes)
            return next((key for key in tried if key is not None), None)

    def freeze(self, *, strict: bool | None = None) -> None:
        """Capture nothing from now on; a key without a graph runs eager, or raises if strict."""
        with self._lock:
            for member in self.lanes:
                member.lifecycle.is_frozen = True
                if strict is not None:
                    member.eager.strict = strict
                member.dispatcher.set_lazy(False)

    def unfreeze(self) -> None:
        """Allow captures again, lazy ones where the runner is lazy: to wake up after a sleep."""
        with self._lock:
            for member in self.lanes:
                member.lifecycle.is_frozen = False
                member.dispatcher.set_lazy(member.lifecycle.lazy)

    def set_eviction(self, score: Callable[[CapturedStep], float] | None) -> None:
        """Choose by a function which graph is evicted first, on every lane.

        Args:
            score: Of a captured step; the lowest goes first. None: as
                ``MemoryOptions.eviction`` names it.
        """
        with self._lock:
            for member in self.lanes:
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
            step = external_step(
                key,
                graph,
                self._lane,
                self._lane.buffers_of(key).inputs,
                inputs,
                outputs,
                output_batch_dims,
                guard=self.guard.now(),
                has_effect=has_effect,
            )
            self.lifecycle.adopt(key, step)

    def has(self, key: GraphKey) -> bool:
        """Return whether a key has a graph now, on any lane."""
        entries = (member.registry.get(key) for member in self.lanes)
        return any(entry is not None and entry.state is KeyState.CAPTURED for entry in entries)

    def get(self, key: GraphKey) -> CapturedStep | None:
        """Return the captured step of a key on the first lane, None if it has none there."""
        return self.lifecycle.live().get(key)

    def evict(self, key: GraphKey) -> None:
        """Give up the graphs of a key.

        Raises:
            RegistryError: It has none.
        """
        with self._lock:
            holders = [member for member in self.lanes if key in member.lifecycle.live()]
            for member in holders or self.lanes[:1]:
                member.lifecycle.evict(key)

    def clear(self) -> None:
        """Give up all graphs."""
        with self._lock:
            for member in self.lanes:
                for key in member.lifecycle.live():
                    member.lifecycle.evict(key)

    def invalidate(self, reason: str = "weights") -> int:
        """Give up all graphs because what they read was replaced; capture them again after.

        Weights that are copied in place need none of this.

        Returns:
            How many graphs there were.
        """
        with self._lock:
            return sum(member.lifecycle.invalidate(reason) for member in self.lanes)

    def set_enabled(
        self, enabled: bool, *, mode: RuntimeMode | str | None = None, key: GraphKey | None = None
    ) -> None:
        """Switch a runtime mode, or one key, on or off while serving."""
        chosen = None if mode is None else RuntimeMode.parse(mode)
        for member in self.lanes:
            member.registry.set_enabled(enabled, mode=chosen, key=key)

    def drain(self, *, wait: bool = False) -> int:
        """Give the outcomes of measured steps that are done to the policy; how many."""
        return sum(member.timings.drain(wait=wait) for member in self.lanes)

    # -- reading ------------------------------------------------------------------------

    @property
    def can_split(self) -> bool:
        """Whether PIECEWISE can run: the step is a list of pieces."""
        return self._step.can_split

    @property
    def num_bytes(self) -> int:
        """Bytes that the graphs take: their pool, and the outputs they share."""
        return sum(member._lane.num_bytes() for member in self.lanes)

    def stats(self) -> RunnerStats:
        """Return what has been done so far, on all lanes together."""
        return RunnerStats.total(member.counters.read() for member in self.lanes)

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

        It says what such steps took, where the policy had some timed and they were read
        (``drain`` does that too).

        Args:
            num_tokens: Tokens of the batch.
            num_reqs: Requests in it; 0 where they are not known.
            uniform: False for a mixed batch, True for a uniform decode batch.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.
            cost_model: Say what the step costs by this model too: one that ``calibrate`` made
                of this runner, or the name of a built-in one or a file.
            axes: The value of each axis, by its name.

        Raises:
            DescriptorError: The batch is impossible.
            UnknownNameError: There is no such cost model.
        """
        if axes or self.config.axes:
            loras = self.config.variant(loras, **axes)
        found = explain_batch(self.dispatcher, num_tokens, num_reqs, uniform, loras, ceiling)
        decision = attrs.evolve(
            found.decision, reason=self._planner.own_reason(found.decision.reason)
        )
        model = load_cost_model(cost_model) if isinstance(cost_model, str) else cost_model
        return attrs.evolve(
            found,
            decision=decision,
            cost=None if model is None else model.cost_of(decision, num_tokens),
            times=self.timings.of(decision, found.batch),
        )
