"""Captures: when they run, how they fail, and what remains."""

from __future__ import annotations

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    BatchDescriptor,
    BufferOptions,
    CaptureOptions,
    GraphKey,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import (  # noqa: E402
    CaptureError,
    ConfigError,
    NoGraphError,
    RegistryError,
    ReplayError,
)
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.capture.retries import MAX_ATTEMPTS, RETRY_AFTER  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


def double(tokens):
    return tokens * 2


# -- warmup -----------------------------------------------------------------------------------


def test_first_use_of_a_library_is_warmed_up_before_the_capture(make_runner, backend):
    """Objects that a library creates at its first call are created outside the capture."""
    handles = []

    def step(tokens):
        if not handles:
            handles.append(int(tokens.sum()) + 1)  # waits for the device, which a capture refuses
        return tokens * handles[0]

    runner = make_runner(step)
    assert runner.capture().failed == {}
    same(runner(torch.arange(3)), torch.arange(3))


class _Counting(torch.nn.Module):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        return tokens * 2


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")
@pytest.mark.parametrize(
    ("step", "reason", "why"),
    [
        (_Counting(), "python_state", "_Counting.calls"),
        (lambda tokens: tokens * tokens.sum().item(), "capture_failed", "Tensor.item"),
    ],
)
def test_explain_gives_the_reason_that_steps_are_counted_by(make_runner, step, reason, why):
    """The reason includes the error of the graph's capture."""
    runner = make_runner(step)
    runner.capture()
    runner(torch.arange(3))
    found = runner.explain(3)
    assert dict(runner.stats().eager_by_reason) == {found.decision.reason: 1} == {reason: 1}
    assert found.because.startswith("state: the capture of the graph for this batch failed: ")
    assert why in found.because


def test_without_warmups_a_capture_works_or_says_why_not(make_runner):
    works = make_runner(
        double,
        options=RunnerOptions(
            capture=CaptureOptions(warmups=0), buffers=BufferOptions(output_batch_dims=0)
        ),
    )
    assert works.capture().failed == {}
    same(works(torch.arange(3)), torch.arange(3) * 2)
    says = make_runner(double, options=RunnerOptions(capture=CaptureOptions(warmups=0)))
    failed = says.capture().failed
    assert len(failed) == 4
    assert all("warmups=0" in why for why in failed.values())


def test_warmup_and_capture_use_one_stream_for_all_keys(make_runner, backend):
    """Libraries keep a workspace per stream, so a second stream would use more memory."""
    runner = make_runner([graph_piece(double), eager_piece(double), graph_piece(double)])
    runner.capture()
    assert {kind for kind, _ in backend.streams_used} == {"warmup", "capture"}
    assert len({handle for _, handle in backend.streams_used}) == 1


def test_all_keys_can_be_warmed_up_before_the_first_capture(make_runner, backend):
    """Scratch memory that grows with the size gets its final address before any graph."""
    scratch = [torch.zeros(1)]

    def step(tokens):
        if scratch[0].numel() < tokens.shape[0]:
            scratch[0] = torch.zeros(tokens.shape[0])
        return tokens + scratch[0][: tokens.shape[0]].long()

    runner = make_runner(step)
    assert runner.controls.warm_up() == {}
    grown = scratch[0]
    assert grown.numel() == 8
    assert [kind for kind, _ in backend.streams_used if kind == "capture"] == []
    runner.capture(sorted(runner.registry, key=lambda key: key.num_tokens))
    assert scratch[0] is grown
    same(runner(torch.arange(3)), torch.arange(3))


def test_warmup_that_raises_is_reported_and_marks_nothing(make_runner):
    def step(tokens):
        if tokens.shape[0] == 4:
            raise ValueError("four")
        return tokens

    runner = make_runner(step)
    failed = runner.controls.warm_up()
    assert [key.num_tokens for key in failed] == [4]
    assert {entry.state for entry in runner.registry.entries.values()} == {KeyState.DECLARED}


def test_garbage_collector_is_as_before(make_runner):
    class Cycle:
        """A reference cycle."""

    def step(tokens):
        ring = Cycle()
        ring.ring = ring
        return tokens * 2

    assert gc.isenabled()
    runner = make_runner(step)
    runner.capture()
    assert gc.isenabled()
    gc.disable()
    try:
        make_runner(step).capture()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_capture_beside_a_busy_neighbour(make_runner):
    """One thread captures while another computes and polls events; both are correct."""
    runner = make_runner(double)
    stop = threading.Event()
    results = []

    def work():
        event = runner.backend.new_event()
        while not stop.is_set():
            x = torch.arange(100)
            event.record()
            results.append(bool((x + 1 - x == 1).all()) and event.query())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert runner.capture().failed == {}
    finally:
        stop.set()
        thread.join()
    assert all(results)
    same(runner(torch.arange(3)), torch.arange(3) * 2)


