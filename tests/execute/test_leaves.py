"""Results that are not tensors, and containers and weights passed by calls."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import re
import threading
import types
import warnings

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, RunnerOptions, StaticInput, graphed  # noqa: E402
from dispatchkit.errors import InputError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.io.structure import flatten, is_same_value  # noqa: E402


class Kind(enum.Enum):
    DENSE = 1


Pair = collections.namedtuple("Pair", "y name")

X = {"x": StaticInput((None, 3), "float32")}
ROWS = (4, 3, 8, 5, 1, 3, 6, 7, 2)


def make_runner(step, **settings):
    settings = {"sizes": [2, 4, 8], "mode": "FULL", "backend": "tape", **settings}
    return GraphRunner(step, X, options=RunnerOptions(check=1), **settings)


def assert_same(got, want):
    """Compare results of equal structure: values by type, tensors by content."""
    ours, structure = flatten(got)
    theirs, other = flatten(want)
    assert structure == other
    assert type(got) is type(want)
    for one, two in zip(ours, theirs, strict=True):
        if isinstance(two, torch.Tensor):
            torch.testing.assert_close(one, two)
        else:
            assert is_same_value(one, two), (one, two)


# -- values next to tensors -----------------------------------------------------------------

VALUES = {
    "text": lambda x: "dense",
    "enum": lambda x: Kind.DENSE,
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "set": lambda x: {"a", 1},
    "frozenset": lambda x: frozenset([Kind.DENSE]),
    "type": lambda x: dict,
    "nothing": lambda x: None,
    "nan": lambda x: float("nan"),
    "numpy scalar": lambda x: np.float32(0.5),
    "numpy array": lambda x: np.arange(3),
    "size of one row": lambda x: x[0].shape,
    "named tuple": lambda x: Pair(x + 1, "pair"),
    "rows": lambda x: x.shape[0],
    "size": lambda x: x.shape,
    "elements": lambda x: x.numel(),
    "half of the rows": lambda x: x.shape[0] // 2,
    "few or many": lambda x: "few" if x.shape[0] < 6 else "many",
    "even": lambda x: x.shape[0] % 2 == 0,
    "text of the rows": lambda x: f"{x.shape[0]} rows",
    "range of the rows": lambda x: range(x.shape[0]),
    "record without tensors": lambda x: types.SimpleNamespace(rows=x.shape[0]),
}


@pytest.mark.slow_except(
    "text",
    "dtype",
    "set",
    "numpy array",
    "named tuple",
    "rows",
    "size",
    "half of the rows",
    "text of the rows",
    "record without tensors",
)
@pytest.mark.parametrize("name", VALUES)
def test_values_beside_tensors_are_those_of_the_call(name):
    """This holds for values that depend on the number of rows; every step replays."""

    def step(x):
        return {"y": x * 2, "value": VALUES[name](x), "more": (x.sum(1), [x.shape[1]])}

    runner = make_runner(step, lazy=True)
    for rows in ROWS:
        x = torch.randn(rows, 3)
        assert_same(runner(x=x), step(x))
    assert runner.stats().steps_by_mode["FULL"] == len(ROWS)


@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_what_a_caller_does_to_a_value_changes_no_later_result(outputs):
    """Sets and arrays are copied for each call; tensors are not affected."""
    runner = make_runner(lambda x: (x + 1, {"a"}, np.zeros(2)), outputs=outputs)
    runner.capture()
    for _ in range(3):
        _, names, array = runner(x=torch.ones(3, 3))
        assert names == {"a"}
        assert array.tolist() == [0, 0]
        names.add("b")
        array += 1


def test_values_are_right_behind_an_eager_piece_and_beside_axes():
    """Includes Python pieces at each replay and results cut along an axis."""
    from dispatchkit import Axis
    from dispatchkit.execute import eager_piece, graph_piece

    pieces = [graph_piece(lambda x: (x * 2, "a")), eager_piece(lambda v: (v[0] + 1, v[0].shape[0]))]
    runner = make_runner(pieces, mode="PIECEWISE")
    runner.capture()
    for rows in (3, 4, 7):
        y, count = runner(x=torch.ones(rows, 3))
        assert (y.shape[0], count) == (rows, rows)
    assert runner.stats().steps_by_mode["PIECEWISE"] == 3
    runner = GraphRunner(
        lambda x, length: types.SimpleNamespace(y=x + 1, name="a", rows=x.shape[0]),
        {"x": StaticInput((None, "length"), "float32")},
        axes=[Axis("length", (4, 8))],
        sizes=[4],
        mode="FULL",
        backend="tape",
    )
    runner.capture()
    result = runner(x=torch.ones(3, 5), length=5)
    assert (result.y.shape, result.name, result.rows) == ((3, 5), "a", 3)
    assert runner.stats().steps_by_mode["FULL"] == 1


@pytest.mark.parametrize(
    "make", [itertools.count().__next__, object, threading.Lock], ids=["counter", "object", "lock"]
)
def test_a_value_that_no_replay_could_return_is_refused_and_named(make):
    """The value differs between runs on the same rows."""
    runner = make_runner(lambda x: (x + 1, make()))
    report = runner.capture()
    assert report.num_graphs == 0
    assert all("python_state" in one or "Output 1" in one for one in report.failed.values())
    with pytest.warns(EagerStepWarning):
        first, second = (runner(x=torch.ones(2, 3))[1] for _ in range(2))
    assert first is not second


# -- objects that hold tensors --------------------------------------------------------------


@dataclasses.dataclass
class Output:
    y: object
    name: str = "dataclass"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenOutput:
    y: object
    rows: int


@attrs.frozen
class AttrsOutput:
    y: object


class Bag(dict):
    """A dictionary that is not registered with torch's pytree."""


