"""Background captures: steps of other threads continue and compute correct results."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import threading
import time
import weakref
from queue import Empty, SimpleQueue

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphMemory, GraphRunner, Lanes, StaticInput, eager_piece, graph_piece  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, RegistryError  # noqa: E402
from dispatchkit.execute.memory import turns  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning"),
    pytest.mark.filterwarnings("ignore::dispatchkit.execute.PaddedDrawsWarning"),
]

WIDTH = 16
SIZES = (1, 2, 4, 8, 16)


def layers(number=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(number)]

    def step(x):
        for weight in weights:
            x = torch.tanh(x @ weight) + x
        return x

    return step


def rows_of(number, seed=0):
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def runner_of(step, **settings):
    settings = {
        "policy": OneBucketPolicy(),
        "mode": "FULL",
        "sizes": SIZES,
        "backend": TapeBackend(),
        **settings,
    }
    return GraphRunner(step, {"x": StaticInput((None, WIDTH), "float32")}, **settings)


def serve(runner, step, stop, *, seed=0, calls=None):
    """Run steps until stopped; return (wrong results, times in seconds)."""
    chooser, wrong, times = random.Random(seed), 0, []
    while not stop.is_set() or (calls is not None and len(times) < calls):
        x = rows_of(chooser.randint(1, 16), len(times))
        start = time.perf_counter()
        result = runner(x)
        times.append(time.perf_counter() - start)
        wrong += not torch.allclose(result, step(x), atol=1e-5)
        if calls is not None and len(times) >= calls:
            break
    return wrong, times


def test_steps_go_on_beside_the_captures_and_are_right():
    """Between operators of captures, and before there are graphs, results equal eager's."""
    step = layers(3)
    runner = runner_of(step, sizes=(4, 16))
    stop = threading.Event()
    found = {}

    def call():
        found["wrong"], found["times"] = serve(runner, step, stop)

    thread = threading.Thread(target=call)
    thread.start()
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    report = background.wait(60)
    stop.set()
    thread.join()
    assert background.is_done()
    assert (report.num_graphs, report.failed, report.skipped) == (2, {}, {})
    assert runner.controls.ready()
    assert found["wrong"] == 0
    assert len(found["times"]) > 5
    for rows in range(1, 17):
        x = rows_of(rows, rows)
        torch.testing.assert_close(runner(x), step(x))


def test_a_step_comes_between_two_operators_of_one_capture():
    """A step does not wait for a whole capture."""
    inside, served = threading.Event(), threading.Event()
    step = layers()
    main = threading.get_ident()

    def slow(x):
        for part in range(4):
            x = step(x)
            if threading.get_ident() != main and x.shape[0] == 16 and part == 1:
                inside.set()
                served.wait(0.05)
        return x

    def expected(x):
        for _ in range(4):
            x = step(x)
        return x

    runner = runner_of(slow, sizes=(4, 16))
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    assert inside.wait(30)
    x = rows_of(3)
    result = runner(x)  # during the other thread's capture
    assert not background.is_done()
    served.set()
    torch.testing.assert_close(result, expected(x))
    assert background.wait(60).num_graphs == 2
    torch.testing.assert_close(runner(x), expected(x))


def test_steps_come_between_the_parts_of_a_capture_and_never_within_one(monkeypatch):
    """A step may therefore set an attribute during its own run."""
    monkeypatch.setattr(turns, "GAP_S", 0.05)
    main, inner = threading.get_ident(), layers()
    is_within, runs, seen = threading.Event(), SimpleQueue(), SimpleQueue()

    def step(x):
        if threading.get_ident() == main:
            seen.put((runs.qsize(), is_within.is_set()))
            return inner(x)
        is_within.set()
        time.sleep(0.002)  # the other thread is waiting to run
        y = inner(x)
        is_within.clear()
        runs.put(None)
        return y

    runner = runner_of(step, sizes=(4, 16))
    runner.capture([key for key in runner.registry if key.num_tokens == 4])
    background = runner.controls.capture_in_background(max_pause_us=2000)
    while not background.is_done():
        runner(rows_of(20))  # above all sizes, so it calls this function
    assert background.wait().num_graphs == 1
    found = {seen.get() for _ in range(seen.qsize())}
    assert not any(within for _, within in found)
    assert {number for number, _ in found} >= {1, 2}  # after the warmup, and after the capture


