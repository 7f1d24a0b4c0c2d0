"""Swaps while serving are atomic, prepared in advance, and undone completely on failure."""

from __future__ import annotations

import copy
import gc
import resource
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    BufferOptions,
    DispatchConfig,
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import (  # noqa: E402
    CaptureError,
    ConfigError,
    PolicyError,
    RegistryError,
    SwapError,
    UnknownNameError,
)
from dispatchkit.execute import ChurnWarning, EagerStepWarning  # noqa: E402

# Ladders that end below the largest batch are intended here.
pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")


def double(tokens):
    return tokens * 2


def served_by(runner, rows):
    """Run a step, compare it with eager, and return its graph's size (0: eager)."""
    assert torch.equal(runner(torch.arange(rows)), torch.arange(rows) * 2)
    key = runner.dispatcher.dispatch(rows).key
    return 0 if key is None else key.num_tokens


def sizes_of(runner):
    return sorted(key.num_tokens for key in runner.registry)


@pytest.fixture
def runner(make_runner):
    made = make_runner(double)
    made.capture()
    return made


# -- effects of a swap ----------------------------------------------------------------------


def test_new_sizes_are_captured_before_they_serve_and_old_ones_go(runner, backend):
    kept = runner.controls.get(next(key for key in runner.registry if key.num_tokens == 8))
    report = runner.swap(sizes=(3, 6, 8))
    assert (report.epoch, runner.dispatcher.epoch) == (1, 1)
    assert [key.num_tokens for key in report.added] == [6, 3]
    assert report.captured == report.added
    assert [key.num_tokens for key in report.removed] == [4, 2, 1]
    assert sizes_of(runner) == [3, 6, 8]
    assert backend.live == 3
    assert runner.controls.get(kept.key) is kept
    assert [served_by(runner, rows) for rows in (1, 4, 7)] == [3, 6, 8]
    assert "2 keys added (2 captured ahead), 3 removed" in str(report)


def test_the_old_policy_sees_nothing_of_what_is_captured_ahead(make_runner, backend):
    chosen = []
    runner = make_runner(double)
    runner.capture()
    capture = type(backend).capture

    def looking(run, **options):
        graph = capture(backend, run, **options)
        chosen.append((runner.dispatcher.dispatch(3).key.num_tokens, len(runner.dispatcher.graphs)))
        return graph

    backend.capture = looking
    runner.swap(sizes=(3, 6, 8))
    assert chosen == [(4, 4), (4, 4)]


def test_steps_run_between_the_captures_of_a_swap(runner, monkeypatch):
    """Another thread runs between two captures, under the old policy."""
    results = []

    def in_between():
        with ThreadPoolExecutor(1) as pool:
            results.append(pool.submit(served_by, runner, 3).result(timeout=60))

    monkeypatch.setattr("dispatchkit.execute.live.swap._let_steps_run", in_between)
    runner.swap(sizes=(3, 5, 8))
    assert results == [4, 4]
    assert served_by(runner, 3) == 3


def test_limits_alone_change_without_a_new_epoch(runner, backend):
    report = runner.swap(max_graphs=2)
    assert report.epoch == 0
    assert backend.live == runner.lanes[0].lifecycle.num_graphs() == 2
    runner.swap(max_graphs=None, eviction="benefit")
    assert runner.capture().num_graphs == 2
    assert runner.lanes[0].lifecycle.budget.eviction == "benefit"


def test_a_byte_budget_that_shrinks_keeps_what_fits(runner):
    for rows in (8, 4, 2, 1):
        served_by(runner, rows)
    limit = runner.num_bytes // 2
    runner.swap(max_bytes=limit)
    assert runner.num_bytes <= limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for rows in (8, 4, 2, 1):
            assert torch.equal(runner(torch.arange(rows)), torch.arange(rows) * 2)


def test_the_limit_grows_before_the_new_graphs_are_captured(make_runner):
    runner = make_runner(double, options=RunnerOptions(memory=MemoryOptions(max_graphs=4)))
    runner.capture()
    with pytest.raises(SwapError, match="max_graphs is 4"):
        runner.swap(sizes=(3, 6, 8))
    assert sizes_of(runner) == [1, 2, 4, 8]
    assert runner.lanes[0].lifecycle.num_graphs() == 4
    assert runner.swap(sizes=(3, 6, 8), max_graphs=6).epoch == 1
    assert runner.lanes[0].lifecycle.num_graphs() == 3


