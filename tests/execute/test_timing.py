"""Timed steps: the outcomes of an adaptive policy, and when they arrive."""

from __future__ import annotations

import threading

import attrs
import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Batch,
    CellUpdate,
    Decision,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.base import BackendCapabilities  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, PolicyError  # noqa: E402


class Learning:
    """Requests measurements of steps with 3 tokens and records their outcomes."""

    name = "learning"

    def __init__(self, inner):
        self._inner = inner
        self.heard = []

    def declare(self, config):
        return self._inner.declare(config)

    def decide(self, batch, graphs):
        answer = self._inner.decide(batch, graphs)
        return attrs.evolve(answer, timed=batch.num_tokens == 3)

    def observe(self, outcome):
        self.heard.append(outcome)
        return ()


@pytest.fixture
def learning(policy):
    return Learning(policy)


def test_timed_steps_are_told_when_drained(make_runner, learning):
    """Times are read later; a host time is labelled."""
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1)
    )
    runner.capture()
    for rows in (3, 5, 3):
        runner(torch.arange(rows))
    assert runner.drain(wait=True) + len(learning.heard[:-1]) >= 1
    assert len(learning.heard) == 2
    for outcome in learning.heard:
        assert outcome.batch.num_tokens == 3
        assert isinstance(outcome.decision, Decision)
        assert str(outcome.decision.key) == "FULL tokens=4"
        assert outcome.elapsed_us > 0
        assert outcome.clock == "host"  # the tape has no device clock, and reports that
        assert outcome.completed
        assert not outcome.queued
    assert runner.drain() == 0


def test_timed_eager_steps_are_told_too(make_runner, learning):
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1)
    )
    runner.capture()
    runner(torch.arange(3), ceiling=0)
    runner.drain(wait=True)
    assert [outcome.decision.key for outcome in learning.heard] == [None]


def test_a_step_that_failed_teaches_no_time(make_runner, learning, backend, quiet):
    """The outcome is not completed and has no time."""
    runner = make_runner(
        lambda tokens: tokens + 1,
        policy=learning,
        options=RunnerOptions(sample_every=1),
        proves=False,
    )
    runner.capture()
    backend.replay_fault = "before"
    runner(torch.arange(3))
    assert [(one.completed, one.elapsed_us) for one in learning.heard] == [(False, None)]


def test_a_call_that_captured_is_no_sample_of_the_capture(make_runner, learning, backend):
    """A call that warmed up or captured measures only the launch.

    The time is taken on the stream that it ran on.
    """
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, lazy=True, options=RunnerOptions(sample_every=1)
    )
    captures = []
    plain = backend.capture
    backend.capture = lambda *args, **kwargs: (captures.append(1), plain(*args, **kwargs))[1]
    runner(torch.arange(3))
    runner.drain(wait=True)
    assert captures == [1]
    assert len(learning.heard) == 1
    assert str(learning.heard[0].decision.key) == "FULL tokens=4"


def test_queued_samples_are_told_apart(make_runner, learning, policy):
    """With work ahead on the stream, the time is marked as queued."""
    backend = TapeBackend(scheduler=4)
    runner = GraphRunner(
        lambda tokens: tokens + 1,
        {"tokens": StaticInput((None,), "int64")},
        sizes=(4,),
        mode="FULL",
        policy=learning,
        backend=backend,
        options=RunnerOptions(sample_every=1),
    )
    runner.capture()
    stream = backend.new_stream()
    idle = []
    with backend.use_stream(stream):
        for _ in range(20):
            given = torch.arange(3)
            idle.append(stream.query())
            runner(given)
    runner.drain(wait=True)
    assert [outcome.queued for outcome in learning.heard] == [not one for one in idle]
    assert set(idle) == {True, False}


def test_a_time_that_is_not_ready_is_no_error_and_is_waited_for_by_nobody(make_runner, learning):
    """Steps continue; a later drain reads the time when the device has reached it."""
    backend = TapeBackend(scheduler=4)
    runner = make_runner(
        lambda tokens: tokens + 1,
        policy=learning,
        backend=backend,
        options=RunnerOptions(sample_every=1),
    )
    runner.capture()
    stream = backend.new_stream()
    with backend.use_stream(stream):
        ready = [runner.drain() for _ in range(20) if runner(torch.arange(3)) is not None]
        assert 0 in ready
        assert not stream.query()
        told = len(learning.heard)
        assert told < 20
    backend.synchronize()
    assert runner.drain() > 0
    assert len(learning.heard) == 20
    assert all(outcome.elapsed_us >= 0 for outcome in learning.heard)


