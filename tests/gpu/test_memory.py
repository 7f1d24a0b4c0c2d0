"""Memory shared by runners on a device: pools, the account, sleep, background captures."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from device_memory import is_alone  # noqa: E402

from dispatchkit import GraphMemory, GraphRunner, Lanes, StaticInput  # noqa: E402
from dispatchkit.backends import resolve_backend  # noqa: E402
from dispatchkit.backends.cuda.pool import MAX_ENDED  # noqa: E402
from dispatchkit.errors import ReplayError  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def device_alone():
    """Skip if other processes allocate on the device, which falsifies its numbers."""
    if not is_alone():
        pytest.skip("other processes take memory of the device at the same time")


def network(seed, width=1024, layers=6):
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = [
        torch.randn(width, width, device="cuda", generator=generator) / width**0.5
        for _ in range(layers)
    ]

    def step(x):
        for weight in weights:
            x = torch.tanh(x @ weight) + x
        return x

    return step


def rows_of(number, seed=0, width=1024):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(number, width, device="cuda", generator=generator)


def runner_of(step, memory, sizes=(64, 256, 1024), width=1024, **settings):
    settings = {
        "policy": OneBucketPolicy(),
        "mode": "FULL",
        "sizes": sizes,
        "backend": "cuda",
        **settings,
    }
    return GraphRunner(
        step, {"x": StaticInput((None, width), "float32")}, lanes=Lanes(memory=memory), **settings
    )


def used():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_shared_runners_take_little_more_than_one_and_compute_the_same():
    """Steps interleave randomly on two streams, with views held over others' steps."""
    steps = [network(seed) for seed in range(4)]
    alone = runner_of(steps[0], None)
    alone.capture()
    one = alone.lanes[0].lane.group.pool_bytes()
    memory = GraphMemory()
    runners = [
        runner_of(step, memory, outputs="view" if number % 2 else "owned")
        for number, step in enumerate(steps)
    ]
    for runner in runners:
        runner.capture()
    pool = runners[0].lanes[0].lane.group.pool_bytes()
    assert pool <= 1.3 * one
    chooser, streams = random.Random(0), [torch.cuda.Stream() for _ in range(2)]
    held = {}
    for number in range(300):
        index, rows = chooser.randrange(4), chooser.randint(1, 1024)
        with torch.cuda.stream(chooser.choice(streams)):
            x = rows_of(rows, number)
            result = runners[index](x)
            expected = steps[index](x)
        torch.cuda.synchronize()
        held[index] = (result, expected)
        for got, wanted in held.values():
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert all(runner.stats().steps_by_mode.get("NONE", 0) == 0 for runner in runners)


@pytest.mark.usefixtures("device_alone")
def test_the_account_explains_what_the_device_has_given_away():
    """At most five per cent of the used memory is unexplained."""
    memory = GraphMemory()
    runners = [runner_of(network(seed), memory.group(f"g{seed % 2}")) for seed in range(4)]
    for runner in runners:
        runner.capture()
        for rows in (64, 200, 1024):
            runner(rows_of(rows))
    torch.cuda.synchronize()
    (account,) = memory.account()
    assert account.pool_bytes > 0
    assert account.workspace_bytes > 0
    assert abs(account.unexplained_bytes) <= 0.05 * account.taken_bytes + 2 * MIB, str(memory)


@pytest.mark.usefixtures("device_alone")
def test_a_budget_holds_for_lazy_groups_that_take_turns():
    steps = [network(seed) for seed in range(3)]
    alone = GraphMemory()
    one = runner_of(steps[0], alone)
    one.capture()
    limit = int(2.2 * alone.num_bytes())
    del one
    memory = GraphMemory(max_bytes=limit)
    runners = [
        runner_of(step, memory.group(str(number)), lazy=True) for number, step in enumerate(steps)
    ]
    for number in range(90):
        index = number // 10 % 3
        x = rows_of((64, 256, 1024)[number % 3], number)
        torch.testing.assert_close(runners[index](x), steps[index](x), rtol=1e-3, atol=1e-3)
        assert memory.num_bytes() <= limit
    assert sum(runner.stats().evictions for runner in runners) > 0


