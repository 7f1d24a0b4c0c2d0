"""Attribute the time of a warm ``GraphRunner`` step to its parts, for ``floors.py``.

The measurement is a ladder. The lowest rung is a bare launch, and each rung adds one part of the
step to the rung below. The rungs are handwritten functions that use the runner's graph, copy node
and table; the highest rung is the runner's call. In this way, each part is measured around a
launch, as in use, instead of in a separate loop with warm caches. The lower rungs are single
functions. The higher rungs call the plan and the dispatcher, and so show the cost of dividing a
step into functions.

Without a GPU, launches and copy nodes do nothing, and tensors are in host memory.
"""

# ruff: noqa: SLF001 - the parts of a step are measured individually

from __future__ import annotations

import statistics
from typing import Any

import torch
from _common import emit
from step import FIXED, HAS_GPU, INT64, Case, Idle, Run, in_turns, names

BENCH = "floors"
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


class Parts:
    """The parts of a warm step of a runner.

    Args:
        case: Step to measure, with its inputs.
        runner: Runner of the step. Its results are views.
    """

    def __init__(self, case: Case, runner: Any) -> None:
        self.given = dict(zip(names(3), case.device[FIXED], strict=True))
        self.values = tuple(self.given.values())
        self.runner = runner
        for _ in range(3):  # fill caches, and record the layout of the inputs
            runner(**self.given)
            runner.run_in_place(FIXED)
        executor = runner.lanes[0]
        self.plan = executor.decide(FIXED).plan
        self.launch, self.graph = self.plan._launch, self.plan._graph
        self.lane, self.step = self.plan.step.lane, self.plan.step
        self.set_node = self.plan.transport._set
        self.row = executor.dispatcher.row()
        self.decide = executor.decide
        self.lock, self.stream = runner._lock, runner._current_stream_handle
        self.bind, self.check = runner._bind, runner._check
        self.set_node(self.values)

    def in_place(self) -> dict[str, Run]:
        """Return the rungs of ``run_in_place``, lowest first."""
        launch, graph, argument = self.launch, self.graph, self.lane.stream_argument
        lock, stream, decide, plan = self.lock, self.stream, self.decide, self.plan
        row, step, lane, values = self.row, self.step, self.lane, self.step.values
        modules, load_in_place = plan._modules, plan.transport.load_in_place
        count, ready = plan.count, plan._ready

        def launched(_: int) -> None:
            launch(graph, argument)

        def on_stream(_: int) -> None:
            stream()
            launch(graph, argument)

        def locked(_: int) -> None:
            stream()
            with lock:
                launch(graph, argument)

        def looked_up(rows: int) -> Any:
            stream()
            with lock:
                found = row[rows]
                launch(graph, argument)
                return found

        def guarded(rows: int) -> Any:
            handle = stream()
            with lock:
                found = row[rows]
                if step.released or _is_any_autocast_enabled():
                    return None
                for module, training, place_now, place in modules:
                    if module.training is not training or place_now() != place:
                        return None
                if lane.tick >= values.due and not values.is_unchanged(lane.tick):
                    return None
                if handle != lane.handle:
                    return None
                launch(graph, argument)
                return found

        def cleaned(rows: int) -> Any:
            handle = stream()
            with lock:
                found = row[rows]
                if step.released or _is_any_autocast_enabled():
                    return None
                for module, training, place_now, place in modules:
                    if module.training is not training or place_now() != place:
                        return None
                if lane.tick >= values.due and not values.is_unchanged(lane.tick):
                    return None
                if handle != lane.handle:
                    return None
                load_in_place()
                launch(graph, argument)
                return found

        def counted(rows: int) -> Any:
            handle = stream()
            with lock:
                row[rows]
                if step.released or _is_any_autocast_enabled():
                    return None
                for module, training, place_now, place in modules:
                    if module.training is not training or place_now() != place:
                        return None
                if lane.tick >= values.due and not values.is_unchanged(lane.tick):
                    return None
                if handle != lane.handle:
                    return None
                load_in_place()
                launch(graph, argument)
                lane.tick = step.last_used = lane.tick + 1
                step.hits += 1
                count.steps += 1
                count.tokens += rows
                return ready

        def planned(rows: int) -> Any:
            handle = stream()
            with lock:
                row[rows]
                return plan.run(None, handle)

        def dispatched(rows: int) -> Any:
            handle = stream()
            with lock:
                return decide(rows, 0, 0, 0, 2).plan.run(None, handle)

        return {
            "the launch": launched,
            "+ get the current stream": on_stream,
            "+ acquire the lock": locked,
            "+ look up the cell in the dispatch table": looked_up,
            "+ check autocast, modules, values and stream": guarded,
            "+ reset stale rows beyond the batch": cleaned,
            "+ update the counters, and compare values in every 16th step": counted,
            "the same operations, performed by the plan": planned,
            "the same operations, performed by dispatcher and plan": dispatched,
            "run_in_place": self.runner.run_in_place,
        }

    def views(self) -> dict[str, Run]:
        """Return the rungs of a call with inputs on the device, lowest first."""
        launch, graph, argument = self.launch, self.graph, self.lane.stream_argument
        lock, stream, decide, plan = self.lock, self.stream, self.decide, self.plan
        row, set_node, bind, check = self.row, self.set_node, self.bind, self.check
        values, given, runner = self.values, self.given, self.runner

        def launched(_: int) -> None:
            launch(graph, argument)

        def addressed(_: int) -> None:
            set_node(values)
            launch(graph, argument)

        def checked(_: int) -> None:
            check(values)
            set_node(values)
            launch(graph, argument)

        def locked(rows: int) -> Any:
            check(values)
            stream()
            with lock:
                found = row[rows]
                set_node(values)
                launch(graph, argument)
                return found

        def planned(_: int) -> Any:
            _, readable = check(values)
            handle = stream()
            with lock:
                return plan.run(values, handle, readable)

        def dispatched(_: int) -> Any:
            rows, readable = check(values)
            handle = stream()
            with lock:
                return decide(rows, 0, 0, 0, 2).plan.run(values, handle, readable)

        def bound(**inputs: Any) -> Any:
            tensors = bind((), inputs)
            rows, readable = check(tensors)
            handle = stream()
            with lock:
                return decide(rows, 0, 0, 0, 2).plan.run(tensors, handle, readable)

        return {
            "the launch": launched,
            "+ compare the addresses of the inputs": addressed,
            "+ check the inputs": checked,
            "+ get the stream, acquire the lock, look up the cell in the dispatch table": locked,
            "+ check the guards and update the counters; from here on, the plan performs all "
            "operations": planned,
            "the same operations, performed by dispatcher and plan": dispatched,
            "+ bind the inputs by name": lambda _: bound(**given),
            "the complete call": lambda _: runner(**given),
        }

    def comparisons(self, case: Case) -> dict[str, Run]:
        """Return single calls and other ways to launch, for comparison."""
        launch, graph, argument = self.launch, self.graph, self.lane.stream_argument
        values, set_node = self.values, self.set_node
        others = tuple(case.elsewhere[FIXED])
        turns = [values, others]

        def updated_node(_: int) -> None:
            turns.reverse()
            set_node(turns[0])
            launch(graph, argument)

        found: dict[str, Run] = {
            "the launch": lambda _: launch(graph, argument),
            "set the parameters of the copy node and launch": updated_node,
            "create a view of the result": lambda _: values[0][:100],
            "clone the result": lambda _: values[0].clone(),
            "nothing": lambda _: None,
        }
        if HAS_GPU:
            event, current = torch.cuda.Event(), torch.cuda.current_stream()
            found["record an event"] = lambda _: event.record(current)
            case.capture()
            found["replay through torch"] = case.bare_replay()
            found["make_graphed_callables"] = case.graphed()
        return found


def account(rounds: int) -> None:
    """Print each rung of both ladders with the time that it adds, and the comparisons."""
    case = Case([FIXED], [INT64] * 3, 50 if HAS_GPU else 1)
    runner = case.runner("view", "auto" if HAS_GPU else Idle())
    parts = Parts(case, runner)
    for group, rungs in (("in place", parts.in_place()), ("views", parts.views())):
        samples = in_turns(rungs, [FIXED], rounds=rounds, together=10)
        below = samples["the launch"]
        for name, values in samples.items():
            added = statistics.median(mine - base for mine, base in zip(values, below, strict=True))
            best, more = round(min(values), 2), {"adds": round(added, 2)}
            median = statistics.median(values)
            emit(BENCH, name, median, "us", rounds, group=f"account, {group}", best=best, **more)
            below = values
    samples = in_turns(parts.comparisons(case), [FIXED], rounds=rounds, together=10)
    for name, values in samples.items():
        best, median = round(min(values), 2), statistics.median(values)
        emit(BENCH, name, median, "us", rounds, group="account, comparisons", best=best)
