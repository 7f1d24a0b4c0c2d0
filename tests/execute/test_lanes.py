"""Lanes: concurrent steps on several streams compute the serial results."""

from __future__ import annotations

import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    BatchDescriptor,
    GraphKey,
    GraphRunner,
    LaneOptions,
    Lanes,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, InputError, PolicyError, ReplayError  # noqa: E402
from dispatchkit.execute import LanePolicyWarning, StepFuture  # noqa: E402

SEEDS = range(2)
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
ROWS = {"x": StaticInput((None, 8), "float32")}


class InTurn:
    """A round-robin policy without a plugin."""

    name = "in-turn"

    def __init__(self):
        self.steps = []

    def choose(self, step, lanes):
        self.steps.append(step)
        return (len(self.steps) - 1) % len(lanes)


def network(x):
    hidden = torch.relu(x @ WEIGHT)
    return hidden @ WEIGHT + x, hidden.sum(1)


PIECES = [
    graph_piece(lambda x: torch.relu(x @ WEIGHT) + 1),
    eager_piece(lambda h: h * 2),
    graph_piece(lambda h: ((h @ WEIGHT).relu() @ WEIGHT, h.sum(1))),
]


@pytest.fixture
def make_lanes(make_runner):
    def make(step=network, inputs=ROWS, *, seed=None, lanes=3, lane_policy=None, **settings):
        settings.setdefault("backend", TapeBackend(scheduler=seed))
        settings.setdefault("sizes", (1, 2, 4, 8) if seed is None else (4, 8))
        if lanes > 1:
            lanes = Lanes(lanes, lane_policy or InTurn())
        return make_runner(step, inputs, lanes=lanes, **settings)

    return make


def same(got, want):
    return all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))


def batches(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + i * 3 % 8, 8, generator=generator) for i in range(number)]


# -- results ---------------------------------------------------------------------------------


def deferred_results(runner, given, *, waits_before_reading=True):
    """Make inputs on a deferred stream, submit all steps, then read all results."""
    backend = runner.backend
    caller = backend.new_stream()
    with backend.use_stream(caller):
        futures = [runner.submit(x * 2) for x in given]
        results = [[leaf.clone() for leaf in future.result()] for future in futures]
    backend.synchronize()
    return results


def right(runner, given, want):
    return all(
        same(got, one) for got, one in zip(deferred_results(runner, given), want, strict=True)
    )


@pytest.mark.slow_except("pieces")
@pytest.mark.parametrize("step", [network, PIECES], ids=["whole", "pieces"])
def test_submitted_steps_give_the_serial_results(make_lanes, step):
    given = batches(9)
    serial = make_lanes(step, lanes=1, mode="FULL" if step is network else "PIECEWISE")
    serial.capture()
    want = [serial(x * 2) for x in given]
    for seed in SEEDS[:2]:
        runner = make_lanes(step, seed=seed, mode=str(serial.config.mode))
        assert not runner.capture().failed
        assert right(runner, given, want), f"seed {seed}"
        assert runner.stats().steps_by_mode["NONE"] == 0
        assert [lane.num_steps for lane in runner.lanes.stats()] == [3, 3, 3]


def planted(runner, fault, monkeypatch):
    """Introduce one of the faults that lanes must avoid."""
    first, *others = (member.lane for member in runner.lanes)
    if fault == "the lane does not wait for the caller":
        for queue in runner.lanes._ready_queues():
            monkeypatch.setattr(queue.arrived, "record", lambda stream: None)
    elif fault == "the caller does not wait for the lane":
        monkeypatch.setattr(StepFuture, "wait", lambda self, stream=None: None)
    elif fault == "shared buffers":
        for lane in others:
            lane.buffers = first.buffers
    elif fault == "shared pool":
        for lane in others:
            lane.group.pool = first.group.pool
    else:
        for lane in others:
            lane.outputs = first.outputs


FAULTS = [
    "the lane does not wait for the caller",
    "the caller does not wait for the lane",
    "shared buffers",
    "shared pool",
    "shared outputs",
]