def test_what_is_not_captured_ahead_runs_eager_until_it_is(runner, quiet):
    report = runner.swap(sizes=(3, 6, 8), ahead=False)
    assert report.captured == ()
    assert served_by(runner, 3) == 0
    assert served_by(runner, 7) == 8
    runner.capture()
    assert served_by(runner, 3) == 3


def test_a_lazy_runner_captures_new_sizes_when_they_are_asked_for(make_runner):
    runner = make_runner(double, lazy=True)
    served_by(runner, 3)
    assert runner.swap(sizes=(3, 6)).captured == ()
    assert served_by(runner, 5) == 6
    assert runner.stats().captures == 2


def test_larger_sizes_need_room_that_was_made_for_them(runner, make_runner):
    with pytest.raises(ConfigError, match=r"16 tokens.*only 8 rows.*buffer_rows=16"):
        runner.swap(config=DispatchConfig(sizes=(8, 16), mode="FULL"))
    roomy = make_runner(
        double, max_num_tokens=16, options=RunnerOptions(buffers=BufferOptions(buffer_rows=16))
    )
    roomy.capture()
    roomy.swap(sizes=(8, 16))
    assert served_by(roomy, 12) == 16


def test_the_mode_is_swapped_within_what_the_step_can_do(make_runner):
    pieces = [graph_piece(lambda tokens: tokens * 2), eager_piece(lambda hidden: hidden)]
    runner = make_runner(pieces)
    runner.capture()
    runner.swap(mode="PIECEWISE")
    assert served_by(runner, 3) == 4
    assert {key.mode.name for key in runner.registry} == {"PIECEWISE"}
    assert (str(runner.lanes[0].requested_mode), str(runner.config.mode)) == (
        "PIECEWISE",
        "PIECEWISE",
    )


def test_a_policy_by_name_takes_options_alone(make_runner):
    runner = make_runner(
        double, policy="threshold", options=RunnerOptions(policy_options={"max_tokens": 4})
    )
    runner.capture()
    assert [served_by(runner, rows) for rows in (3, 7)] == [4, 0]
    report = runner.swap(policy_options={"max_tokens": 8})
    assert [served_by(runner, rows) for rows in (3, 7)] == [4, 8]
    assert (report.policy, report.previous) == ("threshold", "threshold")
    assert [key.num_tokens for key in report.captured] == [8]
    assert runner.swap(policy="vllm").policy == "vllm"


def test_a_copy_of_the_runner_is_made_as_it_stands_after_the_swap(runner, policy):
    runner.swap(sizes=(3, 6), max_graphs=5, policy=policy)
    other = copy.copy(runner)
    assert other.config.sizes == (3, 6)
    assert other.lanes[0].lifecycle.budget.max_graphs == 5
    assert other.dispatcher.policy is policy


def test_a_copy_after_a_swap_has_the_axes(make_runner):
    inputs = {"x": StaticInput((None, "length"), "float32")}
    runner = make_runner(lambda x: x * 2, inputs, axes=[Axis("length", (4, 16))])
    runner.capture()
    runner.swap(sizes=(3, 8))
    copied = copy.copy(runner)
    assert copied.config == runner.config
    assert copied(torch.ones(2, 3), length=3, ceiling=0).shape == (2, 3)


@pytest.mark.parametrize(("name", "value"), [("axes", ()), ("max_loras", 2)])
def test_a_swap_cannot_change_the_variants_of_the_inputs(make_runner, name, value):
    inputs = {"x": StaticInput((None, "length"), "float32")}
    runner = make_runner(lambda x: x * 2, inputs, axes=[Axis("length", (4, 16))])
    changed = attrs.evolve(runner.config, **{name: value})
    with pytest.raises(ConfigError, match=f"A swap cannot change {name}"):
        runner.swap(config=changed)
    assert runner.config != changed


