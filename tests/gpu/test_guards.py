"""Threads, guards, check mode and axes on a device; the tape has the same tests."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from device_steps import in_threads, unproven  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.capture_guard import is_any_capturing  # noqa: E402
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.execute import CheckWarning, EagerStepWarning  # noqa: E402
from dispatchkit.execute.capture import effects  # noqa: E402
from dispatchkit.execute.step.values import ValueWatch  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WIDTH = 64
INPUT = {"x": StaticInput((None, WIDTH), "float32")}


def runner_of(step, inputs=None, **settings):
    settings.setdefault("sizes", (1, 2, 4, 8, 16))
    settings.setdefault("mode", "FULL")
    settings.setdefault("backend", CudaBackend(DEVICE))
    settings["options"] = unproven(settings.get("options"))
    return GraphRunner(step, inputs or INPUT, policy="vllm", **settings)


def rows_of(number, seed=0, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, width, generator=generator).to(DEVICE)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture
def step():
    weight = rows_of(WIDTH, 9) / WIDTH**0.5
    return lambda x: torch.relu(x @ weight) @ weight + x


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        yield


def test_eight_threads_give_the_serial_results_bit_for_bit(step):
    """Each thread has its own stream; process-wide settings are unchanged."""
    runner = runner_of(step)
    runner.capture()
    given = [rows_of(1 + i % 16, i) for i in range(256)]
    serial = [runner(x) for x in given]
    torch.cuda.synchronize()
    before = torch.backends.cudnn.enabled, torch.is_grad_enabled(), torch.get_num_threads()

    def work(index):
        stream = torch.cuda.Stream(DEVICE)
        with torch.cuda.stream(stream):
            found = [(i, runner(given[i])) for i in range(index, len(given), 8)]
        stream.synchronize()
        return found

    for results in in_threads(8, work):
        for i, result in results:
            assert torch.equal(result, serial[i])
    assert runner.stats().eager_by_reason == {}
    after = torch.backends.cudnn.enabled, torch.is_grad_enabled(), torch.get_num_threads()
    assert after == before
    assert not is_any_capturing()


def test_fifty_simultaneous_first_calls_capture_each_key_once(step):
    """Fifty threads share one graph per key, on a device too."""
    runner = runner_of(step, lazy=True)
    given = [rows_of(1 + i % 16, i) for i in range(50)]

    def work(index):
        result = runner(given[index])
        torch.cuda.synchronize()
        return result

    for x, result in zip(given, in_threads(50, work), strict=True):
        same(result, step(x))
    assert runner.stats().captures == 5
    assert runner.stats().steps_by_mode["FULL"] == 50


class Planted(torch.nn.Module):
    """A step whose environment can change after the capture."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)))
        self.factor = 2.0
        self.negate = False
        self.inner = torch.nn.Dropout(0.0)

    def forward(self, x):
        mixed = (x @ self.weight) * self.factor + self.shift + self.table
        if self.inner.training:
            mixed = mixed + 1
        mixed = mixed + x.sum()  # makes a stale tail visible
        return -mixed if self.negate else mixed


def live(runner):
    return runner.lanes[0].lifecycle.live().values()


def replaced_weight(step, runner):
    step.weight = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 3.0, device=DEVICE))


def replaced_buffer(step, runner):
    step.shift = torch.ones(WIDTH, device=DEVICE)


def weight_moved_and_the_same(step, runner):
    step.table.data = step.table.data.clone()


def baked_scalar(step, runner):
    step.factor = 5.0


def baked_branch(step, runner):
    step.negate = True


def switched_submodule(step, runner):
    step.inner.eval()


def freed_memory(step, runner):
    old, step.table = step.table, step.table.clone()
    old.fill_(1e6)


def moved_input(step, runner):
    for captured in live(runner):
        buffers = captured.input_path.buffers
        buffers.tensors = [tensor.clone() for tensor in buffers.tensors]
    runner.lanes[0].lane.forget_plans()


def overwritten_output(step, runner):
    for captured in live(runner):
        captured.leaves = tuple(leaf.clone() for leaf in captured.leaves)


def stale_tail(step, runner):
    """Mark the buffers clean although they hold a large batch."""
    for captured in live(runner):
        buffers = captured.input_path.buffers
        for tensor in buffers.tensors:
            tensor.fill_(7.0)
        buffers.clean_from, buffers.clean_to = 0, buffers.num_rows


PLANTED = [
    replaced_weight,
    replaced_buffer,
    weight_moved_and_the_same,
    baked_scalar,
    baked_branch,
    switched_submodule,
    freed_memory,
    moved_input,
    overwritten_output,
    stale_tail,
]


