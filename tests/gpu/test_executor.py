"""Captures and memory of the executor on a device.

tests/execute has the same tests on the tape. Here are cases that only a device can break: libraries
with a first use, concurrent threads, memory that others may reuse.
"""

from __future__ import annotations

import gc
import queue
import random
import subprocess
import sys
import textwrap
import threading
import warnings

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
from dispatchkit.errors import InputError  # noqa: E402
from dispatchkit.execute import CheckWarning, EagerStepWarning  # noqa: E402
from dispatchkit.execute.capture import effects  # noqa: E402
from dispatchkit.execute.step.values import ValueWatch  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning"),
]

DEVICE = "cuda:0"
SIZES = (1, 2, 4, 8, 16, 32)


def cuda_backend(**options):
    from dispatchkit.backends.cuda import CudaBackend

    return CudaBackend(DEVICE, **options)


def runner_of(step, width=64, **settings):
    settings.setdefault("sizes", SIZES)
    settings.setdefault("backend", cuda_backend())
    settings.setdefault("policy", "vllm")
    settings.setdefault("mode", "PIECEWISE" if isinstance(step, list) else "FULL")
    return GraphRunner(step, {"x": StaticInput((None, width), "float32")}, **settings)


def rows_of(number, seed=0, width=64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, width, generator=generator).to(DEVICE)


def same(actual, expected):
    # The bucket has another shape than the batch, so other kernels may compute it.
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def weight_of(width=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(width, width, generator=generator) / width**0.5).to(DEVICE)


@pytest.fixture
def step():
    weight = weight_of()
    return lambda x: torch.relu(x @ weight) @ weight + x