def test_disabled_keys_are_not_waited_for(make_runner, quiet):
    runner = make_runner(double)
    runner.capture()
    runner.controls.set_enabled(False, mode="FULL")
    assert len(runner.swap(sizes=(3, 6)).captured) == 0
    runner.controls.set_enabled(True, mode="FULL")
    runner.capture()
    assert served_by(runner, 2) == 3


# -- failing swaps --------------------------------------------------------------------------


def state_of(runner):
    graphs = {str(key): id(entry.graph) for key, entry in runner.registry.entries.items()}
    dispatcher = runner.dispatcher
    return (
        graphs,
        dispatcher.epoch,
        dispatcher.policy,
        runner.config,
        runner.lanes[0].lifecycle.budget,
    )


def refused(runner, error, match, **change):
    before = state_of(runner)
    bytes_before = runner.num_bytes
    with pytest.raises(error, match=match):
        runner.swap(**change)
    assert state_of(runner) == before
    assert runner.num_bytes <= bytes_before
    assert [served_by(runner, rows) for rows in (3, 8)] == [4, 8]


def test_a_capture_that_fails_ahead_leaves_all_as_it_was_and_says_why(runner, backend):
    capture, seen = type(backend).capture, []

    def second_fails(run, **options):
        seen.append(run)
        if len(seen) == 2:
            raise CaptureError("it read a value back", reason="host_sync")
        return capture(backend, run, **options)

    backend.capture = second_fails
    refused(
        runner,
        SwapError,
        r"'smallest' and its configuration stay.*tokens=3: host_sync",
        sizes=(3, 6, 8),
    )
    assert backend.live == 4
    backend.capture = lambda run, **options: capture(backend, run, **options)
    runner.swap(sizes=(3, 6, 8))
    assert served_by(runner, 5) == 6


class Broken:
    name = "broken"

    def declare(self, config):
        return []

    def decide(self, batch, graphs):
        return "eager"


def test_a_policy_that_is_refused_leaves_the_old_one(runner):
    refused(runner, PolicyError, "broken", policy=Broken(), sizes=(3, 6))


def test_impossible_changes_are_refused_before_anything_happens(runner):
    for error, match, change in (
        (UnknownNameError, "policy", {"policy": "nobody"}),
        (ConfigError, "changes nothing", {}),
        (ConfigError, "changes nothing", {"sizes": (1, 2, 4, 8)}),
        (ConfigError, "policy_options", {"policy_options": {"x": 1}}),
        (ConfigError, "max_graphs", {"max_graphs": -1}),
        (UnknownNameError, "eviction", {"eviction": "oldest"}),
        (ConfigError, "the policy in force", {"policy": runner.dispatcher.policy}),
        (
            ConfigError,
            "cannot be combined with separate settings",
            {"config": runner.config, "sizes": (1, 2)},
        ),
        (ConfigError, "sizes", {"sizes": (0,)}),
    ):
        refused(runner, error, match, **change)


class Remembering:
    """Clears its measurements when it is configured, as adaptive policies may."""

    name = "remembering"

    def __init__(self, inner):
        self.inner, self.learnt = inner, []

    def declare(self, config):
        self.learnt.clear()
        return self.inner.declare(config)

    def decide(self, batch, graphs):
        answer = self.inner.decide(batch, graphs)
        return attrs.evolve(answer, timed=True)

    def observe(self, outcome):
        self.learnt.append(outcome)


def test_a_swap_that_fails_takes_nothing_from_what_was_learnt(make_runner, backend, policy):
    runner = make_runner(double, policy=Remembering(policy))
    runner.capture()
    served_by(runner, 3)  # creates the plan and is not measured
    served_by(runner, 3)
    runner.drain(wait=True)
    mine = runner.dispatcher.policy
    assert len(mine.learnt) == 1
    backend.capture_fault = ValueError("planted")
    with pytest.raises(SwapError, match="planted"):
        runner.swap(sizes=(3, 6))
    backend.capture_fault = None
    assert runner.dispatcher.policy is mine
    assert len(mine.learnt) == 1
    runner.swap(sizes=(3, 6))
    assert runner.dispatcher.policy is not mine