# -- failure ----------------------------------------------------------------------------------


def fails_by_sync(tokens):
    return tokens * int(tokens.sum())


def fails_in_capture(backend):
    def step(tokens):
        if backend.is_capturing():
            raise ValueError("in the capture")
        return tokens * 2

    return step


def fails_by_memory(backend):
    def step(tokens):
        if backend.is_capturing():
            raise torch.OutOfMemoryError("no memory left")
        return tokens * 2

    return step


def fails_in_warmup(tokens):
    if tokens.shape[0] in (8, 4, 2, 1) and not tokens.any():
        raise LookupError("nothing but fill")
    return tokens * 2


KINDS = ["sync", "capture", "memory", "warmup", "exit"]


def failing_step(kind, backend):
    if kind == "sync":
        return fails_by_sync, "host_sync"
    if kind == "capture":
        return fails_in_capture(backend), "error"
    if kind == "memory":
        return fails_by_memory(backend), "out_of_memory"
    if kind == "warmup":
        return fails_in_warmup, "error"

    def asserts(tokens):
        assert not backend.is_capturing(), "assertion in the capture"
        return tokens * 2

    return asserts, "error"


@pytest.mark.parametrize("kind", KINDS)
def test_failed_capture_is_contained(make_runner, backend, quiet, kind):
    """The key is marked with the reason; generators, stream and other keys are unchanged."""
    step, reason = failing_step(kind, backend)
    other = make_runner(double)
    other.capture()
    runner = make_runner(step)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    stream = backend.current_stream_handle()
    report = runner.capture()
    assert report.num_graphs == 0
    assert len(report.failed) == 4
    assert all(why.startswith(f"{reason}:") for why in report.failed.values())
    assert torch.equal(torch.get_rng_state(), before)
    assert backend.current_stream_handle() == stream
    assert not backend.is_capturing()
    assert gc.isenabled()
    states = {entry.state for entry in runner.registry.entries.values()}
    assert states == {KeyState.FAILED}
    given = torch.arange(3) + 1
    same(runner(given), step(given))
    assert runner.stats().eager_by_reason == {"capture_failed": 1}
    same(other(given), given * 2)


def test_one_failing_key_leaves_the_others(make_runner, backend, keys, quiet):
    def step(tokens):
        if tokens.shape[0] == 4 and backend.is_capturing():
            raise ValueError("four")
        return tokens * 2

    runner = make_runner(step)
    report = runner.capture()
    assert list(report.failed) == [keys.full(4)]
    assert report.num_graphs == 3
    for rows in (3, 8, 2):
        same(runner(torch.arange(rows)), torch.arange(rows) * 2)
    assert runner.stats().eager_by_reason == {"capture_failed": 1}


def test_twenty_failing_captures_leave_nothing_behind(make_runner, backend, quiet):
    """Memory is constant, no stream keeps capturing, and later captures succeed."""
    counter = torch.zeros(1)

    def step(tokens):
        counter.add_(1)
        if backend.is_capturing() and wrong[0]:
            raise ValueError("planted")
        return tokens * 2

    wrong = [True]
    runner = make_runner(step, state=[counter], sizes=tuple(range(1, 21)), max_num_tokens=20)
    assert len(runner.capture().failed) == 20
    assert runner.num_bytes == runner.lanes[0].lane.outputs.num_bytes
    assert backend.live == 0
    assert counter.item() == 0
    wrong[0] = False
    assert runner.capture().num_graphs == 20
    same(runner(torch.arange(13)), torch.arange(13) * 2)
    assert counter.item() == 1


def test_failed_key_is_left_alone_after_bounded_tries(make_runner, backend, quiet):
    """A session limits its tries too."""
    backend.capture_fault = CaptureError("planted", reason="planted")
    runner = make_runner(double)
    for _ in range(MAX_ATTEMPTS):
        assert len(runner.capture().failed) == 4
    report = runner.capture()
    assert report.failed == {}
    assert len(report.skipped) == 4
    assert all("planted" in why for why in report.skipped.values())