@pytest.mark.slow_except(
    "the lane does not wait for the caller",
    "the caller does not wait for the lane",
    "shared buffers",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_shows(make_lanes, monkeypatch, fault):
    """The tests here detect missing waits and memory shared between lanes."""
    given = batches(12)
    serial = make_lanes(lanes=1)
    serial.capture()
    want = [serial(x * 2) for x in given]
    for seed in SEEDS:
        runner = make_lanes(seed=seed)
        planted(runner, fault, monkeypatch)
        runner.capture()
        if not right(runner, given, want):
            return
    pytest.fail(f"{fault}: not seen")


def submit_in_threads(runner, given, number):
    """Submit from several threads that start together, each on its own stream."""
    start = threading.Barrier(number)
    backend = runner.backend

    def work(index):
        with backend.use_stream(backend.new_stream()):
            start.wait()
            futures = [(i, runner.submit(given[i] + 0)) for i in range(index, len(given), number)]
            results = [(i, [leaf.clone() for leaf in one.result()]) for i, one in futures]
            backend.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(number) as pool:
        parts = [future.result() for future in [pool.submit(work, i) for i in range(number)]]
    return [result for _, result in sorted(pair for part in parts for pair in part)]


@settings(max_examples=2)
@given(
    lanes=st.integers(2, 8),
    threads=st.integers(1, 8),
    seed=st.none() | st.integers(0, 999),
    order=st.lists(st.integers(1, 10), min_size=1, max_size=12),
    lazy=st.booleans(),
)
def test_any_schedule_equals_serial(lanes, threads, seed, order, lazy):
    """For any lanes, threads, batches and device schedule, results equal those of one lane."""
    _check_schedule(lanes, threads, seed, order, lazy)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    lanes=st.integers(2, 8),
    threads=st.integers(1, 8),
    seed=st.none() | st.integers(0, 9999),
    order=st.lists(st.integers(1, 10), min_size=1, max_size=48),
    lazy=st.booleans(),
)
def test_many_schedules_equal_serial(lanes, threads, seed, order, lazy):
    """Repeats it with longer runs."""
    _check_schedule(lanes, threads, seed, order, lazy)


@pytest.mark.slow
def test_thousand_concurrent_steps_equal_eager(make_lanes):
    """Four threads use four lanes of one device; each result equals the plain step's."""
    given = batches(1000)
    runner = make_lanes(seed=11, lanes=4)
    runner.capture()
    for got, x in zip(submit_in_threads(runner, given, 4), given, strict=True):
        torch.testing.assert_close(got, list(network(x)))
    assert runner.stats().steps_by_mode["FULL"] == runner.stats().steps == 1000


def _check_schedule(lanes, threads, seed, order, lazy):
    generator = torch.Generator().manual_seed(len(order))
    given = [torch.randn(rows, 8, generator=generator) for rows in order]
    shared = {"sizes": (2, 8), "max_num_tokens": 10, "mode": "FULL", "lazy": lazy}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows above the largest size run eager as intended
        serial = GraphRunner(network, ROWS, backend="tape", **shared)
        backend = TapeBackend(scheduler=seed)
        runner = GraphRunner(network, ROWS, backend=backend, lanes=Lanes(lanes, InTurn()), **shared)
        if not lazy:
            serial.capture()
            runner.capture()
        want = [serial(x) for x in given]
        got = submit_in_threads(runner, given, threads)
    for mine, other in zip(got, want, strict=True):
        assert same(mine, other)
    assert runner.stats().steps == len(order)


def test_calls_and_submits_mix(make_lanes):
    """A call keeps the caller's order and shares lane 0 with submitted steps."""
    given = batches(12)
    for seed in SEEDS:
        runner = make_lanes(seed=seed, lanes=2)
        runner.capture()
        want = [network(x) for x in given]
        caller = runner.backend.new_stream()
        with runner.backend.use_stream(caller):
            got = [
                (runner(x), None) if i % 3 == 0 else (None, runner.submit(x))
                for i, x in enumerate(given)
            ]
            got = [called if future is None else future.result() for called, future in got]
        runner.backend.synchronize()
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine, other)


# -- state and random numbers -----------------------------------------------------------------


