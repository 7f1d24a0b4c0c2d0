"""DecisionRunner: decide steps first, then run them exactly as decided."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dispatchkit.dispatch import Decision
from dispatchkit.errors import ConfigError, InputError, ReplayError, counted
from dispatchkit.execute.executor import Executor, run_again
from dispatchkit.execute.io.axes import AxisCut
from dispatchkit.execute.io.calls import CallReader
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.step.values import ValueWatch
from dispatchkit.keys.batch import GraphKey


class DecisionRunner:
    """A runner that decides steps first and runs them later.

    Args:
        executor: The executor that decides and runs the steps.
        reader: Reader that binds and validates inputs.
        taps: Recorder, listener and watcher of steps.
        lock: The lock that every step holds.
    """

    def __init__(
        self, executor: Executor, reader: CallReader, taps: StepTaps, lock: threading.RLock
    ) -> None:
        self._executor, self._reader, self._taps, self._lock = executor, reader, taps, lock
        # Watches of the values built into graphs, and registry.num_changes when they were listed.
        self._watches: tuple[ValueWatch, ...] = ()
        self._found_at = -1

    def decide(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        """Return the decision for a step, to be passed to ``run``.

        The decision is recorded and passed to the listener, as in a call of the runner. Arguments
        and errors are those of ``Dispatcher.dispatch``.
        """
        with self._lock:
            return self._taps.dispatch(num_tokens, num_reqs, uniform, loras, ceiling)

    def drop_replaced(self) -> str:
        """Invalidate all graphs if a value built into one of them was replaced.

        Call this method before ``decide``, because ``run`` detects replaced values only after the
        decision. As in calls of the runner, values are usually checked in only some of the steps.
        In the other steps, this method only compares counters.

        Returns:
            The reason to run eager; empty if nothing was replaced.
        """
        executor = self._executor
        lane, registry, lifecycle = executor.lane, executor.registry, executor.lifecycle
        with self._lock:
            if self._found_at != registry.num_changes:
                self._found_at = registry.num_changes
                found = {id(one.values): one.values for one in lifecycle.live().values()}
                self._watches = tuple(found.values())
            for values in self._watches:
                if lane.tick >= values.due and not values.is_unchanged(lane.tick):
                    graphs = lifecycle.live().values()
                    return lifecycle.replaced(next(one for one in graphs if one.values is values))
        return ""

    def run(self, decision: Decision, inputs: Mapping[str, Any]) -> Any:
        """Run a step exactly as decided, or raise.

        Unlike a call, this method does not fall back to eager if the graph is unusable. Other ranks
        may be in the collectives of the graph, and would wait for this rank forever.

        Args:
            decision: A decision returned by ``decide``, for the number of rows in the inputs.
            inputs: Inputs and values of axes, by name.

        Returns:
            The results of the step.

        Raises:
            ConfigError: The decision is not from this runner's dispatcher.
            InputError: An input is missing or unknown, or has the wrong dtype, device or shape; or
                the decision is not for the number of rows or the buckets of these inputs. The step
                has not run.
            NoGraphError: The decision is a downgrade to eager, and the runner is strict.
            ReplayError: The graph was evicted or could not be launched, the modes (autocast,
                training) have changed since its capture, or the current stream is capturing.
        """
        executor, reader = self._executor, self._reader
        eager, backend = executor.eager, executor.work.backend
        plan = getattr(decision, "plan", None)
        if plan is None or plan.eager is not eager:
            raise ConfigError(
                "decision",
                decision,
                "a decision from this runner's dispatcher",
                "Get it from runner.decisions.decide().",
            )
        tensors, num_tokens, readable = reader.read((), dict(inputs))
        if reader.axes is not None and decision.key is not None:
            buckets, own = reader.axes.buckets(tensors), decision.key.descriptor.axes
            if buckets != own:
                raise InputError(
                    "",
                    f"The axis values are in buckets {buckets}, but the decision is for buckets "
                    f"{own}. Get a decision for these inputs from runner.decisions.decide().",
                )
        if num_tokens != decision.num_tokens:
            raise InputError(
                "",
                f"The inputs have {counted(num_tokens, 'row')}, but the decision is for "
                f"{decision.num_tokens}. Get a decision for these inputs from "
                "runner.decisions.decide().",
            )
        stream = backend.current_stream_handle()
        if stream and backend.is_capturing():
            raise ReplayError(
                "run() was called while other code captures the current stream, and a step cannot "
                "run as decided inside another capture. Call the step function inside the capture, "
                "or call run() outside it."
            )
        with self._lock:
            watcher = self._taps.watcher
            if watcher is not None:
                watcher.enter(decision, 0)
            eager.exact, failed = decision, True
            try:
                result = plan.run(tensors, stream, readable)
                if result is AGAIN:
                    result = run_again(
                        executor.dispatcher, eager, tensors, stream, readable, num_tokens
                    )
                failed = False
            except Exception:
                executor.counters.failed_steps += 1
                raise
            finally:
                eager.exact = None
                if watcher is not None:
                    watcher.leave(failed=failed)
        return result

    def known_axis_cuts(
        self, values: Sequence[int], key: GraphKey | None
    ) -> tuple[AxisCut, ...] | None:
        """Return the output dimensions that depend on an axis, as measured by captures.

        Args:
            values: The values of all axes.
            key: The key of the graph; None for eager.

        Returns:
            The output dimensions to cut; None if no capture has measured them.
        """
        return self._executor.warmups.known_axis_cuts(values, key)

    def check_inputs(self, inputs: Mapping[str, Any]) -> int:
        """Validate the inputs of a call and return their number of rows.

        Args:
            inputs: Inputs and values of axes, by name.

        Raises:
            InputError: An input is missing or unknown, or has the wrong dtype, device, shape or
                number of rows.
        """
        return self._reader.read((), dict(inputs))[1]
