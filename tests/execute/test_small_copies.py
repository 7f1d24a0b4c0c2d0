"""Inputs brought in by the first node of a graph, on a tape that plays the driver's part."""

from __future__ import annotations

import ctypes
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit import StaticInput, eager_piece, graph_piece  # noqa: E402
from dispatchkit.backends.cuda_copy import (  # noqa: E402
    CopyKernel,
    CopyNode,
    LaunchConfig,
    NodeParams,
    Work,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ReplayError  # noqa: E402
from dispatchkit.execute.buffers import InputBuffers, Loader  # noqa: E402
from dispatchkit.execute.check import CheckWarning  # noqa: E402
from dispatchkit.execute.inputs import InputSet  # noqa: E402
from dispatchkit.execute.small_copies import MAX_BYTES, NodeLoader, input_node  # noqa: E402

CPU = torch.device("cpu")
SPECS = {
    "x": StaticInput((None, 3), "float32", fill=-1),
    "y": StaticInput((None,), "int64", fill=7),
    "scale": StaticInput((2,), "float32"),
}
OTHERS = {
    "wide": StaticInput((3, None), "int32", fill=4),
    "pairs": StaticInput((None,), "complex128", fill=2),
    "host": StaticInput((None,), "int64", fill=9, host=True),
}


class Played(TapeBackend):
    """A tape whose graphs begin with the copy; handles are the numbers of graphs."""

    def __init__(self):
        super().__init__()
        self.code = self.stop_code = 0
        self.problem = ""
        self.work, self.grids, self.launches = {}, [], []
        self.contexts = set()  # threads that have one
        self.changes = 0
        kernel = ctypes.c_void_p(1)
        self.kernel = CopyKernel(kernel, self.launch, self.change, self.find, self.enter)

    def copy_node(self, num_pieces, num_bytes):
        return self.problem or CopyNode(self.kernel, num_pieces, num_bytes)

    def launch(self, config, function, params, extra):
        self.launches.append(LaunchConfig.from_address(config).stream)
        return 0

    def find(self, raw_graph):
        return raw_graph

    def enter(self):
        self.contexts.add(threading.get_native_id())

    def change(self, handle, node, place):
        params = NodeParams.from_address(place.value)
        assert handle.value == node.value
        assert list(params.block) == [256, 1, 1]
        argument = ctypes.c_void_p.from_address(params.params).value
        work = Work.from_buffer_copy(ctypes.string_at(argument, ctypes.sizeof(Work)))
        is_stop = not any(work.targets)
        if threading.get_native_id() not in self.contexts:
            raise AssertionError("The driver ends the process where a thread has no context.")
        if self.stop_code if is_stop else self.code:
            return self.stop_code if is_stop else self.code
        self.work[handle.value] = work, params.grid[1]
        self.changes += 1
        return 0

    def play(self, number):
        work, num_pieces = self.work.get(number, (None, 0))
        for index in range(num_pieces):
            size, tail, target = work.num_bytes[index], work.tail_bytes[index], work.targets[index]
            if work.sources[index] != target:
                ctypes.memmove(target, work.sources[index], size)
            fill = work.fills[index].to_bytes(8, "little")
            ctypes.memmove(target + size, fill * -(-tail // 8), tail)

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        number = len(self.grids) + 1
        self.grids.append(number)
        graph.raw_graph_handle = graph.raw_exec_handle = number
        replay = graph.replay

        def played():
            self.play(number)
            replay()

        graph.replay = played
        return graph


def rows_of(rows, number):
    return [
        torch.full((rows, 3), float(number)),
        torch.full((rows,), number),
        torch.full((2,), float(number)),
    ]


def others_of(rows, number):
    return [
        torch.full((3, rows), number, dtype=torch.int32),
        torch.full((rows,), number, dtype=torch.complex128),
        torch.full((rows,), number).numpy(),
    ]


def holds(buffers, specs, call, rows, bucket):
    for (_, spec), seen, value in zip(specs.items(), buffers.views(bucket), call, strict=True):
        dim, value = spec.batch_dim, torch.as_tensor(value)
        if dim is None:
            assert torch.equal(seen, value)
        else:
            assert torch.equal(seen.narrow(dim, 0, rows), value)
            behind = seen.narrow(dim, rows, bucket - rows)
            assert torch.equal(behind, torch.full_like(behind, spec.fill))


class Case:
    """Buffers, and a node for each bucket, as after captures."""

    def __init__(self, specs):
        self.specs, self.backend = specs, Played()
        self.buffers = InputBuffers(InputSet(specs, CPU), 16, backend=self.backend)
        self.nodes, self.loaders = {}, {}

    def node(self, bucket):
        if bucket not in self.nodes:
            stream, pool = self.backend.new_stream(), self.backend.new_pool()
            node = input_node(self.backend, self.buffers, bucket)
            graph = self.backend.capture(lambda: node.record(3), stream=stream, pool=pool)
            self.nodes[bucket] = node.attached(graph), graph
        return self.nodes[bucket]

    def loader(self, rows, *, by_node=True):
        bucket = next(size for size in (1, 2, 4, 8, 16) if size >= rows)
        known = self.loaders.setdefault((rows, by_node), None)
        if known is None:
            node = self.node(bucket)[0]
            known = (
                NodeLoader(node, self.buffers, rows, bucket)
                if by_node
                else Loader(self.buffers, rows, bucket)
            )
            self.loaders[rows, by_node] = known
        return known

    def launch(self, bucket):
        self.node(bucket)[1].replay()
        if self.buffers.staging is not None:  # the copy that such a graph has too
            self.buffers.staging.queue_copy(bucket)


def run(case, steps, make):
    for number, (what, rows) in enumerate(steps, 1):
        if what == "poison":
            case.buffers.poison()
            continue
        loader, call = case.loader(rows), make(rows, number)
        bucket = loader.bucket
        if what == "strided":
            call[0] = torch.arange(3.0 * rows).view(3, rows).T
        if what == "negated":
            call[1] = torch._neg_view(call[1])
        if what == "in place":
            case.launch(bucket)
            for view, value in zip(case.buffers.views(rows), call, strict=True):
                view.copy_(torch.as_tensor(value))
            if case.buffers.staging is not None:
                case.buffers.staging.arrays["host"][:rows] = call[-1]
            if not loader.is_settled():
                loader.settle()
        elif what == "not launched":
            loader.load(call)
            continue
        else:
            loader.load(call)
        case.launch(bucket)
        holds(case.buffers, case.specs, call, rows, bucket)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "strided", "negated", "in place", "not launched", "poison"]),
        st.integers(1, 16),
    )
)


