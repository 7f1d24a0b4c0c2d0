"""Lanes on a device: concurrent steps equal eager, and memory is kept while it is read."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    GraphRunner,
    Lanes,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.errors import ConfigError, ReplayError  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WIDTH = 64


class InTurn:
    name = "in-turn"

    def __init__(self):
        self.turn = 0

    def choose(self, step, lanes):
        self.turn += 1
        return self.turn % len(lanes)


class Urgent(InTurn):
    name = "urgent"

    def stream_priorities(self, num_lanes):
        return [0] * (num_lanes - 1) + [1]


def make(step, lanes, lane_policy=None, **settings):
    settings.setdefault("sizes", (1, 8, 32))
    return GraphRunner(
        step,
        {"x": StaticInput((None, WIDTH), "float32")},
        max_num_tokens=32,
        mode="FULL",
        backend="cuda",
        lanes=Lanes(lanes, lane_policy or InTurn()) if lanes > 1 else 1,
        options=RunnerOptions(strict=True),
        **settings,
    )


def whole_numbers(rows, value):
    """Return small integers, whose sums are exact in any kernel."""
    return torch.full((rows, WIDTH), float(value), device=DEVICE)


def exact(x):
    for _ in range(10):
        x = (x + x.roll(1, 1)) % 251.0
    return x


def test_views_of_lanes_are_right_until_the_next_step_of_their_lane():
    """Reads on the submitting stream come before writes that reuse their memory."""
    runner = make(exact, 4, outputs="view")
    runner.capture()
    sums = []
    for start in range(0, 200, 4):
        handles = [
            runner.submit(whole_numbers(1 + number % 32, number % 7))
            for number in range(start, start + 4)
        ]
        sums += [handle.result().sum() for handle in handles]
    wanted = [exact(whole_numbers(1 + number % 32, number % 7)).sum() for number in range(200)]
    assert torch.equal(torch.stack(sums), torch.stack(wanted))
    first = runner.submit(whole_numbers(8, 1))
    for _ in range(4):
        runner.submit(whole_numbers(8, 2))
    with pytest.raises(ReplayError, match="may have overwritten"):
        first.result()


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_concurrent_steps_with_fresh_inputs_equal_eager(lanes):
    """A hundred thousand steps in four threads: 40,000 with 2 and 4 lanes each, 20,000 with 8."""
    runner = make(exact, lanes)
    assert not runner.capture().failed
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    total = 20_000 if lanes == 8 else 40_000

    def work(thread):
        mine = torch.zeros((), dtype=torch.int64, device=DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for start in range(thread, total // 4, 16):
                given = [
                    whole_numbers(1 + (start + i) % 32, (start * 7 + i) % 251) for i in range(16)
                ]
                handles = [runner.submit(x) for x in given]
                for x, handle in zip(given, handles, strict=True):
                    mine += (handle.result() != exact(x)).sum()
        stream.synchronize()
        return mine

    with ThreadPoolExecutor(4) as pool:
        for part in [pool.submit(work, thread) for thread in range(4)]:
            wrong += part.result()
    assert wrong.item() == 0
    assert runner.stats().steps >= total - 64


def test_inputs_and_results_may_be_let_go_of_at_once():
    """The allocator must not reuse their memory while a lane or a reader needs it."""
    runner = make(exact, 4)
    runner.capture()
    sums = []
    for number in range(2000):
        handle = runner.submit(whole_numbers(32, number % 251))  # no other reference to the input
        sums.append(handle.result().sum())  # or to the result
        whole_numbers(32, 7.0)  # takes the memory, if it is free
    want = [exact(whole_numbers(32, number % 251)).sum() for number in range(2000)]
    assert torch.equal(torch.stack(sums), torch.stack(want))


def test_an_only_graph_gives_results_of_their_own():
    """It writes to pool memory instead of the lane's; earlier results are unchanged."""
    runner = make(exact, 4, sizes=(32,))
    assert not runner.capture().failed
    handles = [runner.submit(whole_numbers(1 + i % 32, i % 251)) for i in range(400)]
    for i, handle in enumerate(handles):
        assert torch.equal(handle.result(), exact(whole_numbers(1 + i % 32, i % 251))), i


def test_a_handle_tells_of_its_own_step_however_many_come_after_it():
    """Events are reused, but not while a handle may query its own."""
    runner = make(exact, 2)
    runner.capture()
    kept = []
    for number in range(300):
        handle = runner.submit(whole_numbers(8, number % 251))
        if number % 50 == 0:
            kept.append((number, handle))
            handle.synchronize()
    assert all(handle.is_done() for _, handle in kept)
    for number, handle in kept:
        assert torch.equal(handle.result(), exact(whole_numbers(8, number % 251)))


def test_steps_that_change_state_do_not_overlap():
    """Two at a time would lose an update."""
    total = torch.zeros(WIDTH, device=DEVICE)

    def step(x):
        before = total + 0
        total.copy_(before + x.sum(0))
        return x + 1

    runner = make(step, 4, state=[total])
    runner.capture()
    for _ in range(1000):
        runner.submit(whole_numbers(8, 1))
    torch.cuda.synchronize()
    assert total[0].item() == 8000


def test_random_numbers_are_those_of_the_order_of_submission():
    def step(x):
        return x + torch.rand_like(x)

    serial, runner = make(step, 1), make(step, 4)
    results = []
    for one in (serial, runner):
        one.capture()
        torch.cuda.manual_seed(5)
        handles = [one.submit(whole_numbers(32, 0)) for _ in range(200)]
        results.append([handle.result() for handle in handles])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_lanes_are_distinct_streams_up_to_the_limit_of_the_device():
    gc.collect()
    runner = make(exact, 8)
    assert len({member.lane.stream.handle for member in runner.lanes}) == 8
    with pytest.raises(ConfigError, match="lanes must be at most 32"):
        make(exact, 33)


def test_urgent_lanes_have_streams_that_go_first():
    runner = make(exact, 3, lane_policy=Urgent())
    assert not runner.capture().failed
    priorities = [member.lane.stream.raw.priority for member in runner.lanes]
    assert priorities[:2] == [0, 0]
    assert priorities[2] < 0
    x = whole_numbers(8, 3)
    assert all(torch.equal(runner.submit(x).result(), exact(x)) for _ in range(6))


def test_costs_are_told_before_the_capture():
    runner = make(exact, 4)
    (cost,) = runner.lanes.costs()
    assert runner.num_bytes == 0
    runner.capture()
    assert 0 < runner.num_bytes <= 2 * cost.graph_bytes


def test_upload_ahead_of_the_first_launch():
    runner = make(exact, 2)
    runner.capture()
    key = next(iter(runner.registry))
    assert runner.controls.upload(key)
    x = whole_numbers(key.num_tokens, 2)
    assert torch.equal(runner.submit(x).result(), exact(x))