@pytest.fixture
def unwatched(monkeypatch):
    """Leave the detection of replaced values to check mode."""
    monkeypatch.setattr(effects, "ValueWatch", lambda *_: ValueWatch())


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_corruption_is_found(plant, quiet):
    """Check mode reports each planted kind on a device too."""
    step = Planted().to(DEVICE)
    # A graph whose first node brings in the inputs fills their tails each time.
    more = {"backend": CudaBackend(DEVICE, copy_node=False)} if plant is stale_tail else {}
    runner = runner_of(step, options=RunnerOptions(check=1), **more)
    runner.capture()
    x = rows_of(3)
    plant(step, runner)
    with torch.no_grad():
        with pytest.warns(CheckWarning):
            result = runner(x)
        same(result, step(x))
    assert runner.stats().eager_by_reason == {"check_failed": 1}


def test_state_that_a_replay_changes_otherwise_is_found(quiet):
    """Results are right, but written state is wrong by a number or by filler rows."""
    total, cache = torch.zeros((), device=DEVICE), torch.zeros(17, WIDTH, device=DEVICE)
    factor = [1]

    def step(x, slots):
        total.add_(factor[0])
        cache.index_copy_(0, slots, x)
        return x * 2

    for fill in (16, 0):
        inputs = {
            "x": StaticInput((None, WIDTH), "float32"),
            "slots": StaticInput((None,), "int64", fill=fill),
        }
        runner = runner_of(step, inputs, state=[total, cache], options=RunnerOptions(check=1))
        runner.capture()
        slots = torch.arange(16, device=DEVICE)
        for rows in (16, 3, 5, 1):
            x = rows_of(rows, rows)
            if fill == 0 and rows == 3:
                with pytest.warns(CheckWarning, match="padding rows probably"):
                    same(runner(x, slots[1 : 1 + rows]), x * 2)
                break
            same(runner(x, slots[:rows]), x * 2)
        else:
            assert runner.stats().eager_by_reason == {}
            factor[0] = 2
            with pytest.warns(CheckWarning, match="state 0"):
                runner(rows_of(16), slots)


def test_hundred_thousand_clean_steps_pass():
    """Weights change in place, and each call steps the state once."""
    step = Planted().to(DEVICE)
    total = torch.zeros((), device=DEVICE)

    def counting(x):
        total.add_(1)
        return step(x), total + 0

    runner = runner_of(counting, state=[total], options=RunnerOptions(check=1))
    runner.capture()
    given = [rows_of(1 + i % 16, i) for i in range(64)]
    for index in range(100_000):
        if index % 100 == 0:
            with torch.no_grad():
                step.weight.mul_(-1)
        _, count = runner(given[index % 64])
    assert count.item() == 100_000
    stats = runner.stats()
    assert stats.steps_by_mode["FULL"] == stats.steps == 100_000


def test_moved_and_switched_modules_are_not_replayed(quiet):
    """Graphs from before a move or a switch of mode are not used."""
    module = torch.nn.Linear(WIDTH, WIDTH).to(DEVICE)
    runner = runner_of(lambda x: module(x.to(module.weight.dtype)).float())
    runner.capture()
    x = rows_of(5)
    with torch.no_grad():
        module.half()
        same(runner(x), module(x.half()).float())
        module.train(not module.training)
        same(runner(x), module(x.half()).float())
        runner.invalidate()
        runner.capture()
        same(runner(x), module(x.half()).float())
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_release_and_recapture_for_sleep_and_wake(step):
    """All memory is freed and comes back on request."""
    runner = runner_of(step)
    runner.capture()
    x = rows_of(7)
    want = runner(x)
    for _ in range(3):
        runner.invalidate("sleep")
        assert runner.num_bytes == 0
        assert runner.capture().num_graphs == 5
        assert torch.equal(runner(x), want)


@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_axes_are_padded_and_cut(outputs):
    """Values within the buckets give eager's results; outside them the step runs eager."""
    weight = rows_of(8, 3, 4)
    inputs = {"x": StaticInput((None, "length", 8), "float32")}
    runner = runner_of(
        lambda x: torch.tanh(x @ weight),
        inputs,
        axes=[Axis("length", (4, 32))],
        outputs=outputs,
        options=RunnerOptions(check=2),
    )
    assert runner.capture().failed == {}
    for rows, length in ((16, 32), (3, 5), (2, 4), (1, 1), (9, 31)):
        x = torch.randn(rows, length, 8, device=DEVICE)
        same(runner(x, length=length), torch.tanh(x @ weight))
    assert runner.stats().eager_by_reason == {}