@pytest.fixture
def quiet():
    """Allow warnings of downgrades, which this test expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        yield


@pytest.fixture
def unwatched(monkeypatch):
    """Leave replaced values to the tested code: no replay compares them first."""
    monkeypatch.setattr(effects, "ValueWatch", lambda *_: ValueWatch())


def reserved():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# -- first use, streams, collector, concurrent threads --------------------------------------


@pytest.mark.parametrize("warmups", [1, 0])
def test_first_matrix_product_of_a_process_works(warmups):
    """The library is unused before; without warmups the capture succeeds or reports the reason."""
    program = f"""
        import warnings
        import torch
        from dispatchkit import (
            BufferOptions, CaptureOptions, GraphRunner, RunnerOptions, StaticInput,
        )
        warnings.simplefilter("ignore")
        weight = torch.ones(64, 64, device="cuda:0")
        runner = GraphRunner(
            lambda x: x @ weight, {{"x": StaticInput((None, 64), "float32")}}, sizes=(4, 8),
            mode="FULL", backend="cuda",
            options=RunnerOptions(
                capture=CaptureOptions(warmups={warmups}),
                buffers=BufferOptions(output_batch_dims=0),
            ),
        )
        failed = runner.capture().failed
        for rows in (3, 8, 5):
            x = torch.ones(rows, 64, device="cuda:0")
            assert runner(x).unique().tolist() == [64.0]
        print("failed:", *failed.values())
        print("graphs:", runner.stats().steps_by_mode["FULL"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    failed, graphs = done.stdout.strip().splitlines()
    assert failed == "failed:" or "capture" in failed
    if warmups:
        assert (failed, graphs) == ("failed:", "graphs: 3")


def test_warmup_and_capture_use_one_stream_for_all_keys(step):
    """Libraries keep a workspace per stream, so a second stream would use more memory."""
    used = []

    class Noting(type(cuda_backend())):
        def warmup(self, run, *, stream, iterations=1):
            used.append(("warmup", stream.handle))
            return super().warmup(run, stream=stream, iterations=iterations)

        def capture(self, run, *, stream, **settings):
            used.append(("capture", stream.handle))
            return super().capture(run, stream=stream, **settings)

    assert runner_of(step, backend=Noting(DEVICE)).capture().num_graphs == len(SIZES)
    assert {kind for kind, _ in used} == {"warmup", "capture"}
    assert len({handle for _, handle in used}) == 1


def test_collection_in_mid_capture_destroys_old_graphs_without_harm(step):
    """A collection that would destroy an old graph does not void a capture."""

    def collecting(x):
        y = step(x)
        gc.collect()
        return y

    gc.collect()
    for _ in range(3):
        old = runner_of(step)
        old.capture()
        old.me = old  # a cycle that only the collector frees
        del old
    runner = runner_of(collecting)
    assert runner.capture().failed == {}
    x = rows_of(5)
    same(runner(x), step(x))


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_captures_beside_busy_neighbours(step, mode):
    """Another thread copies, allocates and polls events; both are correct."""
    stop, rounds, errors = threading.Event(), [], []

    def busy():
        try:
            # Another priority, because torch has 32 streams of each and could return the runner's.
            stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    there = torch.full((1 << 14,), 2.0).cuda() * 3
                    event.record()
                    event.query()
                    rounds.append(float(there[0].cpu()))
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for seed in range(3):
            runner = runner_of(step, backend=cuda_backend(capture_error_mode=mode))
            assert runner.capture().failed == {}
            for rows in (1, 7, 32):
                x = rows_of(rows, seed)
                same(runner(x), step(x))
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert set(rounds) <= {6.0}


# -- failure ----------------------------------------------------------------------------------


KINDS = ("sync", "raises", "device sync", "memory", "host copy")


def fail(kind, y):
    if kind == "sync":
        y.sum().item()
    elif kind == "raises":
        raise ValueError("planted")
    elif kind == "device sync":
        torch.cuda.synchronize()
    elif kind == "memory":
        torch.empty(1 << 38, dtype=torch.uint8, device=DEVICE)
    else:
        y.cpu()


def test_failing_captures_of_five_kinds_leave_all_else_as_it_was(quiet):
    """After twenty failures in one runner, memory is constant and later steps are correct."""
    weight, counter = weight_of(), torch.zeros(1, device=DEVICE)
    # The runner cannot inspect this queue, so emptying it keeps graphs of other keys.
    faults: queue.SimpleQueue[None] = queue.SimpleQueue()
    faults.put(None)

    def step(x):
        counter.add_(1)
        y = torch.tanh(x @ weight)
        if not faults.empty() and x.shape[0] <= 20 and torch.cuda.is_current_stream_capturing():
            fail(KINDS[x.shape[0] % 5], y)
        return y + torch.rand_like(y) * 0

    runner = runner_of(step, sizes=tuple(range(1, 25)), state=[counter])
    good = [key for key in runner.registry if key.num_tokens > 20]
    assert runner.capture(good).failed == {}
    levels = []
    for key in sorted(runner.registry, key=lambda one: one.num_tokens)[:20]:
        stream = torch.cuda.current_stream()
        assert len(runner.capture([key]).failed) == 1
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        levels.append((runner.num_bytes, reserved()))
        x = rows_of(22, key.num_tokens)
        same(runner(x), torch.tanh(x @ weight))  # a key captured earlier
    assert len(set(levels[5:])) == 1, levels
    assert counter.item() == 20
    torch.cuda.manual_seed(3)
    drawn = torch.rand(4, device=DEVICE)
    torch.cuda.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4, device=DEVICE))
    reasons = {entry.reason.partition(":")[0] for entry in runner.registry.entries.values()}
    assert reasons == {"", "host_sync", "error", "out_of_memory"}
    faults.get()
    assert runner.capture().failed == {}
    for rows in range(1, 25):
        x = rows_of(rows, rows)
        same(runner(x), torch.tanh(x @ weight))
    assert runner.stats().eager_by_reason == {}


