"""Without garbage collection, the last reference to a runner frees it and all that it holds."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    BufferOptions,
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.keys.axes import Axis  # noqa: E402

INPUT = {"x": StaticInput((None, 4), torch.float32)}


class Model(torch.nn.Module):
    """A module that raises or waits for the device on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.linear(x)


def make(model, **settings) -> GraphRunner:
    settings = {"sizes": (2, 4), "mode": "FULL", "backend": "tape", **settings}
    return GraphRunner(model, INPUT, **settings)


def stepped(model, **settings) -> GraphRunner:
    runner = make(model, **settings)
    runner.capture()
    for rows in (1, 2, 3, 4):
        runner(torch.ones(rows, 4))
    return runner


def lazy(model) -> GraphRunner:
    return stepped(model, lazy=True)


def in_place(model) -> GraphRunner:
    runner = stepped(model, outputs="view")
    runner.run_in_place(2)
    return runner


def pieces(model) -> GraphRunner:
    step = [graph_piece(model), eager_piece(torch.sin), graph_piece(torch.cos)]
    return stepped(step, mode="FULL_AND_PIECEWISE")


def host_inputs(model) -> GraphRunner:
    inputs = {"x": StaticInput((None, 4), torch.float32, host=True)}
    runner = GraphRunner(model, inputs, sizes=(2, 4), mode="FULL", backend="tape")
    runner.capture()
    runner(torch.ones(2, 4))
    return runner


def lanes(model) -> GraphRunner:
    runner = make(model, lanes=3)
    runner.capture()
    handles = [runner.submit(torch.ones(rows, 4)) for rows in (1, 2, 3, 4)]
    for handle in handles:
        handle.result()
    runner.lanes.stats()
    return runner


def axes(model) -> GraphRunner:
    inputs = {"x": StaticInput((None, "length", 4), torch.float32)}
    axis = Axis("length", (2, 4))
    runner = GraphRunner(model, inputs, sizes=(2,), mode="FULL", backend="tape", axes=[axis])
    runner.capture()
    for length in (1, 4):
        runner(torch.ones(2, length, 4), length=length)
    return runner


def swapped(model) -> GraphRunner:
    runner = stepped(model, options=RunnerOptions(buffers=BufferOptions(buffer_rows=8)))
    runner.swap(sizes=(2, 8))
    runner(torch.ones(4, 4))
    return runner


def refused_swap(model) -> GraphRunner:
    runner = stepped(model)
    with pytest.raises(Exception, match="static inputs have only 4 rows"):
        runner.swap(sizes=(64,))
    return runner


class Watcher:
    def enter(self, decision, lane) -> None: ...

    def leave(self, *, failed) -> None: ...


def watched(model) -> GraphRunner:
    runner = stepped(model)
    runner.start_recording()
    runner.taps.watch_steps(Watcher())
    runner.taps.on_decision(lambda decision: None)
    runner(torch.ones(2, 4))
    return runner


def explained(model) -> GraphRunner:
    runner = stepped(model)
    assert all(map(str, (runner.explain(3), runner, runner.stats(), runner.capture())))
    return runner


def checked(model) -> GraphRunner:
    return stepped(model, options=RunnerOptions(check=1))


def learning(model) -> GraphRunner:
    runner = stepped(model, policy="adaptive")
    runner.drain(wait=True)
    return runner


def evicted(model) -> GraphRunner:
    limits = RunnerOptions(memory=MemoryOptions(max_graphs=1))
    runner = stepped(model, lazy=True, options=limits)
    runner.invalidate()
    runner(torch.ones(2, 4))
    return runner


def failed_capture(model) -> GraphRunner:
    def step(x):
        return model(x) * model(x).sum().item()

    runner = make(step)
    assert runner.capture().failed
    runner(x=torch.ones(2, 4))
    return runner


def failed_replay(model) -> GraphRunner:
    runner = stepped(model)

    def refuse():
        raise RuntimeError("the device is gone")

    for captured in runner.lanes[0].lifecycle.live().values():
        captured.graphs[0].replay = refuse
    runner(torch.ones(2, 4))
    return runner


