"""Memory: order of captures, limits that hold, new weights."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import StaticInput  # noqa: E402
from dispatchkit.errors import RegistryError  # noqa: E402
from dispatchkit.execute import ChurnWarning, EagerStepWarning  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

WIDTH = 64


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def wide():
    """A step with intermediates and outputs that are large beside its inputs."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))

    def step(x):
        hidden = torch.relu(x @ weight)
        return torch.tanh(hidden @ weight) + hidden

    return step


INPUT = {"x": StaticInput((None, WIDTH), "float32")}


def rows_of(number, seed=0):
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_largest_first_takes_about_the_memory_of_the_largest(make_runner, wide):
    runner = make_runner(wide, INPUT)
    runner.capture([key for key in runner.registry if key.num_tokens == 8])
    largest = runner.num_bytes
    runner.capture()
    assert runner.lifecycle.num_graphs() == 4
    assert runner.num_bytes <= 1.05 * largest


def test_a_session_orders_itself(make_runner, wide, backend):
    runner = make_runner(wide, INPUT)
    sizes = []
    runner.capture(
        sorted(runner.registry, key=lambda key: key.num_tokens),
        progress=lambda done, total, key: sizes.append(key and key.num_tokens),
    )
    assert sizes == [8, 4, 2, 1, None]


