"""Split models and the torch.compile backend on a device: correct results in shared memory."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import GraphRunner, StaticInput, graph_piece, split_module  # noqa: E402
from dispatchkit.execute import EagerStepWarning, UncompiledCodeWarning  # noqa: E402

from dispatchkit_compile import batch_facts, torch_compile  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # torch's own warnings when it loads inductor
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]

DEVICE = "cuda:0"
SIZES = [1, 2, 4, 8, 16, 32, 64]
SLOTS, WIDTH = 8, 64
AT = ["compile_gpu_test::attend"]


@torch.library.custom_op("compile_gpu_test::attend", mutates_args=("memory", "out"))
def attend(
    query: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    memory: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write each row to its slot, then weight the whole memory by the query."""
    memory.index_copy_(0, slots, value)
    weights = torch.softmax(query @ memory[1:].T, dim=-1)
    torch.mm(weights, memory[1:], out=out)


@attend.register_fake
def _(query, value, slots, memory, out):
    return None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(SLOTS + 1, WIDTH))

    def forward(self, hidden, slots):
        normed = self.norm(hidden)
        query, value = self.query(normed), self.value(normed)
        out = torch.empty_like(query)
        attend(query, value, slots, self.memory, out)
        hidden = hidden + out
        return hidden + torch.relu(self.mlp(hidden))


class Decoder(nn.Module):
    """Rows without a token use slot 0."""

    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens, slots):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, slots)
        return self.head(hidden)


INPUTS = {"tokens": StaticInput((None,), "int64"), "slots": StaticInput((None,), "int64")}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def make_decoder():
    torch.manual_seed(3)
    return Decoder().requires_grad_(False).to(DEVICE)


def make_batch(rows):
    """Rows beyond the number of slots write to slot 0 too, as padding does."""
    slots = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    used = min(rows, SLOTS)
    slots[:used] = torch.arange(1, used + 1, device=DEVICE)
    return torch.randint(32, (rows,), device=DEVICE), slots


def memories(model):
    return [buffer[1:] for _, buffer in model.named_buffers()]


def assert_same(got, want):
    """Other kernels may multiply padded matrices and sum in another order."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_compiled_decoder_equals_eager_for_all_sizes_with_one_compile(compiler):
    """FULL and PIECEWISE alternate over 1 to 64 rows, with plain and with inductor's pieces."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    compiled = torch_compile.compile(
        model,
        at=AT,
        sizes=SIZES,
        piece_compiler=compiler,
        fullgraph=True,
        fill={"slots": 0},
    )
    for rows in range(1, 65):
        for uniform in (False, True):
            batch = make_batch(rows)
            want = reference(*batch)
            if uniform:
                with batch_facts(num_reqs=rows, uniform=True):
                    got = compiled(*batch)
            else:
                got = compiled(*batch)
            assert_same(got, want)
    assert_same(memories(model), memories(reference))
    assert compiled.num_compiles == 1
    (stats,) = compiled.stats()
    assert stats.plain_steps == {}
    assert stats.runner.steps_by_mode == {"NONE": 0, "PIECEWISE": 64, "FULL": 64}
    assert stats.runner.capture_failures == 0


def test_split_decoder_equals_eager():
    """A runner splits the same model, without Dynamo in the step."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    pieces = split_module(model, INPUTS, at=AT)
    runner = GraphRunner(pieces, INPUTS, sizes=SIZES, state=list(model.buffers()))
    report = runner.capture()
    assert not report.failed
    for rows in (64, 3, 17, 1, 33, 8):
        for uniform in (False, True):
            tokens, slots = make_batch(rows)
            want = reference(tokens, slots)
            got = runner(tokens=tokens, slots=slots, num_reqs=rows, uniform=uniform)
            assert_same(got, want)
    assert_same(memories(model), memories(reference))
    assert runner.stats().steps_by_mode["NONE"] == 0


def test_sizes_share_the_memory_between_pieces():
    """All sizes together need little more memory than the largest alone."""
    rows, width, layers = 2048, 1024, 6

    def step(x):
        for _ in range(layers):
            x = torch.relu(x * 2)
            x = x + torch.cumsum(x, -1)
        return x

    inputs = {"x": StaticInput((None, width), "float32")}
    reserved = {}
    for name, sizes in {"one": [rows], "all": [rows - 64 * i for i in range(16)]}.items():
        pieces = split_module(step, inputs, at=["cumsum"], device=DEVICE)
        assert sum(not piece.is_graph for piece in pieces) == layers
        runner = GraphRunner(pieces, inputs, sizes=sizes, mode="PIECEWISE")
        assert not runner.capture().failed
        reserved[name] = runner.num_bytes
        x = torch.randn(rows - 64 * 15, width, device=DEVICE)
        torch.testing.assert_close(runner(x=x), step(x))
        del runner, pieces
        gc.collect()
    assert reserved["all"] < 1.5 * reserved["one"]


def test_training_gets_right_gradients():
    """A step that needs gradients runs plainly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(DEVICE)
    reference = copy.deepcopy(model)
    compiled = torch_compile.compile(model, sizes=SIZES)
    x = torch.randn(6, 8, device=DEVICE)
    with pytest.warns(RuntimeWarning, match="gradients"):
        compiled(x).sum().backward()
    reference(x).sum().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_compiled_model_inside_a_runner_gives_right_results():
    """The outer capture records the inner graph's operations, or the step runs eager."""
    compiled = torch_compile.compile(lambda x: x * 2, sizes=SIZES)
    x = torch.randn(5, 8, device=DEVICE)
    compiled(x)
    inputs = {"x": StaticInput((None, 8), "float32")}
    runner = GraphRunner(lambda x: compiled(x) + 1, inputs, sizes=[8], mode="FULL")
    runner.capture()
    for rows in (5, 8, 2):
        x = torch.randn(rows, 8, device=DEVICE)
        torch.testing.assert_close(runner(x=x), x * 2 + 1)