@settings(max_examples=25)
@given(STEPS)
def test_a_graph_sees_the_rows_of_its_call_and_fill_behind(steps):
    run(Case(SPECS), steps, rows_of)


@settings(max_examples=25)
@given(STEPS)
def test_inputs_that_the_node_is_not_for_come_beside_it(steps):
    case = Case(SPECS | OTHERS)
    assert case.node(4)[0].inputs == (0, 1, 2)
    run(case, steps, lambda rows, number: rows_of(rows, number) + others_of(rows, number))


@settings(max_examples=20)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 16))))
def test_calls_by_the_node_and_by_torch_take_turns(steps):
    case = Case(SPECS)
    for number, (by_node, rows) in enumerate(steps, 1):
        loader, call = case.loader(rows, by_node=by_node), rows_of(rows, number)
        if not by_node:
            case.node(loader.bucket)[0].stop()
        loader.load(call)
        case.launch(loader.bucket)
        holds(case.buffers, SPECS, call, rows, loader.bucket)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "bfloat16", "float16", "int32", "float64", "complex64"]
)
def test_all_sizes_of_elements(dtype):
    case = Case({"x": StaticInput((None, 3), dtype, fill=1)})
    for rows in (16, 5, 1):
        call = [torch.ones(rows + 1, 3).to(torch.complex64).real.to(case.specs["x"].dtype)[1:]]
        case.buffers.tensors[0].zero_()
        case.loader(rows).load(call)
        case.launch(case.loader(rows).bucket)
        holds(case.buffers, case.specs, call, rows, case.loader(rows).bucket)


def test_what_is_in_its_place_already_stays():
    case = Case(SPECS)
    call = case.buffers.views(3)
    for view, value in zip(call, rows_of(3, 5), strict=True):
        view.copy_(value)
    case.loader(3).load(call)
    case.launch(4)
    holds(case.buffers, SPECS, rows_of(3, 5), 3, 4)


