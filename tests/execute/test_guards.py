"""A call whose conditions differ from the capture's never uses its graph."""

from __future__ import annotations

import functools
import math

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import StaticInput, eager_piece, graph_piece  # noqa: E402
from dispatchkit.errors import InputError  # noqa: E402
from dispatchkit.execute.capture.fingerprint import Facts, changed  # noqa: E402

INPUT = {"x": StaticInput((None, 4), "float32")}
X = torch.arange(12.0).view(3, 4) / 8


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


class Layer(torch.nn.Module):
    """A weight, and behaviour that depends on the training flag."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).float() * (2 if self.training else 3)

    def run(self, x):
        return self(x)


def as_module(layer):
    return layer


def as_method(layer):
    return layer.run


def as_closure(layer):
    def step(x):
        return layer(x)

    return step


def as_global(layer):
    """Put a module at the top level of a script and return a lambda that reads it."""
    names = {"layer": layer}
    exec("step = lambda x: layer(x)", names)  # noqa: S102 - a module's globals, one for each test
    return names["step"]


class Engine:
    """Holds a module, as an engine does."""

    def __init__(self, layer):
        self.layer = layer

    def step(self, x):
        return self.layer(x)

    @torch.no_grad()
    def decorated(self, x):
        return self.layer(x)

    def __call__(self, x):
        return self.layer(x)


def as_method_of_an_engine(layer):
    return Engine(layer).step


def as_decorated_method(layer):
    return Engine(layer).decorated


def as_called_object(layer):
    return Engine(layer)


def as_closure_over_an_engine(layer):
    engine = Engine(layer)
    return lambda x: engine.layer(x) * 1


def as_partial(layer):
    return functools.partial(lambda layer, x: layer(x), layer)


def as_pieces(layer):
    return [graph_piece(lambda x: x * 1), eager_piece(lambda h: h + 0), graph_piece(layer)]


forms = pytest.mark.parametrize(
    "form",
    [
        as_module,
        as_method,
        as_closure,
        as_global,
        as_method_of_an_engine,
        as_decorated_method,
        as_called_object,
        as_closure_over_an_engine,
        as_partial,
        as_pieces,
    ],
)


@pytest.mark.slow_except(
    "as_module", "as_method_of_an_engine", "as_decorated_method", "as_closure_over_an_engine"
)
@forms
def test_switching_to_training_and_back(make_runner, quiet, form):
    """The graph of the other flag is not replayed; after switching back, it is."""
    layer = Layer().eval()
    runner = make_runner(form(layer), INPUT)
    runner.capture()
    for flag in (False, True, False):
        layer.train(flag)
        with torch.no_grad():
            same(runner(X), layer(X))
    assert runner.stats().eager_by_reason == {"training_mode": 1}


@pytest.mark.slow_except(
    "double-as_module",
    "double-as_method_of_an_engine",
    "half-as_closure_over_an_engine",
    "half-as_pieces",
)
@forms
@pytest.mark.parametrize("move", [torch.nn.Module.double, torch.nn.Module.half])
def test_module_of_another_type_is_not_replayed(make_runner, quiet, form, move):
    """The conversion moves the weights; a new capture reads their new addresses."""
    layer = Layer()
    runner = make_runner(form(layer), INPUT)
    runner.capture()
    move(layer)
    with torch.no_grad():
        same(runner(X), layer(X))
        assert runner.stats().eager_by_reason == {"moved_module": 1}
        runner.invalidate()
        runner.capture()
        same(runner(X), layer(X))
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_moved_module_of_buffers_alone_is_not_replayed(make_runner, quiet):
    """A move replaces buffers, while it replaces only the data of parameters."""
    layer = torch.nn.Module()
    layer.inner = torch.nn.Module()
    layer.inner.register_buffer("weight", torch.randn(4, 4))
    layer.forward = lambda x: (x.to(layer.inner.weight.dtype) @ layer.inner.weight).float()
    runner = make_runner(layer, INPUT)
    runner.capture()
    layer.inner.weight.mul_(2)
    same(runner(X), layer(X))
    layer.double()
    same(runner(X), layer(X))
    assert runner.stats().eager_by_reason == {"moved_module": 1}


def test_weights_loaded_in_place_are_no_move(make_runner):
    layer, other = Layer(), Layer()
    runner = make_runner(layer, INPUT)
    runner.capture()
    layer.load_state_dict(other.state_dict())
    with torch.no_grad():
        same(runner(X), other(X))
    assert runner.stats().steps_by_mode["FULL"] == 1


@pytest.mark.parametrize(
    "enter",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.set_grad_enabled(False),
    ],
)
def test_gradient_mode_of_the_caller_changes_nothing(make_runner, enter):
    """Steps record no gradients in any mode, and the caller's mode is restored."""
    layer = Layer()
    runner = make_runner(layer, INPUT, lazy=True)
    with enter():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for _ in range(2):
            result = runner(X)
            assert not result.requires_grad
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    with torch.no_grad():
        same(runner(X), layer(X))
    assert runner.stats().steps_by_mode["FULL"] == 3


def test_inputs_of_any_strides_are_read_by_value(make_runner):
    runner = make_runner(lambda x: x * 2, INPUT)
    runner.capture()
    base = torch.randn(8, 8)
    for x in (base.t()[:3, :4], base[::2, ::2][:3], base[:, :1].expand(8, 4)[:5], base[:4, 2:6]):
        same(runner(x), x * 2)
    assert runner.stats().steps_by_mode["FULL"] == 4


@pytest.mark.parametrize(
    "x", [X.double(), X.half(), X.to("meta"), X[0], X[:, :3], X.clone().requires_grad_()]
)
def test_other_types_places_shapes_and_gradients_never_reach_a_graph(make_runner, x):
    runner = make_runner(lambda x: x * 2, INPUT)
    runner.capture()
    with pytest.raises(InputError, match="'x'"):
        runner(x)
    assert runner.stats().steps == 0


def test_each_runner_has_graphs_of_its_own_function(make_runner):
    """Two functions with the same source, and one with other closure values."""
    runners = []
    for factor in (2, 3):
        runners.append(make_runner(lambda x, factor=factor: x * factor, INPUT))
        runners[-1].capture()
    for factor, runner in zip((2, 3), runners, strict=True):
        same(runner(X), X * factor)


def test_a_number_that_is_not_even_itself_is_no_change():
    then = Facts({}, {"fill": math.nan, "scale": 1})
    assert changed(then, Facts({}, {"fill": math.nan, "scale": 2})) == "scale changed from 1 to 2"