class Layer:
    def __init__(self, keys):
        self.keys, self.length = keys, keys.shape[0]


class Cache:
    """A cache as in libraries: plain objects in a list."""

    def __init__(self, layers):
        self.layers = layers


def bag_of(x):
    bag = Bag(y=x * 2)
    bag.name = "bag"
    return bag


OBJECTS = {
    "dataclass": lambda x: Output(x * 2),
    "frozen dataclass": lambda x: FrozenOutput([x * 2], x.shape[0]),
    "attrs": lambda x: AttrsOutput({"a": x * 2}),
    "namespace": lambda x: types.SimpleNamespace(y=x * 2, inner=types.SimpleNamespace(z=x + 1)),
    "dictionary": bag_of,
    "cache": lambda x: (x + 1, Cache([Layer(x * 2), Layer(x * 3)])),
}


@pytest.mark.slow_except("dataclass", "attrs", "cache")
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_with_tensors_are_new_in_each_result(name):
    """As in the plain call, each result has its own objects and tensors."""
    step = OBJECTS[name]
    runner = make_runner(step, lazy=True)
    results = []
    for rows in ROWS:
        x = torch.randn(rows, 3)
        got, want = runner(x=x), step(x)
        assert_same(got, want)
        results.append((got, want))
    for got, want in results:  # owned: later calls have not changed them
        assert_same(got, want)
    assert runner.stats().steps_by_mode["FULL"] == len(ROWS)


def test_an_object_that_the_step_keeps_is_returned_itself():
    """It contains the tensors that the graph wrote."""
    cache = Cache([torch.zeros(3)])

    def step(x):
        cache.layers[0].copy_(x[0])
        return x + 1, cache

    runner = make_runner(step, lazy=True)
    for number, rows in enumerate((3, 4, 3)):
        _, kept = runner(x=torch.full((rows, 3), float(number)))
        assert kept is cache
        assert cache.layers[0].tolist() == [number] * 3
    assert runner.stats().steps_by_mode["FULL"] == 3


def test_an_object_within_itself_is_refused():
    def step(x):
        ring = Cache([x + 1])
        ring.layers.append(ring)
        return ring

    runner = make_runner(step)
    assert runner.capture().num_graphs == 0


# -- containers of the caller ---------------------------------------------------------------


def replace_key(d):
    d["h"] = torch.tanh(d["h"] + d["x"])
    return d["h"].sum(-1)


def add_key(d):
    d["new"] = d["x"] + d["h"]
    return d["new"] * 2


def remove_key(d):
    return d.pop("h") + d["x"] if "h" in d else d["x"] * 1


def append_to_inner_list(d):
    d["log"].append(d["x"] + 1)
    return d["x"] * 2


def count_in_inner_dictionary(d):
    d["counts"]["calls"] += 1
    return d["x"] * d["counts"]["calls"]


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (replace_key, r"args\[0\]\['h'\]"),
        (add_key, r"args\[0\]\['new'\]"),
        (remove_key, r"args\[0\]\['h'\]"),
        (append_to_inner_list, r"args\[0\]\['log'\]\[1\]"),
        (count_in_inner_dictionary, r"args\[0\]\['counts'\]\['calls'\]"),
    ],
)
@pytest.mark.parametrize(
    "kind", [dict, pytest.param(collections.OrderedDict, marks=pytest.mark.slow)]
)
def test_what_a_step_writes_to_a_container_is_written_to_the_callers_own(step, named, kind):
    """Keys are written, added and removed, and items appended, in nested containers too."""

    def fresh():
        return kind(
            x=torch.ones(4, 3), h=torch.zeros(4, 3), log=[torch.zeros(4)], counts={"calls": 0}
        )

    run = graphed(step, backend="tape", sizes=[4])
    plain, given = fresh(), fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for _ in range(3):
            torch.testing.assert_close(run(given), step(plain))
    assert_same(given, plain)
    reasons = collections.Counter()
    for one in run.graphed.stats().runners.values():
        reasons.update(one.eager_by_reason)
    assert reasons["container_written"] == sum(reasons.values()) > 0
    assert re.search(named, str(run.graphed.runners[0]))


