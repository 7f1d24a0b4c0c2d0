"""Memory: order of captures, limits, new weights."""

from __future__ import annotations

import gc
import random
import weakref

import attrs
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from dispatchkit import (  # noqa: E402
    BufferOptions,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import RegistryError  # noqa: E402
from dispatchkit.execute import ChurnWarning, EagerStepWarning  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

WIDTH = 64


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def wide():
    """A step whose intermediates and outputs are large compared with its inputs."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))

    def step(x):
        hidden = torch.relu(x @ weight)
        return torch.tanh(hidden @ weight) + hidden

    return step


INPUT = {"x": StaticInput((None, WIDTH), "float32")}


def rows_of(number, seed=0):
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_largest_first_takes_about_the_memory_of_the_largest(make_runner, wide):
    """Graphs of one pool share its memory."""
    runner = make_runner(wide, INPUT)
    runner.capture([key for key in runner.registry if key.num_tokens == 8])
    largest = runner.num_bytes
    runner.capture()
    assert runner.lanes[0].lifecycle.num_graphs() == 4
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
    """When memory grows, nothing that earlier graphs read or write moves."""
    runner = make_runner(wide, INPUT, lazy=True)
    for size in order:
        runner(rows_of(size))
    for seed, number in enumerate((8, 3, 1, 5, 2, 8, 4)):
        x = rows_of(number, seed)
        same(runner(x), wide(x))
    assert runner.stats().captures == 4


@pytest.mark.slow_except("1-lru", "3-benefit")
@pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning")
@pytest.mark.parametrize("eviction", ["lru", "benefit"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_number_of_graphs_never_passes_the_limit(make_runner, backend, limit, eviction):
    """It holds even while one graph replaces another."""
    runner = make_runner(
        lambda x: x * 2,
        {"x": StaticInput((None,), "int64")},
        sizes=tuple(range(1, 9)),
        lazy=True,
        options=RunnerOptions(memory=MemoryOptions(max_graphs=limit, eviction=eviction)),
    )
    chooser = random.Random(limit)
    for _ in range(60):
        rows = chooser.randint(1, 8)
        same(runner(torch.arange(rows)), torch.arange(rows) * 2)
        assert backend.live <= limit
    assert backend.most_live == limit
    assert backend.live == runner.lanes[0].lifecycle.num_graphs() == limit
    stats = runner.stats()
    assert stats.steps == stats.steps_by_mode["FULL"] == 60


def test_limit_of_a_session_skips_the_rest(make_runner, wide, backend, keys):
    runner = make_runner(wide, INPUT, options=RunnerOptions(memory=MemoryOptions(max_graphs=2)))
    report = runner.capture()
    assert report.num_graphs == 2
    assert set(report.skipped) == {keys.full(1), keys.full(2)}
    assert all("max_graphs is 2" in why for why in report.skipped.values())
    assert backend.most_live == 2
    with pytest.warns(EagerStepWarning, match="max_graphs is reached"):
        runner(rows_of(1))
    assert "max_graphs is reached" in runner.explain(1).note
    runner.evict(keys.full(4))
    assert "max_graphs" not in runner.explain(1).note
    runner.capture([keys.full(1)])
    assert runner.explain(3).decision.reason == "evicted"
    assert "max_graphs is reached" in runner.explain(3).note


def test_no_graphs_at_all(make_runner, wide, quiet):
    runner = make_runner(
        wide, INPUT, lazy=True, options=RunnerOptions(memory=MemoryOptions(max_graphs=0))
    )
    x = rows_of(3)
    same(runner(x), wide(x))
    assert runner.lanes[0].lifecycle.num_graphs() == 0
    assert runner.stats().eager_by_reason == {"capture_failed": 1}


def test_least_recently_used_goes_first(make_runner, keys):
    runner = make_runner(
        lambda tokens: tokens, lazy=True, options=RunnerOptions(memory=MemoryOptions(max_graphs=2))
    )
    for rows in (8, 4, 8, 2):
        runner(torch.arange(rows))
    assert set(runner.lanes[0].lifecycle.live()) == {keys.full(8), keys.full(2)}
    assert runner.registry.get(keys.full(4)).state is KeyState.EVICTED


def test_least_useful_for_its_size_goes_first(make_runner, keys):
    runner = make_runner(
        lambda tokens: tokens,
        lazy=True,
        options=RunnerOptions(memory=MemoryOptions(max_graphs=2, eviction="benefit")),
    )
    for rows in (2, 2, 2, 8, 8, 4):  # 8 is the most recent, and serves least for its size
        runner(torch.arange(rows))
    assert set(runner.lanes[0].lifecycle.live()) == {keys.full(2), keys.full(4)}


@pytest.fixture
def metered(backend):
    """Return a tape that records the peak memory of all pools."""

    class MeteredTape(type(backend)):
        def __init__(self):
            super().__init__()
            self.begin()

        def begin(self):
            """Measure allocations from here on."""
            self.pools = []
            self.most_bytes = self.most_live = self.live = 0

        def new_pool(self):
            self.pools.append(super().new_pool())
            return self.pools[-1]

        def capture(self, run, *, stream, pool, generators=()):
            graph = super().capture(run, stream=stream, pool=pool, generators=generators)
            self.most_bytes = max(self.most_bytes, sum(one.num_bytes for one in self.pools))
            return graph

    return MeteredTape()


def bytes_of_all(make_runner, step, inputs=None, **settings):
    runner = make_runner(step, inputs or INPUT, **settings)
    runner.capture()
    return runner.num_bytes


def drive(runner, step, calls, chooser, limit):
    for _ in range(calls):
        x = rows_of(chooser.randint(1, 8), chooser.randint(0, 3))
        same(runner(x), step(x))
        assert runner.num_bytes <= limit


@pytest.mark.slow_except("0.6-True")
@pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning")
@pytest.mark.parametrize("share_outputs", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_bytes_never_pass_the_limit(make_runner, wide, metered, quiet, share, share_outputs):
    """It holds even during a capture; keys that do not fit run eager with a reason."""
    options = RunnerOptions(buffers=BufferOptions(share_outputs=share_outputs))
    needed = bytes_of_all(make_runner, wide, backend=metered, options=options)
    limit = int(needed * share)
    metered.begin()
    runner = make_runner(
        wide,
        INPUT,
        lazy=True,
        backend=metered,
        options=attrs.evolve(options, memory=MemoryOptions(max_bytes=limit)),
    )
    drive(runner, wide, 60, random.Random(1), limit)
    assert metered.most_bytes <= limit
    stats = runner.stats()
    assert stats.steps_by_mode["FULL"] > 0
    assert set(stats.eager_by_reason) == (set() if share == 1.0 else {"capture_failed"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning")
@pytest.mark.parametrize("budget", [{"max_graphs": 2}, {"max_bytes": 0.6}, {"max_bytes": 0.3}])
def test_budgets_hold_under_many_calls(make_runner, wide, metered, quiet, budget, is_nightly):
    """The counts of graphs and bytes stay within the limits at every moment."""
    calls = 10_000 if is_nightly else 1_000
    limit = 1 << 40
    if "max_bytes" in budget:
        limit = int(bytes_of_all(make_runner, wide, backend=metered) * budget["max_bytes"])
        budget = {"max_bytes": limit}
    metered.begin()
    options = RunnerOptions(memory=MemoryOptions(**budget))
    runner = make_runner(wide, INPUT, lazy=True, backend=metered, options=options)
    drive(runner, wide, calls, random.Random(2), limit)
    assert metered.most_bytes <= limit
    assert metered.most_live <= budget.get("max_graphs", 4)
    assert runner.stats().steps == calls


def test_pool_goes_as_a_group_and_what_is_still_wanted_is_captured_anew(
    make_runner, wide, backend, keys
):
    """Captured from small to large, they waste memory; with the large one first all fit."""
    limit = bytes_of_all(make_runner, wide)
    runner = make_runner(
        wide, INPUT, lazy=True, options=RunnerOptions(memory=MemoryOptions(max_bytes=limit))
    )
    for rows in (1, 2, 4, 8):
        runner(rows_of(rows))
    assert runner.stats().evictions > 0
    for rows in (1, 2, 4, 8, 3, 1):
        x = rows_of(rows, rows)
        same(runner(x), wide(x))
        assert runner.num_bytes <= limit
    assert set(runner.lanes[0].lifecycle.live()) == {keys.full(size) for size in (1, 2, 4, 8)}
    assert runner.stats().eager_by_reason == {}


def test_idle_capture_brings_back_what_gave_way(make_runner, wide, keys, quiet):
    """Evicted graphs that are still used come back at the next session."""
    limit = bytes_of_all(make_runner, wide)
    runner = make_runner(wide, INPUT, options=RunnerOptions(memory=MemoryOptions(max_bytes=limit)))
    for size in (1, 2, 4):
        runner.capture([keys.full(size)])
    runner(rows_of(8))
    assert runner.controls.capture_next() == keys.full(8)
    assert runner.stats().evictions == 3
    assert runner.lanes[0].lifecycle.num_graphs() == 4
    assert runner.num_bytes <= limit


def test_key_that_could_never_fit_evicts_nothing(make_runner, wide, keys, quiet):
    """A graph too large for the limit is refused, and the others stay."""
    limit = int(bytes_of_all(make_runner, wide) * 0.6)
    runner = make_runner(
        wide, INPUT, lazy=True, options=RunnerOptions(memory=MemoryOptions(max_bytes=limit))
    )
    for rows in (1, 2, 8, 8, 1, 2):
        x = rows_of(rows)
        same(runner(x), wide(x))
    stats = runner.stats()
    assert stats.evictions == 0
    assert stats.eager_by_reason == {"capture_failed": 2}
    entry = runner.registry.get(keys.full(8))
    assert entry.reason.startswith("over_budget: ")
    assert entry.attempts == 1


def test_graph_with_outputs_of_its_own_goes_alone(make_runner, wide, keys):
    """Evicting it frees its memory, so the others may stay."""
    own = RunnerOptions(buffers=BufferOptions(share_outputs=False))
    limit = bytes_of_all(make_runner, wide, options=own) - 1
    runner = make_runner(
        wide,
        INPUT,
        lazy=True,
        options=RunnerOptions(
            memory=MemoryOptions(max_bytes=limit), buffers=BufferOptions(share_outputs=False)
        ),
    )
    for rows in (8, 4, 2, 1):
        x = rows_of(rows)
        same(runner(x), wide(x))
    assert runner.stats().evictions == 1
    assert set(runner.lanes[0].lifecycle.live()) == {keys.full(size) for size in (4, 2, 1)}


def test_budget_of_bytes_of_pieces(make_runner, metered, quiet):
    """Each graph of a step counts, and so do the values between graphs."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))

    def project(x):
        return torch.relu(x @ weight) @ weight, x

    def mix(pair):
        return pair[0].cumsum(0) + pair[1]

    def finish(mixed):
        return torch.tanh(mixed @ weight)

    def whole(x):
        return finish(mix(project(x)))

    pieces = [graph_piece(project), eager_piece(mix), graph_piece(finish)]
    settings = {"mode": "PIECEWISE", "backend": metered}
    full = bytes_of_all(make_runner, pieces, **settings)
    for share in (0.4, 0.7, 1.0):
        limit = int(full * share)
        metered.begin()
        runner = make_runner(
            pieces,
            INPUT,
            lazy=True,
            options=RunnerOptions(memory=MemoryOptions(max_bytes=limit)),
            **settings,
        )
        drive(runner, whole, 40, random.Random(3), limit)
        assert metered.most_bytes <= limit
        assert runner.stats().steps_by_mode["PIECEWISE"] > 0


class Holding:
    """A graph that keeps its operations' storages alive until it is released."""

    def __init__(self, graph, holds):
        self._graph, self.holds, self.host_tensors = graph, holds, []
        self.num_plain_operations = 0

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def release(self):
        self.holds.clear()
        self._graph.release()


@pytest.fixture
def holding(backend):
    """Return a tape whose graphs keep their storages, and which can capture unwatched."""

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.given = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    self.given[storage._cdata] = storage
            return func(*args, **(kwargs or {}))

    class HoldingTape(type(backend)):
        @property
        def capabilities(self):
            return attrs.evolve(super().capabilities, unwatched_captures=True)

        def new_notes(self):
            return None

        def capture(self, run, *, watched=True, notes=None, compiled=False, draws=True, **settings):
            watch = Watch()

            def watched_run():
                with watch:
                    return run()

            graph = super().capture(watched_run if watched else run, **settings)
            return Holding(graph, list(watch.given.values()))

    return HoldingTape()


def test_memory_between_pieces_goes_with_the_graphs(make_runner, holding, quiet):
    pieces = [
        graph_piece(lambda x: x * 2),
        eager_piece(lambda x: x.cumsum(0)),
        graph_piece(lambda x: x + 1),
    ]
    runner = make_runner(pieces, INPUT, mode="PIECEWISE", backend=holding)
    runner.capture()
    assert runner.num_bytes > 0
    runner.swap(max_bytes=0)
    assert runner.num_bytes == 0
    runner.swap(max_bytes=None)
    runner.capture()
    x = rows_of(3)
    same(runner(x), (x * 2).cumsum(0) + 1)


class Unrehearsed:
    """A device that cannot measure a capture's memory in advance."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        if name == "rehearse":
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_device_without_rehearsals_goes_by_the_first_warmup(make_runner, wide, backend, quiet):
    """A graph that is larger than expected is released immediately."""
    limit = int(bytes_of_all(make_runner, wide) * 0.6)
    runner = make_runner(
        wide,
        INPUT,
        lazy=True,
        backend=Unrehearsed(backend),
        options=RunnerOptions(memory=MemoryOptions(max_bytes=limit)),
    )
    drive(runner, wide, 60, random.Random(1), limit)
    assert runner.stats().steps_by_mode["FULL"] > 0
    runner = make_runner(
        wide,
        INPUT,
        lazy=True,
        backend=Unrehearsed(backend),
        options=RunnerOptions(memory=MemoryOptions(max_bytes=limit)),
    )
    runner.lanes[0].lifecycle._budget._forecast = lambda key: 0  # a wrong forecast
    drive(runner, wide, 60, random.Random(1), limit)
    assert runner.stats().steps_by_mode["FULL"] > 0


def test_graphs_captured_elsewhere_keep_their_memory(make_runner, wide, backend, keys):
    """They do not belong to the evicted pool."""
    limit = bytes_of_all(make_runner, wide)
    runner = make_runner(
        wide, INPUT, lazy=True, options=RunnerOptions(memory=MemoryOptions(max_bytes=limit))
    )
    static = torch.zeros(2, WIDTH)
    stream, pool = backend.new_stream(), backend.new_pool()
    graph = backend.capture(lambda: wide(static), stream=stream, pool=pool)
    runner.controls.register(
        keys.full(2), graph, inputs={"x": static}, outputs=graph.outputs, has_effect=False
    )
    for rows in (1, 4, 8, 2, 1, 4):
        x = rows_of(rows, rows)
        same(runner(x), wide(x))
    assert runner.stats().evictions > 0
    assert runner.controls.get(keys.full(2)).is_external
    assert runner.stats().eager_by_reason == {}


def test_bytes_of_a_session_skip_what_does_not_fit(make_runner, wide):
    free = make_runner(wide, INPUT)
    free.capture()
    runner = make_runner(
        wide,
        INPUT,
        options=RunnerOptions(memory=MemoryOptions(max_bytes=int(free.num_bytes * 0.6))),
    )
    report = runner.capture()
    assert [key.num_tokens for key in report.skipped] == [8]
    assert report.num_graphs == 3
    assert runner.num_bytes <= free.num_bytes * 0.6
    x = rows_of(3)
    same(runner(x), wide(x))


def test_an_only_graph_copies_its_outputs_nowhere(make_runner, wide):
    """No other graph shares its memory."""
    runner = make_runner(wide, INPUT, sizes=(8,), mode="FULL")
    runner.capture()
    assert runner.lanes[0].lane.outputs.num_bytes == 0
    results = [(x, runner(x)) for x in map(rows_of, (3, 8))]
    for x, result in results:
        same(result, wide(x))


def test_memory_that_outgrown_graphs_still_use_is_counted(make_runner, wide):
    """A larger graph allocates new memory for outputs; the smaller one keeps its own."""
    runner = make_runner(wide, INPUT, lazy=True)
    runner(rows_of(2))
    runner(rows_of(8))
    assert runner.lanes[0].lane.outputs.num_bytes == (2 + 8) * WIDTH * 4
    runner.evict(next(key for key in runner.lanes[0].lifecycle.live() if key.num_tokens == 2))
    assert runner.lanes[0].lane.outputs.num_bytes == 8 * WIDTH * 4


def test_recapture_of_everything_does_not_hold_old_and_new_together(make_runner, wide, backend):
    """The old graphs are released before the first new capture."""
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
    """Graphs that come and go repeatedly cause one warning."""
    runner = make_runner(
        lambda tokens: tokens,
        sizes=tuple(range(1, 41)),
        lazy=True,
        options=RunnerOptions(memory=MemoryOptions(max_graphs=2)),
    )
    for rows in range(1, 17):
        runner(torch.arange(rows))
    with pytest.warns(ChurnWarning, match="max_graphs"):
        call_all(runner, range(17, 21))
    call_all(runner, range(1, 41))  # warns once: a second warning would be an error here


@pytest.mark.parametrize("way", ["clear", "evict"])
def test_graphs_that_their_owner_takes_away_are_no_churn(make_runner, way):
    """A larger budget would keep none of them, so there must be no warning (an error here)."""
    limits = RunnerOptions(memory=MemoryOptions(max_graphs=2))
    runner = make_runner(lambda tokens: tokens, sizes=(1, 2), lazy=True, options=limits)
    for _ in range(40):
        call_all(runner, (1, 2))
        if way == "clear":
            runner.clear()
        else:
            for key in runner.lanes[0].lifecycle.live():
                runner.evict(key)
    assert runner.stats().captures == 80
    assert runner.stats().evictions == (80 if way == "evict" else 0)


def call_all(runner, sizes):
    for rows in sizes:
        runner(torch.arange(rows))


def test_eviction_frees_what_only_that_graph_held(make_runner, wide, keys):
    runner = make_runner(wide, INPUT)
    runner.capture()
    runner.clear()
    assert runner.lanes[0].lifecycle.num_graphs() == 0
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


def test_nothing_waits_for_a_garbage_collection(make_runner, wide, backend, quiet):
    """This concerns objects reached by failed captures and graphs named in errors."""
    pools, new_pool = weakref.WeakSet(), backend.new_pool

    def watched_pool():
        pools.add(pool := new_pool())
        return pool

    backend.new_pool = watched_pool
    pieces = [graph_piece(wide), eager_piece(lambda h: h.cumsum(0)), graph_piece(torch.tanh)]
    own = BufferOptions(share_outputs=False)
    roomy = make_runner(pieces, INPUT, mode="PIECEWISE", options=RunnerOptions(buffers=own))
    roomy.capture()
    limit = roomy.num_bytes // 2
    pools.clear()
    gc.collect()
    gc.disable()
    try:
        runner = make_runner(
            pieces,
            INPUT,
            mode="PIECEWISE",
            options=RunnerOptions(memory=MemoryOptions(max_bytes=limit), buffers=own),
        )
        for _ in range(3):
            report = runner.capture()
            assert report.num_graphs
            assert report.skipped
            kept = [runner.controls.get(key) for key in runner.registry]
            runner.invalidate()
            assert sum(pool.num_bytes for pool in pools) == 0
            assert any(kept)
    finally:
        gc.enable()


# -- new weights ------------------------------------------------------------------------------


def test_values_copied_in_place_are_seen_by_the_next_replay(make_runner):
    """A graph reads memory, not values."""
    module = torch.nn.Linear(4, 4)
    runner = make_runner(module, {"input": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.randn(3, 4)
    with torch.no_grad():
        same(runner(x), module(x))
        module.weight.mul_(3)
        same(runner(x), module(x))


def test_replaced_weights_after_invalidate(make_runner, quiet):
    """After one call, no old graph is replayed, and a new session captures new weights."""
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


def test_replaced_weights_do_not_crash_before_invalidate(make_runner, quiet):
    """A graph keeps the memory that it reads: old values, but never freed memory."""
    module = torch.nn.Linear(4, 4)
    runner = make_runner(module, {"input": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.randn(3, 4)
    with torch.no_grad():
        old = module(x)
        module._parameters["weight"] = torch.nn.Parameter(torch.randn(4, 4))
        new = module(x)
    for _ in range(20):
        result = runner(x)
        assert any(torch.allclose(result, one) for one in (old, new))
