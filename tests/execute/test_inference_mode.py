"""Inference mode: graphs are captured in it or outside it, and serve in both."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, StepState, graphed  # noqa: E402

X = {"x": StaticInput((None, 2), "float32")}
MODES = {"inside": torch.inference_mode, "outside": contextlib.nullcontext}


class Scratch(torch.nn.Module):
    """Writes to a buffer from a profile run, as servers' backends do."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.buffer = torch.zeros(8, 2)

    def forward(self, x):
        rows = self.buffer[: x.shape[0]]
        rows.copy_(x)
        return rows * 2


class Cache(torch.nn.Module):
    """Writes to a declared cache that was made in inference mode."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("cache", torch.zeros(16, 2))

    def forward(self, x):
        self.cache[: x.shape[0]] += x
        return self.cache[: x.shape[0]] * 2


class Model(torch.nn.Module):
    """Weights, disabled dropout, and composite operations."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.linear = torch.nn.Linear(2, 2)
            self.linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.norm = torch.nn.LayerNorm(2)

    def forward(self, x):
        hidden = torch.nn.functional.dropout(self.linear(x), training=self.training)
        return self.norm(hidden).reshape(-1, 1, 2).flatten(1)


class Closure(torch.nn.Module):
    """Accesses its memory only through a closure."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            memory = {"seen": torch.zeros(8, 2)}

        def write(x):
            memory["seen"][: x.shape[0]] = x
            return memory["seen"][: x.shape[0]] + 1

        self.write = write

    def forward(self, x):
        return self.write(x)


MODELS = [Scratch, Cache, Model, Closure]


def runner_of(model, **settings):
    settings = {"sizes": [1, 2, 4, 8], "mode": "FULL", "backend": "tape", **settings}
    return GraphRunner(model, X, **settings)


def twins(make):
    """Return two modules with equal weights."""
    model, twin = make().eval(), make().eval()
    with torch.inference_mode():
        twin.load_state_dict(model.state_dict())
    return model, twin


def batch(rows, seed):
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow_except(
    "owned-inside-outside-Scratch",
    "owned-outside-inside-Cache",
    "view-inside-outside-Model",
    "view-outside-inside-Closure",
    "owned-inside-inside-Model",
    "view-outside-inside-Cache",
)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("captured", MODES)
@pytest.mark.parametrize("served", MODES)
@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_captured_and_served_in_any_mode(make, captured, served, outputs):
    """Every key is captured, every step replays, and results equal eager's."""
    model, twin = twins(make)
    state = [model.cache] if isinstance(model, Cache) else []
    runner = runner_of(model, state=state, outputs=outputs)
    with MODES[captured]():
        assert runner.capture().failed == {}
    for index, rows in enumerate((3, 8, 1, 5)):
        x = batch(rows, index)
        with torch.inference_mode():
            expected = twin(x).clone()
        with MODES[served]():
            given = x.clone()
            torch.testing.assert_close(runner(x=given), expected)
    assert runner.stats().steps_by_mode["FULL"] == 4


def test_tensors_of_inference_mode_are_inputs_anywhere():
    runner = runner_of(Model().eval())
    runner.capture()
    with torch.inference_mode():
        inside = batch(3, 0) + 0
    assert inside.is_inference()
    torch.testing.assert_close(runner(x=inside), runner(x=batch(3, 0)))
    assert runner.stats().steps_by_mode["FULL"] == 2


@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_results_of_graphs_captured_inside_are_usable_outside(outputs):
    """Results are written in place and saved for a gradient."""
    runner = runner_of(Model().eval(), outputs=outputs, sizes=[4])
    with torch.inference_mode():
        runner.capture()
    result = runner(x=batch(3, 0))
    assert not result.is_inference()
    result += 1
    weight = torch.ones(2, requires_grad=True)
    (result * weight).sum().backward()
    assert torch.equal(weight.grad, result.sum(0))


def test_a_step_inside_draws_as_eager_and_is_seen_to_draw():
    """Composite operations are not decomposed in inference mode; their draws are still detected."""

    def step(x):
        return torch.nn.functional.dropout(x, 0.5, training=True)

    runner = runner_of(step, sizes=[4])
    x = torch.ones(4, 2)
    with torch.inference_mode():
        runner.capture()
        torch.manual_seed(3)
        drawn = [runner(x=x) for _ in range(3)]
        torch.manual_seed(3)
        for one in drawn:
            assert torch.equal(one, step(x))


def test_undeclared_state_is_put_back_inside():
    cache = torch.zeros(8, 2)

    def step(x):
        cache.add_(1)
        return x + cache[: x.shape[0]]

    runner = runner_of(step, sizes=[4])
    with torch.inference_mode():
        runner.capture()
        assert not cache.any()
        assert torch.equal(runner(x=torch.zeros(2, 2)), torch.ones(2, 2))
    assert torch.equal(cache, torch.ones(8, 2))


def test_scratch_made_inside_may_be_declared():
    model = Scratch().eval()
    runner = runner_of(model, state=StepState(scratch=[model.buffer]))
    assert runner.capture().failed == {}
    assert torch.equal(runner(x=torch.ones(3, 2)), torch.full((3, 2), 2.0))


@pytest.mark.parametrize("make", MODELS)
def test_graphed_inside(make):
    model, twin = twins(make)
    with torch.inference_mode():
        fast = graphed(model, backend="tape")
        for index in range(6):
            x = batch(4, index)
            torch.testing.assert_close(fast(x), twin(x))