def test_steps_run_while_the_backend_ends_a_capture():
    """On a device, the driver ends and instantiates the graph in a call of milliseconds."""
    in_end, served = threading.Event(), threading.Event()
    step = layers(2)

    class Slow(TapeBackend):
        was_served = None

        def capture(self, run, **settings):
            graph = super().capture(run, **settings)
            if threading.current_thread().name == "dispatchkit-capture":
                in_end.set()
                self.was_served = served.wait(20)
            return graph

    backend = Slow()
    runner = runner_of(step, sizes=(4, 16), backend=backend)
    small, large = sorted(runner.registry, key=lambda key: key.num_tokens)
    runner.capture([small])
    background = runner.controls.capture_in_background([large], max_pause_us=1000)
    assert in_end.wait(20)
    x = rows_of(3)
    torch.testing.assert_close(runner(x), step(x))
    time.sleep(0.002)
    served.set()
    assert background.wait(60).num_graphs == 1
    assert backend.was_served
    named = [pause for pause in background.pauses if pause.part == "graph instantiation"]
    assert [(pause.key, pause.is_free) for pause in named] == [(str(large), True)]
    assert runner.stats().long_pauses["graph instantiation"] == 1
    torch.testing.assert_close(runner(rows_of(13)), step(rows_of(13)))


class StepsAtEachTurn:
    """Runs steps in another thread at every turn of a capture."""

    def __init__(self, monkeypatch):
        self.calls, self.number, self.problems = [], 0, []
        yield_lock, release = turns.Turns.yield_lock, turns.Turns.release
        itself = self

        def give_way_to_steps(self):
            self.release()
            self.reacquire()
            yield_lock(self)

        def release_to_steps(self):
            release(self)
            thread = threading.Thread(target=itself.run)
            thread.start()
            thread.join()

        monkeypatch.setattr(turns.Turns, "yield_lock", give_way_to_steps)
        monkeypatch.setattr(turns.Turns, "release", release_to_steps)

    def run(self):
        for call in self.calls:
            try:
                call()
            except AssertionError as error:  # raised in another thread, so the test would pass
                self.problems.append(error)
            self.number += 1


@pytest.mark.parametrize(
    ("kind", "between_operators"),
    [
        ("floats", False),
        ("floats", True),
        ("integers", False),
        ("unbatched", False),
        ("row_count", False),
        ("independent", False),
    ],
)
def test_a_step_at_each_turn_changes_no_graph_and_no_proof(kind, between_operators, monkeypatch):
    """When the proof continues, the step must have restored inputs and outputs."""
    from dispatchkit import BufferOptions, RunnerOptions

    inner = layers(2)
    table = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(5))
    specs = {"x": StaticInput((None, WIDTH), "float32")}
    settings = {"sizes": (4, 16), "mode": "FULL", "backend": TapeBackend()}

    def step(x, ids=None, scale=None, n=None):
        y = inner(x)
        y = y if ids is None else y + table[ids]
        y = y if scale is None else y * scale
        return y if n is None else y * (torch.arange(x.shape[0]) < n)[:, None]

    def given(rows, seed):
        made = {"x": 50 * rows_of(rows, seed)}
        if kind == "integers":
            made["ids"] = torch.arange(rows) % 6 + 1
        elif kind == "unbatched":
            made["scale"] = torch.tensor([float(seed + 2)])
        return made

    if kind == "integers":
        specs["ids"] = StaticInput((None,), "int64")
    elif kind == "unbatched":
        specs["scale"] = StaticInput((1,), "float32")
    elif kind == "row_count":
        settings["options"] = RunnerOptions(buffers=BufferOptions(row_count="n"))
    elif kind == "independent":
        settings["options"] = RunnerOptions(rows_independent=True)
    runner = GraphRunner(step, specs, policy=OneBucketPolicy(), **settings)
    runner.capture([key for key in runner.registry if key.num_tokens == 4])
    steps = StepsAtEachTurn(monkeypatch)

    def call(rows, seed):
        made = given(rows, seed)
        more = {"n": rows} if kind == "row_count" else {}
        torch.testing.assert_close(runner(**made), step(**made, **more))

    steps.calls = [lambda: call(3, 1), lambda: call(11, 2)]
    background = runner.controls.capture_in_background(
        max_pause_us=1, between_operators=between_operators
    )
    report = background.wait(60)
    assert (report.num_graphs, report.failed) == (1, {})
    assert steps.problems == []
    if not between_operators and kind in {"floats", "integers", "unbatched"}:
        assert steps.number == 2 * 4  # after warmup and capture, and two replays; no further call
    live = runner.lanes[0].lifecycle.live()
    (captured,) = [one for key, one in live.items() if key.num_tokens == 16]
    assert (captured.rows.reason, captured.rows.coupling) == ("", "")
    call(3, 3)
    call(13, 4)
    assert not any(reason.startswith("rows") for reason in runner.stats().eager_by_reason)