def test_steps_that_change_state_do_not_overlap(make_lanes):
    """Each step reads, then writes; two at a time would lose an update."""
    for seed in SEEDS:
        total = torch.zeros(8)

        def step(x, total=total):
            before = total + 0
            total.copy_(before + x.sum(0))
            return x * 1

        runner = make_lanes(step, seed=seed, state=[total])
        runner.capture()
        given = [torch.full((2, 8), float(i)) for i in range(12)]
        with runner.backend.use_stream(runner.backend.new_stream()):
            for x in given:
                runner.submit(x)
        runner.backend.synchronize()
        assert total[0].item() == 2 * sum(range(12)), f"seed {seed}"


def test_disjoint_state_is_left_to_the_caller(make_lanes):
    """Lanes that write different rows of a cache run concurrently, and every row is written."""
    cache = torch.zeros(16, 8)

    def step(x, slots):
        cache.index_copy_(0, slots, x)
        return x + 1

    inputs = {**ROWS, "slots": StaticInput((None,), "int64", fill=15)}
    disjoint = RunnerOptions(lanes=LaneOptions(disjoint_state=True))
    for seed in SEEDS:
        cache.zero_()
        runner = make_lanes(step, inputs, seed=seed, state=[cache], options=disjoint)
        runner.capture()
        for i in range(6):
            runner.submit(torch.full((2, 8), float(i + 1)), torch.tensor([2 * i, 2 * i + 1]))
        runner.backend.synchronize()
        assert cache[:12, 0].tolist() == [float(1 + i // 2) for i in range(12)]


def test_random_numbers_are_those_of_the_order_of_submission(make_lanes):
    def step(x):
        return x + torch.rand(x.shape)

    given = [torch.zeros(4, 8) for _ in range(9)]
    serial = make_lanes(step, lanes=1, sizes=(4,))
    serial.capture()
    torch.manual_seed(3)
    want = [serial(x) for x in given]
    for seed in SEEDS:
        runner = make_lanes(step, seed=seed, sizes=(4,))
        runner.capture()
        torch.manual_seed(3)
        futures = [runner.submit(x) for x in given]
        assert all(torch.equal(h.result(), w) for h, w in zip(futures, want, strict=True))


# -- futures ----------------------------------------------------------------------------------


def test_handle_waits_on_a_stream_and_on_the_host(make_lanes):
    runner = make_lanes(seed=5, lanes=2)
    runner.capture()
    backend = runner.backend
    x = torch.ones(3, 8)
    first = runner.submit(x)
    first.synchronize()
    assert first.is_done()
    assert same(first.result(), network(x))
    second = runner.submit(x)
    reader = backend.new_stream()
    second.wait(reader)
    with backend.use_stream(reader):
        read = second._result[0] + 1
    reader.synchronize()
    assert second.is_done()
    torch.testing.assert_close(read, network(x)[0] + 1)
    assert (first.lane, second.lane) == (0, 1)


def test_one_lane_submits_too(make_lanes):
    given = batches(9)
    for seed in SEEDS:
        runner = make_lanes(lanes=1, seed=seed)
        runner.capture()
        assert right(runner, given, [runner(x * 2) for x in given])


def test_inputs_are_let_go_of_when_a_lane_has_run(make_lanes):
    runner = make_lanes(seed=1, lanes=2)
    runner.capture()
    with runner.backend.use_stream(runner.backend.new_stream()):
        for x in batches(6):
            runner.submit(x)
    runner.backend.synchronize()
    assert [lane.num_unfinished for lane in runner.lanes.stats()] == [0, 0]
    assert not any(queue._in_flight for queue in runner.lanes._queues)


def test_a_kept_handle_keeps_the_result_and_not_the_inputs(make_lanes):
    runner = make_lanes(lanes=1)
    runner.capture()
    x = torch.ones(3, 8)
    gone, future = weakref.ref(x), runner.submit(x)
    del x
    runner.lanes.stats()  # collects completed steps
    assert gone() is None
    assert same(future.result(), network(torch.ones(3, 8)))


def test_events_serve_again_once_nobody_asks_for_their_step(make_lanes):
    """A future keeps its step's event, for any number of later steps."""
    runner = make_lanes(seed=3, lanes=1)
    runner.capture()
    made = []
    new_event = runner.backend.new_event
    runner.backend.new_event = lambda **facts: made.append(1) or new_event(**facts)
    with runner.backend.use_stream(runner.backend.new_stream()):
        kept = runner.submit(torch.ones(3, 8))
        kept.synchronize()
        for x in batches(20):
            runner.submit(x).synchronize()
        runner.submit(torch.ones(3, 8))
    assert kept.is_done()
    assert len(made) <= 4
    runner.backend.synchronize()


def test_host_inputs_are_copied_before_submit_returns(make_lanes):
    numpy = pytest.importorskip("numpy")
    inputs = {"x": StaticInput((None, 8), "float32", host=True)}
    for seed in SEEDS:
        runner = make_lanes(network, inputs, seed=seed)
        runner.capture()
        array = numpy.empty((4, 8), numpy.float32)
        futures, want = [], []
        for i in range(9):
            array[:] = i
            futures.append(runner.submit(array))
            want.append(network(torch.full((4, 8), float(i))))
        for future, one in zip(futures, want, strict=True):
            torch.testing.assert_close(future.result(), one)


# -- failures ---------------------------------------------------------------------------------


def test_submit_refuses_what_a_call_refuses(make_lanes):
    runner = make_lanes()
    with pytest.raises(InputError, match="x"):
        runner.submit(torch.zeros(3, 9))
    with pytest.raises(InputError):
        runner.submit()


def test_submit_inside_a_capture_is_refused(make_lanes):
    runner = make_lanes(lanes=2)
    backend = runner.backend

    def capture():
        runner.submit(torch.zeros(2, 8))

    with pytest.raises(Exception, match="submit\\(\\) was called inside a capture") as caught:
        backend.capture(capture, stream=backend.new_stream(), pool=backend.new_pool())
    assert isinstance(caught.value.__cause__, ReplayError)


def test_a_step_that_raises_is_counted_and_the_lane_goes_on(make_lanes):
    calls = []

    def step(x):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("first")
        return x + 1

    runner = make_lanes(step, lanes=2, mode="NONE")
    with pytest.raises(ValueError, match="first"):
        runner.submit(torch.zeros(2, 8))
    future = runner.submit(torch.zeros(2, 8))
    assert torch.equal(future.result(), torch.ones(2, 8))
    assert runner.stats().failed_steps == 1


class Broken:
    name = "broken"

    def __init__(self, answer):
        self.answer = answer

    def choose(self, step, lanes):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.slow_except("7", "ValueError('lost')")
@pytest.mark.parametrize("answer", [7, -1, "0", True, ValueError("lost")], ids=repr)
def test_faulty_lane_policy_loses_no_step(make_lanes, answer):
    runner = make_lanes(lane_policy=Broken(answer))
    runner.capture()
    with pytest.warns(LanePolicyWarning, match="Policy 'broken': choose .*Warned once"):
        future = runner.submit(torch.ones(2, 8))
    assert same(future.result(), network(torch.ones(2, 8)))
    runner.submit(torch.ones(2, 8))
    assert runner.lanes.num_faults == 2


def test_faulty_lane_policy_raises_in_a_strict_runner(make_lanes):
    runner = make_lanes(lane_policy=Broken(7), options=RunnerOptions(strict=True))
    runner.capture()
    with pytest.raises(PolicyError, match=r"returned lane 7, but the indices are 0 to 2"):
        runner.submit(torch.ones(2, 8))


OF_A_LANE_POLICY = RunnerOptions(lanes=LaneOptions(lane_policy_options={"a": 1}))
BY_UNKNOWN_NAME = RunnerOptions(lanes=LaneOptions(lane_policy="nowhere"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lanes": 0}, "lanes must be a whole number"),
        ({"lanes": True}, "lanes must be a whole number"),
        ({"lanes": 5, "backend": TapeBackend(max_streams=4)}, "lanes must be at most 4"),
        ({"lanes": 2, "options": RunnerOptions(check=3)}, "check must be 0 with several lanes"),
        ({"lanes": Lanes(2, InTurn)}, r"Pass an instance: InTurn\(\.\.\.\)"),
        ({"lanes": Lanes(2, InTurn()), "options": OF_A_LANE_POLICY}, "omitted if Lanes contains"),
        ({"lanes": 1, "options": BY_UNKNOWN_NAME}, "lane policy must be one of.*'nowhere'"),
    ],
    ids=["none", "bool", "more than streams", "check", "class", "options", "name"],
)
def test_what_does_not_go_with_lanes_is_refused(make_runner, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_runner(network, ROWS, **settings)


def test_each_lane_learns_for_itself(make_runner, policy):
    policy.observe = lambda outcome: None
    with pytest.raises(ConfigError, match="is a policy that learns, so 2 lanes cannot share it"):
        make_runner(network, ROWS, policy=policy, lanes=Lanes(2, InTurn()))


# -- results without a copy -------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_views_are_right_until_the_next_step_of_their_lane(make_lanes, seed):
    given = batches(9)
    runner = make_lanes(seed=seed, outputs="view")
    runner.capture()
    for start in (0, 3, 6):
        some = given[start : start + 3]
        results = deferred_results(runner, some)
        assert all(same(got, network(x * 2)) for got, x in zip(results, some, strict=True))


def test_a_view_is_not_copied_and_not_given_out_once_it_is_overwritten(make_lanes):
    """It never shows another step's values silently."""
    runner = make_lanes(outputs="view")
    runner.capture()
    first = [runner.submit(torch.ones(4, 8)) for _ in range(3)]
    memory = [future.result()[0].data_ptr() for future in first]
    assert len(set(memory)) == 3
    second = runner.submit(torch.ones(4, 8))
    assert (second.lane, second.result()[0].data_ptr()) == (0, memory[0])
    with pytest.raises(ReplayError, match="a later step of lane 0 may have overwritten"):
        first[0].result()
    first[0].synchronize()
    assert first[1].result()[0].data_ptr() == memory[1]


def test_a_call_overwrites_a_view_of_the_first_lane(make_lanes):
    runner = make_lanes(outputs="view")
    runner.capture()
    future = runner.submit(torch.ones(4, 8))
    runner(torch.zeros(2, 8))
    with pytest.raises(ReplayError, match="lane 0"):
        future.result()


# -- resources of each lane -----------------------------------------------------------------


def test_lanes_have_streams_pools_buffers_and_graphs_of_their_own(make_lanes):
    """Graphs that may run concurrently share no working memory."""
    runner = make_lanes(lanes=4)
    report = runner.capture()
    lanes = [member.lane for member in runner.lanes]
    assert report.num_graphs == 16
    assert report.num_bytes == runner.num_bytes == sum(lane.num_bytes() for lane in lanes)
    for own in (
        {lane.stream.handle for lane in lanes},
        {id(lane.pool) for lane in lanes},
        {lane.buffers.tensors[0].data_ptr() for lane in lanes},
        {member.lifecycle.live()[KEY(8)].leaves[0].data_ptr() for member in runner.lanes},
    ):
        assert len(own) == 4


def KEY(size):  # noqa: N802 - reads as the key it makes
    from dispatchkit import BatchDescriptor, GraphKey, RuntimeMode

    return GraphKey(RuntimeMode.FULL, BatchDescriptor(size))


class OneLanePerKey(InTurn):
    """Keeps each key on one lane, chosen by its size."""

    name = "one-lane-per-key"
    needs_key = True

    def lanes_for_key(self, key, num_lanes):
        return [key.num_tokens.bit_length() % num_lanes]

    def choose(self, step, lanes):
        return 0 if step.key is None else self.lanes_for_key(step.key, len(lanes))[0]


def test_keys_are_captured_on_their_assigned_lanes(make_lanes):
    runner = make_lanes(lanes=2, lane_policy=OneLanePerKey())
    every, assigned = runner.lanes.costs()
    assert (every.way, every.num_graphs) == ("every lane", 8)
    assert (assigned.way, assigned.num_graphs) == ("assigned lanes", 4)
    assert assigned.graph_bytes < every.graph_bytes
    runner.capture()
    assert [lane.num_graphs for lane in runner.lanes.stats()] == [2, 2]
    assert runner.num_bytes == assigned.graph_bytes
    for key in runner.registry:  # the second lane's graphs too
        assert runner.controls.launch_path(key)
        assert runner.controls.input_path(key)
    for x in batches(16):
        torch.testing.assert_close(runner.submit(x).result(), network(x))
    assert runner.stats().steps_by_mode["NONE"] == 0
    assert "captured on lane 0; declared on lane 1" in str(runner)


def test_costs_are_those_of_the_capture(make_lanes):
    runner = make_lanes(lanes=3)
    (every,) = runner.lanes.costs()
    runner.capture()
    assert every.graph_bytes == runner.num_bytes
    assert every.static_bytes == 3 * 8 * 8 * 4


def test_what_is_done_to_a_runner_is_done_to_all_lanes(make_lanes, keys):
    runner = make_lanes(lanes=3)
    runner.capture()
    runner.evict(keys.full(8))
    assert [lane.num_graphs for lane in runner.lanes.stats()] == [3, 3, 3]
    assert not runner.controls.has(keys.full(8))
    assert runner.invalidate() == 9
    runner.capture()
    runner.clear()
    assert [lane.num_graphs for lane in runner.lanes.stats()] == [0, 0, 0]
    runner.freeze()
    assert all(member.lifecycle.is_frozen for member in runner.lanes)


def test_recording_hears_every_lane(make_lanes):
    runner = make_lanes()
    runner.capture()
    recorder = runner.start_recording()
    told = []
    runner.taps.on_decision(lambda decision: told.append(decision.key))
    for x in batches(6):
        runner.submit(x)
    runner.stop_recording()
    assert recorder.num_steps == len(told) == 6
    runner.taps.on_decision(None)
    runner.submit(torch.ones(1, 8))
    assert len(told) == 6


def test_copies_have_lanes_of_their_own(make_lanes):
    import copy

    runner = make_lanes(lanes=2)
    twin = copy.copy(runner)
    twin.capture()
    assert len(twin.lanes) == 2
    assert runner.lanes.stats()[0].num_graphs == 0


def test_lazy_capture_waits_for_the_other_lanes(make_lanes):
    """A capture saves and restores state, so no other lane's step may run in between."""
    for seed in SEEDS:
        total = torch.zeros(8)

        def step(x, total=total):
            total.add_(x.sum(0))
            return x + 1

        runner = make_lanes(step, seed=seed, state=[total], lazy=True)
        with runner.backend.use_stream(runner.backend.new_stream()):
            for rows in (1, 2, 4, 8, 5, 2, 8):
                runner.submit(torch.ones(rows, 8))
        runner.backend.synchronize()
        assert total[0].item() == 30, f"seed {seed}"


def test_axes_go_with_lanes(make_lanes):
    """Concurrent calls of several lengths are each cut to their own length."""
    runner = make_lanes(
        lambda x: torch.tanh(x * 2),
        {"x": StaticInput((None, "length", 8), "float32")},
        axes=[Axis("length", (4, 16))],
        seed=2,
    )
    assert not runner.capture().failed
    given = [torch.randn(1 + i % 4, 1 + 2 * i % 16, 8) for i in range(8)]
    futures = [runner.submit(x, length=x.shape[1]) for x in given]
    for x, future in zip(given, futures, strict=True):
        torch.testing.assert_close(future.result(), torch.tanh(x * 2))
    assert runner.stats().steps_by_mode["NONE"] == 0


def test_a_runner_of_several_lanes_shows_a_graph_that_was_registered_on_one(backend):
    runner = GraphRunner(
        lambda x: x * 2,
        {"x": StaticInput((None,), "float32")},
        sizes=(4, 8),
        policy="vllm",
        mode="FULL",
        backend=backend,
        lanes=2,
    )
    key = GraphKey(RuntimeMode.FULL, BatchDescriptor(6, uniform=True))
    graph = SimpleNamespace(replay=lambda: None)
    runner.controls.register(key, graph, inputs={"x": torch.zeros(6)}, outputs=torch.zeros(6))
    assert "captured on lane 0; not declared on lane 1" in str(runner)