def test_out_of_memory_in_a_capture_is_told_as_such(step, quiet):
    """The key runs eager, captured keys stay, and memory is unchanged."""

    def greedy(x):
        if x.shape[0] == 8 and torch.cuda.is_current_stream_capturing():
            return step(x) + torch.empty(1 << 38, dtype=torch.uint8, device=DEVICE)[0]
        return step(x)

    runner = runner_of(greedy, sizes=(8, 32))
    large, small = sorted(runner.registry, key=lambda key: -key.num_tokens)
    assert runner.capture([large]).num_graphs == 1
    before = runner.num_bytes
    (why,) = runner.capture([small]).failed.values()
    assert why.startswith("out_of_memory: ")
    assert runner.num_bytes == before
    for rows in (30, 5):
        x = rows_of(rows, rows)
        same(runner(x), step(x))
    assert runner.stats().eager_by_reason == {"capture_failed": 1}
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_scratch_that_grows_is_warmed_up_before_the_first_capture():
    scratch = [torch.zeros(1, device=DEVICE)]

    def step(x):
        if scratch[0].shape[0] < x.shape[0]:
            scratch[0] = torch.zeros(x.shape[0], device=DEVICE)
        return x + scratch[0][: x.shape[0], None]

    runner = runner_of(step)
    assert runner.controls.warm_up() == {}
    grown = scratch[0]
    runner.capture(sorted(runner.registry, key=lambda key: key.num_tokens))
    assert scratch[0] is grown
    assert grown.shape[0] == 32


@pytest.mark.usefixtures("unwatched")
def test_check_mode_finds_memory_that_has_moved_since(quiet):
    """With scratch or weights in new storage, the caller gets eager's result and a message."""
    scratch = [torch.zeros(8, device=DEVICE)]

    def step(x):
        return x + scratch[0][: x.shape[0], None]

    runner = runner_of(step, sizes=(4, 8), options=RunnerOptions(check=1))
    runner.capture()
    x = rows_of(3)
    same(runner(x), x)
    scratch[0] = torch.ones(32, device=DEVICE)
    with pytest.warns(CheckWarning, match="invalidate"):
        same(runner(x), x + 1)
    same(runner(x), x + 1)
    assert runner.stats().eager_by_reason == {"check_failed": 2}


def test_call_inside_the_callers_capture_passes_straight_through(step):
    """A call in the caller's capture becomes part of the caller's graph."""
    runner = runner_of(step)
    runner.capture()
    static = rows_of(5)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = runner(static) * 2
    static.copy_(rows_of(5, seed=9))
    graph.replay()
    same(out, step(rows_of(5, seed=9)) * 2)
    assert runner.stats().eager_by_reason == {"inside_capture": 1}


# -- first captures, which use the notes of their warmup ------------------------------------


@pytest.mark.usefixtures("unwatched")
def test_first_graph_holds_what_its_warmup_was_given():
    """Weights that the step drops, and memory created in the warmup."""
    weights, made = [weight_of()], []

    def step(x):
        if not made:
            made.append(torch.full((64,), 3.0, device=DEVICE))
        return torch.relu(x @ weights[0]) * made[0]

    runner = runner_of(step, sizes=(8,))
    assert runner.capture().failed == {}
    x = rows_of(8)
    want = step(x)
    (graph,) = runner.controls.get(next(iter(runner.registry))).graphs
    held = {storage.data_ptr() for storage in graph.holds}
    assert {weights[0].data_ptr(), made[0].data_ptr()} <= held
    assert len(held) == 3  # with the static input, without objects of the warmup
    weights.clear()
    made.clear()
    gc.collect()
    torch.cuda.synchronize()
    others = [torch.full((64, 64), float("nan"), device=DEVICE) for _ in range(64)]
    same(runner(x), want)
    assert len(others) == 64


def test_first_graph_draws_as_eager_does():
    runner = runner_of(lambda x: x + torch.rand_like(x), sizes=(8,))
    assert runner.capture().failed == {}
    x = rows_of(8)
    torch.cuda.manual_seed(5)
    got = [runner(x) for _ in range(3)]
    torch.cuda.manual_seed(5)
    for one in got:
        assert torch.equal(one, x + torch.rand_like(x))


def test_first_capture_names_the_call_that_waits(step, quiet):
    """The warmup records the call, and the capture refuses it before the driver does."""
    for wait, name in ((lambda y: float(y.sum()), "Tensor.__float__"), (torch.Tensor.cpu, "cpu")):

        def waiting(x, wait=wait):
            y = step(x)
            wait(y)
            return y

        runner = runner_of(waiting, sizes=(8,))
        (why,) = runner.capture().failed.values()
        assert why.startswith("host_sync: ")
        assert name in why
        x = rows_of(5)
        same(runner(x), step(x))


# -- inputs and outputs -----------------------------------------------------------------------