def raising(model) -> GraphRunner:
    runner = stepped(model)
    for inputs in ({}, {"x": 1}, {"x": torch.ones(2, 3)}, {"y": torch.ones(2, 4)}):
        with contextlib.suppress(Exception):
            runner(**inputs)
    for facts in ({"num_reqs": -1}, {"ceiling": 99}, {"loras": 5}):
        with contextlib.suppress(Exception):
            runner(torch.ones(2, 4), **facts)
    with contextlib.suppress(Exception):
        runner.explain(-1)
    with contextlib.suppress(Exception):
        runner.evict("no key")
    return runner


def strict(model) -> GraphRunner:
    runner = make(model, options=RunnerOptions(strict=True))
    with contextlib.suppress(Exception):
        runner(torch.ones(2, 4))
    return runner


def step_raises(model) -> GraphRunner:
    def step(x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return model(x)

    runner = make(step, mode="NONE")
    runner(torch.ones(2, 4))
    for _ in range(2):
        with contextlib.suppress(ValueError):
            runner(torch.ones(3, 4))
    return runner


WAYS = [
    make, stepped, lazy, in_place, pieces, host_inputs, lanes, axes, swapped, refused_swap,
    watched, explained, checked, learning, evicted, failed_capture, failed_replay,
    raising, strict, step_raises,
]  # fmt: skip


def held_by(runner: GraphRunner) -> dict[str, weakref.ref]:
    found = {"runner": weakref.ref(runner), "dispatcher": weakref.ref(runner.dispatcher)}
    for number, executor in enumerate(runner.lanes):
        found[f"lane {number}"] = weakref.ref(executor.lane)
        found[f"executor {number}"] = weakref.ref(executor)
        for key, captured in executor.lifecycle.live().items():
            found[f"{key} on lane {number}"] = weakref.ref(captured)
            found |= {f"graphs of {key} {i}": weakref.ref(g) for i, g in enumerate(captured.graphs)}
    return found


@pytest.mark.slow_except(
    "stepped",
    "lazy",
    "pieces",
    "host_inputs",
    "lanes",
    "axes",
    "swapped",
    "learning",
    "failed_replay",
    "step_raises",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_last_reference_frees_runner_module_and_graphs(way):
    gc.collect()
    gc.disable()
    try:
        model = Model().eval()
        runner = way(model)
        held = held_by(runner) | {"module": weakref.ref(model)}
        del runner, model
        alive = [name for name, one in held.items() if one() is not None]
    finally:
        gc.enable()
    assert alive == []


def made_by_torch(garbage: list) -> set[int]:
    """Return ids of the settings classes that torch leaves when its compiler is loaded."""
    new = [
        one
        for one in garbage
        if getattr(one, "__module__", "") == "torch.utils._config_module"
        or (isinstance(one, dict) and one.get("__module__") == "torch.utils._config_module")
    ]
    there, found = {id(one) for one in garbage}, set()
    while new:
        found |= {id(one) for one in new}
        new = [one for one in gc.get_referents(*new) if id(one) in there - found]
    return found


def made_again(way, times: int) -> list[str]:
    """Return the objects that dropped runners leave for the collector."""
    way(Model().eval())  # created once per process
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(times):
            way(Model().eval())
        gc.collect()
        theirs = made_by_torch(gc.garbage)
        return sorted(
            f"{type(one).__module__}.{type(one).__qualname__}"
            for one in gc.garbage
            if id(one) not in theirs
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# A policy given by name loads plugins, and pluggy and importlib leave some objects.
BY_NO_NAME = [way for way in WAYS if way is not learning]


@pytest.mark.slow_except(
    "stepped", "lazy", "pieces", "host_inputs", "lanes", "swapped", "failed_replay", "step_raises"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", BY_NO_NAME, ids=lambda way: way.__name__)
def test_a_dropped_runner_leaves_nothing_for_the_collector(way):
    """Host memory stays constant with the collector off, as in some services."""
    assert made_again(way, 2) == []
