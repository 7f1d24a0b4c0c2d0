"""DecisionRunner: steps whose decision was made before, by all ranks together."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dispatchkit.dispatch import Decision
from dispatchkit.errors import ConfigError, InputError, ReplayError
from dispatchkit.execute.executor import Executor, run_again
from dispatchkit.execute.io.axes import AxisCut
from dispatchkit.execute.io.calls import CallReader
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.step.values import ValueWatch
from dispatchkit.keys.batch import GraphKey


class DecisionRunner:
    """Decide steps first, and run them under those decisions later.

    Args:
        executor: Decides and runs them.
        reader: Binds and checks their inputs.
        taps: What follows steps.
        lock: Held by each step.
    """

    def __init__(
        self, executor: Executor, reader: CallReader, taps: StepTaps, lock: threading.RLock
    ) -> None:
        self._executor, self._reader, self._taps, self._lock = executor, reader, taps, lock
        # What watches the values that graphs have built in, and at which change of keys.
        self._watches: tuple[ValueWatch, ...] = ()
        self._found_at = -1

    def decide(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        """Return the decision of a step that ``run`` is to run, as of any other.

        Recordings and listeners see it too. The arguments and errors are those of
        ``Dispatcher.dispatch``.
        """
        with self._lock:
            return self._taps.dispatch(num_tokens, num_reqs, uniform, loras, ceiling)

    def drop_replaced(self) -> str:
        """Put the graphs out of use if what they have built in was replaced: before deciding.

        A call finds that by itself, when it is decided already. It is looked for as often as in
        calls, so that most times this compares two numbers.

        Returns:
            The reason to run eager; empty if nothing was found.
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
        """Run one step under a decision, that way or not at all.

        A call runs eager where a graph turns out not to be usable. Here that raises: other
        ranks may be in the collectives of that graph, and would wait for this one for ever.

        Args:
            decision: One that this runner's dispatcher made, for as many tokens as the inputs
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
        executor, reader = self._executor, self._reader
        eager, backend = executor.eager, executor.work.backend
        plan = getattr(decision, "plan", None)
        if plan is None or plan.eager is not eager:
            raise ConfigError("decision", decision, "one that this runner's dispatcher gave")
        tensors, num_tokens, readable = reader.read((), dict(inputs))
        if reader.axes is not None and decision.key is not None:
            buckets, own = reader.axes.buckets(tensors), decision.key.descriptor.axes
            if buckets != own:
                raise InputError(
                    "", f"The values of axes are in buckets {buckets}; the decision is for {own}."
                )
        if num_tokens != decision.num_tokens:
            raise InputError(
                "", f"The inputs have {num_tokens} rows; the decision is for {decision.num_tokens}."
            )
        stream = backend.current_stream_handle()
        if stream and backend.is_capturing():
            raise ReplayError(
                "A decision was run inside a capture that is not the runner's own, which no "
                "decided graph can be part of. Call the step itself there."
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
        """Return which dimensions of outputs follow an axis, as far as captures measured it.

        Args:
            values: Those of all axes.
            key: What runs; None: eager.

        Returns:
            Indices of output, dimension and axis; None where they were not measured.
        """
        return self._executor.warmups.known_axis_cuts(values, key)

    def check_inputs(self, inputs: Mapping[str, Any]) -> int:
        """Return the rows of a call's inputs, without running anything.

        Args:
            inputs: Inputs, and values of axes, by name.

        Raises:
            InputError: An input is missing, unknown, of another type, device, shape or number
                of rows than it should be.
        """
        return self._reader.read((), dict(inputs))[1]