def test_memory_sleeps_and_wakes_bit_for_bit():
    """Memory returns to the device, and the first replay gives the same results as before."""
    backend = resolve_backend("cuda")
    if problem := backend.sleep_problem():
        pytest.skip(f"memory cannot sleep here: {problem}")
    memory = GraphMemory(sleeps=True)
    steps = [network(seed) for seed in range(3)]
    runners = [runner_of(step, memory) for step in steps]
    for runner in runners:
        runner.capture()
    inputs = [rows_of(rows, rows) for rows in (3, 64, 700, 1024)]
    before = [[runner(x) for x in inputs] for runner in runners]
    captures = [runner.stats().captures for runner in runners]
    awake = used()
    given_back = memory.sleep()
    asleep = used()
    assert awake - asleep >= 0.9 * given_back > 0
    with pytest.raises(ReplayError, match="wake"):
        runners[0](inputs[0])
    filler = torch.full((given_back // 2,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del filler
    torch.cuda.empty_cache()
    memory.wake()
    after = [[runner(x) for x in inputs] for runner in runners]
    torch.cuda.synchronize()
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert [runner.stats().captures for runner in runners] == captures
    memory.sleep()
    start = used()
    del runners, runner  # asleep
    gc.collect()
    assert used() <= start


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")
@pytest.mark.parametrize("between_operators", [False, True])
def test_steps_beside_captures_in_the_background(between_operators):
    """Results are right, and no step waits for a capture."""
    step = network(0)
    runner = runner_of(step, None, sizes=tuple(range(32, 1025, 32)))
    stop, wrong, times = threading.Event(), [], []

    def serve():
        chooser = random.Random(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                x = rows_of(chooser.randint(1, 1024), len(times))
                start = time.perf_counter()
                result = runner(x)
                torch.cuda.current_stream().synchronize()
                times.append(time.perf_counter() - start)
                if not torch.allclose(result, step(x), rtol=1e-3, atol=1e-3):
                    wrong.append(len(times))

    thread = threading.Thread(target=serve)
    thread.start()
    background = runner.controls.capture_in_background(
        max_pause_us=2000, between_operators=between_operators
    )
    report = background.wait(120)
    stop.set()
    thread.join()
    assert (report.num_graphs, report.failed) == (32, {})
    assert runner.controls.ready()
    assert wrong == []
    assert len(times) >= 8  # steps ran in between, even with fast captures


@pytest.mark.usefixtures("device_alone")
def test_runners_made_and_dropped_leave_nothing_with_the_collector_off():
    """Neither host memory nor device memory grows."""
    memory = GraphMemory()

    def once(seed):
        runner = runner_of(network(seed, 128, 2), memory, sizes=(8,), width=128)
        runner.capture()
        runner(rows_of(3, seed, 128))

    for seed in range(3):
        once(seed)
    gc.collect()
    gc.disable()
    try:
        before, tensors = torch.cuda.memory_allocated(), used()
        for seed in range(40):
            once(seed)
        torch.cuda.synchronize()
        # Host memory is constant too: libraries leave a few objects once, and runners none.
        assert gc.collect() < 40
        assert torch.cuda.memory_allocated() <= before
        assert used() <= tensors + 4 * MIB
    finally:
        gc.enable()


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads what glibc has handed out")
def test_pools_that_ended_leave_nothing_on_the_host():
    """torch keeps 48 KB for each until the cache of its pinned memory is emptied."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    backend = resolve_backend("cuda")
    stream, x = backend.new_stream(), rows_of(3)

    def once():
        pool = backend.new_pool()
        backend.capture(lambda: x + 1, stream=stream, pool=pool).release()
        assert backend.pool_bytes(pool) == 0

    for _ in range(MAX_ENDED):
        once()
    before = mallinfo()
    for _ in range(10 * MAX_ENDED):
        once()
    after = mallinfo()
    grown = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    assert grown <= MAX_ENDED * 48 * 1024 + MIB