def test_unread_measurements_are_bounded(make_runner, learning):
    from dispatchkit.execute.replay.timing import MAX_PENDING

    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1)
    )
    runner.capture()
    for _ in range(5):
        runner(torch.arange(3))
    assert len(runner.lanes[0].timings._pending) <= MAX_PENDING
    runner.lanes[0].timings.clear()
    assert runner.drain(wait=True) == 0


def test_waiting_for_measured_steps_holds_up_no_other_step(make_runner, learning, monkeypatch):
    """Another thread runs a whole timed step while one waits for the device."""
    from dispatchkit.backends.tape.streams import TapeEvent

    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1)
    )
    runner.capture()
    monkeypatch.setattr(TapeEvent, "query", lambda event: False)
    runner(torch.arange(3))
    wait, waited = TapeEvent.synchronize, []

    def run_a_step_meanwhile(event):
        if not waited:
            other = threading.Thread(target=runner, args=(torch.arange(3),), daemon=True)
            waited.append(other)
            other.start()
            other.join(timeout=20)
        wait(event)

    monkeypatch.setattr(TapeEvent, "synchronize", run_a_step_meanwhile)
    runner.drain(wait=True)
    assert not waited[0].is_alive()
    runner.drain(wait=True)
    assert sorted(outcome.step for outcome in learning.heard) == [1, 2]  # one outcome each


def test_an_explanation_tells_what_such_steps_took(make_runner, learning):
    """Times belong to a graph for replays and to a size for eager; unmeasured ones are omitted."""
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1)
    )
    runner.capture()
    assert runner.explain(3).times == ()
    assert "no step with this decision has been timed yet" in str(runner.explain(3))
    for _ in range(3):
        runner(torch.arange(3))
    runner(torch.arange(3), ceiling=0)
    runner.drain(wait=True)
    took = [outcome.elapsed_us for outcome in learning.heard]
    (replayed,) = runner.explain(4).times
    assert (replayed.steps, replayed.median_us) == (3, sorted(took[:3])[1])
    assert (replayed.clock, replayed.queued) == (learning.heard[0].clock, False)
    (eager,) = runner.explain(3, ceiling=0).times
    assert (eager.steps, eager.median_us) == (1, took[3])
    assert "median of 3 steps, on an idle stream" in str(runner.explain(3))
    assert runner.explain(4, ceiling=0).times == ()


def test_an_explanation_tells_the_cost_by_a_model(make_runner):
    """A cost model object, or a built-in model by name."""
    from dispatchkit.errors import UnknownNameError

    from dispatchkit_plan import CostModel

    model = CostModel(
        name="mine", eager_us=[(1, 90.0), (8, 100.0)], graph_us=[(1, 10.0), (8, 80.0)]
    )
    runner = make_runner(lambda tokens: tokens + 1, lazy=True)
    told = runner.explain(3, cost_model=model)
    assert told.decision.key.num_tokens == 4
    assert (told.cost.step_us, told.cost.lost_us) == (model.graph_us(4), 10.0)
    assert (
        "40 µs; eager 93 µs; a graph of the exact size would save 10 µs (cost model mine)"
        in str(told)
    )
    eager = runner.explain(3, ceiling=0, cost_model=model).cost
    assert eager.step_us == eager.eager_us == model.eager_us(3)
    assert runner.explain(0, cost_model=model).cost.step_us == 0.0
    assert runner.explain(3).cost is None
    assert runner.explain(3, cost_model="lm-decode-h100").cost.measured
    with pytest.raises(UnknownNameError, match="lm-decode-h100"):
        runner.explain(3, cost_model="lm-decode-h10")


def test_steady_steps_are_measured_seldom_and_one_shot_ones_always(make_runner, learning):
    """Eager and replayed steps count equally; each outcome has the number of begun steps."""
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=5)
    )
    runner.capture()
    batch = runner.dispatcher.batch(3)
    probe = Decision.eager("probe", timed=True)
    for index in range(21):
        if index in (2, 12):
            runner.dispatcher.update(CellUpdate(batch, probe, one_shot=True))
        runner(torch.arange(3), ceiling=0 if index % 2 else 2)
    runner.drain(wait=True)
    steady = [one.step for one in learning.heard if not one.decision.one_shot]
    one_shot = [one.step for one in learning.heard if one.decision.one_shot]
    assert one_shot == [3, 13]
    assert steady == [1, 8, 18]


