"""GraphMemory: pools shared by runners, the common budget, and the account."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import threading
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    BufferOptions,
    GraphMemory,
    GraphRunner,
    Lanes,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
    graphed,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

WIDTH = 32


def network(seed, width=WIDTH):
    """Return a step whose intermediates are large compared with its inputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(3)]

    def step(x):
        for weight in weights:
            x = torch.tanh(x @ weight) + x
        return x

    return step


@pytest.fixture
def tape():
    return TapeBackend()


@pytest.fixture
def make(tape):
    """Return runners with sizes 1, 2, 4, 8 on one tape, which share a memory."""

    def make(step, memory, *, width=WIDTH, **settings):
        settings = {
            "policy": OneBucketPolicy(),
            "mode": "FULL",
            "sizes": (1, 2, 4, 8),
            "backend": tape,
            **settings,
        }
        return GraphRunner(
            step,
            {"x": StaticInput((None, width), "float32")},
            lanes=Lanes(settings.pop("lanes", 1), memory=memory),
            **settings,
        )

    return make


def rows_of(number, seed=0, width=WIDTH):
    return torch.randn(number, width, generator=torch.Generator().manual_seed(seed))


def live(runner):
    return runner.lanes[0].lifecycle.num_graphs()


def test_runners_that_share_a_memory_take_little_more_than_the_largest(make):
    """Separate pools need the sum of all."""
    apart = [make(network(seed), None) for seed in range(4)]
    memory = GraphMemory()
    shared = [make(network(seed), memory) for seed in range(4)]
    for runner in (*apart, *shared):
        runner.capture()
    pools = [runner.lanes[0].lane.group for runner in shared]
    assert len(set(map(id, pools))) == 1
    alone = apart[0].lanes[0].lane.group.pool_bytes()
    assert pools[0].pool_bytes() <= 1.1 * alone
    assert sum(one.lanes[0].lane.group.pool_bytes() for one in apart) == 4 * alone


@pytest.mark.slow_except("False-owned", "True-view")
@pytest.mark.parametrize("outputs", ["owned", "view"])
@pytest.mark.parametrize("share_outputs", [True, False])
def test_steps_in_any_order_compute_what_eager_computes(make, outputs, share_outputs):
    """A replay overwrites the working memory of the pool's other graphs, but no results."""
    memory, chooser = GraphMemory(), random.Random(1)
    options = RunnerOptions(buffers=BufferOptions(share_outputs=share_outputs))
    steps = [network(seed) for seed in range(3)]
    # includes a single graph, which otherwise keeps its output
    sizes = [(1, 2, 4, 8), (8,), (3, 8)]
    runners = [
        make(step, memory, sizes=own, outputs=outputs, options=options)
        for step, own in zip(steps, sizes, strict=True)
    ]
    for runner in reversed(runners):
        runner.capture()
    held = {}
    for number in range(60):
        index, rows = chooser.randrange(3), chooser.randint(1, 8)
        x = rows_of(rows, number)
        result = runners[index](x)
        held[index] = (result, steps[index](x))  # a view is valid until the runner's next call
        for got, expected in held.values():
            torch.testing.assert_close(got, expected)
    assert all(runner.stats().steps_by_mode.get("NONE", 0) == 0 for runner in runners)


def pieces(seed):
    step = network(seed)
    return [graph_piece(step), eager_piece(lambda h: h + 1), graph_piece(step)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lanes": 2}, "several lanes"),
        ({"options": RunnerOptions(memory=MemoryOptions(max_bytes=1 << 20))}, "max_bytes"),
        (
            {
                "outputs": "view",
                "options": RunnerOptions(buffers=BufferOptions(share_outputs=False)),
            },
            "outputs are views",
        ),
    ],
)
def test_what_could_overlap_or_be_overwritten_stays_apart(make, settings, why):
    """These lanes have their own pools, and the account gives the reason."""
    memory = GraphMemory()
    usual, other = make(network(0), memory), make(network(1), memory, **settings)
    usual.capture()
    other.capture()
    groups = [executor.lane.group for executor in (*usual.lanes, *other.lanes)]
    assert len(set(map(id, groups))) == len(groups)
    (account,) = memory.account()
    assert [pool.name for pool in account.pools if why in pool.name] != []
    assert sum(pool.num_graphs for pool in account.pools) == 4 * len(groups)