def test_news_of_the_old_policys_steps_are_not_told_to_the_new(make_runner, policy):
    """Measurements under one policy must not reach another."""
    runner = make_runner(double, policy=Remembering(policy))
    runner.capture()
    served_by(runner, 3)  # creates the plan and is not measured
    served_by(runner, 3)
    old = runner.dispatcher.policy
    runner.swap(policy=Remembering(policy))
    runner.drain(wait=True)
    assert len(old.learnt) == 1
    assert runner.dispatcher.policy.learnt == []


def test_a_policy_that_cannot_be_copied_must_be_given_anew(make_runner, policy):
    held = Remembering(policy)
    held.lock = threading.Lock()
    runner = make_runner(double, policy=held)
    runner.capture()
    refused(runner, ConfigError, "cannot be copied", sizes=(3, 6))
    runner.swap(sizes=(3, 6), policy=policy)
    assert served_by(runner, 3) == 3


def test_a_policy_may_keep_the_view_of_the_graphs_and_still_be_copied(make_runner, policy):
    """The registry behind the view is not copied, because it could not be."""

    class Keeping(Remembering):
        def decide(self, batch, graphs):
            self.graphs = graphs
            return super().decide(batch, graphs)

    runner = make_runner(double, policy=Keeping(policy))
    runner.capture()
    assert served_by(runner, 3) == 4
    before = runner.dispatcher.policy
    runner.swap(sizes=(3, 6))
    assert runner.dispatcher.policy is not before
    assert served_by(runner, 3) == 3


def test_a_frozen_runner_swaps_among_the_graphs_it_has(runner, policy, quiet):
    runner.freeze()
    refused(runner, RegistryError, "frozen", sizes=(3, 6))
    runner.swap(policy=copy.deepcopy(policy), sizes=(4, 8))
    assert [served_by(runner, rows) for rows in (1, 5)] == [4, 8]


def test_weights_replaced_while_graphs_are_captured_ahead(make_runner, backend):
    """Graphs captured from the old weight are captured again and never used."""
    held = {"weight": torch.tensor(2)}
    runner = make_runner(lambda tokens: tokens * held["weight"])
    runner.capture()
    capture, seen = type(backend).capture, []

    def replacing(run, **options):
        seen.append(run)
        if len(seen) == 2:
            held["weight"] = torch.tensor(3)
            runner.invalidate()
        return capture(backend, run, **options)

    backend.capture = replacing
    runner.swap(sizes=(3, 5, 6))
    for rows in (1, 4, 6):
        assert torch.equal(runner(torch.arange(rows)), torch.arange(rows) * 3)
    assert runner.lanes[0].lifecycle.num_graphs() == 3


def test_several_lanes_are_not_swapped(make_runner):
    runner = make_runner(double, policy="vllm", lanes=2)
    with pytest.raises(ConfigError, match="lanes"):
        runner.swap(sizes=(3, 6, 8))


def test_recording_goes_on_over_a_swap(runner):
    recorder = runner.start_recording()
    served_by(runner, 3)
    runner.swap(sizes=(3, 6))
    served_by(runner, 5)
    with pytest.raises(
        ConfigError,
        match=r"to query_lens=.* recorded\. Call runner\.stop_recording",
    ):
        runner.swap(config=DispatchConfig(sizes=(3, 6), query_lens=(2,), mode="FULL"))
    runner.stop_recording()
    assert list(recorder.trace().column("num_tokens")) == [3, 5]


# -- schedules of swaps ---------------------------------------------------------------------

SWAPS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([(1, 2, 4, 8), (3, 6), (8,), (2, 5, 7, 8), (1, 3)]),
        strategies.sampled_from([None, 1, 2, 9]),
        strategies.sampled_from(["ahead", "ahead", "later", "fails", "policy", "invalidates"]),
    ),
    min_size=2,
    max_size=6,
)


def model():
    """Return a step with state, and its counter."""
    counter = torch.zeros((), dtype=torch.int64)
    weight = torch.tensor([[1.0, 2.0], [-1.0, 0.5]])

    def step(x):
        counter.add_(1)
        return torch.relu(x @ weight), counter + 0

    return step, counter, weight


def test_schedules_of_swaps_under_threads_equal_eager(backend, policy):
    @settings(max_examples=3, deadline=None)
    @given(schedule=SWAPS, lazy=strategies.booleans(), seed=strategies.integers(0, 99))
    def check(schedule, lazy, seed):
        follow(schedule, lazy, seed, type(backend)(), type(policy))

    check()


