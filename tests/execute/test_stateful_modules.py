"""Modules with state of every kind, called in any order, compute what eager computes.

A random module is made of parts: counters, flags, state made in the first call, caches, buffers
written in place or replaced. It is run by a GraphRunner (captured ahead or lazily) and by
``graphed``, beside a twin that is run plainly. After every call the results are equal, and so is
all state, in Python as in tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, graphed  # noqa: E402

WIDTH = 3
ROWS = st.integers(1, 4)


def _counter(self: Any, x: Any) -> Any:
    self.calls += 1
    return x + self.calls


def _unread_counter(self: Any, x: Any) -> Any:
    self.stats["calls"] = self.stats.get("calls", 0) + 1
    return x * 2


def _log(self: Any, x: Any) -> Any:
    self.log.append(tuple(x.shape))
    return x + 1


def _assigned(self: Any, x: Any) -> Any:
    self.h = self.h * 0.5 + 1
    return x + self.h


def _in_place(self: Any, x: Any) -> Any:
    self.total.add_(1)
    return x + self.total


def _replaced_buffer(self: Any, x: Any) -> Any:
    self.ring, self.other = self.other, self.ring
    return x + self.ring


def _first_call(self: Any, x: Any) -> Any:
    if self.fresh:
        self.total.zero_()
        self.fresh = False
    self.total.add_(2)
    return x - self.total


def _lazy_state(self: Any, x: Any) -> Any:
    if self.made is None:
        self.made = torch.zeros(WIDTH)
    self.made.add_(1)
    return x * self.made


def _lazy_table(self: Any, x: Any) -> Any:
    if self.table is None:
        self.table = torch.arange(float(WIDTH))
    return x + self.table


def _plain(self: Any, x: Any) -> Any:
    return torch.tanh(self.linear(x))


PARTS: dict[str, Callable[[Any, Any], Any]] = {
    one.__name__[1:]: one
    for one in (
        _plain,
        _counter,
        _unread_counter,
        _log,
        _assigned,
        _in_place,
        _replaced_buffer,
        _first_call,
        _lazy_state,
        _lazy_table,
    )
}
#: Parts that leave Python state alone once they were called.
REPLAYED = {"plain", "in_place", "first_call", "lazy_state", "lazy_table"}


class Model(torch.nn.Module):
    """A chain of parts."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.linear = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        for name in ("total", "ring"):
            self.register_buffer(name, torch.ones(WIDTH))
        self.register_buffer("other", torch.full((WIDTH,), 3.0))
        self.calls, self.fresh = 0, True
        self.stats: dict[str, int] = {}
        self.log: list[Any] = []
        self.h, self.made, self.table = torch.zeros(WIDTH), None, None

    def forward(self, x: Any) -> Any:
        for name in self.parts:
            x = PARTS[name](self, x)
        return x


def _state(model: Model) -> dict[str, Any]:
    values = {**vars(model), **dict(model.named_buffers())}
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in values.items()
        if not name.startswith("_")
    }


def _reset(model: Model) -> None:
    model.fresh = True


def _new_weight(model: Model) -> None:
    model.linear.weight = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.25), requires_grad=False)


def _new_buffer(model: Model) -> None:
    model.total = torch.full((WIDTH,), 7.0)


def _nothing(_model: Model) -> None:
    return


ACTIONS = (_nothing, _nothing, _nothing, _reset, _new_weight, _new_buffer)


def _runner(model: Model, *, lazy: bool) -> Any:
    runner = GraphRunner(
        model,
        {"x": StaticInput((None, WIDTH), "float32")},
        sizes=[2, 4],
        mode="FULL",
        backend="tape",
        lazy=lazy,
    )
    if not lazy:
        runner.capture()
    return runner


WAYS: dict[str, Callable[[Model], Any]] = {
    "captured ahead": lambda model: _runner(model, lazy=False),
    "lazy": lambda model: _runner(model, lazy=True),
    "graphed": lambda model: graphed(model, backend="tape"),
}


def _num_replays(way: Any) -> int:
    stats = way.graphed.stats() if hasattr(way, "graphed") else way.stats()
    return int(stats.steps_by_mode.get("FULL", 0))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@given(
    parts=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4).map(tuple),
    calls=st.lists(st.tuples(ROWS, st.sampled_from(ACTIONS)), min_size=3, max_size=8),
)
def test_any_stateful_module_computes_what_eager_computes(
    way: str, parts: tuple[str, ...], calls: list[tuple[int, Any]]
) -> None:
    """Results and all state are those of a twin that runs plainly, after every call."""
    torch.manual_seed(0)
    model = Model(parts).eval()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        run = WAYS[way](model)
        for rows, action in calls:
            for one in (model, twin):
                action(one)
            x = torch.rand(rows, WIDTH)
            torch.testing.assert_close(run(x), twin(x))
            assert _state(model) == _state(twin)
    quiet = all(action is _nothing for _, action in calls)
    if quiet and set(parts) <= REPLAYED:
        assert _num_replays(run) >= len(calls) - 2