def test_a_deque_that_a_step_rotates_is_the_callers_own():
    def step(steps):
        steps.append(steps.popleft() * 2)
        return steps[-1] + 1

    run = graphed(step, backend="tape")
    plain = collections.deque([torch.ones(2), torch.zeros(2)])
    given = collections.deque([torch.ones(2), torch.zeros(2)])
    with pytest.warns(EagerStepWarning, match="container_written"):
        torch.testing.assert_close(run(given), step(plain))
    torch.testing.assert_close(run(given), step(plain))
    assert_same(given, plain)


def test_containers_that_are_only_read_or_are_the_steps_own_have_graphs():
    """A step may write to its own copy."""

    def step(d, *, more):
        own = dict(d)
        own["h"] = own["x"] + more[0]
        return own["h"]

    run = graphed(step, backend="tape")
    for rows in (3, 4):
        assert run({"x": torch.ones(rows)}, more=[torch.ones(rows)]).tolist() == [2] * rows
    assert run.graphed.stats().steps_by_mode["FULL"] == 2


# -- gradients ------------------------------------------------------------------------------


class Scorer:
    def __init__(self, weight):
        self.weight = weight

    def score(self, x):
        return x @ self.weight

    __call__ = score


def closure(weight):
    return lambda x: x @ weight


def default(weight):
    return lambda x, w=weight: x @ w


def in_list(weight):
    layers = [{"weight": weight}]
    return lambda x: x @ layers[0]["weight"]


def in_module(weight):
    module = torch.nn.Linear(2, 2, bias=False).eval()
    module.weight = torch.nn.Parameter(weight.detach())
    return module.forward


HOLDERS = {
    "closure": closure,
    "method": lambda weight: Scorer(weight).score,
    "object": Scorer,
    "partial": lambda weight: functools.partial(lambda w, x: x @ w, weight),
    "default": default,
    "list": in_list,
    "module": in_module,
    "computed from a leaf": lambda weight: closure(weight * 2),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_gradients_flow_however_a_function_holds_its_weights(name):
    """Calls without gradients before and after use graphs."""
    run = graphed(HOLDERS[name](torch.ones(2, 2, requires_grad=True)), backend="tape")
    x = torch.ones(3, 2)
    with torch.no_grad():
        assert not run(x).requires_grad
    with pytest.warns(EagerStepWarning, match="no_grad"):
        assert run(x).requires_grad
    assert run(x).requires_grad
    with torch.no_grad():
        assert not run(x).requires_grad
    stats = run.graphed.stats()
    assert stats.plain == {"gradients": 2}
    assert stats.steps_by_mode["FULL"] == 2
    with pytest.raises(InputError, match="gradients"):
        run.graphed.submit(x)


def test_results_that_need_no_gradients_have_graphs_after_the_first_call():
    weight = torch.ones(2, 2, requires_grad=True)
    run = graphed(lambda x: (x @ weight).detach(), backend="tape")
    for _ in range(3):
        assert not run(torch.ones(3, 2)).requires_grad
    stats = run.graphed.stats()
    assert stats.plain == {"first_call": 1}
    assert stats.steps_by_mode["FULL"] == 2


def test_weights_frozen_and_thawed_are_seen():
    """``requires_grad_`` is called between calls."""
    weight = torch.ones(2, 2)
    run = graphed(lambda x: x @ weight, backend="tape")
    x = torch.ones(3, 2)
    assert not run(x).requires_grad
    weight.requires_grad_()
    with pytest.warns(EagerStepWarning, match="gradients"):
        assert run(x).requires_grad
    weight.requires_grad_(False)
    assert not run(x).requires_grad
    run(x)
    assert run.graphed.stats().steps_by_mode["FULL"] == 2


def test_a_step_that_differentiates_runs_eager_with_the_callers_gradients():
    """Holds for graphed and a runner; a step that enables gradients only inside is captured."""

    def forces(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x**3).sum(), x)[0]

    def inside(x):
        with torch.enable_grad():
            return forces(x)

    x = torch.full((4, 3), 2.0)
    run, runner = graphed(forces, backend="tape"), make_runner(forces, lazy=True)
    for one in (run, runner):
        with pytest.warns(EagerStepWarning, match="enable_grad"):
            assert one(x).tolist() == [[12] * 3] * 4
        assert one(x[:3]).tolist() == [[12] * 3] * 3
    assert runner.stats().eager_by_reason == {"gradients": 2}
    with pytest.raises(RuntimeError) as raised, pytest.warns(EagerStepWarning):
        make_runner(forces)(x=x)
    assert "torch.enable_grad()" in raised.value.__notes__[0]
    captured = make_runner(inside, lazy=True)
    assert captured(x=x[:3]).tolist() == [[12] * 3] * 3
    assert captured.stats().steps_by_mode["FULL"] == 1


def test_backward_inside_of_a_step_adds_up_as_in_plain_calls():
    """Warmups leave no gradients."""
    weight = torch.ones(3, requires_grad=True)

    def step(x):
        loss = (x @ weight).sum()
        loss.backward()
        return loss.detach()

    run = graphed(step, backend="tape")
    for number in range(1, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            assert run(torch.ones(4, 3)).item() == 12
        assert weight.grad.tolist() == [4 * number] * 3
