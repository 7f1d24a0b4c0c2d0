"""Copies of a runner, and runners sent to other processes, have no graphs and their own buffers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, graphed  # noqa: E402


class Counting(torch.nn.Module):
    """A module with a weight and a buffer that it updates."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.scale


class Scaled(torch.nn.Module):
    """A module whose calls without gradients may use graphs."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x):
        return x * self.scale


def runner_of(module):
    return GraphRunner(
        module,
        {"x": StaticInput((None, 4), "float32")},
        sizes=(2, 4),
        mode="FULL",
        backend="tape",
        state=[module.calls],
    )


@pytest.fixture
def runner():
    made = runner_of(Counting())
    made.capture()
    return made


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])  # noqa: S301
def test_copies_start_without_graphs_and_with_own_buffers(runner, how):
    """This holds for each way to copy; both runners work."""
    twin = how(runner)
    assert twin.lanes[0].lifecycle.num_graphs() == 0
    assert runner.lanes[0].lifecycle.num_graphs() == 2
    own = {tensor.data_ptr() for tensor in runner.lanes[0].lane.buffers.tensors}
    assert own.isdisjoint(tensor.data_ptr() for tensor in twin.lanes[0].lane.buffers.tensors)
    assert twin.capture().num_graphs == 2
    x = torch.ones(3, 4)
    torch.testing.assert_close(twin(x), x * 2)
    torch.testing.assert_close(runner(x), x * 2)


def test_deep_copy_has_state_of_its_own(runner):
    """Steps of the copy do not change the original's state."""
    twin = copy.deepcopy(runner)
    twin.capture()
    twin(torch.ones(3, 4))
    assert twin.lanes[0].work.step.modules[0].calls == 1
    assert runner.lanes[0].work.step.modules[0].calls == 0


def test_attributes_that_are_missing_fail_fast(runner):
    """This includes a runner created without ``__init__``."""
    with pytest.raises(AttributeError, match="no_such"):
        _ = runner.no_such
    empty = GraphRunner.__new__(GraphRunner)
    with pytest.raises(AttributeError):
        _ = empty.no_such


def result_elsewhere(runner):
    runner.capture()
    return runner(torch.ones(3, 4)).tolist(), runner.lanes[0].lifecycle.num_graphs()


def graphed_elsewhere(fast):
    before = fast.graphed.stats().calls
    with torch.no_grad():
        result = fast(torch.ones(3, 4))
    return before, fast.graphed.stats().calls, result.tolist()


@pytest.mark.slow
def test_runner_sent_to_a_spawned_process(runner, monkeypatch):
    """The runner captures there; no part of a graph is sent."""
    fast = graphed(Scaled().eval(), sizes=[4])
    fast(torch.ones(3, 4))
    # Append it last, so that the process finds this module but the same dispatchkit.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).resolve().parents[2])])
    # A process that dies or cannot read its input raises here, where others would hang.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result, graphs = pool.submit(result_elsewhere, runner).result()
        assert pool.submit(graphed_elsewhere, fast).result() == (0, 1, [[2.0] * 4] * 3)
    assert result == [[2.0] * 4] * 3
    assert graphs == 2