@pytest.mark.parametrize(("sample_every", "firsts"), [(1, [True, False]), (2, [False])])
def test_the_first_eager_run_of_a_size_is_told_as_such(make_runner, learning, sample_every, firsts):
    """One-shot or steady; if the first run is unmeasured, no later one is marked."""
    options = RunnerOptions(sample_every=sample_every)
    runner = make_runner(lambda tokens: tokens + 1, policy=learning, options=options)
    runner.capture()
    batch, probe = runner.dispatcher.batch(5), Decision.eager("probe", timed=True)
    for _ in range(2):
        runner.dispatcher.update(CellUpdate(batch, probe, one_shot=True))
        runner(torch.arange(5))
    for _ in range(2):
        runner(torch.arange(3), ceiling=0)
    runner(torch.arange(3))
    runner.drain(wait=True)
    found = [(one.batch.num_tokens, one.is_first) for one in learning.heard]
    assert found[:2] == [(5, True), (5, False)]
    eager = [one.is_first for one in learning.heard[2:] if not one.decision.keys]
    assert eager == firsts


def test_a_step_counts_for_sampling_whether_it_was_replayed_or_eager(make_runner, learning):
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=4)
    )
    runner.capture()
    for rows, ceiling in ((3, 2), (5, 0), (5, 2), (3, 0), (3, 2), (3, 2)):
        runner(torch.arange(rows), ceiling=ceiling)
    runner.drain(wait=True)
    assert [(one.step, one.decision.mode.name) for one in learning.heard] == [
        (1, "FULL"),
        (5, "FULL"),
    ]


def test_a_step_that_creates_its_plan_is_measured_but_passes_on_no_outcome(make_runner, learning):
    """Otherwise rare batches would be measured less often."""
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1)
    )
    runner.capture()
    passed_on = []
    for ceiling in (2, 2, 0, 0):
        runner(torch.arange(3), ceiling=ceiling)
        passed_on.append([one.step for one in learning.heard])
    assert passed_on == [[], [1, 2], [1, 2], [1, 2, 3, 4]]


def test_a_timed_step_that_ran_another_way_teaches_nothing(make_runner, learning, quiet):
    """The call's autocast differs from the capture's."""
    runner = make_runner(
        lambda x: x * 2,
        {"x": StaticInput((None,), "float32")},
        policy=learning,
        options=RunnerOptions(sample_every=1),
    )
    runner.capture()
    with torch.autocast("cpu"):
        runner(torch.ones(3))
    runner.drain(wait=True)
    assert [(one.completed, one.elapsed_us) for one in learning.heard] == [(False, None)]


def test_what_a_policy_answers_wrongly_is_raised_before_the_next_measured_step(
    make_runner, learning, policy
):
    """The measured step has run, and its caller needs the result."""
    learning.observe = lambda outcome: [None]
    runner = make_runner(
        lambda tokens: tokens + 1,
        policy=learning,
        options=RunnerOptions(sample_every=1, strict=True),
    )
    runner.capture()
    for _ in range(2):  # the first creates a plan and reports no outcome
        assert runner(torch.arange(3)).tolist() == [1, 2, 3]
    with pytest.raises(PolicyError, match="observe"):
        runner(torch.arange(3))


def test_step_raises_its_own_error_whatever_the_policy_makes_of_it(make_runner, learning):
    """A strict policy's fault waits for the next measured step, or is dropped with the policy."""

    def step(tokens):
        if tokens.sum() < 0:
            raise KeyError("the step's own")
        return tokens + 1

    def observe(outcome):
        return () if outcome.completed else [None]

    learning.observe = observe
    runner = make_runner(step, policy=learning, options=RunnerOptions(sample_every=1, strict=True))
    with pytest.raises(KeyError, match="the step's own"):
        runner(torch.full((3,), -1), ceiling=0)
    with pytest.raises(PolicyError, match="observe"):
        runner(torch.arange(3), ceiling=0)
    with pytest.raises(KeyError, match="the step's own"):
        runner(torch.full((3,), -1), ceiling=0)
    runner.lanes[0].timings.clear()  # as in a swap
    assert runner(torch.arange(3), ceiling=0).tolist() == [1, 2, 3]