def test_pieces_stay_apart_for_they_may_call_another_runner(make):
    """Values between two pieces are in the pool without a reference."""
    memory, inner_step = GraphMemory(), network(5)
    inner = make(inner_step, memory)
    inner.capture()
    first, last = network(0), network(1)

    def middle(h):
        return h + inner(h) + h

    runner = make(
        [graph_piece(first), eager_piece(middle), graph_piece(last)],
        memory,
        mode="FULL_AND_PIECEWISE",
    )
    runner.capture()
    for rows in (8, 3, 5, 1):
        x = rows_of(rows, rows)
        hidden = first(x)
        torch.testing.assert_close(runner(x), last(hidden + inner_step(hidden) + hidden))
    assert runner.lanes[0].lane.group is not inner.lanes[0].lane.group


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("seed", range(4))
def test_steps_on_different_streams_wait_for_each_other(seed):
    """With a shared pool, overlapping steps would corrupt each other."""
    tape = TapeBackend(scheduler=seed)
    memory, chooser = GraphMemory(), random.Random(seed)
    steps = [network(seed) for seed in range(2)]
    settings = {"policy": OneBucketPolicy(), "mode": "FULL", "sizes": (2, 4), "backend": tape}
    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    runners = [GraphRunner(step, inputs, lanes=Lanes(memory=memory), **settings) for step in steps]
    for runner in runners:
        runner.capture()
    streams = [tape.new_stream() for _ in range(3)]
    for number in range(25):
        done = []
        for _ in range(3):
            index, stream = chooser.randrange(2), chooser.choice(streams)
            x = rows_of(chooser.randint(1, 4), number)
            with tape.use_stream(stream):
                done.append((runners[index](x), steps[index](x)))
        tape.synchronize()
        for got, expected in done:
            torch.testing.assert_close(got, expected)


def test_threads_that_call_different_runners_of_a_pool(make):
    """Their steps run one at a time, including lazy captures."""
    memory, steps = GraphMemory(), [network(seed) for seed in range(3)]
    runners = [make(step, memory, lazy=True) for step in steps]
    failures = []

    def serve(index):
        chooser = random.Random(index)
        for number in range(40):
            x = rows_of(chooser.randint(1, 8), number)
            got, expected = runners[index](x), steps[index](x)
            if not torch.allclose(got, expected, atol=1e-5):
                failures.append((index, number))

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_last_reference_to_a_runner_frees_its_graphs(make):
    """This holds for shared pools too, and with the collector off."""
    memory = GraphMemory()
    stays = make(network(0), memory)
    stays.capture()
    group = stays.lanes[0].lane.group
    before = (group.num_graphs(), group.pool_bytes(), memory.num_bytes())
    gc.collect()
    gc.disable()
    try:
        for seed in range(5):
            other = make(network(seed), memory)
            other.capture()
            del other
        assert (group.num_graphs(), group.pool_bytes(), memory.num_bytes()) == before
    finally:
        gc.enable()


# -- the budget ---------------------------------------------------------------------------


def graph_bytes(runner, memory):
    """Return the bytes that all graphs of a runner use in their own memory."""
    runner.capture()
    (account,) = memory.account()
    return account.pool_bytes + account.output_bytes + account.driver_bytes


LARGE = 256


