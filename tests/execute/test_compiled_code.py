"""Functions of torch.compile in a step: the capture holds the compiler's output.

The tape records operations, so compiled functions run plainly on it. A stand-in shows the behaviour
of a device: it runs a compiled callable where a device captures it.
"""

from __future__ import annotations

import gc
import threading
import warnings

import attrs
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    BufferOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.cuda.watch import CaptureWatch  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.backends.watching.compiled_code import FORCE_EAGER  # noqa: E402
from dispatchkit.backends.watching.dispatch_mode import DispatchMode  # noqa: E402
from dispatchkit.execute import UncompiledCodeWarning  # noqa: E402

WIDTH = 7  # no batch size, because equal numbers would be confused
INPUTS = {"x": StaticInput((None, WIDTH), "float32")}


class Net(torch.nn.Module):
    """Counts its calls in an undeclared buffer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.relu(self.linear(x)) * 2 + 1


class Compiler:
    """A compiler that counts the graphs it compiled and their runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


@attrs.define
class StandInGraph:
    run: object
    num_plain_operations: int
    outputs: object = None
    has_random_state: bool = True
    holds: list = attrs.Factory(list)
    host_tensors: list = attrs.Factory(list)

    def replay(self):
        self.run()

    def release(self):
        self.holds = []


class StandIn(TapeBackend):
    """Runs what a device would capture, with a device's watch."""

    def __init__(self, compiler):
        super().__init__()
        self.compiler = compiler
        self.options: list = []
        self.graphs: list = []
        self.runs: list = []
        self.compiled_inside = 0

    @property
    def capabilities(self):
        return attrs.evolve(super().capabilities, unwatched_captures=True)

    def new_notes(self):
        return None

    def capture(self, run, *, stream, pool, generators=(), **options):
        self.options.append(options)
        graphs, runs = self.compiler.graphs, self.compiler.runs
        watch = CaptureWatch(compiled=options["compiled"])
        if options["watched"]:
            with watch.watching():
                run()
        else:
            run()
        self.compiled_inside += self.compiler.graphs - graphs
        self.runs.append(self.compiler.runs - runs)
        self.graphs.append(StandInGraph(run, watch.num_plain_operations))
        return self.graphs[-1]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def want_of(net, x):
    return torch.relu(net.linear(x)) * 2 + 1


def test_a_watched_warmup_leaves_compiled_code_compiled(compiler, net):
    """If Dynamo skips code under a mode once, it skips it for good."""
    fast = torch.compile(net, backend=compiler)
    runner = GraphRunner(fast, INPUTS, sizes=[2, 8], mode="FULL", backend="tape")
    assert not runner.capture().failed
    assert float(net.calls) == 0  # although the write is undeclared
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(runner(x=x), want_of(net, x))
    assert float(net.calls) == 1
    before = compiler.runs
    fast(x)
    assert compiler.runs == before + 1


@pytest.mark.slow
def test_code_compiled_before_stays_so(compiler, net):
    fast = torch.compile(net, backend=compiler)
    x = torch.randn(8, WIDTH)
    with torch.no_grad():
        fast(x)
        graphs = compiler.graphs
        runner = GraphRunner(
            fast,
            INPUTS,
            sizes=[8],
            mode="FULL",
            backend="tape",
            options=RunnerOptions(buffers=BufferOptions(output_batch_dims=0)),
        )
        runner.capture()
        fast(x)
    assert compiler.graphs == graphs


@pytest.mark.parametrize(
    "dynamic",
    [False, pytest.param(True, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)],
)
def test_every_size_is_captured_compiled_and_compiled_before(compiler, net, dynamic):
    """This holds beyond Dynamo's limit, after which it would run code plainly."""
    fast = torch.compile(net, backend=compiler, dynamic=dynamic)
    device = StandIn(compiler)
    sizes = [2, 3, 4, 5, 6]
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = GraphRunner(fast, INPUTS, sizes=sizes, mode="FULL", backend=device)
        assert not runner.capture().failed
    assert device.runs == [1] * len(sizes)
    assert device.compiled_inside == 0
    assert [one["compiled"] for one in device.options] == [True] + [False] * (len(sizes) - 1)
    assert [one["watched"] for one in device.options] == [True] + [False] * (len(sizes) - 1)
    assert compiler.graphs == {True: 2, False: len(sizes), None: 2}[dynamic]


def test_sizes_that_only_show_shapes_are_not_compiled(compiler, net):
    """Only one size and length are compiled; others show which dimensions depend on them."""
    fast = torch.compile(lambda x, length: net(x) * length, backend=compiler)
    device = StandIn(compiler)
    runner = GraphRunner(
        fast, INPUTS, sizes=[4], axes=[Axis("length", [8, 16])], mode="FULL", backend=device,
        lazy=True,
    )  # fmt: skip
    x = torch.randn(3, WIDTH)
    with torch.no_grad():  # as in captures; the stand-in's replays are runs
        torch.testing.assert_close(runner(x=x, length=8), want_of(net, x) * 8)
    assert compiler.graphs == 1
    assert not FORCE_EAGER.is_on


def test_a_file_of_the_user_is_not_taken_for_one_of_dynamo(compiler):
    """Compiled code is captured compiled, for any name of its file."""
    source = "def fn(x):\n    return x * 2 + 1\n"
    names = {}
    exec(compile(source, "/home/me/torch/test_torch_compile.py", "exec"), names)  # noqa: S102
    device = StandIn(compiler)
    fast = torch.compile(names["fn"], backend=compiler)
    runner = GraphRunner(fast, INPUTS, sizes=[2], mode="FULL", backend=device)
    assert not runner.capture().failed
    assert device.options == [{"watched": True, "notes": None, "compiled": True, "draws": False}]
    assert device.runs == [1]


