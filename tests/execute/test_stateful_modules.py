"""Modules with state of every kind, called in any order, compute what eager computes.

A random module consists of parts: counters, flags, state created in the first call, caches, buffers
written in place or replaced, dropout, statistics. A GraphRunner (captured ahead or lazily) or
``graphed`` runs it, and a twin runs plainly. After every call results and all Python and tensor
state are equal. The reason of a step that ran eager for Python state names an attribute of one of
its parts.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, graphed  # noqa: E402

WIDTH = 3
SIZES = (2, 4)
#: Fraction of all steps; one step in three belongs to a model whose every call changes Python
#: state.
LEAST_REPLAYED = 0.6


@dataclasses.dataclass
class Settings:
    """Fields that a step reads, and one that it writes."""

    scale: float = 2.0
    shifted: bool = False
    seen: int = 0


# -- parts whose steps replay, at the latest after a first call -----------------------------


def _plain(self: Any, x: Any) -> Any:
    return torch.tanh(self.linear(x))


def _in_place(self: Any, x: Any) -> Any:
    self.total.add_(1)
    return x + self.total


def _in_a_list(self: Any, x: Any) -> Any:
    for number, level in enumerate(self.levels):
        level.mul_(0.5).add_(number)
    return x * self.levels[-1]


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


def _lazy_buffer(self: Any, x: Any) -> Any:
    if "cache" not in self.inner._buffers:
        self.inner.register_buffer("cache", torch.full((WIDTH,), 0.5))
    return x - self.inner.cache


def _fields(self: Any, x: Any) -> Any:
    x = x * self.settings.scale
    return x + 1 if self.settings.shifted else x


def _dropout(_self: Any, x: Any) -> Any:
    return torch.nn.functional.dropout(x, 0.5)


def _statistics(self: Any, x: Any) -> Any:
    # updates running statistics without a declared write
    self.norm(torch.ones(2, WIDTH) * self.total)
    return x + self.norm.running_mean


# -- parts that change Python state in each call ----------------------------------------------


def _counter(self: Any, x: Any) -> Any:
    self.calls += 1
    return x + self.calls


def _unread_counter(self: Any, x: Any) -> Any:
    self.stats["calls"] = self.stats.get("calls", 0) + 1
    return x * 2


def _field_counter(self: Any, x: Any) -> Any:
    self.settings.seen += 1
    return x * 0.5


def _log(self: Any, x: Any) -> Any:
    self.log.append(tuple(x.shape))
    return x + 1


def _window(self: Any, x: Any) -> Any:
    self.window.append(len(self.window))
    return x - self.window[0]


def _assigned(self: Any, x: Any) -> Any:
    self.h = self.h * 0.5 + 1
    return x + self.h


def _replaced_buffer(self: Any, x: Any) -> Any:
    self.ring, self.other = self.other, self.ring
    return x + self.ring


def _named(*parts: Callable[[Any, Any], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    return {one.__name__[1:]: one for one in parts}


REPLAYED = _named(
    _plain,
    _in_place,
    _in_a_list,
    _first_call,
    _lazy_state,
    _lazy_table,
    _lazy_buffer,
    _fields,
    _dropout,
    _statistics,
)
CHANGING = _named(
    _counter, _unread_counter, _field_counter, _log, _window, _assigned, _replaced_buffer
)
PARTS = REPLAYED | CHANGING
#: Names in reasons of eager steps: attributes of parts and of objects that callers replace.
NAMED = {
    "first_call": ("fresh", "made", "table", "cache"),
    "python_state": ("calls", "stats", "seen", "log", "window", ".h ", "ring", "other"),
    "weights_replaced": ("linear", "total"),
    "value_changed": ("fresh",),
    "stale": ("",),
}


class Model(torch.nn.Module):
    """A chain of parts."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.linear = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        self.inner = torch.nn.Module()
        for name in ("total", "ring"):
            self.register_buffer(name, torch.ones(WIDTH))
        self.register_buffer("other", torch.full((WIDTH,), 3.0))
        self.calls, self.fresh = 0, True
        self.settings = Settings()
        self.stats: dict[str, int] = {}
        self.log: list[Any] = []
        self.window: deque[int] = deque([5], maxlen=3)
        self.levels = [torch.zeros(WIDTH), torch.ones(WIDTH)]
        self.h, self.made, self.table = torch.zeros(WIDTH), None, None

    def forward(self, x: Any) -> Any:
        for name in self.parts:
            x = PARTS[name](self, x)
        return x


def _plainly(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [_plainly(one) for one in value]
    return copy.deepcopy(value)


def _state(model: Model) -> dict[str, Any]:
    values = {**vars(model), **dict(model.named_buffers())}
    return {name: _plainly(value) for name, value in values.items() if not name.startswith("_")}


# -- changes between calls ------------------------------------------------------------------


def _nothing(*_model: Model) -> None:
    return


def _reset(model: Model) -> None:
    model.fresh = True


def _new_weight(model: Model) -> None:
    model.linear.weight = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.25), requires_grad=False)


