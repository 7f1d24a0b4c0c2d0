"""Check mode finds what makes a replay differ from eager, and passes what does not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import StaticInput, eager_piece, graph_piece  # noqa: E402
from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.execute import CheckWarning  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

INPUT = {"x": StaticInput((None, 4), "float32")}


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


class Planted:
    """A step whose surroundings can be changed under the graph's feet."""

    def __init__(self):
        self.weight = torch.ones(4, 4)
        self.factor = 2.0

    def __call__(self, x):
        return (x @ self.weight) * self.factor


def replaced_weight(step, runner):
    step.weight = torch.full((4, 4), 3.0)


def baked_scalar(step, runner):
    step.factor = 5.0


def moved_input(step, runner):
    for captured in runner.lifecycle.live().values():
        captured.buffers.tensors = [tensor.clone() for tensor in captured.buffers.tensors]


def overwritten_output(step, runner):
    for captured in runner.lifecycle.live().values():
        captured.leaves = tuple(leaf.clone() for leaf in captured.leaves)


@pytest.mark.parametrize("plant", [replaced_weight, baked_scalar, moved_input, overwritten_output])
def test_planted_corruption_is_found_and_its_key_put_out_of_use(make_runner, keys, quiet, plant):
    """The caller gets eager's result, once; the message says what differed."""
    step = Planted()
    runner = make_runner(step, INPUT, check=1)
    runner.capture()
    x = torch.arange(12.0).view(3, 4) + 1
    plant(step, runner)
    with pytest.warns(CheckWarning, match="FULL tokens=4"):
        result = runner(x)
    same(result, step(x))
    entry = runner.registry.get(keys.full(4))
    assert entry.state is KeyState.FAILED
    assert entry.reason.startswith("check: ")
    assert runner.stats().eager_by_reason == {"check_failed": 1}
    same(runner(x), step(x))  # eager from now on


def test_stale_tail_is_found(make_runner):
    runner = make_runner(lambda x: x.sum(0), INPUT, check=1)
    runner.capture()
    runner(torch.ones(8, 4))
    for captured in runner.lifecycle.live().values():
        captured.buffers.clean_from = 0  # a lie: eight rows hold ones
    with pytest.warns(CheckWarning):
        same(runner(torch.ones(5, 4)), torch.full((4,), 5.0))


def test_clean_steps_pass_and_change_state_once(make_runner):
    """With state, an eager piece in between, and every kind of call."""
    cache = torch.zeros(4)

    def write(x):
        cache.add_(1)
        return x.cumsum(0)

    pieces = [
        graph_piece(lambda x: x * 2),
        eager_piece(write),
        graph_piece(lambda x: (x + cache, x.shape[0])),
    ]
    runner = make_runner(pieces, INPUT, check=1, state=[cache])
    runner.capture()
    for number in range(20):
        x = torch.randn(1 + number % 8, 4)
        mixed, rows = runner(x, ceiling=1 + number % 2)
        same(mixed, (x * 2).cumsum(0) + number + 1)
        assert rows == x.shape[0]
    assert cache.tolist() == [20.0] * 4
    stats = runner.stats()
    assert stats.eager_by_reason == {}
    assert stats.steps == 20


def test_random_steps_are_compared_where_they_can_be(make_runner):
    """At the bucket's size both draw the same; below it they cannot, and are not compared."""
    runner = make_runner(lambda x: x + torch.rand_like(x), INPUT, check=1)
    runner.capture()
    for rows in (8, 5, 8):
        runner(torch.zeros(rows, 4))
    assert runner.stats().steps_by_mode["FULL"] == 3


def test_samples_only(make_runner):
    ran = []

    def step(x):
        ran.append(1)
        return x

    runner = make_runner(step, INPUT, check=5)
    runner.capture()
    ran.clear()
    for _ in range(20):
        runner(torch.ones(3, 4))
    assert len(ran) == 4


def test_late_use_of_a_view_shows(make_runner):
    """Not plausible values of another call, but NaN."""
    runner = make_runner(lambda x: (x * 2, x.long()), INPUT, check=1_000_000, outputs="view")
    runner.capture()
    first, whole = runner(torch.ones(3, 4))
    same(first, torch.full((3, 4), 2.0))
    runner(torch.ones(5, 4))
    assert first.isnan().all()
    assert (whole == torch.iinfo(torch.int64).max).all()


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_bad_setting(make_runner, value):
    with pytest.raises(ConfigError, match="check"):
        make_runner(lambda x: x, INPUT, check=value)