class Counting(nn.Module):
    """Counts its calls in an undeclared buffer, and draws on demand."""

    def __init__(self, draws=0.0):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(draws)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return self.drop(nn.functional.gelu(self.linear(x)) * 2 + x.sum(-1, keepdim=True))


def want_of(net, x):
    return nn.functional.gelu(net.linear(x)) * 2 + x.sum(-1, keepdim=True)


def kernels_of(run):
    """Return the names of the kernels that a call runs on the device."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]


@pytest.mark.filterwarnings("error::dispatchkit.execute.UncompiledCodeWarning")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_graphs_of_a_compiled_module_hold_its_kernels(mode, dynamic):
    """This holds for more sizes than Dynamo compiles by default."""
    torch.manual_seed(1)
    net = Counting().to(DEVICE).eval().requires_grad_(False)
    fast = torch.compile(net, dynamic=dynamic)
    step = fast if mode == "FULL" else [graph_piece(fast)]
    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    sizes = [2, 4, 6, 8] if dynamic else [2, 3, 4, 6]
    with torch._dynamo.config.patch(recompile_limit=2):
        runner = GraphRunner(step, inputs, sizes=sizes, mode=mode)
        report = runner.capture()
    assert not report.failed
    assert int(net.calls) == 0
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number, rows in enumerate((1, 3, sizes[-1], 2), 1):
        x = torch.randn(rows, WIDTH, device=DEVICE)
        torch.testing.assert_close(runner(x=x), want_of(net, x), rtol=1e-4, atol=1e-4)
        assert int(net.calls) == number
    names = kernels_of(lambda: runner(x=x))
    assert any(name.startswith("triton_") for name in names), names
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert runner.stats().steps_by_mode["NONE"] == 0


def test_a_compiled_module_draws_anew_at_each_replay():
    torch.manual_seed(1)
    net = Counting(draws=0.5).to(DEVICE).requires_grad_(False)
    fast = torch.compile(net)
    runner = GraphRunner(fast, {"x": StaticInput((None, WIDTH), "float32")}, sizes=[8], mode="FULL")
    runner.capture()
    x = torch.ones(8, WIDTH, device=DEVICE)
    drawn = [runner(x=x) == 0 for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    torch.cuda.manual_seed(3)
    first = runner(x=x)
    torch.cuda.manual_seed(3)
    assert torch.equal(runner(x=x), first)


def test_weights_that_only_compiled_kernels_read_are_held():
    """The caller drops them, and the graph still reads their values."""
    torch.manual_seed(1)
    scale = torch.randn(WIDTH, device=DEVICE)
    net = {"scale": scale}
    fast = torch.compile(lambda x: torch.relu(x) * net["scale"] + 1)
    runner = GraphRunner(fast, {"x": StaticInput((None, WIDTH), "float32")}, sizes=[8], mode="FULL")
    assert runner.capture().failed == {}
    kept = scale.clone()
    del scale, net["scale"]
    gc.collect()
    litter = [torch.full((WIDTH,), float("nan"), device=DEVICE) for _ in range(64)]
    x = torch.randn(8, WIDTH, device=DEVICE)
    torch.testing.assert_close(runner(x=x), torch.relu(x) * kept + 1)
    del litter


def test_a_read_of_the_device_in_compiled_code_is_refused():
    fast = torch.compile(lambda x: x * float(x.sum().item()) + 1)
    runner = GraphRunner(fast, {"x": StaticInput((None, WIDTH), "float32")}, sizes=[8], mode="FULL")
    (reason,) = runner.capture().failed.values()
    assert reason.startswith("host_sync")
    x = torch.randn(8, WIDTH, device=DEVICE)
    with pytest.warns(EagerStepWarning, match="capture_failed"):
        result = runner(x=x)
    torch.testing.assert_close(result, x * x.sum() + 1, rtol=1e-4, atol=1e-4)


def test_code_that_dynamo_gave_up_is_told_of():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Foreign(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    fast = torch.compile(lambda x: torch.relu(x) * 2 + 1)
    x = torch.randn(8, WIDTH, device=DEVICE)
    with Foreign():  # for good
        fast(x)
    runner = GraphRunner(fast, {"x": StaticInput((None, WIDTH), "float32")}, sizes=[8], mode="FULL")
    with pytest.warns(UncompiledCodeWarning, match="ran uncompiled"):
        assert runner.capture().failed == {}
    torch.testing.assert_close(runner(x=x), torch.relu(x) * 2 + 1)