def test_failed_key_is_tried_again_on_request(make_runner, backend, keys, quiet):
    """After repairing the cause, users get the graph back without a new runner."""
    backend.capture_fault = CaptureError("planted", reason="planted")
    runner = make_runner(double)
    for _ in range(MAX_ATTEMPTS):
        runner.capture()
    backend.capture_fault = None
    assert runner.capture().num_graphs == 0
    assert runner.capture([keys.full(8)]).num_graphs == 0
    assert runner.capture([keys.full(8)], again=True).num_graphs == 1
    same(runner(torch.arange(8)), torch.arange(8) * 2)
    assert runner.stats().steps_by_mode["FULL"] == 1
    assert runner.capture(again=True).num_graphs == 3


def test_lazy_retries_are_spaced_and_bounded(make_runner, backend, quiet):
    """Retries come after 64 steps, then after four times as many."""
    backend.capture_fault = CaptureError("planted", reason="planted")
    runner = make_runner(double, lazy=True)
    tried_at = []
    for number in range(RETRY_AFTER * 6):
        before = runner.stats().capture_failures
        same(runner(torch.arange(3)), torch.arange(3) * 2)
        if runner.stats().capture_failures > before:
            tried_at.append(number)
    assert tried_at == [0, RETRY_AFTER, RETRY_AFTER + 4 * RETRY_AFTER]
    assert len(tried_at) == MAX_ATTEMPTS
    assert runner.stats().steps == RETRY_AFTER * 6


def test_key_that_failed_once_is_used_after_a_good_retry(make_runner, backend, quiet):
    backend.capture_fault = CaptureError("planted", reason="planted")
    runner = make_runner(double, lazy=True)
    runner(torch.arange(3))
    backend.capture_fault = None
    for _ in range(RETRY_AFTER):
        same(runner(torch.arange(3)), torch.arange(3) * 2)
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_step_runs_exactly_once_when_its_lazy_capture_fails(make_runner, backend, quiet):
    counter = torch.zeros(1)

    def step(tokens):
        counter.add_(1)
        if backend.is_capturing():
            raise ValueError("planted")
        return tokens * 2

    runner = make_runner(step, lazy=True)
    same(runner(torch.arange(3)), torch.arange(3) * 2)
    assert counter.item() == 1


def test_interrupted_capture_puts_state_back(make_runner, backend):
    """Ctrl-C during a capture propagates, and the caller's state is unchanged."""
    counter = torch.zeros(1)

    def step(tokens):
        counter.add_(1)
        if backend.is_capturing():
            raise KeyboardInterrupt
        return tokens

    runner = make_runner(step)
    with pytest.raises(KeyboardInterrupt):
        runner.capture()
    assert counter.item() == 0
    assert not backend.is_capturing()


# -- replay failures --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["before", "after"])
def test_failing_replay_of_a_pure_step_gives_the_own_result(make_runner, backend, quiet, fault):
    """The result is not that of an earlier step, and the key is not tried again."""
    runner = make_runner(double)
    runner.capture()
    runner(torch.arange(3) + 50)
    backend.replay_fault = fault
    same(runner(torch.arange(3)), torch.arange(3) * 2)
    replays = backend.replays
    same(runner(torch.arange(3)), torch.arange(3) * 2)
    assert backend.replays == replays
    stats = runner.stats()
    assert stats.replay_failures == 1
    assert stats.eager_by_reason == {"replay_failed": 2}
    backend.replay_fault = ""
    same(runner(torch.arange(8)), torch.arange(8) * 2)


def test_failing_replay_of_a_step_with_state_raises(make_runner, backend):
    """The replay may have taken effect, so running the step again would apply it twice."""
    counter = torch.zeros(1)

    def step(tokens):
        counter.add_(1)
        return tokens * 2

    runner = make_runner(step, state=[counter])
    runner.capture()
    backend.replay_fault = "after"
    with pytest.raises(ReplayError, match="was not run again") as caught:
        runner(torch.arange(4))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert counter.item() == 1
    assert runner.stats().failed_steps == 1
    with pytest.warns(EagerStepWarning, match="replay_failed"):
        runner(torch.arange(4))
    assert counter.item() == 2


def test_failing_replay_behind_an_eager_piece_raises(make_runner, backend):
    runner = make_runner([eager_piece(double), graph_piece(double)], mode="PIECEWISE")
    runner.capture()
    backend.replay_fault = "before"
    with pytest.raises(ReplayError):
        runner(torch.arange(4))


# -- when -------------------------------------------------------------------------------------


def test_lazy_capture_at_the_first_ask(make_runner):
    runner = make_runner(double, lazy=True)
    for rows in (3, 8, 3):
        same(runner(torch.arange(rows)), torch.arange(rows) * 2)
    stats = runner.stats()
    assert stats.hits == {"FULL tokens=4": 2, "FULL tokens=8": 1}
    assert stats.captures == 2