@pytest.mark.slow
def test_pieces_are_captured_compiled(compiler, net):
    from dispatchkit import eager_piece, graph_piece

    fast = torch.compile(net, backend=compiler)
    pieces = [graph_piece(fast), eager_piece(lambda y: y + 1)]
    device = StandIn(compiler)
    runner = GraphRunner(pieces, INPUTS, sizes=[2, 4], mode="PIECEWISE", backend=device)
    assert not runner.capture().failed
    assert device.runs == [1, 1]
    assert device.compiled_inside == 0


@pytest.mark.slow
def test_a_graph_holds_what_compiled_code_reads(compiler, net):
    fast = torch.compile(net, backend=compiler)
    device = StandIn(compiler)
    runner = GraphRunner(fast, INPUTS, sizes=[2, 4], mode="FULL", backend=device)
    runner.capture()

    def missing():
        held = [{one.data_ptr() for one in graph.holds} for graph in device.graphs[-2:]]
        read = {one.data_ptr() for one in net.state_dict().values()}
        return [read - one for one in held]

    assert missing() == [set(), set()]
    old = net.linear.weight.data
    net.linear.weight.data = torch.ones(WIDTH, WIDTH)
    runner.invalidate()
    runner.capture()
    assert missing() == [set(), set()]
    held = {one.data_ptr() for graph in device.graphs[-2:] for one in graph.holds}
    assert old.data_ptr() not in held


@pytest.mark.slow
def test_code_that_dynamo_gave_up_is_told_of(compiler, net):
    class Foreign(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    fast = torch.compile(net, backend=compiler)
    with Foreign():  # permanent in torch 2.11 to 2.13
        fast(torch.randn(2, WIDTH))
    device = StandIn(compiler)
    runner = GraphRunner(fast, INPUTS, sizes=[2], mode="FULL", backend=device)
    with pytest.warns(UncompiledCodeWarning, match=r"\(6 ran uncompiled\)"):
        runner.capture()
    assert device.runs == [0]


@pytest.mark.slow
def test_a_capture_while_another_thread_has_code_run_plainly_is_told_of(compiler, net):
    class Meanwhile(StandIn):
        def capture(self, run, **options):
            thread = threading.Thread(target=begin_and_end)
            thread.start()
            thread.join(30)
            return super().capture(run, **options)

    def begin_and_end():
        with Looking():
            pass

    runner = GraphRunner(
        torch.compile(net, backend=compiler), INPUTS, sizes=[2], mode="FULL",
        backend=Meanwhile(compiler),
    )  # fmt: skip
    with pytest.warns(UncompiledCodeWarning, match="another thread"):
        runner.capture()


def test_what_handles_an_operation_is_not_compiled(compiler):
    def fn(x):
        y = x * 2
        torch._dynamo.graph_break()
        y.cos_()
        return y + 1

    fast = torch.compile(fn, backend=compiler)
    x = torch.randn(3)
    fast(x)
    frames = dict(torch._dynamo.utils.counters["frames"])
    watch = CaptureWatch(compiled=True)
    with watch.watching():
        fast(x)
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert watch.num_plain_operations == 0


def test_a_runner_leaves_nothing_for_the_collector_where_dynamo_is_loaded(net):
    """This holds with Dynamo's settings and a device's watch."""

    def once():
        runner = GraphRunner(net, INPUTS, sizes=[2, 8], mode="FULL", backend="tape")
        assert not runner.capture().failed
        with CaptureWatch().watching():
            runner(torch.ones(2, 7))

    once()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        once()
        gc.collect()
        assert [type(one).__qualname__ for one in gc.garbage] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Looking(DispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        with self:  # as for the parts of an operation
            pass
        return func(*args, **(kwargs or {}))


def test_a_mode_that_fails_lets_code_run_compiled_again(compiler):
    fast = torch.compile(lambda x: x * 2 + 1, backend=compiler)
    x = torch.randn(3)
    mode = Looking()

    def fails():
        with mode:
            fast(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (mode.seen, compiler.runs) == (2, 0)
    assert not FORCE_EAGER.is_on
    fast(x)
    assert compiler.runs == 1


def test_modes_of_several_threads_end_in_any_order(compiler):
    fast = torch.compile(lambda x: x * 2 + 1, backend=compiler)
    x = torch.randn(3)
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first():
        with Looking():
            first_is_in.set()
            second_is_in.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_in.wait(30)
    with Looking() as mode:
        second_is_in.set()
        thread.join(30)
        fast(x)
    assert (mode.seen, compiler.runs) == (2, 0)
    fast(x)
    assert compiler.runs == 1


def test_modes_that_overlap_in_two_threads_leave_code_to_be_compiled(compiler):
    """Otherwise torch's flag would stay on, and no further code would be compiled."""
    fast = torch.compile(lambda x: x * 2 + 1, backend=compiler)
    first, second = Looking(), Looking()
    is_in, may_end = threading.Event(), threading.Event()

    def overlap():
        with second:
            is_in.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=overlap)
    with first:
        thread.start()
        assert is_in.wait(30)
    may_end.set()
    thread.join(30)
    fast(torch.randn(3))
    assert compiler.runs == 1
    with CaptureWatch(compiled=True).watching():
        fast(torch.randn(3))
    assert (compiler.runs, compiler.graphs) == (2, 1)
