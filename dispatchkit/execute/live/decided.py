"""Steps whose decision was made before: by all ranks together, or by a policy to be taught."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import CalibrationRun, CellUpdate, Decision, Dispatcher, GraphView
from dispatchkit.dispatch.cells import cell_of_batch
from dispatchkit.errors import ConfigError, InputError, PolicyError, ReplayError
from dispatchkit.execute.capture.captured import CapturedStep
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.io.axes import AxisInputs
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.sample_inputs import sample_inputs
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.live.recording import StepWatcher
from dispatchkit.execute.replay.check import Checker
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.replay.planner import Planner
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.replay.timing import Timings
from dispatchkit.execute.step.state import Snapshot, restored
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.observe.counters import StepCounters
from dispatchkit.observe.recorder import StepRecorder


class Decided:
    """The part of GraphRunner that runs steps under decisions of somebody else."""

    dispatcher: Dispatcher
    config: DispatchConfig
    backend: GraphBackend
    counters: StepCounters
    timings: Timings
    checker: Checker | None
    lifecycle: Lifecycle
    eager: EagerRunner
    _planner: Planner
    _snapshot: Callable[[], Snapshot]
    _axes: AxisInputs | None
    _bind_inputs: Callable[..., Any]
    _check_inputs: Callable[[Any], tuple[int, bool]]
    _to_arrays: Callable[[Any], Any]
    _is_special: bool
    _inputs: InputSet
    _lane: Lane
    _lock: threading.RLock
    _recorder: StepRecorder | None
    _shadow_dispatch: Callable[..., Decision] | None
    _tell: Callable[[Decision], None] | None
    _watcher: StepWatcher | None

    def decide(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        """Return the decision of a step that ``run_decision`` is to run, as of any other.

        What records steps, is told of decisions, or shadows them learns of it. The arguments
        and errors are those of ``Dispatcher.dispatch``.
        """
        with self._lock:
            dispatch = self._shadow_dispatch or self.dispatcher.dispatch
            decision = dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
            if self._tell is not None:
                self._tell(decision)
            if self._recorder is not None:
                self._recorder.add(num_tokens, num_reqs, uniform, loras, ceiling)
            return decision

    def run_decision(self, decision: Decision, inputs: Mapping[str, Any]) -> Any:
        """Run one step under a decision, that way or not at all.

        A call runs eager where a graph turns out not to be usable. Here that raises: other
        ranks may be in the collectives of that graph, and would wait for this one for ever.

        Args:
            decision: One that this runner's dispatcher gave, for as many tokens as the inputs
                have.
            inputs: Inputs, and values of axes, by name.

        Returns:
            What the step returns for these inputs.

        Raises:
            ConfigError: The decision is not one of this runner's dispatcher.
            InputError: An input is missing, unknown, of another type, device or shape, or has
                another number of rows, or other buckets, than the decision. Nothing has run.
            ReplayError: The graph was given up, was captured under other facts (autocast,
                training mode), or its launch failed; or this stream is being captured.
        """
        plan = getattr(decision, "plan", None)
        if plan is None or plan.eager is not self.eager:
            raise ConfigError("decision", decision, "one that this runner's dispatcher gave")
        tensors, num_tokens, readable = self._bound_and_checked(inputs)
        if self._axes is not None and decision.key is not None:
            buckets, own = self._axes.buckets(tensors), decision.key.descriptor.axes
            if buckets != own:
                raise InputError(
                    "", f"The values of axes are in buckets {buckets}; the decision is for {own}."
                )
        if num_tokens != decision.num_tokens:
            raise InputError(
                "", f"The inputs have {num_tokens} rows; the decision is for {decision.num_tokens}."
            )
        stream = self.backend.current_stream_handle()
        if stream and self.backend.is_capturing():
            raise ReplayError(
                "run_decision() was called inside a capture that is not the runner's own, which "
                "no decided graph can be part of. Call the step itself there."
            )
        with self._lock:
            watcher = self._watcher
            if watcher is not None:
                watcher.enter(decision, 0)
            self.eager.is_exact, failed = True, True
            try:
                result = plan.run(tensors, stream, readable)
                if result is AGAIN:
                    self.eager.refuse_if_exact("its graph was given up", decision.key)
                failed = False
            except Exception:
                self.counters.failed_steps += 1
                raise
            finally:
                self.eager.is_exact = False
                if watcher is not None:
                    watcher.leave(failed=failed)
        return result

    def check_inputs(self, inputs: Mapping[str, Any]) -> int:
        """Return the rows of a call's inputs, without running anything.

        Args:
            inputs: Inputs, and values of axes, by name.

        Raises:
            InputError: An input is missing, unknown, of another type, device, shape or number
                of rows than it should be.
        """
        return self._bound_and_checked(inputs)[1]

    def _bound_and_checked(self, inputs: Mapping[str, Any]) -> tuple[Any, int, bool]:
        tensors = self._bind_inputs((), dict(inputs))
        if self._is_special:
            tensors = self._to_arrays(tensors)
        return (tensors, *self._check_inputs(tensors))

    def run_calibration(self) -> int:
        """Time the runs that a learning policy asks for; ``capture`` does so at its end.

        A policy asks by ``calibration_runs(graphs)``, which returns runs (batch, decision, how
        often) until it knows enough. Each is done twice as often, on dummy rows: first
        with nothing ahead on the stream, then right behind the one before; eager behind the
        largest graph too, so that the device is not done before all of it is submitted.
        Nothing of it is counted, and what the step changes is put back. With axes nothing is
        run: what the policy knows of them is the dispatcher's to say.

        Returns:
            How many steps were run.

        Raises:
            PolicyError: The policy raised when it was asked. Graphs that were captured stay.
        """
        wants = self.dispatcher.policy_parts.calibration_runs
        # In check mode nothing is measured.
        if wants is None or self.checker is not None or self.config.axes:
            return 0
        steps = 0
        with self._lock, self.counters.unchanged():
            while runs := self._wanted(wants):
                try:
                    steps += self._run_all(runs)
                except ReplayError:
                    # Its graph is marked as failed, what it changed is put back, and no step of
                    # the caller's was lost: a capture does not fail for it.
                    break
        return steps

    def _wanted(
        self, wants: Callable[[GraphView], Iterable[CalibrationRun]]
    ) -> list[CalibrationRun]:
        name, origin = self.dispatcher.policy_name, self.dispatcher.policy_origin
        try:
            runs = list(wants(self.dispatcher.graphs) or ())
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
            raise PolicyError(name, "calibration_runs", problem, origin=origin) from error
        for run in runs:
            if not isinstance(run, CalibrationRun):
                problem = f"returned {run!r:.60}; return CalibrationRuns (of dispatchkit.dispatch)."
                raise PolicyError(name, "calibration_runs", problem, origin=origin, value=run)
        return runs

    def _run_all(self, runs: Iterable[CalibrationRun]) -> int:
        steps = 0
        largest = max(self.lifecycle.live().items(), key=_size, default=None)
        for run in runs:
            if run.decision.key is not None and run.decision.key not in self.lifecycle.live():
                continue  # a runner that captures lazily: nothing is captured for this
            ceiling, uniform, loras, num_tokens = cell_of_batch(self.dispatcher.config, run.batch)
            tensors = self._sample(num_tokens)
            ahead: Callable[[], Any] | None = None
            if run.decision.key is None and largest is not None:
                ahead = self._replay_of(*largest)
            self.dispatcher.update(CellUpdate(run.batch, run.decision, one_shot=True))
            plan = self.dispatcher.dispatch(num_tokens, 0, uniform, loras, ceiling).plan
            with self._lane.alone(), restored(self._snapshot()), self._holding():
                for _ in range(run.runs):
                    self.backend.synchronize()
                    for kind in ("idle", "queued"):
                        if kind == "queued" and ahead is not None:
                            ahead()
                        if plan.run(tensors, self.backend.current_stream_handle()) is not AGAIN:
                            steps += 1
            self.timings.drain(wait=True)
        return steps

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Have nothing learnt inside."""
        self.timings.is_held = True
        try:
            yield
        finally:
            self.timings.is_held = False

    def _sample(self, num_tokens: int) -> Any:
        device = torch.device(self._inputs.device)
        tensors = self._inputs.bind((), sample_inputs(self._inputs.specs, num_tokens, device))
        return self._inputs.to_arrays(tensors) if self._inputs.host else tensors

    def _replay_of(self, key: GraphKey, step: CapturedStep) -> Callable[[], Any]:
        plan = self._planner.replay(key, step, key.num_tokens)
        tensors = self._sample(key.num_tokens)
        return lambda: plan.run(tensors, self.backend.current_stream_handle())


def _size(item: tuple[GraphKey, CapturedStep]) -> int:
    return item[0].num_tokens