@pytest.mark.parametrize(
    ("special", "holds"),
    [
        (lambda: torch._neg_view(torch.ones(4)), -1),
        (lambda: torch._efficientzerotensor((4,)), 0),
        (lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False), 1),
        (lambda: torch.ones(8)[::2], 1),
        (lambda: torch.view_as_complex(torch.ones(4, 2)).conj().imag, -1),
    ],
    ids=["negated", "zeros without memory", "parameter", "strided", "negated by torch"],
)
def test_tensors_whose_memory_is_not_what_they_are(special, holds):
    case = Case({"x": StaticInput((None,), "float32")})
    for value, want in ((torch.full((4,), 3.0), 3), (special(), holds), (torch.full((4,), 2.0), 2)):
        case.loader(4).load([value])
        case.launch(4)
        assert case.buffers.tensors[0].tolist() == [want] * 4 + [0] * 12


def test_a_node_that_cannot_be_set_is_made_up_for(caplog):
    """Torch copies then, and the launch must not copy again; else it is refused."""
    case = Case(SPECS)
    case.loader(5).load(rows_of(5, 1))
    case.backend.code = 1
    case.loader(5).load(rows_of(5, 2))
    case.buffers.tensors[1][1] = 44  # a launch that still copied would overwrite it
    case.launch(8)
    assert case.buffers.tensors[1].tolist()[:6] == [2, 44, 2, 2, 2, 7]
    assert "copied by torch from now on" in caplog.text
    case.backend.stop_code = 1
    case.node(8)[0].is_idle = False
    with pytest.raises(ReplayError, match="CUDA error 1"):
        case.loader(5).load(rows_of(5, 2))