def test_lazy_capture_after_so_many_asks(make_runner):
    """Earlier steps run eager with a reason that does not count as a downgrade."""
    runner = make_runner(
        double, lazy=True, options=RunnerOptions(capture=CaptureOptions(capture_after=3))
    )
    for _ in range(5):
        same(runner(torch.arange(3)), torch.arange(3) * 2)
    stats = runner.stats()
    assert stats.eager_by_reason == {"capture_pending": 2}
    assert stats.hits == {"FULL tokens=4": 3}


def test_idle_moments_capture_what_was_most_asked_for(make_runner, keys, quiet):
    runner = make_runner(double)
    assert runner.controls.capture_next() is None
    for rows in (3, 8, 8, 3, 8):
        runner(torch.arange(rows))
    assert runner.controls.capture_next() == keys.full(8)
    assert runner.controls.capture_next() == keys.full(4)
    assert runner.controls.capture_next() is None
    assert runner.controls.has(keys.full(8))


@pytest.mark.parametrize("keys", [["x"], "x", 3, [[1]]])
def test_what_is_no_key_is_refused_with_how_to_list_keys(make_runner, keys):
    runner = make_runner(double)
    how = r"keys(\[0\] must be a GraphKey| must be a list of GraphKeys).*list\(runner\.registry\)"
    for wrong in (runner.capture, runner.controls.capture_in_background, runner.controls.ready):
        with pytest.raises(ConfigError, match=how):
            wrong(keys)
    other = GraphKey(RuntimeMode.FULL, BatchDescriptor(999))
    for wrong in (lambda: runner.capture([other]), lambda: runner.evict(other)):
        with pytest.raises(RegistryError, match=r"tokens=999 is not declared.*list\(runner\."):
            wrong()


def test_frozen_runner_captures_nothing(make_runner, keys):
    """A key without a graph runs eager and is counted; with strict it raises."""
    runner = make_runner(double, lazy=True)
    runner(torch.arange(8))
    runner.freeze()
    with pytest.warns(EagerStepWarning, match="not_captured"):
        same(runner(torch.arange(3)), torch.arange(3) * 2)
    same(runner(torch.arange(7)), torch.arange(7) * 2)
    assert runner.stats().captures == 1
    for forbidden in (runner.capture, runner.controls.capture_next, runner.controls.warm_up):
        with pytest.raises(RegistryError, match="frozen"):
            forbidden()
    runner.freeze(strict=True)
    with pytest.raises(NoGraphError, match="FULL tokens=4") as caught:
        runner(torch.arange(3))
    assert caught.value.nearest == ("FULL tokens=8",)


@pytest.mark.slow_except("True-2")
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("lazy", [False, True])
def test_frozen_runner_sleeps_and_wakes_up(make_runner, quiet, lazy, lanes):
    """All memory is freed and the graphs are captured again; then the runner is frozen again."""
    runner = make_runner(double, lazy=lazy, lanes=lanes)
    runner.capture()
    runner.freeze()
    before = runner.num_bytes
    for _ in range(2):
        runner.invalidate("sleep")
        assert runner.num_bytes == 0
        with pytest.raises(RegistryError, match="unfreeze"):
            runner.capture()
        same(runner(torch.arange(3)), torch.arange(3) * 2)
        runner.unfreeze()
        assert runner.capture().num_graphs == 4 * lanes
        runner.freeze()
        assert runner.num_bytes == before
        same(runner(torch.arange(3)), torch.arange(3) * 2)
    assert runner.stats().eager_by_reason == {"stale": 2}


# -- nested runners and captures ------------------------------------------------------------


def test_inside_the_callers_capture_a_call_passes_straight_through(make_runner, backend):
    """The outer graph records the step itself, so exactly one layer acts."""
    runner = make_runner(double)
    runner.capture()
    static = torch.arange(3)
    pool, stream = backend.new_pool(), backend.new_stream()
    replays = backend.replays
    graph = backend.capture(lambda: runner(static) + 1, stream=stream, pool=pool)
    static.add_(5)
    graph.replay()
    same(graph.outputs, static * 2 + 1)
    assert backend.replays == replays + 1  # only the outer one
    assert runner.stats().eager_by_reason == {"inside_capture": 1}