@pytest.mark.parametrize("order", [(1, 2, 4, 8), (4, 8, 1, 2), (8, 1, 4, 2)])
def test_any_other_order_is_correct_too(make_runner, wide, order):
    """Growing memory moves nothing that earlier graphs read or write."""
    runner = make_runner(wide, INPUT, lazy=True)
    for size in order:
        runner(rows_of(size))
    for seed, number in enumerate((8, 3, 1, 5, 2, 8, 4)):
        x = rows_of(number, seed)
        same(runner(x), wide(x))
    assert runner.stats().captures == 4


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning")
@pytest.mark.parametrize("eviction", ["lru", "benefit"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_number_of_graphs_never_passes_the_limit(make_runner, backend, limit, eviction):
    """Not even for a moment while one takes another's place."""
    runner = make_runner(
        lambda x: x * 2,
        {"x": StaticInput((None,), "int64")},
        sizes=tuple(range(1, 9)),
        lazy=True,
        max_graphs=limit,
        eviction=eviction,
    )
    chooser = random.Random(limit)
    for _ in range(60):
        rows = chooser.randint(1, 8)
        same(runner(torch.arange(rows)), torch.arange(rows) * 2)
        assert backend.live <= limit
    assert backend.most_live == limit
    assert backend.live == runner.lifecycle.num_graphs() == limit
    stats = runner.stats()
    assert stats.steps == stats.steps_by_mode["FULL"] == 60


def test_limit_of_a_session_skips_the_rest(make_runner, wide, backend, keys):
    runner = make_runner(wide, INPUT, max_graphs=2)
    report = runner.capture()
    assert report.num_graphs == 2
    assert set(report.skipped) == {keys.full(1), keys.full(2)}
    assert all("max_graphs is 2" in why for why in report.skipped.values())
    assert backend.most_live == 2


def test_no_graphs_at_all(make_runner, wide, quiet):
    runner = make_runner(wide, INPUT, max_graphs=0, lazy=True)
    x = rows_of(3)
    same(runner(x), wide(x))
    assert runner.lifecycle.num_graphs() == 0
    assert runner.stats().eager_by_reason == {"capture_failed": 1}


def test_least_recently_used_goes_first(make_runner, keys):
    runner = make_runner(lambda tokens: tokens, lazy=True, max_graphs=2)
    for rows in (8, 4, 8, 2):
        runner(torch.arange(rows))
    assert set(runner.lifecycle.live()) == {keys.full(8), keys.full(2)}
    assert runner.registry.get(keys.full(4)).state is KeyState.EVICTED


def test_least_useful_for_its_size_goes_first(make_runner, keys):
    runner = make_runner(lambda tokens: tokens, lazy=True, max_graphs=2, eviction="benefit")
    for rows in (2, 2, 2, 8, 8, 4):  # 8 is used last, and serves least for what it holds
        runner(torch.arange(rows))
    assert set(runner.lifecycle.live()) == {keys.full(2), keys.full(4)}


def test_bytes_never_pass_the_limit(make_runner, wide, backend):
    """At the end of every call; a graph that does not fit runs eager and says so."""
    free = make_runner(wide, INPUT)
    free.capture()
    limit = int(free.num_bytes * 0.6)
    runner = make_runner(wide, INPUT, lazy=True, max_bytes=limit)
    chooser = random.Random(1)
    with pytest.warns(EagerStepWarning, match="capture_failed"):
        runner(rows_of(8))
    for _ in range(40):
        rows = chooser.randint(1, 8)
        x = rows_of(rows)
        same(runner(x), wide(x))
        assert runner.num_bytes <= limit
    stats = runner.stats()
    assert stats.steps_by_mode["FULL"] > 0
    assert "capture_failed" in stats.eager_by_reason


def test_bytes_of_a_session_skip_what_does_not_fit(make_runner, wide):
    free = make_runner(wide, INPUT)
    free.capture()
    runner = make_runner(wide, INPUT, max_bytes=int(free.num_bytes * 0.6))
    report = runner.capture()
    assert [key.num_tokens for key in report.skipped] == [8]
    assert report.num_graphs == 3
    assert runner.num_bytes <= free.num_bytes * 0.6
    x = rows_of(3)
    same(runner(x), wide(x))


def test_recapture_of_everything_does_not_hold_old_and_new_together(make_runner, wide, backend):
    runner = make_runner(wide, INPUT)
    runner.capture()
    before = runner.num_bytes
    for _ in range(3):
        assert runner.invalidate() == 4
        assert backend.live == 0
        assert runner.num_bytes == 0
        assert runner.capture().num_graphs == 4
        assert runner.num_bytes == before
    assert backend.most_live == 4


def test_endless_new_shapes_lead_to_a_warning(make_runner):
    runner = make_runner(lambda tokens: tokens, sizes=tuple(range(1, 41)), lazy=True, max_graphs=2)
    for rows in range(1, 17):
        runner(torch.arange(rows))
    with pytest.warns(ChurnWarning, match="max_graphs"):
        call_all(runner, range(17, 21))
    call_all(runner, range(1, 41))  # told once: a second warning would be an error here


def call_all(runner, sizes):
    for rows in sizes:
        runner(torch.arange(rows))


def test_eviction_frees_what_only_that_graph_held(make_runner, wide, keys):
    runner = make_runner(wide, INPUT)
    runner.capture()
    runner.clear()
    assert runner.lifecycle.num_graphs() == 0
    x = rows_of(8)
    with pytest.warns(EagerStepWarning, match="evicted"):
        same(runner(x), wide(x))
    with pytest.raises(RegistryError):
        runner.evict(keys.full(8))


def test_survivors_of_an_eviction_are_right(make_runner, wide, keys):
    runner = make_runner(wide, INPUT)
    runner.capture()
    runner.evict(keys.full(8))
    for seed, number in enumerate((3, 1, 2, 4)):
        x = rows_of(number, seed)
        same(runner(x), wide(x))
    assert runner.stats().steps_by_mode["FULL"] == 4


# -- new weights ------------------------------------------------------------------------------


def test_values_copied_in_place_are_seen_by_the_next_replay(make_runner):
    module = torch.nn.Linear(4, 4)
    runner = make_runner(module, {"input": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.randn(3, 4)
    with torch.no_grad():
        same(runner(x), module(x))
        module.weight.mul_(3)
        same(runner(x), module(x))


def test_replaced_weights_after_invalidate(make_runner, quiet):
    """One call: nothing replays the old ones, and a new session captures the new."""
    module = torch.nn.Linear(4, 4)
    runner = make_runner(module, {"input": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.randn(3, 4)
    module.weight = torch.nn.Parameter(torch.randn(4, 4))
    assert runner.invalidate("reload") == 4
    with torch.no_grad():
        same(runner(x), module(x))
        assert runner.stats().eager_by_reason == {"stale": 1}
        assert runner.capture().num_graphs == 4
        same(runner(x), module(x))
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_lazy_runner_captures_anew_after_invalidate(make_runner):
    factor = [torch.tensor(2)]
    runner = make_runner(lambda tokens: tokens * factor[0], lazy=True)
    runner(torch.arange(3))
    factor[0] = torch.tensor(5)
    runner.invalidate()
    same(runner(torch.arange(3)), torch.arange(3) * 5)
    assert runner.stats().steps_by_mode["FULL"] == 2


def test_replaced_weights_do_not_crash_before_invalidate(make_runner):
    """A graph holds what it reads: old values, never freed memory."""
    module = torch.nn.Linear(4, 4)
    runner = make_runner(module, {"input": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.randn(3, 4)
    with torch.no_grad():
        old = module(x)
    module.weight = torch.nn.Parameter(torch.randn(4, 4))
    same(runner(x), old)