def test_other_autocast_than_at_capture_runs_eager_and_other_types_are_refused(step):
    """There is no silent conversion."""
    runner = runner_of(step)
    runner.capture()
    x = rows_of(5)
    for _ in range(3):  # afterwards the layout of the inputs is recorded
        runner(x)
    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        pytest.warns(EagerStepWarning, match="autocast"),
    ):
        assert torch.equal(runner(x), step(x))
    with pytest.raises(InputError, match="float32"):
        runner(x.half())
    assert runner.stats().eager_by_reason == {"autocast": 1}


def test_late_use_of_a_view_shows_in_check_mode(step):
    """A result that is read after the next call holds no plausible values."""
    runner = runner_of(step, outputs="view", options=RunnerOptions(check=1 << 40))
    runner.capture()
    first = runner(rows_of(3))
    same(first, step(rows_of(3)))
    runner(rows_of(5))
    assert first.isnan().all()


@pytest.mark.parametrize("pin", [True, False])
def test_order_with_copies_from_and_to_the_host(step, pin):
    """The caller copies on its own stream before and after each step, without waits."""
    runner = runner_of(step)
    runner.capture()
    given = [
        torch.randn(1 + number * 7 % 32, 64, generator=torch.Generator().manual_seed(number))
        for number in range(30)
    ]
    hosts = [one.pin_memory() if pin else one for one in given]
    results = [
        torch.empty_like(one).pin_memory() if pin else torch.empty_like(one) for one in given
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for host, result in zip(hosts, results, strict=True):
            there = host.to(DEVICE, non_blocking=True)
            result.copy_(runner(there), non_blocking=True)
            del there
    torch.cuda.synchronize()
    for host, result in zip(given, results, strict=True):
        same(result, step(host.to(DEVICE)).cpu())


def test_host_memory_that_a_graph_copies_from_lives_as_long_as_the_graph():
    """Host temporaries of a capture are not reused meanwhile."""

    def step(x):
        bias = torch.full((64,), 7.0, pin_memory=True)
        return x + bias.to(DEVICE, non_blocking=True)

    runner = runner_of(step)
    report = runner.capture()
    x = rows_of(3)
    gc.collect()
    others = [torch.full((64,), -1.0, pin_memory=True) for _ in range(64)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        same(runner(x), x + 7)
    assert len(others) == 64
    assert report.failed == {} or all(why.startswith("host_sync") for why in report.failed.values())


# -- memory -----------------------------------------------------------------------------------


WIDE = 2048
WIDE_SIZES = (64, 256, 512, 1024, 1536, 2048, 3072, 4096)


@pytest.fixture
def wide():
    """A step whose intermediates take up to 32 MiB each."""
    weight = weight_of(WIDE)

    def step(x):
        hidden = torch.relu(x @ weight)
        return (torch.tanh(hidden @ weight) + hidden)[:, :8].contiguous()

    return step


class Meter:
    """A backend that records the peak memory of all graph pools at the end of each capture."""

    def __init__(self):
        meter = self

        class Metered(type(cuda_backend())):
            def capture(self, run, **settings):
                graph = super().capture(run, **settings)
                meter.most = max(meter.most, pool_bytes_of_the_process() - meter.others)
                return graph

        self.backend = Metered(DEVICE)
        self.most = 0
        self.others = pool_bytes_of_the_process()


def pool_bytes_of_the_process():
    return sum(
        one["total_size"]
        for one in torch.cuda.memory_snapshot()
        if tuple(one["segment_pool_id"]) != (0, 0)
    )


def wide_runner(step, **settings):
    return runner_of(step, WIDE, sizes=WIDE_SIZES, **settings)


def test_largest_first_takes_about_the_memory_of_the_largest(wide):
    """Graphs of a pool share its memory."""
    largest = wide_runner(wide)
    largest.capture([max(largest.registry, key=lambda key: key.num_tokens)])
    runner = wide_runner(wide)
    runner.capture()
    assert runner.lanes[0].lifecycle.num_graphs() == len(WIDE_SIZES)
    assert runner.num_bytes <= 1.1 * largest.num_bytes


@pytest.mark.parametrize("order", [(64, 4096, 1024, 256), (256, 1024, 2048, 4096)])
def test_any_order_of_captures_is_correct(wide, order):
    runner = wide_runner(wide, lazy=True)
    for rows in order:
        runner(rows_of(rows, width=WIDE))
    for seed, rows in enumerate((4000, 60, 1000, 200, 2048, 3)):
        x = rows_of(rows, seed, width=WIDE)
        same(runner(x), wide(x))


@pytest.mark.parametrize("seed", range(6))
def test_rehearsal_is_never_below_what_a_capture_takes(seed):
    """Random programs run in a pool that other graphs have fragmented."""
    chance = random.Random(seed)
    backend = cuda_backend()
    stream, pool = backend.new_stream(), backend.new_pool()
    base = torch.ones(1 << 10, device=DEVICE)
    graphs, held, exact = [], [], 0
    for _ in range(12):
        plan = [(chance.randint(1, 40 << 18), chance.random() < 0.4) for _ in range(6)]
        keeps = chance.random() < 0.5

        def program(plan=plan, keeps=keeps):
            alive = []
            for size, stays in plan:
                made = torch.empty(size, device=DEVICE)
                made[:1].copy_(base[:1])
                if stays:
                    alive.append(made)
            return alive if keeps else None

        backend.warmup(program, stream=stream)
        before = backend.pool_bytes(pool)
        expected = backend.rehearse(program, stream=stream, pool=pool)
        assert backend.pool_bytes(pool) == before
        graphs.append(backend.capture(program, stream=stream, pool=pool))
        held.append(graphs[-1].outputs)
        assert backend.pool_bytes(pool) - before <= expected
        exact += backend.pool_bytes(pool) - before == expected
        if chance.random() < 0.5:
            held.pop(chance.randrange(len(held)))
    assert exact >= 10  # of 12, so not just a bound
    for graph in graphs:
        graph.release()


def test_rehearsal_gives_its_memory_back(wide):
    backend = cuda_backend()
    stream, pool = backend.new_stream(), backend.new_pool()
    x = rows_of(4096, width=WIDE)
    backend.warmup(lambda: wide(x), stream=stream)
    before = reserved()
    assert backend.rehearse(lambda: wide(x), stream=stream, pool=pool) >= 64 << 20
    assert reserved() == before


def many_calls(runner, step, calls, check_every=200):
    chance = random.Random(0)
    inputs = {rows: rows_of(rows, rows, width=WIDE) for rows in range(1, 4097, 63)}
    often = chance.sample(sorted(inputs), 3)
    for number in range(calls):
        rows = chance.choice(often if chance.random() < 0.97 else sorted(inputs))
        result = runner(inputs[rows])
        if number % check_every == 0:
            same(result, step(inputs[rows]))
        yield
    torch.cuda.synchronize()


def test_budget_of_graphs_holds_under_ten_thousand_calls(wide, quiet):
    runner = wide_runner(wide, lazy=True, options=RunnerOptions(memory=MemoryOptions(max_graphs=3)))
    for _ in many_calls(runner, wide, 10_000):
        assert runner.lanes[0].lifecycle.num_graphs() <= 3
    assert runner.stats().steps == runner.stats().steps_by_mode["FULL"] == 10_000
    assert runner.stats().evictions > 10


@pytest.mark.parametrize(
    ("share", "share_outputs", "calls"),
    [(0.75, True, 10_000), (1.0, True, 2_000), (0.6, False, 2_000)],
)
def test_budget_of_bytes_holds_at_every_moment(wide, quiet, share, share_outputs, calls):
    """Measured in the allocator at the end of each capture, over all pools of the process."""
    free = wide_runner(
        wide, options=RunnerOptions(buffers=BufferOptions(share_outputs=share_outputs))
    )
    free.capture()
    limit = int(free.num_bytes * share)
    free.clear()
    del free
    reserved()
    meter = Meter()
    runner = wide_runner(
        wide,
        lazy=True,
        backend=meter.backend,
        options=RunnerOptions(
            memory=MemoryOptions(max_bytes=limit),
            buffers=BufferOptions(share_outputs=share_outputs),
        ),
    )
    for number, _ in enumerate(many_calls(runner, wide, calls)):
        if number % 100 == 0:
            assert runner.num_bytes <= limit
    assert 0 < meter.most <= limit
    assert runner.stats().steps == calls
    assert runner.stats().steps_by_mode["FULL"] > 0
    if share == 1.0:
        assert runner.stats().eager_by_reason == {}


def test_recapture_of_everything_does_not_hold_old_and_new_together(wide):
    """The old graphs are released before the first new capture."""
    meter = Meter()
    runner = wide_runner(wide, backend=meter.backend)
    runner.capture()
    once = meter.most
    for _ in range(3):
        runner.invalidate()
        assert runner.num_bytes == 0
        assert runner.capture().num_graphs == len(WIDE_SIZES)
    assert meter.most == once


# -- new weights ------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(weight_of(), requires_grad=False)

    def forward(self, x):
        return torch.relu(x @ self.weight)


def test_values_copied_in_place_are_seen_by_the_next_replay():
    """A graph reads memory, not values."""
    module = Layer()
    runner = runner_of(module)
    runner.capture()
    x = rows_of(5)
    same(runner(x), module(x))
    module.weight.copy_(weight_of(seed=4))
    same(runner(x), module(x))
    assert runner.stats().steps_by_mode["FULL"] == 2


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("pieces", [False, True])
def test_graph_holds_the_weights_it_reads(pieces):
    """A graph that replays after its weights were replaced reads the old values, not NaN."""
    module = Layer()
    whole = [graph_piece(module), eager_piece(lambda y: y + 1)]
    runner = runner_of(whole if pieces else module)
    runner.capture()
    x = rows_of(5)
    old = runner(x)
    module.weight = torch.nn.Parameter(weight_of(seed=4), requires_grad=False)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((64, 64), float("nan"), device=DEVICE) for _ in range(256)]
    same(runner(x), old)
    assert len(others) == 256
    runner.invalidate()
    runner.capture()
    same(runner(x), module(x) + (1 if pieces else 0))


@pytest.mark.usefixtures("unwatched")
def test_weights_in_new_storage_are_found_in_check_mode(quiet):
    module = Layer()
    runner = runner_of(module, options=RunnerOptions(check=1))
    runner.capture()
    x = rows_of(5)
    same(runner(x), module(x))
    module.weight = torch.nn.Parameter(weight_of(seed=4), requires_grad=False)
    with pytest.warns(CheckWarning):
        same(runner(x), module(x))


def test_invalidation_while_replays_are_in_flight(wide):
    """Queued replays finish with the old memory, which is freed only afterwards."""
    weight = weight_of(WIDE)
    holder = [weight]

    def step(x):
        for _ in range(8):
            x = torch.tanh(x @ holder[0])
        return x[:, :8].contiguous()

    runner = wide_runner(step)
    runner.capture()
    x = rows_of(4000, width=WIDE)
    want = step(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        results = [runner(x) for _ in range(6)]
    runner.invalidate("reload")
    holder[0] = weight_of(WIDE, seed=5)
    del weight
    torch.cuda.empty_cache()
    spoiled = [torch.full((WIDE, WIDE), float("nan"), device=DEVICE) for _ in range(16)]
    torch.cuda.synchronize()
    for result in results:
        same(result, want)
    assert len(spoiled) == 16
    assert runner.capture().failed == {}
    same(runner(x), step(x))


def test_reload_that_failed_half_way_leaves_a_runner_that_works(quiet):
    """One call invalidates, and the next captures read the current weights."""
    modules = [Layer(), Layer()]
    runner = runner_of(lambda x: modules[1](modules[0](x)))
    runner.capture()
    x = rows_of(5)

    def reload():
        try:
            modules[0].weight = torch.nn.Parameter(weight_of(seed=6), requires_grad=False)
            raise OSError("the file ends here")
        finally:
            runner.invalidate("reload")

    with pytest.raises(OSError, match="ends here"):
        reload()
    states = {entry.state for entry in runner.registry.entries.values()}
    assert states == {KeyState.STALE}
    same(runner(x), modules[1](modules[0](x)))
    assert runner.capture().failed == {}
    same(runner(x), modules[1](modules[0](x)))
    assert runner.stats().steps_by_mode["FULL"] == 1