def lazy_groups(make, room, names=("a", "b", "c")):
    """Return lazy runners in separate groups, whose budget has room for ``count`` groups."""
    alone = GraphMemory()
    one = graph_bytes(make(network(0, LARGE), alone, width=LARGE), alone)
    memory = GraphMemory()
    steps = [network(seed, LARGE) for seed in range(len(names))]
    runners = [
        make(step, memory.group(name), width=LARGE, lazy=True)
        for step, name in zip(steps, names, strict=True)
    ]
    fixed = memory.num_bytes() + len(names) * 4096  # their workspaces
    memory.max_bytes = fixed + int(room * one)
    return memory, runners, steps


def test_the_budget_of_all_holds_at_every_moment(make):
    """Lazy runners of three groups take turns and together never exceed it."""
    memory, runners, steps = lazy_groups(make, 1.5)
    chooser = random.Random(0)
    for number in range(60):
        index = number // 10 % 3
        x = rows_of(chooser.randint(1, 8), number, LARGE)
        torch.testing.assert_close(runners[index](x), steps[index](x))
        assert memory.num_bytes() <= memory.max_bytes
    assert all(runner.stats().steps_by_mode["FULL"] == 20 for runner in runners)
    assert all(runner.stats().captures > 4 for runner in runners), "no group came back"


def test_the_pool_that_was_idle_for_longest_goes_first(make):
    """Steps do not record their times, so idleness is measured in evictions."""
    _, (first, second, third), _ = lazy_groups(make, 2.5)
    x = rows_of(8, width=LARGE)
    for runner in (first, second, third):
        runner(x)  # the third finds both in use, and frees the first
    assert [live(one) for one in (first, second, third)] == [0, 1, 1]
    first(x)  # both have run since the last check
    assert [live(one) for one in (first, second, third)] == [1, 0, 1]
    second(x)  # the third has run nothing since
    assert [live(one) for one in (first, second, third)] == [1, 1, 0]


def test_a_pool_goes_as_a_whole_with_the_graphs_of_all_its_runners(make):
    """Evicting one graph of a shared pool would free almost nothing."""
    memory, runners, steps = lazy_groups(make, 1.6, ("pair", "pair", "other"))
    x = rows_of(8, width=LARGE)
    for runner in runners[:2]:
        for rows in (8, 4):
            runner(x[:rows])
    assert [live(one) for one in runners] == [2, 2, 0]
    runners[2](x)
    assert [live(one) for one in runners] == [0, 0, 1]
    for runner, step in zip(runners, steps, strict=True):
        torch.testing.assert_close(runner(x), step(x))
    assert memory.num_bytes() <= memory.max_bytes


def test_a_pool_that_is_full_is_given_up_by_its_own_runners(make):
    """The graphs that they use are captured again as far as there is room."""
    memory, (small, large), _ = lazy_groups(make, 0.2, ("one", "one"))
    small(rows_of(1, width=LARGE))
    with pytest.warns(EagerStepWarning, match="capture_failed"):
        large(rows_of(8, width=LARGE))  # would not fit even alone
    assert (live(small), live(large)) == (1, 0)
    memory, (first, second), steps = lazy_groups(make, 1.05, ("one", "one"))
    for runner, step in ((first, steps[0]), (second, steps[1])):
        for rows in (1, 2, 8):
            x = rows_of(rows, width=LARGE)
            torch.testing.assert_close(runner(x), step(x))
    assert live(second) >= 1
    assert memory.num_bytes() <= memory.max_bytes


def test_a_session_skips_what_finds_no_room(make):
    _, (first, second), _ = lazy_groups(make, 1.1, ("one", "two"))
    assert first.capture().num_graphs == 4
    report = second.capture()
    assert (report.num_graphs, len(report.skipped)) == (0, 4)
    assert "of the shared GraphMemory" in next(iter(report.skipped.values()))
    assert live(first) == 4  # a session takes nothing from the other groups


def test_static_inputs_count_and_must_find_room(make):
    memory = GraphMemory(max_bytes=2000)
    make(network(0), memory)  # 8 rows of 32 numbers: freed immediately
    kept = make(network(0), memory)
    with pytest.raises(ConfigError, match="max_bytes") as caught:
        make(network(1), memory)
    assert "static inputs" in str(caught.value)
    assert memory.num_bytes() == kept.lanes[0].lane.static_bytes == 1024