def test_steps_are_not_measured_in_check_mode(make_runner, learning):
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=1, check=2)
    )
    runner.capture()
    for ceiling in (2, 2, 0, 2):
        runner(torch.arange(3), ceiling=ceiling)
    assert runner.drain(wait=True) == 0


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_a_wrong_rate_of_sampling_is_refused(make_runner, bad):
    with pytest.raises(ConfigError, match="sample_every"):
        make_runner(lambda tokens: tokens + 1, options=RunnerOptions(sample_every=bad))


class _Device:
    """A device with its own clock, which reaches a recorded event after all work so far."""

    capabilities = BackendCapabilities(device_timing=True)

    def __init__(self):
        self.now_us = self.busy_until_us = 0.0

    def current_stream(self):
        return self

    def query(self):
        return self.now_us >= self.busy_until_us

    def new_event(self, *, timing):
        return _Mark(self)

    def submit(self, host_us, device_us):
        self.now_us += host_us
        self.busy_until_us = max(self.busy_until_us, self.now_us) + device_us


class _Mark:
    def __init__(self, device):
        self._device, self._at = device, 0.0

    def record(self, stream):
        self._at = max(self._device.now_us, self._device.busy_until_us)

    def query(self):
        return self._device.now_us >= self._at

    def synchronize(self):
        pass

    def elapsed_us(self, end):
        return end._at - self._at


@pytest.fixture
def measured(monkeypatch):
    """Return the timer of steps on a device, and its last outcome."""
    from dispatchkit.execute.replay import timing

    device, heard = _Device(), []
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: int(device.now_us * 1e3))
    lane = type("Lane", (), {"tick": 0})()
    learner = type("Dispatcher", (), {"observe": lambda self, outcome: heard.append(outcome)})()
    learner.pace = 1
    timings = timing.Timings(device, learner, lane, 1)

    def run(*, ahead_us, host_us, device_us=10.0, learner=learner):
        device.now_us = max(device.now_us, device.busy_until_us)
        device.submit(0.0, ahead_us)
        step = timings.begin(Batch(3), Decision.eager("test", timed=True))
        device.submit(host_us, device_us)
        timings.finish(step)
        timings.drain(wait=True)
        return heard[-1]

    return run


@pytest.mark.parametrize(
    ("ahead_us", "queued", "elapsed_us", "device_us"),
    [
        pytest.param(0.0, False, 270.0, None, id="idle: the host gives the pace"),
        pytest.param(100.0, True, 0.9 * 260.0, None, id="the device is done ahead of the host"),
        pytest.param(900.0, True, 0.9 * 260.0, 10.0, id="the device is behind all the while"),
    ],
)
def test_a_step_costs_the_time_of_the_host_where_that_is_slower(
    measured, ahead_us, queued, elapsed_us, device_us
):
    """After other work, events alone would show less time than consecutive steps need.

    Only a step that is submitted before the device reaches it has a device time without delays.
    """
    told = measured(ahead_us=ahead_us, host_us=260.0)
    assert told.queued is queued
    assert told.elapsed_us == pytest.approx(elapsed_us)
    assert told.host_us == pytest.approx(260.0)
    assert told.device_us == (None if device_us is None else pytest.approx(device_us))


def test_a_host_that_waits_for_room_in_the_queue_is_not_slow(measured):
    """The host's own time is that of steps before which the device was idle."""
    for _ in range(3):
        measured(ahead_us=0.0, host_us=260.0)
    told = measured(ahead_us=9000.0, host_us=4000.0)
    assert told.elapsed_us == pytest.approx(0.9 * 260.0)
    told = measured(ahead_us=9000.0, host_us=200.0)
    assert told.elapsed_us == pytest.approx(0.9 * 200.0)


def test_a_host_that_has_become_slower_is_noticed(measured):
    """Such steps make the device wait."""
    for _ in range(20):
        measured(ahead_us=0.0, host_us=260.0)
    for _ in range(20):
        measured(ahead_us=100.0, host_us=500.0)
    assert measured(ahead_us=9000.0, host_us=500.0).elapsed_us == pytest.approx(0.9 * 500.0)


def test_a_policy_may_ask_for_fewer_steps_to_be_measured(make_runner, learning):
    runner = make_runner(
        lambda tokens: tokens + 1, policy=learning, options=RunnerOptions(sample_every=2)
    )
    runner.capture()
    learning.pace = 3
    for index in range(20):
        if index == 13:
            learning.pace = 1
        runner(torch.arange(3))
    runner.drain(wait=True)
    assert [outcome.step for outcome in learning.heard] == [1, 7, 13, 19]