def test_no_step_runs_within_a_rehearsal(monkeypatch):
    """On a device it uses the same memory of libraries and is not waited for."""
    from dispatchkit import MemoryOptions, RunnerOptions

    is_rehearsing, within = threading.Event(), []

    class Rehearsing(TapeBackend):
        def rehearse(self, run, *, stream, pool, generators=()):
            is_rehearsing.set()
            self.warmup(run, stream=stream)
            is_rehearsing.clear()
            return 0

    limits = RunnerOptions(memory=MemoryOptions(max_bytes=1 << 30))
    runner = runner_of(layers(), sizes=(4, 16), options=limits, backend=Rehearsing())
    runner.capture([key for key in runner.registry if key.num_tokens == 4])
    steps = StepsAtEachTurn(monkeypatch)
    steps.calls = [lambda: (runner(rows_of(3)), within.append(is_rehearsing.is_set()))]
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    assert background.wait(60).num_graphs == 1
    assert len(within) > 5
    assert not any(within)


def test_a_step_in_the_middle_of_a_capture_waits_for_no_stream_that_captures():
    """Holds if a step ran during the preceding warmup, whose stream would join the capture."""
    inside, served = SimpleQueue(), SimpleQueue()  # not detected as Python state
    step, main = layers(), threading.get_ident()

    def slow(x):
        for part in range(4):
            x = step(x)
            if threading.get_ident() != main and x.shape[0] == 4 and part == 1:
                inside.put(None)
                with contextlib.suppress(Empty):
                    served.get(timeout=0.05)
        return x

    backend = TapeBackend()
    runner = runner_of(slow, sizes=(4, 16), backend=backend)
    runner.capture([key for key in runner.registry if key.num_tokens == 16])
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    with backend.use_stream(backend.new_stream()):
        for _ in ("warmup", "capture"):
            inside.get(timeout=30)
            runner(rows_of(9))
            served.put(None)
    report = background.wait(60)
    assert (report.num_graphs, report.failed) == (1, {})
    assert runner.stats().eager_by_reason == {}