def test_a_thread_without_a_context_gets_one():
    """Before the driver is asked: it does not refuse such a thread, it ends the process."""
    case = Case(SPECS)
    loader, call = case.loader(5), rows_of(5, 2)
    case.backend.contexts.clear()
    threads = [threading.Thread(target=loader.load, args=(call,)) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert case.backend.changes >= 3
    case.launch(8)
    holds(case.buffers, SPECS, call, 5, 8)


# -- through the runner -------------------------------------------------------------------------


def step(x, y, scale):
    return x * 2 + y[:, None], scale + 1


@pytest.fixture
def made(make_runner):
    def make(run=step, specs=SPECS, backend=None, **settings):
        backend = backend or Played()
        runner = make_runner(run, dict(specs), backend=backend, **settings)
        runner.capture()
        return runner, backend

    return make


def test_a_runner_computes_the_same(made, keys):
    runner, backend = made()
    assert runner.input_path(keys.full(4)) == "node"
    for number, rows in enumerate((7, 3, 8, 2, 2, 5)):
        call = rows_of(rows, number)
        for got, want in zip(runner(*call), step(*call), strict=True):
            assert torch.equal(got, want)
    assert backend.work
    assert runner.stats().eager_by_reason == {}


def test_many_inputs(made, keys):
    specs = {f"x{index}": StaticInput((None,), "int64", fill=index) for index in range(20)}

    def run(**inputs):
        return sum(inputs.values())

    names = ", ".join(specs)
    scope = {"run": run}
    exec(f"def named({names}): return run(**locals())", scope)  # noqa: S102
    runner, _ = made(scope["named"], specs)
    assert runner.input_path(keys.full(4)) == "node"
    for rows in (3, 8, 5):
        call = [torch.arange(rows) * index for index in range(20)]
        assert torch.equal(runner(*call), sum(call))


def test_steps_in_place_are_not_overwritten_by_an_earlier_call(made):
    """A launch that brings nothing in copies nothing of the call before."""
    runner, _ = made(outputs="view")
    runner(*rows_of(3, 1))
    runner.buffers["x"][:3], runner.buffers["y"][:3] = 5.0, 6
    assert torch.equal(runner.step(3)[0], torch.full((3, 3), 16.0))
    assert torch.equal(runner(*rows_of(3, 2))[0], torch.full((3, 3), 6.0))


def test_a_failed_launch_leaves_nothing_behind(made, quiet):
    """Rows that a launch would have filled are not taken for filled."""
    runner, backend = made()
    runner(*rows_of(8, 1))
    play, backend.play = backend.play, None
    assert torch.equal(runner(*rows_of(5, 2))[0], torch.full((5, 3), 6.0))
    assert runner.stats().replay_failures == 1
    backend.play = play
    runner.buffers["x"][:3], runner.buffers["y"][:3] = 5.0, 6
    assert torch.equal(runner.step(3)[0], torch.full((3, 3), 16.0))


def test_random_graphs_have_the_node_too(made, keys):
    runner, _ = made(lambda x, y, scale: x + torch.rand(x.shape) * 0 + y[:, None])
    assert runner.input_path(keys.full(4)) == "node"
    for rows in (3, 4, 7):
        assert torch.equal(runner(*rows_of(rows, 2))[0], torch.full((3,), 4.0))


def test_check_mode_compares_what_the_node_brought(made):
    runner, _ = made(check=1, strict=True)
    for number, rows in enumerate((3, 5, 3, 8)):
        call = rows_of(rows, number)
        assert torch.equal(runner(*call)[0], step(*call)[0])


def test_a_node_that_is_gone_wrong_is_found_by_check_mode(made):
    runner, backend = made(check=1)
    backend.play = lambda number: None
    call = rows_of(3, 4)
    with pytest.warns(CheckWarning):
        assert torch.equal(runner(*call)[0], step(*call)[0])


def test_several_threads(made):
    runner, _ = made()
    wrong = []

    def work(first):
        for number in range(first, first + 40):
            call = rows_of(number % 8 + 1, number)
            if not torch.equal(runner(*call)[0], step(*call)[0]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_lanes(made):
    runner, backend = made(lanes=2)
    handles = []
    for number in range(12):
        call = rows_of(number % 8 + 1, number)
        handles.append((call, runner.submit(*call)))
    for call, handle in handles:
        assert torch.equal(handle.result()[0], step(*call)[0])
    assert len(backend.work) > 1


def test_why_there_is_no_node(made, make_runner, keys):
    runner, _ = made(backend=TapeBackend())
    assert runner.input_path(keys.full(4)) == "copy: this backend has no such node"
    backend = Played()
    backend.problem = "not today"
    runner, _ = made(backend=backend)
    assert runner.input_path(keys.full(4)) == "copy: not today"
    rows = {"x": StaticInput((None, MAX_BYTES // 4), "int64")}
    runner, _ = made(lambda x: x.sum(-1), rows)
    assert "no input on the device is small" in runner.input_path(keys.full(1))
    runner, _ = made([graph_piece(lambda x: x), eager_piece(lambda x: x)], {"x": SPECS["x"]})
    assert "pieces" in runner.input_path(keys.piecewise(4))
    backend = Played()
    backend.find = lambda raw: "the graph begins with another kernel"
    backend.kernel = CopyKernel(
        ctypes.c_void_p(1), backend.launch, backend.change, backend.find, backend.enter
    )
    runner, _ = made(backend=backend)
    assert "another kernel" in runner.input_path(keys.full(4))
    assert torch.equal(runner(*rows_of(3, 4))[0], step(*rows_of(3, 4))[0])


def test_a_node_that_fails_is_told(made, keys, caplog):
    runner, backend = made()
    runner(*rows_of(3, 1))
    backend.code = 1
    for number in (2, 3):
        assert torch.equal(runner(*rows_of(3, number))[0], step(*rows_of(3, number))[0])
    assert "CUDA error 1" in runner.input_path(keys.full(4))
    assert len(caplog.records) == 1


def test_nothing_of_a_call_is_kept_alive(made):
    runner, _ = made()
    for rows, ceiling in ((3, 2), (3, 2), (8, 2), (8, 0), (3, 2), (3, 0)):
        call = rows_of(rows, 1)
        kept = [weakref.ref(value) for value in call]
        assert torch.equal(runner(*call, ceiling=ceiling)[0], step(*call)[0])
        del call
        assert [one() for one in kept] == [None] * 3


def test_the_same_arguments_are_looked_at_anew(made):
    """A tuple of tensors that was contiguous at one call need not be so at the next."""
    runner, _ = made(lambda x: x + 0, {"x": StaticInput((None, 2), "int64")})
    args = (torch.arange(4).view(2, 2),)
    for _ in range(3):
        assert runner(*args).tolist() == [[0, 1], [2, 3]]
        args[0].t_()
        assert runner(*args).tolist() == [[0, 2], [1, 3]]
        args[0].t_()
