"""Tensors without plain strided memory: in steps, weights, inputs and results."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils._pytree import tree_map  # noqa: E402

from dispatchkit import GraphRunner, StaticInput, graphed  # noqa: E402
from dispatchkit.errors import InputError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::dispatchkit.execute.EagerStepWarning",
    "ignore:.*prototype:UserWarning",
    "ignore:Sparse CSR:UserWarning",
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning",
    "ignore:.*quantization:UserWarning",
    "ignore:.*quantiz:DeprecationWarning",
)

X = {"x": StaticInput((None, 2), "float32")}


class Scaled(torch.Tensor):
    """A subclass that wraps other memory, as in quantization libraries."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(one):
            return one.inner * one.scale if isinstance(one, Scaled) else one

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Named(torch.Tensor):
    """A subclass that differs only by its name."""


SCALED = Scaled(torch.randn(2, 2), torch.tensor(2.0))


SPARSE = torch.eye(2).to_sparse()


def cube(row):
    return (row**3).sum()


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


CAPTURED = {
    "subclass weight": lambda x: x @ SCALED,
    "vmap": lambda x: torch.vmap(lambda row: torch.sin(row) * 2)(x) + 1,
    "gradient of a function": lambda x: torch.vmap(torch.func.grad(cube))(x) + 1,
    "forward derivative": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "conjugate": lambda x: torch.view_as_complex(x * 1).conj().imag,
}
REFUSED = {
    "sparse weight": lambda x: torch.sparse.mm(SPARSE, x.T).T,
    "sparse inside": lambda x: x.to_sparse().to_dense() * 2,
    "compressed": lambda x: (torch.eye(2).to_sparse_csr() @ x.T).T,
    "quantized": lambda x: quantized(x).dequantize() + 0,
    "mkldnn": lambda x: (x.to_mkldnn() + x.to_mkldnn()).to_dense(),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]).to_padded_tensor(0.0)[0] * 2,
    "subclass result": lambda x: (x * 2).as_subclass(Named),
}


def run_padded(step):
    """Return a runner after four steps that equal eager."""
    runner = GraphRunner(step, X, sizes=[4, 8], mode="FULL", backend="tape")
    runner.capture()
    for rows in (4, 3, 4, 7):
        x = torch.randn(rows, 2)
        got, want = runner(x=x), step(x)
        assert type(got) is type(want)
        torch.testing.assert_close(got, want)
    return runner


@pytest.mark.slow_except("subclass weight", "vmap", "gradient of a function")
@pytest.mark.parametrize("name", CAPTURED)
def test_what_ends_in_plain_operations_is_captured(name):
    assert run_padded(CAPTURED[name]).stats().steps_by_mode["FULL"] == 4


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_memory_runs_eager(name):
    """They are refused at the capture instead of detected at a replay."""
    if name == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without it")
    assert run_padded(REFUSED[name]).stats().eager_by_reason == {"capture_failed": 4}


def test_an_encoder_whose_padding_mask_makes_nested_tensors_runs_eager():
    """It depends on the mask; without nested tensors the module is captured."""
    torch.manual_seed(0)
    for nested in (True, False):
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested).eval()

        def step(x, pad, encoder=encoder):
            return encoder(x, src_key_padding_mask=pad)

        inputs = {
            "x": StaticInput((None, 6, 8), "float32"),
            "pad": StaticInput((None, 6), "bool"),
        }
        runner = GraphRunner(step, inputs, sizes=[4], mode="FULL", backend="tape")
        report = runner.capture()
        assert all("enable_nested_tensor=False" in one for one in report.failed.values())
        with torch.no_grad():
            for lengths in ([6, 4, 2], [3, 3, 6, 1]):
                pad = torch.arange(6)[None] >= torch.tensor(lengths)[:, None]
                x = torch.randn(len(lengths), 6, 8)
                want = step(x, pad)
                torch.testing.assert_close(runner(x=x, pad=pad), want, rtol=1e-4, atol=1e-5)
        assert runner.stats().steps_by_mode["NONE" if nested else "FULL"] == 2


INPUTS = {
    "sparse": lambda x: x.to_sparse(),
    "quantized": quantized,
    "nested": lambda x: torch.nested.as_nested_tensor(list(x)),
    "named": lambda x: x.as_subclass(Named),
    "wrapper": lambda x: Scaled(x, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_is_no_plain_tensor_is_refused_or_run_plainly(name):
    """A runner states what to convert; graphed returns the function's results."""
    odd = INPUTS[name](torch.ones(4, 2))
    runner = GraphRunner(lambda x: x * 2, X, sizes=[4], mode="FULL", backend="tape")
    runner.capture()
    runner(x=torch.ones(4, 2))
    with pytest.raises(InputError, match=r"plain strided tensor, got a .*tensor.*Convert it with"):
        runner(x=odd)

    def again(x):
        return (x.dequantize() if x.is_quantized else x) * 2

    run = graphed(again, backend="tape")
    run(torch.ones(4, 2))  # a plain tensor with as many rows
    with pytest.warns(EagerStepWarning, match="Tensor x is a .*tensor"):
        got, want = run(odd), again(odd)
    assert type(got) is type(want)
    assert run.graphed.stats().plain == {"tensor_kind": 1}
