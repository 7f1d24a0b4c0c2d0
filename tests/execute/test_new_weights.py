"""Weights in new storage: one call releases their graphs, even with replays in flight.

Runs on a deferred tape, whose scheduler delays queued replays: memory that is freed or overwritten
too early changes their results.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Lanes,
    StaticInput,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.execute.lane import Lane  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

SEEDS = range(2)
ROWS = {"x": StaticInput((None, 4), "float32")}


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


class Layers:
    """Two layers, whose weights are replaced or loaded in halves."""

    def __init__(self):
        self.weights = [torch.randn(4, 4), torch.randn(4, 4)]

    def __call__(self, x):
        return torch.tanh(x @ self.weights[0]) @ self.weights[1]

    def replace(self, numbers=(0, 1)):
        """Replace weights; the memory of the old ones is reused from now on."""
        for number in numbers:
            old, self.weights[number] = self.weights[number], torch.randn(4, 4)
            old.fill_(float("nan"))


class InTurn:
    name = "in-turn"

    def __init__(self):
        self.steps = 0

    def choose(self, step, lanes):
        self.steps += 1
        return (self.steps - 1) % len(lanes)


def in_flight(make_runner, seed, lanes):
    """Return a runner, its step, pending results, and the expected results."""
    layers, backend = Layers(), TapeBackend(scheduler=seed)
    settings = {"lanes": Lanes(lanes, InTurn())} if lanes > 1 else {}
    runner = make_runner(layers, ROWS, sizes=(2, 8), backend=backend, **settings)
    runner.capture()
    given = [torch.randn(1 + number % 8, 4) for number in range(8)]
    want = [layers(x) for x in given]
    with backend.use_stream(backend.new_stream()):
        if lanes > 1:
            results = [runner.submit(x).result() for x in given]
        else:
            results = [runner(x) for x in given]
    return runner, layers, results, want


def all_right(runner, results, want):
    runner.backend.synchronize()
    return all(torch.allclose(got, one) for got, one in zip(results, want, strict=True))


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("lanes", [1, 3])
def test_invalidation_while_replays_are_in_flight(make_runner, quiet, lanes):
    """Queued replays finish with the old memory, which is reused only afterwards."""
    for seed in SEEDS:
        runner, layers, results, want = in_flight(make_runner, seed, lanes)
        assert runner.invalidate("reload") == 2 * lanes
        layers.replace()
        assert all_right(runner, results, want), f"seed {seed}"
        assert {entry.state for entry in runner.registry.entries.values()} == {KeyState.STALE}
        x = torch.randn(3, 4)
        same(runner(x), layers(x))
        assert runner.capture().failed == {}
        same(runner(x), layers(x))
        assert runner.stats().eager_by_reason == {"stale": 1}


def test_missing_wait_before_the_release_shows(make_runner, quiet, monkeypatch):
    """The preceding test fails if an invalidation does not wait for replays in flight."""
    monkeypatch.setattr(Lane, "synchronize", lambda self: None)
    wrong = 0
    for seed in SEEDS:
        runner, layers, results, want = in_flight(make_runner, seed, 1)
        runner.invalidate("reload")
        layers.replace()
        wrong += not all_right(runner, results, want)
    assert wrong


@pytest.mark.slow_except("3-True")
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
def test_reload_that_failed_half_way_leaves_a_runner_that_works(make_runner, quiet, lanes, lazy):
    """One layer is new and one old, with replays in flight: the next step uses these."""
    for seed in SEEDS:
        runner, layers, results, want = in_flight(make_runner, seed, lanes)
        for member in runner.lanes:
            member.lifecycle.lazy = lazy
            member.dispatcher.set_lazy(lazy)

        def reload(runner=runner, layers=layers):
            try:
                runner.invalidate("reload")
                layers.replace([0])
                raise OSError("the file ends here")
            finally:
                runner.invalidate("reload")

        with pytest.raises(OSError, match="ends here"):
            reload()
        assert all_right(runner, results, want), f"seed {seed}"
        x = torch.randn(3, 4)
        same(runner(x), layers(x))
        assert runner.capture().failed == {}
        same(runner(x), layers(x))
        layers.replace([1])  # the reload that succeeds
        runner.invalidate("reload")
        runner.capture()
        same(runner(x), layers(x))
        assert runner.stats().eager_by_reason == ({} if lazy else {"stale": 1})


def test_capture_that_fails_after_an_invalidation_leaves_eager(make_runner, quiet):
    """With a weight of a wrong shape, keys fail by name; steps run again after a repair."""
    layers = Layers()
    runner = make_runner(layers, ROWS, sizes=(2, 8))
    runner.capture()
    runner.invalidate("reload")
    whole, layers.weights[1] = layers.weights[1], torch.randn(3, 4)
    assert len(runner.capture().failed) == 2
    with pytest.raises(RuntimeError, match="shape"):
        runner(torch.randn(3, 4))
    layers.weights[1] = whole
    x = torch.randn(3, 4)
    same(runner(x), layers(x))
    assert runner.invalidate("reload") == 0
    assert runner.capture().failed == {}
    same(runner(x), layers(x))
    assert runner.stats().steps_by_mode["FULL"] == 1
