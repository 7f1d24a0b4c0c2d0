"""Operations that the recorder accepts and refuses, beyond the tests of every backend."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from dispatchkit.backends.tape import TapeBackend
from dispatchkit.backends.tape.poison import poison
from dispatchkit.errors import CaptureError, ConfigError, ReplayError

functional = torch.nn.functional


@pytest.fixture
def capture():
    backend = TapeBackend()
    stream, pool = backend.new_stream(), backend.new_pool()
    return lambda run, **options: backend.capture(run, stream=stream, pool=pool, **options)


class _SelfAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


MODULES = {
    "mlp": (lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (4, 8)),
    "attention": (_SelfAttention, (2, 4, 8)),
    "encoder": (
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (2, 4, 8),
    ),
    "lstm": (lambda: torch.nn.LSTM(8, 8, batch_first=True), (2, 4, 8)),
    "convolution": (lambda: torch.nn.Conv1d(8, 8, 3, padding=1), (2, 8, 8)),
    "batch norm": (lambda: torch.nn.BatchNorm1d(8), (4, 8)),
    "pooling": (lambda: torch.nn.AdaptiveAvgPool1d(4), (2, 8, 8)),
}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_replay_as_eager(capture, name, mode):
    make, shape = MODULES[name]
    module = make().eval()
    x = torch.randn(shape)
    with getattr(torch, mode)():
        graph = capture(lambda: module(x))
        for _ in range(2):
            x.copy_(torch.randn(shape))
            expected = module(x)
            graph.replay()
            got, want = graph.outputs, expected
            if isinstance(want, tuple):
                got, want = got[0], want[0]
            torch.testing.assert_close(got, want)


OPERATIONS = {
    "foreach in place": lambda x, s: torch._foreach_add_([s, s[0]], 1.0),
    "foreach": lambda x, s: torch._foreach_mul([x, x + 1], 2.0),
    "out": lambda x, s: torch.mul(x, 2, out=s),
    "scatter": lambda x, s: s.scatter_(1, x.argsort(1), x),
    "index_put": lambda x, s: s.index_put_((torch.tensor([0, 2]),), x[:2]),
    "index_put of a column": lambda x, s: s[:, torch.tensor([1, 3])].add_(1),
    "assign a column": lambda x, s: s.__setitem__((slice(None), torch.tensor([1, 3])), x[:, :2]),
    "fill a mask": lambda x, s: s.__setitem__(x > 0, 1.0),
    "masked_fill": lambda x, s: s.masked_fill_(x > 0, 2.0),
    "copy with cast": lambda x, s: s.copy_(x.double()),
    "swap": lambda x, s: s.copy_(s.flip(0)),
    "addmm": lambda x, s: s.addmm_(x, x.t() @ x),
    "cumsum": lambda x, s: x.cumsum(1, dtype=torch.float64),
    "sum to int": lambda x, s: (x > 0).sum(dim=1, dtype=torch.int32),
    "embedding": lambda x, s: functional.embedding(x.argsort(1), s),
    "std and mean": lambda x, s: torch.std_mean(x, dim=1),
    "split copy": lambda x, s: torch.split_copy(x, 2, dim=1),
    "unbind": lambda x, s: [row * 2 for row in x.unbind()],
    "einsum": lambda x, s: torch.einsum("ij,ik->jk", x, s),
    "linalg": lambda x, s: torch.linalg.qr(x @ x.t() + 5 * torch.eye(4)).R,
    "fft": lambda x, s: torch.fft.rfft(x).abs(),
    "complex": lambda x, s: torch.polar(x.abs(), x).conj().resolve_conj().real * 1,
    "bit views": lambda x, s: x.view(torch.int32) & 0xFF,
    "expand": lambda x, s: x[:1].expand(4, 4).clone(),
    "as_strided": lambda x, s: x.as_strided((3, 2), (1, 4)) + 0,
    "empty and fill": lambda x, s: torch.empty(3).fill_(2.0),
    "resize own": lambda x, s: torch.empty(0).resize_(4).fill_(1.0),
    "growing out": lambda x, s: torch.cat([x, x], out=torch.empty(0)),
    "transpose in place": lambda x, s: (x + 1).t_().contiguous(),
    "searchsorted": lambda x, s: torch.searchsorted(x[0].sort().values, x[1]),
    "one_hot by width": lambda x, s: (x.argsort(1)[..., None] == torch.arange(4)).long(),
    "interpolate": lambda x, s: functional.interpolate(x[None, None], scale_factor=2.0),
    "cross entropy": lambda x, s: functional.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "half": lambda x, s: (x.half() @ x.half().t()).float(),
    "quantise by hand": lambda x, s: (x * 10).round().clamp(-8, 7).to(torch.int8),
}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_replay_as_eager(capture, name, mode):
    operation = OPERATIONS[name]
    x, state = torch.randn(4, 4), torch.randn(4, 4)
    with getattr(torch, mode)():
        before = state.clone()
        graph = capture(lambda: operation(x, state))
        assert torch.equal(state, before)
        for _ in range(2):
            x.copy_(torch.randn(4, 4))
            twin = state.clone()
            expected = operation(x.clone(), twin)
            graph.replay()
            torch.testing.assert_close(graph.outputs, expected)
            assert torch.equal(state, twin)


REFUSED = {
    "assignment by a mask": lambda x: x.__setitem__(x > 0, x[0]),
    "bincount": lambda x: torch.bincount(x.argsort(1).flatten()),
    "array": lambda x: __import__("numpy").asarray(x),
    "format": lambda x: f"{x.sum():.2f}",
    "contains": lambda x: 3.0 in x,
    "allclose": lambda x: torch.allclose(x, x),
    "list": lambda x: [float(value) for value in x[0]],
}


@pytest.mark.parametrize("name", REFUSED)
def test_further_reads_by_the_host_are_refused(capture, name):
    pytest.importorskip("numpy")
    x = torch.randn(4, 4)
    with pytest.raises(CaptureError) as caught:
        capture(lambda: REFUSED[name](x + 1))
    assert caught.value.reason == "host_sync"


def test_resizing_what_was_made_outside_is_refused_and_undone(capture):
    state = torch.arange(4.0)
    with pytest.raises(CaptureError, match="resized"):
        capture(lambda: state.resize_(1000).fill_(1.0))
    assert state.untyped_storage().nbytes() == 16
    assert state.untyped_storage().tolist()[:4] == torch.arange(4.0).untyped_storage().tolist()[:4]


def test_tensors_the_tape_cannot_hold_are_refused(capture):
    """The error names the layout or device, whether they are arguments or results."""
    sparse, dense = torch.eye(3).to_sparse(), torch.eye(3)
    for run in (lambda: sparse * 2, dense.to_sparse, lambda: sparse.mul_(2)):
        with pytest.raises(CaptureError, match=r"cannot record torch\.sparse_coo tensors"):
            capture(run)
    with pytest.raises(CaptureError, match="cannot record tensors on meta"):
        capture(lambda: torch.zeros(3, device="meta") + 1)


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"])
def test_small_floats_are_poisoned_with_their_own_nan(name):
    x = torch.zeros(3, dtype=torch.uint8).view(getattr(torch, f"float8_{name}"))
    poison(x)
    assert x.to(torch.float32).isnan().all()


def test_a_compiled_function_is_recorded_by_what_it_does(capture):
    x = torch.randn(4, 4)
    compiled = torch.compile(lambda y: (y * 2 + 1).relu(), backend="aot_eager")
    compiled(x)
    graph = capture(lambda: compiled(x))
    x.copy_(torch.randn(4, 4))
    graph.replay()
    torch.testing.assert_close(graph.outputs, (x * 2 + 1).relu())


def test_an_operator_registered_by_a_library_is_recorded_by_what_it_does(capture):
    runs = []
    with torch.library._scoped_library("dispatchkit_tape_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")

        def twice(x):
            runs.append(1)
            return x * 2

        library.impl("twice", twice, "CPU")
        x = torch.ones(3)
        graph = capture(lambda: torch.ops.dispatchkit_tape_test.twice(x) + 1)
        x.fill_(4)
        graph.replay()
        graph.replay()
        assert graph.outputs.tolist() == [9.0] * 3
        assert runs == [1]


def test_backward_hooks_and_accumulated_gradients_are_recorded(capture):
    weight = torch.randn(4, 4, requires_grad=True)
    weight.grad = torch.zeros(4, 4)
    x = torch.randn(3, 4)

    def step():
        weight.grad.zero_()
        (x @ weight).pow(2).sum().backward()

    graph = capture(step)
    assert torch.equal(weight.grad, torch.zeros(4, 4))
    x.copy_(torch.randn(3, 4))
    graph.replay()
    twin = weight.detach().clone().requires_grad_()
    (x @ twin).pow(2).sum().backward()
    torch.testing.assert_close(weight.grad, twin.grad)


def test_a_generator_may_be_used_without_being_named(capture):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    graph = capture(lambda: torch.rand(4, generator=generator))
    assert torch.equal(generator.get_state(), before)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(1))
    graph.replay()
    assert torch.equal(graph.outputs, expected)


def test_a_draw_that_takes_no_number_is_no_random_state(capture):
    x = torch.randn(4)
    graph = capture(lambda: functional.dropout(x, 0.5, training=False))
    assert not graph.has_random_state


def test_steps_between_capture_and_replay_are_few():
    """Views and new memory cost nothing in a replay."""
    backend = TapeBackend()
    x = torch.randn(4, 8)
    lines = []
    from dispatchkit.backends.tape import backend as tape

    original = tape.compile_replay
    try:
        tape.compile_replay = lambda steps, tensors: (
            lines.append(len(steps)) or original(steps, tensors)
        )
        backend.capture(
            lambda: x.view(2, 16).t()[::2].unsqueeze(0).squeeze(0) + torch.empty(8, 2),
            stream=backend.new_stream(),
            pool=backend.new_pool(),
        )
    finally:
        tape.compile_replay = original
    assert lines == [1]


def test_a_replay_inside_a_capture_is_refused():
    backend = TapeBackend()
    stream, pool = backend.new_stream(), backend.new_pool()
    x = torch.zeros(2)
    graph = backend.capture(lambda: x + 1, stream=stream, pool=pool)
    with pytest.raises(CaptureError) as caught:
        backend.capture(graph.replay, stream=stream, pool=pool)
    assert isinstance(caught.value.__cause__, ReplayError)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "three"])
def test_the_number_of_streams_must_be_a_positive_whole_number(value):
    with pytest.raises(ConfigError, match="max_streams"):
        TapeBackend(max_streams=value)


def test_streams_that_are_let_go_of_make_room_for_new_ones():
    backend = TapeBackend(max_streams=2)
    first, second = backend.new_stream(), backend.new_stream()
    with pytest.raises(ConfigError, match=r"All streams of cpu are in use \(max_streams=2\)"):
        backend.new_stream()
    del first
    assert backend.new_stream().handle not in (0, second.handle)


def test_a_failed_capture_lets_go_of_the_callables_tensors():
    import gc
    import weakref

    backend = TapeBackend()
    held = []

    def run():
        hidden = torch.zeros(1000)
        held.append(weakref.ref(hidden))
        raise ValueError("on purpose")

    gc.disable()
    try:
        with pytest.raises(CaptureError) as caught:
            backend.capture(run, stream=backend.new_stream(), pool=backend.new_pool())
        assert held[0]() is None
        assert caught.value.__cause__ is not None
    finally:
        gc.enable()