def _new_buffer(model: Model) -> None:
    model.total = torch.full((WIDTH,), 7.0)


def _new_scale(model: Model) -> None:
    model.settings.scale += 0.5


def _switch(model: Model) -> None:
    model.settings.shifted = not model.settings.shifted


ACTIONS = (*[_nothing] * 14, _reset, _new_weight, _new_buffer, _new_scale, _switch)
#: Python reads these values: a change shows within some steps, or immediately after invalidate.
SAID = {_new_scale, _switch}


@attrs.frozen
class Way:
    """A way to run a model with graphs.

    Attributes:
        run: Function that calls the model.
        invalidate: Function that invalidates graphs after a change of what the model reads.
        capture: Function that captures graphs again after replacements were detected.
        runners: Function that returns the runners made so far.
    """

    run: Callable[[Any], Any]
    invalidate: Callable[[], Any]
    capture: Callable[[], Any]
    runners: Callable[[], list[Any]]


def _by_runner(model: Model, *, lazy: bool) -> Way:
    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    settings: dict[str, Any] = {"sizes": SIZES, "mode": "FULL", "backend": "tape", "lazy": lazy}
    runner = GraphRunner(model, inputs, **settings)

    if lazy:
        return Way(runner, runner.invalidate, _nothing, lambda: [runner])
    runner.capture()
    return Way(runner, runner.invalidate, runner.capture, lambda: [runner])


def _by_graphed(model: Model) -> Way:
    fast = graphed(model, sizes=SIZES, backend="tape")
    return Way(fast, fast.graphed.invalidate, _nothing, lambda: list(fast.graphed.runners))


WAYS: dict[str, Callable[[Model], Way]] = {
    "captured ahead": lambda model: _by_runner(model, lazy=False),
    "lazy": lambda model: _by_runner(model, lazy=True),
    "graphed": _by_graphed,
}


def _check_reasons(way: Way, said: str) -> tuple[int, int]:
    """Check the reasons of eager steps; return the counts of replayed and all steps."""
    modes: Counter[str] = Counter()
    for runner in way.runners():
        stats = runner.stats()
        modes.update(stats.steps_by_mode)
        for reason in stats.eager_by_reason:
            assert any(name in said for name in NAMED[reason]), (reason, said)
    return modes["FULL"], modes.total()


def _models() -> st.SearchStrategy[tuple[str, ...]]:
    quiet = st.lists(st.sampled_from(sorted(REPLAYED)), min_size=1, max_size=4)
    any_part = st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4)
    return st.sampled_from((quiet, quiet, any_part)).flatmap(lambda one: one).map(tuple)


def _play(name: str, parts: tuple[str, ...], calls: list[tuple[int, Any]]) -> tuple[int, int]:
    """Call a model and its twin; return the counts of replayed and all steps."""
    torch.manual_seed(0)
    model = Model(parts).eval()
    model.norm.train()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        way = WAYS[name](model)
        for number, (rows, action) in enumerate(calls):
            for one in (model, twin):
                action(one)
            if action in SAID:
                way.invalidate()
                way.capture()
            if "dropout" in parts:  # padding draws too: only full buckets give eager's numbers
                rows = 2 if rows <= 2 else 4
            x = torch.rand(rows, WIDTH)
            torch.manual_seed(number)
            got = way.run(x)
            torch.manual_seed(number)
            torch.testing.assert_close(got, twin(x))
            assert _state(model) == _state(twin)
            if action is not _nothing:
                way.capture()
    return _check_reasons(way, "\n".join(str(one.message) for one in said))


def test_a_flag_of_a_step_that_changed_more_in_its_first_calls_is_seen_at_once() -> None:
    """A window full of one number stops changing, so that the step is captured."""
    calls = [*[(2, _nothing)] * 4, (2, _new_weight), *[(2, _nothing)] * 4, (2, _reset)]
    replayed, _ = _play("captured ahead", ("window", "first_call"), calls)
    assert replayed


def test_one_first_call_serves_the_graphs_of_all_sizes() -> None:
    """State that it creates exists for the other sizes too."""
    calls = [(rows, _nothing) for rows in (2, 4, 2, 3)]
    assert _play("captured ahead", ("lazy_state",), calls) == (3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_any_stateful_module_computes_what_eager_computes(name: str) -> None:
    """After every call, results and all state equal those of a twin that runs plainly."""
    replayed: list[tuple[int, int]] = []

    @given(
        parts=_models(),
        calls=st.lists(
            st.tuples(st.integers(1, 4), st.sampled_from(ACTIONS)), min_size=6, max_size=12
        ),
    )
    def check(parts: tuple[str, ...], calls: list[tuple[int, Any]]) -> None:
        replayed.append(_play(name, parts, calls))

    check()
    num_replayed, num_steps = map(sum, zip(*replayed, strict=True))
    assert num_replayed >= LEAST_REPLAYED * num_steps, f"{num_replayed} of {num_steps} replayed"