@pytest.mark.parametrize("kind", ["state", "draws", "pieces", "lanes", "scratch"])
def test_what_steps_would_see_is_captured_in_one_piece(kind):
    """Changes of a warmup are put back, which would also undo those of a concurrent step."""
    from dispatchkit import StepState

    count, inner = torch.zeros(1), layers(3)
    steps, settings = inner, {"sizes": (4, 16)}
    if kind == "state":

        def steps(x):
            count.add_(1)
            return inner(x)

        settings["state"] = [count]
    elif kind == "draws":

        def steps(x):
            return inner(x) + torch.rand(x.shape)

    elif kind == "pieces":
        steps = [graph_piece(inner), eager_piece(lambda x: x + 1), graph_piece(inner)]
        settings["mode"] = "PIECEWISE"
    elif kind == "lanes":
        settings["lanes"] = 2
    else:
        settings["state"] = StepState(scratch=[count])
    runner = runner_of(steps, **settings)
    stop, served = threading.Event(), []

    def call():
        while not stop.is_set():
            served.append(runner(rows_of(3)))

    thread = threading.Thread(target=call)
    thread.start()
    while not served:
        time.sleep(0.001)
    background = runner.controls.capture_in_background(max_pause_us=1)
    report = background.wait(60)
    stop.set()
    thread.join()
    assert report.num_graphs == len(runner.lanes) * 2 or report.num_graphs == 2
    assert runner.controls.ready()
    assert {pause.part for pause in background.pauses} == {"warmup and capture"}
    assert runner.stats().long_pauses == {"warmup and capture": len(background.pauses)}
    if kind == "state":
        assert count.item() == len(served)


def test_nothing_is_captured_on_demand_beside_it():
    """A step waiting for the capture would hold the lock that the capture waits for."""
    inside, go_on = threading.Event(), threading.Event()
    main, step = threading.get_ident(), layers(2)

    def slow(x):
        x = step(x)
        if threading.get_ident() != main and x.shape[0] == 16:
            inside.set()
            go_on.wait(0.2)
        return step(x)

    backend = TapeBackend()
    runner = runner_of(slow, lazy=True, sizes=(4, 16), backend=backend)
    other = runner_of(step, lazy=True, sizes=(4,), backend=backend)
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    assert inside.wait(30)
    runner(rows_of(3))
    other(rows_of(3))
    for one in (runner, other):
        assert one.stats().eager_by_reason == {"capture_pending": 1}
    go_on.set()
    background.wait(60)
    other(rows_of(3))
    assert other.stats().captures == 1


def test_what_changes_graphs_waits_for_the_capture_under_way():
    """Evictions, swaps and further captures start when the current capture has ended."""
    inside, go_on = threading.Event(), threading.Event()
    main, step = threading.get_ident(), layers(2)

    def slow(x):
        x = step(x)
        if threading.get_ident() != main and x.shape[0] == 16:
            inside.set()
            go_on.wait(0.05)
        return step(x)

    runner = runner_of(slow, sizes=(4, 16))
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    assert inside.wait(30)
    changes = [
        runner.controls.clear,
        runner.controls.invalidate,
        lambda: runner.swap(sizes=(2, 16)),
        runner.controls.capture,
    ]
    for change in changes:
        change()
    go_on.set()
    background.wait(60)
    for rows in (1, 2, 16):
        x = rows_of(rows)
        torch.testing.assert_close(runner(x), step(step(x)))


