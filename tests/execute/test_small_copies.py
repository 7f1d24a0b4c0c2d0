"""Inputs brought in by the first node of a graph, on a tape that plays the driver's part."""

from __future__ import annotations

import ctypes
import threading
import weakref
from itertools import product
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit import (  # noqa: E402
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.cuda.copy import (  # noqa: E402
    CAPACITIES,
    CopyKernel,
    CopyNode,
    LaunchConfig,
    NodeParams,
    Work,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ReplayError  # noqa: E402
from dispatchkit.execute.io.buffers import InputBuffers  # noqa: E402
from dispatchkit.execute.io.input_path import MAX_BYTES, choose_path, copied_path  # noqa: E402
from dispatchkit.execute.io.inputs import InputSet  # noqa: E402
from dispatchkit.execute.io.staging import Staging  # noqa: E402
from dispatchkit.execute.io.transports import CopyTransport, transport_of  # noqa: E402
from dispatchkit.execute.replay.check import CheckWarning  # noqa: E402

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
HOSTS = {
    "tokens": StaticInput((None,), "int64", fill=7, host=True),
    "half": StaticInput((None, 3), "bfloat16", fill=1, host=True),
    "flags": StaticInput((None,), "bool", fill=True, host=True),
    "table": StaticInput((2,), "float32", host=True),
}


def in_threads(work):
    """Run it in three threads at once, each with its own first number."""
    threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Played(TapeBackend):
    """A tape whose graphs begin with the copy; handles are the numbers of graphs."""

    def __init__(self):
        super().__init__()
        self.code = self.stop_code = 0
        self.problem = ""
        self.work, self.grids, self.launches = {}, [], []
        self.contexts = set()  # threads that have one
        self.changes = 0
        self.most_data = CAPACITIES[-1]
        self.capacities = {}  # by the number of the kernel

    def copy_node(self, num_regions, num_bytes, data_bytes=0):
        if self.problem or data_bytes > self.most_data:
            return self.problem or f"{data_bytes} bytes are too many"
        capacity = next(one for one in CAPACITIES if one >= data_bytes)
        number = 1 + CAPACITIES.index(capacity)
        self.capacities[number] = capacity
        function = ctypes.c_void_p(number)
        kernel = CopyKernel(function, self.launch, self.change, self.find, self.enter, capacity)
        return CopyNode(kernel, num_regions, num_bytes)

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
        first, second = (ctypes.c_void_p * 2).from_address(params.params)
        work = Work.from_buffer_copy(ctypes.string_at(first, ctypes.sizeof(Work)))
        capacity = self.capacities[params.function]
        data = ctypes.create_string_buffer(ctypes.string_at(second, capacity), capacity)
        is_stop = not any(work.targets)
        if threading.get_native_id() not in self.contexts:
            raise AssertionError("The driver ends the process where a thread has no context.")
        if self.stop_code if is_stop else self.code:
            return self.stop_code if is_stop else self.code
        self.work[handle.value] = work, params.grid[1], data
        self.changes += 1
        return 0

    def play(self, number):
        work, num_pieces, data = self.work.get(number, (None, 0, b""))
        for index in range(num_pieces):
            size, tail, target = work.num_bytes[index], work.tail_bytes[index], work.targets[index]
            source = work.sources[index]
            if source != target:
                source += ctypes.addressof(data) if source < len(data) else 0
                ctypes.memmove(target, source, size)
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


def hosts_of(rows, number):
    return [
        torch.full((rows,), number),
        torch.full((rows, 3), number, dtype=torch.bfloat16),
        torch.full((rows,), number % 2 == 0),
        torch.full((2,), float(number)),
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
    """Buffers, and two steps for each bucket, as after captures: a whole graph, and pieces."""

    def __init__(self, specs, *, most_data=CAPACITIES[-1], problem=""):
        self.specs, self.backend = specs, Played()
        self.backend.most_data = most_data
        if problem:
            self.backend.find = lambda raw: problem
        self.buffers = InputBuffers(InputSet(specs, CPU), 16, backend=self.backend)
        self.steps, self.loaders = {}, {}

    def step(self, bucket, what=""):
        pieces = "pieces" in what
        if (bucket, pieces) not in self.steps:
            stream, pool = self.backend.new_stream(), self.backend.new_pool()
            if pieces:
                path = copied_path(self.buffers, bucket, "made of pieces")
            else:
                path = choose_path(self.backend, self.buffers, bucket)
            record = (lambda: path.node.record(3)) if path.node else lambda: None
            graph = self.backend.capture(record, stream=stream, pool=pool)
            path.attach(graph)
            self.steps[bucket, pieces] = SimpleNamespace(path=path, graph=graph)
        return self.steps[bucket, pieces]

    def node(self, bucket):
        return self.step(bucket).path

    def loader(self, rows, what=""):
        sizes = (16,) if "largest" in what else (1, 2, 4, 8, 16)
        step = self.step(next(size for size in sizes if size >= rows), what)
        known = self.loaders.get((rows, id(step)))
        if known is None:
            known = self.loaders[rows, id(step)] = transport_of(step.path, rows)
        return known

    def load(self, loader, call):
        """Load a call; the host's values are gone at once."""
        given = [
            torch.as_tensor(value).clone() if spec.host else value
            for spec, value in zip(self.specs.values(), call, strict=True)
        ]
        loader.load(self.buffers.inputs.to_arrays(given), False)
        for spec, value in zip(self.specs.values(), given, strict=True):
            if spec.host:
                value.zero_()

    def write(self, loader, call, what):
        """Write a call in place, and have it brought in."""
        rows, step = loader.num_rows, self.step(loader.bucket, what)
        places = self.buffers.views(rows)
        for index, host in self.buffers.host_rows(rows):
            places[index] = host
        for place, value in zip(places, call, strict=True):
            place.copy_(torch.as_tensor(value))
        loader.load_in_place()
        if step.path.staging is None:  # what was brought in may be written again at once
            for _, host in self.buffers.host_rows(rows):
                host.fill_(77)

    def launch(self, bucket, what=""):
        step = self.step(bucket, what)
        step.graph.replay()
        if step.path.staging is not None:  # the copy that such a graph has too
            step.path.staging.queue_copy(bucket)


def run(case, steps, make):
    on_device = [not spec.host for spec in case.specs.values()]
    for number, (what, rows) in enumerate(steps, 1):
        if what == "poison":
            case.buffers.poison()
            continue
        loader, call = case.loader(rows, what), make(rows, number)
        bucket = loader.bucket
        if what == "strided" and on_device[0]:
            call[0] = torch.arange(3.0 * rows).view(3, rows).T
        if what == "negated" and on_device[1]:
            call[1] = torch._neg_view(call[1])
        case.backend.code = int(what.startswith("refused"))
        if "in place" in what:
            case.launch(bucket, what)
            case.write(loader, call, what)
        else:
            case.load(loader, call)
        if what == "not launched":
            continue
        case.launch(bucket, what)
        holds(case.buffers, case.specs, call, rows, bucket)


WAYS = ["call", "strided", "negated", "in place", "not launched", "poison", "refused"]
WAYS += ["refused in place", "largest", "largest in place", "pieces", "pieces in place"]
STEPS = st.lists(st.tuples(st.sampled_from(WAYS), st.integers(1, 16)), min_size=2)


@settings(max_examples=25)
@given(STEPS)
def test_a_graph_sees_the_rows_of_its_call_and_fill_behind(steps):
    run(Case(SPECS), steps, rows_of)


@settings(max_examples=25)
@given(STEPS)
def test_inputs_that_the_node_is_not_for_come_beside_it(steps):
    case = Case(SPECS | OTHERS)
    assert (case.node(4).device_inputs, case.node(4).host_offsets) == ((0, 1, 2), {5: 0})
    run(case, steps, lambda rows, number: rows_of(rows, number) + others_of(rows, number))


def both_of(rows, number):
    return rows_of(rows, number) + hosts_of(rows, number)


@pytest.mark.parametrize(
    ("specs", "make"), [(HOSTS, hosts_of), (SPECS | HOSTS, both_of)], ids=["host", "mixed"]
)
@settings(max_examples=15)
@given(steps=STEPS)
def test_host_inputs_come_by_the_node_or_by_pinned_memory_where_they_are_large(specs, make, steps):
    """In turn: the node up to 8 rows, the graph's own copy of pinned memory at 16."""
    case = Case(specs, most_data=200)
    assert [len(case.node(8).host_offsets), case.step(8).path.staging] == [4, None]
    assert case.step(16).path.staging is case.buffers.staging
    run(case, steps, make)


@pytest.mark.parametrize(
    ("specs", "make"), [(HOSTS, hosts_of), (SPECS | HOSTS, both_of)], ids=["host", "mixed"]
)
@settings(max_examples=10)
@given(steps=STEPS)
def test_torch_brings_host_inputs_to_graphs_whose_node_is_not_found(specs, make, steps):
    case = Case(specs, most_data=200, problem="the graph begins with another kernel")
    assert type(case.loader(3)) is CopyTransport
    run(case, steps, make)


@pytest.mark.parametrize(
    ("specs", "make", "problem"),
    [
        (HOSTS, hosts_of, ""),
        (SPECS | HOSTS, both_of, ""),
        (SPECS | HOSTS, both_of, "the graph begins with another kernel"),
    ],
    ids=["host", "mixed", "mixed, by torch"],
)
def test_each_way_after_each_other(specs, make, problem):
    """Fewer rows than before, so that what is left behind shows where it is not filled."""
    for first, second in product(WAYS, WAYS):
        case = Case(specs, most_data=200, problem=problem)
        run(case, [(first, 7), (second, 3), ("pieces", 3), ("largest", 2)], make)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "bfloat16", "float16", "int32", "float64", "complex64"]
)
def test_all_sizes_of_elements(dtype):
    case = Case({"x": StaticInput((None, 3), dtype, fill=1)})
    for rows in (16, 5, 1):
        call = [torch.ones(rows + 1, 3).to(torch.complex64).real.to(case.specs["x"].dtype)[1:]]
        case.buffers.tensors[0].zero_()
        case.loader(rows).load(call, False)
        case.launch(case.loader(rows).bucket)
        holds(case.buffers, case.specs, call, rows, case.loader(rows).bucket)


def test_what_is_in_its_place_already_stays():
    case = Case(SPECS)
    call = case.buffers.views(3)
    for view, value in zip(call, rows_of(3, 5), strict=True):
        view.copy_(value)
    case.loader(3).load(call, False)
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
        case.loader(4).load([value], False)
        case.launch(4)
        assert case.buffers.tensors[0].tolist() == [want] * 4 + [0] * 12


def test_a_node_that_cannot_be_set_is_made_up_for(caplog):
    """Torch copies then, and the launch must not copy again; else it is refused."""
    case = Case(SPECS)
    case.loader(5).load(rows_of(5, 1), False)
    case.backend.code = 1
    case.loader(5).load(rows_of(5, 2), False)
    case.buffers.tensors[1][1] = 44  # a launch that still copied would overwrite it
    case.launch(8)
    assert case.buffers.tensors[1].tolist()[:6] == [2, 44, 2, 2, 2, 7]
    assert "copied by torch instead" in caplog.text
    case.backend.stop_code = 1
    case.node(8).is_idle = False
    with pytest.raises(ReplayError, match="CUDA error 1"):
        case.loader(5).load(rows_of(5, 2), False)


def test_a_thread_without_a_context_gets_one():
    """Before the driver is asked: it does not refuse such a thread, it ends the process."""
    case = Case(SPECS)
    loader, call = case.loader(5), rows_of(5, 2)
    case.backend.contexts.clear()
    threads = [threading.Thread(target=loader.load, args=(call, False)) for _ in range(3)]
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
    runner, _ = made(options=RunnerOptions(check=1, strict=True))
    for number, rows in enumerate((3, 5, 3, 8)):
        call = rows_of(rows, number)
        assert torch.equal(runner(*call)[0], step(*call)[0])


def test_a_node_that_is_gone_wrong_is_found_by_check_mode(made):
    runner, backend = made(options=RunnerOptions(check=1))
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

    in_threads(work)
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


# -- host inputs through the runner --------------------------------------------------------------


def host_step(tokens, half, flags, table):
    total = tokens.sum() + half.float().sum() + flags.sum()
    return tokens * 2 + flags, half.float() + table.sum(), total


def mixed_step(x, y, scale, tokens, half, flags, table):
    return x.sum(-1) + y + tokens, half.float() + scale.sum() + table.sum(), flags.sum()


CHECKED = {name: HOSTS[name] for name in ("tokens", "half")}
RUNS = {"host": (host_step, HOSTS, hosts_of), "mixed": (mixed_step, SPECS | HOSTS, both_of)}
BUCKETS = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
EITHER = pytest.mark.parametrize("what", list(RUNS))


def expected(what, call, bucket):
    """Return what a graph gives: the last result counts fill too."""
    run, specs, _ = RUNS[what]
    rows, padded = len(call[0]), []
    for spec, value in zip(specs.values(), call, strict=True):
        full = spec.full(bucket, CPU)
        (full if spec.batch_dim is None else full[:rows]).copy_(value)
        padded.append(full)
    *by_row, total = run(*padded)
    return [*(one[:rows] for one in by_row), total]


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def run_calls(runner, what, numbers, in_place=lambda number: False, ceiling=lambda number: 2):
    _, specs, make = RUNS[what]
    for number in numbers:
        rows = number * 5 % 8 + 1
        call = make(rows, number)
        want = expected(what, call, BUCKETS[rows] if ceiling(number) else rows)
        if in_place(number):
            runner.buffers.wait()
            for (name, spec), value in zip(specs.items(), call, strict=True):
                place = runner.buffers[name]
                (place if spec.batch_dim is None else place[:rows]).copy_(value)
            got = runner.step(rows, ceiling=ceiling(number))
        else:
            got = runner(*call, ceiling=ceiling(number))
        same(got, want)


@EITHER
def test_host_inputs_in_any_order_of_calls(made, keys, monkeypatch, what):
    """Calls, steps in place and eager ones; no copy of pinned memory, and no event, is there."""
    for name in ("queue_copy", "note_launch"):
        monkeypatch.setattr(Staging, name, None)
    runner, backend = made(*RUNS[what][:2])
    assert {runner.input_path(keys.full(size)) for size in (1, 2, 4, 8)} == {"node"}
    run_calls(runner, what, range(40), lambda number: number % 3 == 1, lambda n: 2 * (n % 7 != 5))
    assert backend.changes >= 30
    assert runner.stats().eager_by_reason == {"ceiling": 5}


@EITHER
def test_large_host_inputs_go_by_pinned_memory_beside(made, keys, what):
    backend = Played()
    backend.most_data = 100
    runner, _ = made(*RUNS[what][:2], backend=backend)
    assert runner.input_path(keys.full(4)) == "node"
    staged = "staging: 136 bytes are too many"
    wanted = staged if what == "host" else f"node; host inputs: {staged}"
    assert runner.input_path(keys.full(8)) == wanted
    run_calls(runner, what, range(30), lambda number: number % 3 == 1)


@EITHER
def test_host_inputs_of_graphs_whose_node_is_not_found(made, keys, what):
    backend = Played()
    backend.find = lambda raw: "the graph begins with another kernel"
    runner, _ = made(*RUNS[what][:2], backend=backend)
    path = "copy: the graph begins with another kernel"
    assert runner.input_path(keys.full(4)) == path
    run_calls(runner, what, range(30), lambda number: number % 3 == 1)
    assert runner.stats().eager_by_reason == {}


@EITHER
def test_host_inputs_where_the_node_fails_for_a_while(made, keys, what, caplog):
    runner, backend = made(*RUNS[what][:2])
    for number in range(30):
        backend.code = int(number % 4 == 2)
        run_calls(runner, what, [number], lambda number: number % 3 == 1)
    assert runner.input_path(keys.full(4)) == "copy: the node failed with CUDA error 1"
    assert len(caplog.records) == 2  # the graphs of 4 and of 8 rows, once each


def test_why_host_inputs_do_not_come_by_the_node(made, keys):
    runner, _ = made(*RUNS["mixed"][:2], backend=TapeBackend())
    problem = "this backend has no such node"
    assert runner.input_path(keys.full(4)) == f"copy: {problem}; host inputs: staging: {problem}"
    wide = {"x": SPECS["x"], "wide": StaticInput((3, None), "int32", host=True)}
    runner, _ = made(lambda x, wide: x.sum(-1) + wide.sum(0), wide)
    assert "another dimension" in runner.input_path(keys.full(4))
    many = {f"x{index}": StaticInput((None,), "int64", host=True) for index in range(17)}
    scope = {}
    exec(f"def named({', '.join(many)}): return x0 + x16", scope)  # noqa: S102
    runner, _ = made(scope["named"], many)
    assert runner.input_path(keys.full(4)) == (
        "staging: there are 17 and the node has room for 16 more inputs"
    )
    assert torch.equal(runner(*[torch.full((3,), n) for n in range(17)]), torch.full((3,), 16))
    pieces = [graph_piece(lambda tokens: tokens), eager_piece(lambda x: x)]
    runner, _ = made(pieces, {"tokens": HOSTS["tokens"]})
    assert runner.input_path(keys.piecewise(4)) == "staging: made of pieces"


def test_host_inputs_under_check_mode(made):
    runner, backend = made(
        lambda tokens, half: (tokens * 2, half.float()), CHECKED, options=RunnerOptions(check=1)
    )
    for number in range(16):
        tokens, half, *_ = hosts_of(number % 8 + 1, number)
        same(runner(tokens, half), (tokens * 2, half.float()))
    assert runner.stats().eager_by_reason == {}
    backend.play = lambda number: None
    with pytest.warns(CheckWarning):
        same(runner(tokens + 1, half), (tokens * 2 + 2, half.float()))


@EITHER
def test_host_inputs_of_lanes_are_taken_when_they_are_given(made, what):
    run, specs, make = RUNS[what]
    runner, _ = made(run, specs, lanes=2)
    handles = []
    for number in range(16):
        rows = number % 8 + 1
        call = make(rows, number)
        want = expected(what, call, BUCKETS[rows])
        handles.append((runner.submit(*call), want))
        for spec, value in zip(specs.values(), call, strict=True):
            if spec.host:
                value.zero_()
    for handle, want in handles:
        same(handle.result(), want)


def test_host_inputs_from_several_threads(made):
    runner, backend = made(*RUNS["host"][:2])
    run_calls(runner, "host", range(8))
    backend.contexts.clear()
    wrong = []

    def work(first):
        try:
            run_calls(runner, "host", range(first, first + 30))
        except AssertionError as error:
            wrong.append(error)

    in_threads(work)
    assert wrong == []