def test_an_idle_pool_makes_room_for_static_inputs(make):
    memory = GraphMemory()
    first = make(network(0), memory)
    first.capture()
    memory.max_bytes = memory.num_bytes() + 500
    make(network(1), memory.group("second"))
    assert live(first) == 0


def test_a_pool_in_use_is_not_taken_away(make):
    """The pool's thread holds its step lock and may wait for ours."""
    _, (first, second), steps = lazy_groups(make, 1.2, ("one", "two"))
    x, seen = rows_of(8, width=LARGE), []
    first(x)

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            seen.append(second(x))

    with first.lanes[0].lane.group.lock:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(30)
    torch.testing.assert_close(seen[0], steps[1](x))
    assert (live(first), live(second)) == (1, 0)
    assert second.stats().eager_by_reason.keys() == {"capture_failed"}


# -- the account --------------------------------------------------------------------------


def test_the_account_adds_up(make, tape):
    """Each byte that a device would allocate is in exactly one line."""
    memory = GraphMemory(max_bytes=1 << 30)
    runners = [make(network(seed), memory.group(f"g{seed % 2}")) for seed in range(4)]
    for runner in runners:
        runner.capture()
    (account,) = memory.account()
    assert account.num_bytes == memory.num_bytes() == memory.num_bytes("cpu")
    assert [(one.name, one.num_lanes, one.num_graphs) for one in account.pools] == [
        ("g0", 2, 8),
        ("g1", 2, 8),
    ]
    assert account.static_bytes == 4 * 8 * WIDTH * 4
    assert account.output_bytes == 4 * 8 * WIDTH * 4
    assert account.workspace_bytes == 2 * tape.workspace_bytes(runners[0].lanes[0].lane.stream) > 0
    used, reserved, _ = tape.device_memory()
    assert account.driver_bytes == used - reserved > 0
    assert account.taken_bytes >= used
    assert account.unexplained_bytes == 0
    assert memory.num_bytes("cuda:7") == 0
    for runner in runners:
        runner.clear()
    (account,) = memory.account()
    assert account.driver_bytes == account.pool_bytes == account.unexplained_bytes == 0


def test_what_others_take_is_unexplained(make, tape):
    """The bytes must not be hidden in another line."""
    memory = GraphMemory()
    runner = make(network(0), memory)
    runner.capture()
    x = torch.ones(64)
    theirs = tape.capture(lambda: (x + 1) * 2, stream=tape.new_stream(), pool=tape.new_pool())
    (account,) = memory.account()
    assert account.unexplained_bytes == 2 * 64
    assert (theirs.num_steps, live(runner)) == (2, 4)


def test_it_prints_where_memory_has_gone(make):
    memory = GraphMemory(max_bytes=3 << 20)
    assert str(memory) == "GraphMemory(max_bytes=3145728)"
    make(network(0), memory).capture()
    text = str(memory)
    assert text.startswith("Graphs on cpu: 0.0")
    assert "of 3.00 MiB" in text
    lines = ("pools", "default", "outputs", "static inputs", "workspaces", "driver", "unexplained")
    assert all(any(line.strip().startswith(one) for line in text.splitlines()) for one in lines)


# -- callers that accept a memory -----------------------------------------------------------


@pytest.mark.parametrize("given", [1 << 30, MemoryOptions(max_bytes=1), "default"])
def test_only_a_memory_is_taken_for_one(make, given):
    with pytest.raises(ConfigError, match="a GraphMemory, or one of its groups"):
        make(network(0), given)


@pytest.mark.parametrize("limit", [-1, 1.5, "1 GiB", True])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(ConfigError, match="max_bytes"):
        GraphMemory(max_bytes=limit)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_group_has_a_name(name):
    with pytest.raises(ConfigError, match="group"):
        GraphMemory().group(name)


