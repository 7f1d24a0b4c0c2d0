"""On a device, the ways listed in the page on the design end at the driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput  # noqa: E402
from dispatchkit.backends.cuda.backend import CudaBackend  # noqa: E402
from dispatchkit.backends.cuda.capture import CaptureAttempt  # noqa: E402
from tests.execute.test_ways import PACKAGE, listed, stack_at  # noqa: E402

pytestmark = pytest.mark.gpu


def make(**settings) -> GraphRunner:
    inputs = {"x": StaticInput((None, 2), torch.float32)}
    settings = {"sizes": (2, 4), "mode": "FULL", "backend": "cuda", **settings}
    return GraphRunner(lambda x: x + 1, inputs, **settings)


def test_a_replay_calls_the_driver_from_its_plan():
    direct, _ = listed("a replay")
    runner, rows = make(), torch.ones(3, 2, device="cuda")
    runner.capture()
    runner(rows)
    plan = runner.lanes[0].decide(3).plan
    launch, stacks = plan._launch, []

    def follow(graph, stream):
        frame, stack = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                stack.append(f"{path.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_name}")
            frame = frame.f_back
        stacks.append(stack[::-1])
        return launch(graph, stream)

    assert launch is not None
    plan._launch = follow
    runner(rows)
    assert stacks == [direct]


def test_a_lazy_capture_begins_within_fifteen_functions():
    (way,) = listed("a lazy capture")
    runner, rows = make(lazy=True), torch.ones(3, 2, device="cuda")
    assert stack_at(lambda: runner(rows), CudaBackend.capture.__code__) == way
    runner, rows = make(lazy=True), torch.ones(3, 2, device="cuda")
    stack = stack_at(lambda: runner(rows), CaptureAttempt.begin.__code__)
    assert len(stack) + 1 <= 15