def follow(schedule, lazy, seed, backend, new_policy):
    """Swap by a schedule in one thread while three others serve; check all results."""
    step, counter, weight = model()
    runner = GraphRunner(
        step,
        {"x": StaticInput((None, 2), "float32")},
        sizes=(1, 2, 4, 8),
        mode="FULL",
        policy=new_policy(),
        backend=backend,
        state=[counter],
        lazy=lazy,
    )
    runner.capture()
    threads, steps = 3, 16
    start = threading.Barrier(threads + 1, timeout=60)
    generator = torch.Generator().manual_seed(seed)
    given_inputs = [torch.randn(1 + i % 8, 2, generator=generator) for i in range(threads * steps)]

    def serve(index):
        start.wait()
        counts = []
        for i in range(index, len(given_inputs), threads):
            result, count = runner(given_inputs[i])
            torch.testing.assert_close(result, torch.relu(given_inputs[i] @ weight))
            counts.append(int(count))
        return counts

    def swap():
        start.wait()
        for sizes, max_graphs, how in schedule:
            before, refused = runner.dispatcher.epoch, None
            try:
                if how == "fails":
                    backend.capture_fault = ValueError("planted")
                if how == "invalidates":
                    runner.invalidate()
                runner.swap(
                    sizes=sizes,
                    max_graphs=max_graphs,
                    policy=new_policy() if how == "policy" else None,
                    ahead=False if how == "later" else None,
                )
            except (SwapError, ConfigError) as error:
                refused = error
            backend.capture_fault = None
            most = before if refused else before + 1
            assert before <= runner.dispatcher.epoch <= most, refused

    with warnings.catch_warnings(), ThreadPoolExecutor(threads + 1) as pool:
        for kind in (EagerStepWarning, ChurnWarning):
            warnings.simplefilter("ignore", kind)
        serving = [pool.submit(serve, index) for index in range(threads)]
        pool.submit(swap).result(timeout=120)
        counts = [count for future in serving for count in future.result(timeout=120)]
    assert sorted(counts) == list(range(1, threads * steps + 1))
    stats = runner.stats()
    assert (stats.steps, stats.failed_steps) == (threads * steps, 0)
    assert backend.live == len({id(one) for one in runner.lanes[0].lifecycle.live().values()})
    # The current policy declares exactly these keys.
    in_force = runner.dispatcher.policy.declare(runner.config)
    assert set(runner.dispatcher.graphs) == set(runner.registry) == set(in_force)


@pytest.mark.slow
def test_memory_is_flat_over_hundreds_of_swaps(make_runner, policy):
    """Sizes, policies and limits alternate; no objects of old ones remain.

    The soak has a thousand swaps, among other changes.
    """
    step, counter, weight = model()
    runner = make_runner(
        step, {"x": StaticInput((None, 2), "float32")}, state=[counter], outputs="view"
    )
    runner.capture()
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, 2, generator=rng) for rows in range(1, 9)]
    wanted = [torch.relu(x @ weight) for x in inputs]
    ladders = [(1, 2, 4, 8), (3, 6, 8), (8,), (2, 5, 8)]

    def serve(first_swap, number):
        for swap in range(first_swap, first_swap + number):
            runner.swap(
                sizes=ladders[(swap + 1) % 4],
                policy=copy.deepcopy(policy) if swap % 3 else None,
                max_graphs=None if swap % 2 else 16,
            )
            for index in range(100):
                at = (index * 3 + swap) % 8
                result, _ = runner(inputs[at])
                if index % 25 == 0:
                    torch.testing.assert_close(result, wanted[at])

    serve(0, 100)
    objects, resident, graphs = in_use(), resident_bytes(), runner.num_bytes
    serve(100, 200)
    assert int(counter) == runner.stats().steps == 30_000
    assert runner.dispatcher.epoch == 300
    assert runner.num_bytes == graphs
    assert in_use() < objects + 500
    # A leak of 50 kB per swap would exceed this; the allocator's own growth is far less.
    assert resident_bytes() < resident + 8_000_000


def in_use():
    gc.collect()
    return len(gc.get_objects())


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
