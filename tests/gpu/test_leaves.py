"""Other values and objects in results, containers, gradients and kinds of tensors on a device."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import GraphRunner, RunnerOptions, StaticInput, graphed  # noqa: E402
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning"),
    pytest.mark.filterwarnings("ignore:.*(nested|prototype|beta state):UserWarning"),
]

DEVICE = "cuda:0"
X = {"x": StaticInput((None, 16), "float32")}


@dataclasses.dataclass
class Output:
    y: object
    rows: int


class Cache:
    def __init__(self, keys):
        self.layers = [keys, keys * 2]


def make_runner(step, **settings):
    settings = {"sizes": [2, 4, 8], "mode": "FULL", "backend": CudaBackend(DEVICE), **settings}
    return GraphRunner(step, X, **settings)


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_values_and_objects_beside_tensors_are_those_of_the_call(outputs):
    """Includes values that depend on the number of rows, in padded steps."""

    def step(x):
        odd = "odd" if x.shape[0] % 2 else "even"
        return Output(x * 2, x.shape[0]), Cache(x + 1), odd, x.shape, {x.device}

    runner = make_runner(step, outputs=outputs, lazy=True, options=RunnerOptions(check=1))
    for rows in (4, 3, 8, 5, 7, 3, 1):
        x = randn(rows, 16)
        output, cache, *values = runner(x=x)
        want, kept, *same = step(x)
        torch.testing.assert_close((output.y, *cache.layers), (want.y, *kept.layers))
        assert (output.rows, values) == (want.rows, same)
    assert runner.stats().steps_by_mode["FULL"] == 7


def test_containers_and_gradients_are_as_in_plain_calls():
    """Written keys are in the caller's container; a closure's weight gets its gradient."""
    weight = torch.ones(16, 16, device=DEVICE, requires_grad=True)

    def cell(d):
        d["h"] = torch.tanh(d["h"] + d["x"])
        return d["h"].sum(-1)

    def forces(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x**3).sum(), x)[0]

    x = randn(4, 16)
    ours, theirs = {"x": x, "h": x * 0}, {"x": x, "h": x * 0}
    run = graphed(cell)
    for _ in range(3):
        torch.testing.assert_close(run(ours), cell(theirs))
    torch.testing.assert_close(ours["h"], theirs["h"])
    graphed(lambda x: x @ weight)(x).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(16, 16))
    run = graphed(forces)
    for _ in range(2):
        torch.testing.assert_close(run(x), 3 * x**2)


def test_what_no_graph_holds_runs_eager_and_other_graphs_live_on():
    """Sparse weights may be captured or refused; results equal eager's."""
    sparse = torch.eye(16, device=DEVICE).to_sparse()

    def choose(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    def nested(x):
        return torch.nested.as_nested_tensor([x, x]).to_padded_tensor(0.0)[0] * 2

    plain = make_runner(lambda x: x * 2)
    plain.capture()
    for step in (choose, nested, lambda x: torch.sparse.mm(sparse, x.T).T):
        runner = make_runner(step)
        runner.capture()
        for rows in (4, 3):
            x = randn(rows, 16)
            torch.testing.assert_close(runner(x=x), step(x))
            torch.testing.assert_close(step(-x), step(-x))
            torch.testing.assert_close(plain(x=x), x * 2)
    assert plain.stats().steps_by_mode["FULL"] == 6


@pytest.mark.parametrize("enabled", [True, False])
def test_an_encoder_with_a_padding_mask(enabled):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=enabled).eval().to(DEVICE)
    run = graphed(lambda x, pad: encoder(x, src_key_padding_mask=pad))
    with torch.no_grad():
        for lengths in ([24, 10, 7], [24, 3, 9, 24], [5, 24, 1]):
            pad = (torch.arange(24)[None] >= torch.tensor(lengths)[:, None]).to(DEVICE)
            x = randn(len(lengths), 24, 32)
            want = encoder(x, src_key_padding_mask=pad)
            torch.testing.assert_close(run(x, pad), want, rtol=1e-3, atol=1e-4)
    assert run.graphed.stats().steps_by_mode["NONE" if enabled else "FULL"] == 3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_modules_with_their_states(kind, batch_first):
    torch.manual_seed(0)
    module = kind(8, 16, 2, batch_first=batch_first).eval().to(DEVICE)
    run = graphed(module)
    with torch.no_grad():
        for rows in (3, 4, 5, 6):
            x = randn(rows, 7, 8) if batch_first else randn(7, rows, 8)
            h = randn(2, rows, 16)
            state = (h, -h) if kind is nn.LSTM else h
            torch.testing.assert_close(run(x, state), module(x, state), rtol=1e-3, atol=1e-4)
    assert len(run.graphed.runners) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.[a-z_]+. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_script_module(frozen):
    module = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval().to(DEVICE))
    run = graphed(torch.jit.freeze(module) if frozen else module)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", EagerStepWarning)
        for rows in (3, 4, 7):
            x = randn(rows, 16)
            torch.testing.assert_close(run(x), module(x), rtol=1e-3, atol=1e-4)
    assert run.graphed.stats().steps_by_mode["FULL"] == 3
