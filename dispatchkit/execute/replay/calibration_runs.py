"""CalibrationRuns: measure steps for a learning policy after a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dispatchkit.dispatch import CalibrationRun, CellUpdate, Dispatcher, GraphView
from dispatchkit.dispatch.cells import cell_of_batch
from dispatchkit.errors import PolicyError, ReplayError, describe_exception, format_value
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.capture.warmup import Warmups
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.sample_inputs import sample_inputs
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.replay.planner import Planner
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.replay.timing import Timings
from dispatchkit.execute.step.state import restored
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import StepCounters


class CalibrationRuns:
    """The calibration runs that a policy requests.

    Args:
        dispatcher: Dispatcher of the policy.
        planner: Planner, for replays of the largest graph.
        lifecycle: Lifecycle of the lane's graphs. Runs of keys without a graph are skipped.
        timings: Timings that collect the measurements of steps.
        lane: Lane that the runs use.
        warmups: Warmups, which record the state that the step changes.
        inputs: Static inputs for which dummy rows are created.
        counters: Step counters, which calibration runs do not change.
        is_off: Whether calibration is off, as in check mode.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        planner: Planner,
        lifecycle: Lifecycle,
        timings: Timings,
        lane: Lane,
        warmups: Warmups,
        inputs: InputSet,
        counters: StepCounters,
        *,
        is_off: bool,
    ) -> None:
        self._dispatcher, self._planner, self._lifecycle = dispatcher, planner, lifecycle
        self._timings, self._lane, self._warmups = timings, lane, warmups
        self._inputs, self._counters, self._is_off = inputs, counters, is_off
        self._backend = lane.backend

    def run(self) -> int:
        """Run the steps that the policy requests; the caller holds the runner's lock.

        The policy's ``calibration_runs(graphs)`` is called until it returns no more runs. Each
        run executes the step twice on dummy rows: on an idle stream, and again directly afterwards.
        If the step runs eager, a replay of the largest graph runs before the second execution, so
        that the device is still busy when the host has submitted that execution. The steps are not
        counted, and state that they change is restored. A runner with axes makes no calibration
        runs, because dummy inputs have no axis values.

        Returns:
            The number of steps run, without the replays of the largest graph.

        Raises:
            PolicyError: The policy raised or returned an invalid run. Captured graphs stay in use.
        """
        wants = self._dispatcher.policy_parts.calibration_runs
        if wants is None or self._is_off or self._dispatcher.config.axes:
            return 0
        steps = 0
        with self._counters.unchanged():
            while runs := self._requested(wants):
                try:
                    steps += self._run_all(runs)
                except ReplayError:
                    # The graph is marked as failed, and the state is restored. The capture itself
                    # succeeds, because no step of the caller has failed.
                    break
        return steps

    def _requested(
        self, hook: Callable[[GraphView], Iterable[CalibrationRun]]
    ) -> list[CalibrationRun]:
        name, origin = self._dispatcher.policy_name, self._dispatcher.policy_origin
        try:
            runs = list(hook(self._dispatcher.graphs) or ())
        except Exception as error:
            problem = describe_exception(error)
            raise PolicyError(name, "calibration_runs", problem, origin=origin) from error
        for run in runs:
            if not isinstance(run, CalibrationRun):
                problem = (
                    f"returned {format_value(run)} as a run; return "
                    "dispatchkit.dispatch.CalibrationRun objects."
                )
                raise PolicyError(name, "calibration_runs", problem, origin=origin, value=run)
        return runs

    def _run_all(self, runs: Iterable[CalibrationRun]) -> int:
        steps = 0
        live, dispatcher = self._lifecycle.live(), self._dispatcher
        largest = max(live.items(), key=lambda item: item[0].num_tokens, default=None)
        for run in runs:
            if any(key not in self._lifecycle.live() for key in run.decision.keys):
                continue  # a lazy runner does not capture for calibration alone
            ceiling, uniform, loras, num_tokens = cell_of_batch(dispatcher.config, run.batch)
            tensors = self._sample(num_tokens)
            ahead: Callable[[], Any] | None = None
            if run.decision.key is None and largest is not None:
                ahead = self._replay_of(*largest)
            dispatcher.update(CellUpdate(run.batch, run.decision, one_shot=True))
            plan = dispatcher.dispatch(num_tokens, 0, uniform, loras, ceiling).plan
            with self._lane.exclusive(), restored(self._warmups.snapshot()), self._outcomes_held():
                for _ in range(run.runs):
                    self._backend.synchronize()
                    for kind in ("idle", "queued"):
                        if kind == "queued" and ahead is not None:
                            ahead()
                        if plan.run(tensors, self._backend.current_stream_handle()) is not AGAIN:
                            steps += 1
            self._timings.drain(wait=True)
        return steps

    @contextlib.contextmanager
    def _outcomes_held(self) -> Iterator[None]:
        self._timings.is_held = True
        try:
            yield
        finally:
            self._timings.is_held = False

    def _sample(self, num_tokens: int) -> Any:
        device = torch.device(self._inputs.device)
        tensors = self._inputs.bind((), sample_inputs(self._inputs.specs, num_tokens, device))
        return self._inputs.to_arrays(tensors) if self._inputs.host else tensors

    def _replay_of(self, key: GraphKey, step: CapturedKey) -> Callable[[], Any]:
        plan, backend = self._planner.replay(key, step, key.num_tokens), self._backend
        tensors = self._sample(key.num_tokens)
        return lambda: plan.run(tensors, backend.current_stream_handle())