def test_runner_within_a_runners_step(make_runner, quiet):
    """When captured, a step that calls another runner contains the inner operations."""
    inner = make_runner(double)
    inner.capture()
    outer = make_runner(lambda tokens: inner(tokens) + 1)
    assert outer.capture().failed == {}
    for rows in (3, 8, 5):
        same(outer(torch.arange(rows)), torch.arange(rows) * 2 + 1)
    assert outer.stats().steps_by_mode["FULL"] == 3


def test_wrapping_twice_is_refused(make_runner):
    """A nested runner would capture within a capture."""
    runner = make_runner(double)
    with pytest.raises(ConfigError, match="Pass the step of that runner"):
        GraphRunner(runner, {"tokens": StaticInput((None,), "int64")})


# -- registration, switches -------------------------------------------------------------------


def test_graph_captured_elsewhere_is_used(make_runner, backend, keys):
    runner = make_runner(double)
    static = torch.zeros(8, dtype=torch.int64)
    pool, stream = backend.new_pool(), backend.new_stream()
    graph = backend.capture(lambda: static * 2, stream=stream, pool=pool)
    runner.controls.register(
        keys.full(8), graph, inputs={"tokens": static}, outputs=graph.outputs, has_effect=False
    )
    assert runner.controls.has(keys.full(8))
    assert runner.controls.get(keys.full(8)).leaves[0] is graph.outputs
    for rows in (8, 5):
        same(runner(torch.arange(rows)), torch.arange(rows) * 2)
    assert static.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]  # stale rows are cleared here too
    runner.evict(keys.full(8))
    graph.replay()  # still belongs to its owner


def test_steps_in_place_reach_what_a_graph_captured_elsewhere_reads(make_runner, backend, keys):
    runner = make_runner(double)
    static = torch.zeros(8, dtype=torch.int64)
    pool, stream = backend.new_pool(), backend.new_stream()
    graph = backend.capture(lambda: static * 2, stream=stream, pool=pool)
    runner.controls.register(keys.full(8), graph, inputs={"tokens": static}, outputs=graph.outputs)
    same(runner(torch.arange(7)), torch.arange(7) * 2)
    for rows in (6, 5, 8):
        runner.buffers["tokens"][:rows] = rows
        same(runner.run_in_place(rows), torch.full((rows,), 2 * rows))
        assert static.tolist() == [rows] * rows + [0] * (8 - rows)
    assert runner.controls.get(keys.full(8)).hits == 4


def test_graph_captured_elsewhere_must_fit(make_runner, backend, keys):
    from dispatchkit.errors import InputError

    runner = make_runner(double)
    with pytest.raises(InputError, match="8 rows"):
        runner.controls.register(
            keys.full(8),
            backend.capture(lambda: 1, stream=backend.new_stream(), pool=backend.new_pool()),
            inputs={"tokens": torch.zeros(4, dtype=torch.int64)},
            outputs=torch.zeros(4),
        )
    with pytest.raises(ConfigError, match="replay"):
        runner.controls.register(keys.full(8), object(), inputs={}, outputs=None)


def test_modes_and_keys_are_switched_while_serving(make_runner, keys, quiet):
    runner = make_runner([graph_piece(double), eager_piece(double)])
    runner.capture()
    runner(torch.arange(3))
    runner.controls.set_enabled(False, mode="FULL")
    runner(torch.arange(3))
    runner.controls.set_enabled(False, key=keys.piecewise(4))
    runner(torch.arange(3))
    runner.controls.set_enabled(True, mode="FULL")
    runner(torch.arange(3))
    stats = runner.stats()
    assert stats.hits == {"FULL tokens=4": 2, "PIECEWISE tokens=4": 1}
    assert stats.eager_by_reason == {"disabled": 1}


def test_observers_hear_of_captures_failures_and_evictions(make_runner, policy, backend, keys):
    from dispatchkit.observe.events import CaptureEvent, CaptureFailedEvent, EvictEvent
    from dispatchkit.plugins import load_plugins

    plugins = load_plugins(allow=())
    heard = []
    for kind in (CaptureEvent, CaptureFailedEvent, EvictEvent):
        plugins.notifier.subscribe(kind, heard.append, "test")
    runner = make_runner(double, policy=plugins.with_policy(policy))
    runner.capture([keys.full(8)])
    runner.evict(keys.full(8))
    backend.capture_fault = CaptureError("planted", reason="planted")
    runner.capture([keys.full(4)])
    assert [(type(event), event.num_tokens) for event in heard] == [
        (CaptureEvent, 8),
        (EvictEvent, 8),
        (CaptureFailedEvent, 4),
    ]
    assert heard[1].reason == "requested"
    assert heard[2].reason == "planted"