def test_a_limit_of_bytes_is_the_memorys_alone(make):
    runner = make(network(0), GraphMemory())
    with pytest.raises(ConfigError, match="GraphMemory"):
        runner.swap(max_bytes=1 << 20)


def test_runners_with_a_backend_by_name_share_a_pool_too(make):
    memory = GraphMemory()
    pair = [make(network(seed), memory, backend="tape") for seed in range(2)]
    assert pair[0].lanes[0].lane.group is pair[1].lanes[0].lane.group


def test_copies_share_it_and_other_processes_begin_anew(make):
    memory = GraphMemory(max_bytes=1 << 30)
    runner = make(Doubled(), memory, backend="tape", policy="vllm")
    for twin in (copy.copy(runner), copy.deepcopy(runner)):
        assert twin.spec.lanes.memory is memory
        assert twin.lanes[0].lane.group is runner.lanes[0].lane.group
    other = pickle.loads(pickle.dumps(runner))  # noqa: S301
    assert other.spec.lanes.memory.max_bytes == memory.max_bytes
    assert other.spec.lanes.memory is not memory
    other.capture()
    torch.testing.assert_close(other(rows_of(3)), rows_of(3) * 2)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


# -- graphed --------------------------------------------------------------------------------


def test_all_forms_of_a_graphed_share_one_pool_and_one_account():
    step = network(0)
    fast = graphed(lambda x, scale: step(x) * scale, sizes=[2, 8])
    for rows, scale in ((8, 1.0), (2, 1.0), (8, 2.0), (5, 3.0), (1, 2.0)):
        x = rows_of(rows, rows)
        torch.testing.assert_close(fast(x, scale), step(x) * scale)
    memory = fast.graphed.memory
    (account,) = memory.account()
    assert [(pool.name, pool.num_lanes) for pool in account.pools] == [("graphed", 3)]
    assert len({id(one.lanes[0].lane.group) for one in fast.graphed.runners}) == 1
    assert "graphed" in str(memory)


def test_a_limit_of_bytes_is_of_all_forms_together():
    """Separate limits per form would allow sixteen times the bytes."""
    limited = RunnerOptions(memory=MemoryOptions(max_bytes=26_000))
    step = network(0)
    fast = graphed(lambda x, scale: step(x) * scale, sizes=[8], options=limited)
    assert fast.graphed.memory.max_bytes == 26_000
    for scale in range(12):
        x = rows_of(8, scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            torch.testing.assert_close(fast(x, float(scale)), step(x) * scale)
        assert fast.graphed.memory.num_bytes() <= 26_000
    assert sum(one.stats().evictions for one in fast.graphed.runners) > 0


def test_a_graphed_may_share_with_others(make):
    memory = GraphMemory()
    step = network(0)
    fast = graphed(step, sizes=[2, 8], memory=memory.group("both"), backend="tape")
    runner = make(network(1), memory.group("both"), backend="tape")
    runner.capture()
    x = rows_of(3)
    torch.testing.assert_close(fast(x), step(x))
    torch.testing.assert_close(runner(x), network(1)(x))
    assert fast.graphed.memory is memory
    (account,) = memory.account()
    assert [(pool.name, pool.num_lanes) for pool in account.pools] == [("both", 2)]
    with pytest.raises(ConfigError, match="a GraphMemory"):
        graphed(step, memory=1 << 30)


def test_the_page_on_memory(capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "memory.md"
    account = page.read_text(encoding="utf-8").split("## The account")[1].split("\n## ")[0]
    names = {"__name__": "example"}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)  # noqa: S102 - the page's own code
    printed = capsys.readouterr().out
    rows = [
        cell for cell in re.findall(r"^\| ([a-z ]+) \|", account, re.MULTILINE) if cell != "line"
    ]
    assert rows
    assert [row for row in rows if row not in printed] == []
