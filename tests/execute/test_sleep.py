"""Sleeping memory: released for a while, addresses kept, no new captures."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from interrupts import interrupted  # noqa: E402

from dispatchkit import (  # noqa: E402
    BufferOptions,
    CaptureOptions,
    GraphMemory,
    GraphRunner,
    Lanes,
    RunnerOptions,
    StaticInput,
    graphed,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, RegistryError, ReplayError  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

WIDTH = 16


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(3)]

    def step(x):
        for weight in weights:
            x = torch.tanh(x @ weight) + x
        return x

    return step


def rows_of(number, seed=0):
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


INPUT = {"x": StaticInput((None, WIDTH), "float32")}


def runner_of(step, memory, inputs=INPUT, **settings):
    settings = {
        "policy": OneBucketPolicy(),
        "mode": "FULL",
        "sizes": (1, 2, 4, 8),
        "backend": "tape",
        **settings,
    }
    lanes = Lanes(settings.pop("lanes", 1), memory=memory)
    return GraphRunner(step, inputs, lanes=lanes, **settings)


@pytest.mark.slow_except("settings0", "settings2")
@pytest.mark.parametrize("settings", [{}, {"outputs": "view"}, {"lanes": 2}])
def test_steps_after_waking_are_those_of_before(settings):
    """No graph is captured again, and no step runs eager."""
    memory = GraphMemory(sleeps=True)
    steps = [network(seed) for seed in range(2)]
    runners = [runner_of(step, memory, **settings) for step in steps]
    for runner in runners:
        runner.capture()
        runner(rows_of(3))
    captures = [runner.stats().captures for runner in runners]
    before = memory.num_bytes()
    for round_number in range(2):
        given_back = memory.sleep()
        assert memory.is_asleep
        assert given_back > 0
        assert memory.num_bytes() <= before - given_back + 8 * 4096
        memory.wake()
        assert not memory.is_asleep
        for rows in (1, 2, 3, 8, 5):
            for runner, step in zip(runners, steps, strict=True):
                x = rows_of(rows, round_number)
                torch.testing.assert_close(runner(x), step(x))
    assert [runner.stats().captures for runner in runners] == captures
    assert all(runner.stats().eager_by_reason == {} for runner in runners)
    assert memory.num_bytes() == before


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")
def test_a_step_that_would_use_it_is_refused():
    """On a device the launch would end the process."""
    memory = GraphMemory(sleeps=True)
    runner = runner_of(network(), memory)
    runner.capture([key for key in runner.registry if key.num_tokens > 2])
    runner(rows_of(3))
    memory.sleep()
    for call in (
        lambda: runner(rows_of(3)),
        lambda: runner(rows_of(8)),
        lambda: runner.run_in_place(3),
        lambda: runner.run_in_place(1),  # runs eager and reads the buffers
        lambda: runner.submit(rows_of(3)).result(),
    ):
        with pytest.raises(ReplayError, match=r"memory\.wake"):
            call()
    with pytest.raises(RegistryError, match=r"memory\.wake"):
        runner.capture()
    with pytest.raises(ConfigError, match=r"memory\.wake"):
        runner_of(network(1), memory)
    memory.wake()
    torch.testing.assert_close(runner(rows_of(3)), network()(rows_of(3)))


def test_what_is_declared_comes_back_as_it_was():
    """State keeps its place; fill and row count are written again, host inputs are kept."""
    memory = GraphMemory(sleeps=True)
    count = torch.zeros(8)

    def step(x, ids, n):
        count.add_(1)
        return x * (torch.arange(x.shape[0]) < n).unsqueeze(1) + ids.unsqueeze(1), count * 1

    inputs = {
        "x": StaticInput((None, WIDTH), "float32", fill=7.0),
        "ids": StaticInput((None,), "int64", fill=5, host=True),
    }
    options = RunnerOptions(buffers=BufferOptions(row_count="n", output_batch_dims=(0, None)))
    runner = runner_of(step, memory, inputs, state=[count], options=options)
    runner.capture()
    for rows in (8, 3, 1):
        ids = np.arange(rows)
        result, total = runner(rows_of(rows), ids)
        torch.testing.assert_close(result, rows_of(rows) + torch.arange(rows).unsqueeze(1))
        memory.sleep()
        memory.wake()
        assert (runner.buffers["x"] == 7.0).all()
        assert total[0] == count[0]
    staged = runner.buffers["ids"].clone()
    memory.sleep()
    memory.wake()
    assert torch.equal(runner.buffers["ids"], staged)
    assert count[0] == 3


def test_graphs_may_go_while_it_sleeps():
    memory = GraphMemory(sleeps=True)
    runners = [runner_of(network(seed), memory) for seed in range(2)]
    for runner in runners:
        runner.capture()
    memory.sleep()
    runners.pop()
    runners[0].evict(next(iter(runners[0].registry)))
    memory.wake()
    torch.testing.assert_close(runners[0](rows_of(5)), network()(rows_of(5)))


def test_an_account_knows_what_sleeps():
    memory = GraphMemory(sleeps=True)
    runner = runner_of(network(), memory)
    runner.capture()
    memory.sleep()
    (account,) = memory.account()
    assert account.pool_bytes == account.output_bytes == account.static_bytes == 0
    assert account.unexplained_bytes == 0
    memory.wake()
    assert memory.account()[0].pool_bytes > 0


def test_an_account_knows_which_pools_woke_and_which_could_not():
    class Full(TapeBackend):
        is_full = False

        def wake(self, pools):
            if self.is_full:
                raise ReplayError("no memory")
            super().wake(pools)

    memory = GraphMemory(sleeps=True)
    roomy, full = (runner_of(network(), memory, backend=kind()) for kind in (TapeBackend, Full))
    for runner in (roomy, full):
        runner.capture()
    groups = [runner.lanes[0].lane.group for runner in (roomy, full)]
    assert groups[0] is not groups[1]
    full.backend.is_full = True
    memory.sleep()
    released = [group.asleep_bytes for group in groups]
    assert min(released) > 0
    (device,) = memory._devices.values()
    assert device.asleep_bytes == sum(released)
    with pytest.raises(ReplayError, match="no memory"):
        memory.wake()
    assert device.asleep_bytes == released[1]
    full.backend.is_full = False
    memory.wake()
    assert device.asleep_bytes == 0


def test_it_is_refused_where_it_was_not_asked_for_or_cannot_be():
    with pytest.raises(ConfigError, match="invalidate"):
        GraphMemory().sleep()
    with pytest.raises(ConfigError, match="sleeps"):
        GraphMemory(sleeps=1)

    class NoSleep(TapeBackend):
        def sleep_problem(self):
            return "the driver is too old"

    memory = GraphMemory(sleeps=True)
    with pytest.raises(ConfigError, match="driver is too old") as caught:
        runner_of(network(), memory, backend=NoSleep())
    assert "invalidate" in str(caught.value)


def test_sleep_waits_for_steps_and_is_refused_in_one():
    memory = GraphMemory(sleeps=True)
    problems = []

    def step(x):
        return x * 2

    def nosy(x):
        try:
            memory.sleep()
        except ReplayError as error:
            problems.append(str(error))
        return x * 2

    runner = runner_of(step, memory)
    runner.capture()
    group = runner.lanes[0].lane.group
    with group.lock:
        thread = threading.Thread(target=memory.sleep)
        thread.start()
        thread.join(0.1)
        assert not memory.is_asleep
    thread.join(30)
    assert memory.is_asleep
    memory.wake()
    asking = runner_of(nosy, memory)
    with pytest.warns(RuntimeWarning):
        torch.testing.assert_close(asking(rows_of(2)), rows_of(2) * 2)
    assert "inside a step" in problems[0]


def test_a_graphed_module_sleeps_with_its_memory():
    memory = GraphMemory(sleeps=True)
    step = network()
    fast = graphed(step, sizes=[2, 8], memory=memory, backend="tape")
    x = rows_of(5)
    torch.testing.assert_close(fast(x), step(x))
    memory.sleep()
    with pytest.raises(ReplayError):
        fast(x)
    memory.wake()
    torch.testing.assert_close(fast(x), step(x))
    assert fast.graphed.runners[0].stats().captures == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in __del__
def test_after_an_interrupt_no_step_runs_on_lost_memory():
    """Whatever place a signal interrupts, waking again maps all memory and writes its fill."""
    memory = GraphMemory(sleeps=True)
    unproven = RunnerOptions(capture=CaptureOptions(prove_rows=False))  # padding adds 0
    runner = runner_of(lambda x: x + x.sum(), memory, sizes=(4,), options=unproven)
    runner.capture()

    def rest():
        memory.sleep()
        memory.wake()

    for at in range(interrupted(rest)):
        interrupted(rest, at)
        group = runner.lanes[0].lane.group
        assert group.is_asleep or not any(pool.is_asleep for pool in group._sleeping()), at
        memory.wake()
        ones = torch.ones(3, WIDTH)
        assert torch.equal(runner(x=ones), ones * (1 + ones.sum())), at


@pytest.mark.filterwarnings("ignore:Steps run eager")
@pytest.mark.parametrize("check", [0, 1])
def test_eager_steps_that_change_state_run_while_it_sleeps(check):
    """A replay is still rejected after them, and sees their changes after waking."""
    memory, total = GraphMemory(sleeps=True), torch.zeros(WIDTH)

    def step(x):
        total.add_(x[0])
        return x + total

    options = RunnerOptions(check=check)
    runner = runner_of(step, memory, sizes=(4,), state=[total], options=options)
    runner.capture()
    ones = torch.ones(5, WIDTH)
    memory.sleep()
    assert torch.equal(runner(x=ones), ones + 1)  # more rows than the largest graph
    with pytest.raises(ReplayError, match="asleep"):
        runner(x=ones[:4])
    memory.wake()
    assert torch.equal(runner(x=ones[:4]), ones[:4] + 2)