def test_weights_that_are_replaced_in_the_middle_of_a_capture_are_not_captured():
    """Otherwise a graph of the old weights would be registered as new."""
    inside, replaced = threading.Event(), threading.Event()
    main = threading.get_ident()
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def slow(x):
        y = model(x)
        if threading.get_ident() != main and x.shape[0] == 16 and not replaced.is_set():
            inside.set()
            replaced.wait(0.2)
        return y + 1

    runner = runner_of(slow, sizes=(4, 16))
    runner.capture([key for key in runner.registry if key.num_tokens == 4])
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    assert inside.wait(30)
    model.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    for _ in range(40):
        runner(rows_of(3))  # looks for the graph and finds it
    replaced.set()
    background.wait(60)
    x = rows_of(16)
    torch.testing.assert_close(runner(x), model(x) + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_no_capture_under_way():
    """The capturing thread does not exist in the child and could not end the capture."""
    inside, go_on = threading.Event(), threading.Event()
    main, step = threading.get_ident(), layers(2)

    def slow(x):
        x = step(x)
        if threading.get_ident() != main and x.shape[0] == 16:
            inside.set()
            go_on.wait(0.2)
        return step(x)

    runner = runner_of(slow, sizes=(4, 16))
    background = runner.controls.capture_in_background(max_pause_us=1, between_operators=True)
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        turns = runner.lanes[0].lane.group.turns
        with runner.lanes[0].lane.group.lock:
            turns.wait()
        os._exit(0 if turns.may_capture() else 3)
    deadline = time.monotonic() + 20
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    go_on.set()
    background.wait(60)
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_runner_that_is_dropped_ends_it():
    step = layers()
    runner = runner_of(step, sizes=tuple(range(1, 33)))
    background = runner.controls.capture_in_background(max_pause_us=1)
    gone = weakref.ref(runner.lanes[0])
    gc.collect()
    gc.disable()
    try:
        del runner
        background.wait(60)
        assert gone() is None
    finally:
        gc.enable()


def test_it_can_be_stopped_and_begun_again():
    runner = runner_of(layers())
    report = runner.controls.capture_in_background(max_pause_us=1).stop()
    assert report.num_graphs <= 5
    assert runner.controls.capture_in_background().wait(60).num_graphs == 5 - report.num_graphs
    assert runner.controls.ready()
    assert runner.controls.capture_in_background().wait(60).num_graphs == 0


def test_ready_tells_of_the_keys_that_are_asked_for():
    runner = runner_of(layers(), sizes=(2, 4))
    small, large = sorted(runner.registry, key=lambda key: key.num_tokens)
    assert not runner.controls.ready()
    runner.capture([small])
    assert runner.controls.ready([small])
    assert not runner.controls.ready([small, large])
    assert not runner.controls.ready()
    runner.controls.set_enabled(False, key=large)
    assert runner.controls.ready()  # the key is not required
    assert not runner.controls.ready([large])


def test_failures_and_budgets_are_reported_as_by_a_session():
    from dispatchkit import MemoryOptions, RunnerOptions

    step = layers()

    def picky(x):
        if x.shape[0] == 4:
            raise ValueError("not four")
        return step(x)

    limits = RunnerOptions(memory=MemoryOptions(max_graphs=3))
    runner = runner_of(picky, options=limits)
    report = runner.controls.capture_in_background().wait(60)
    assert report.num_graphs == 3
    assert [key.num_tokens for key in report.failed] == [4]
    assert [key.num_tokens for key in report.skipped] == [1]


@pytest.mark.parametrize("wrong", [0, -1, "2", None, True, float("nan")])
def test_a_pause_is_a_positive_number(wrong):
    runner = runner_of(layers())
    with pytest.raises(ConfigError, match="max_pause_us"):
        runner.controls.capture_in_background(max_pause_us=wrong)


def test_views_are_not_overwritten_while_they_are_read():
    """A new graph is proven in memory that views of others show."""
    with pytest.raises(ConfigError, match="owned"):
        runner_of(layers(), outputs="view").controls.capture_in_background()


def test_a_frozen_runner_captures_nothing():
    runner = runner_of(layers())
    runner.freeze()
    with pytest.raises(RegistryError, match="frozen"):
        runner.controls.capture_in_background()


def test_a_request_that_waited_for_a_capture_is_logged(caplog):
    runner = runner_of(layers(), lazy=True)
    with caplog.at_level(logging.INFO, logger="dispatchkit"):
        runner(rows_of(3))
        runner(rows_of(3))
    (line,) = [one.getMessage() for one in caplog.records if "waited" in one.getMessage()]
    assert "tokens=4" in line


def test_runners_that_share_a_pool_serve_beside_each_others_captures():
    memory, backend = GraphMemory(), TapeBackend()
    steps = [layers(seed=seed) for seed in range(2)]
    runners = [runner_of(step, lanes=Lanes(memory=memory), backend=backend) for step in steps]
    stop, found = threading.Event(), {}

    def call():
        found["wrong"], found["times"] = serve(runners[0], steps[0], stop)

    thread = threading.Thread(target=call)
    thread.start()
    both = [one.controls.capture_in_background(max_pause_us=1) for one in runners]
    assert [one.wait(60).num_graphs for one in both] == [5, 5]
    stop.set()
    thread.join()
    assert found["wrong"] == 0
    for runner, step in zip(runners, steps, strict=True):
        torch.testing.assert_close(runner(rows_of(7)), step(rows_of(7)))
