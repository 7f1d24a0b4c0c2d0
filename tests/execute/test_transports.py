"""Transports on their own buffers, and copy nodes on a tape that imitates the driver.

``test_input_transports.py`` tests what all transports share, through runners.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from interrupts import interrupted  # noqa: E402
from played_tape import PlayedTape  # noqa: E402

from dispatchkit import RunnerOptions, StaticInput, eager_piece, graph_piece  # noqa: E402
from dispatchkit.backends.cuda.copy import CAPACITIES, CopyKernel  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ReplayError  # noqa: E402
from dispatchkit.execute.io.buffers import InputBuffers  # noqa: E402
from dispatchkit.execute.io.input_path import MAX_BYTES, choose_path, copied_path  # noqa: E402
from dispatchkit.execute.io.inputs import InputSet  # noqa: E402
from dispatchkit.execute.io.staging import StagingBuffers  # noqa: E402
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
#: Elements of every size, and types that numpy lacks.
TYPES = ("bool", "uint8", "bfloat16", "float16", "int32", "float64", "complex64", "float8_e4m3fn")
EVERY_TYPE = {
    f"x{index}": StaticInput((None, 3) if index % 2 else (None,), dtype, fill=1)
    for index, dtype in enumerate(TYPES)
}


def call_of(specs, rows, number):
    """Return the values of a call in declared order; all are small integers."""
    values = []
    for spec in specs.values():
        whole = torch.arange(spec.sized(rows).numel()).add(number).remainder(5)
        values.append(whole.view(spec.sized(rows)).float().to(spec.dtype))
    return values


def holds(buffers, specs, call, rows, bucket):
    """Compare a graph's inputs bit by bit, because some types cannot be compared otherwise."""
    for (_, spec), seen, value in zip(specs.items(), buffers.views(bucket), call, strict=True):
        wanted = spec.full(bucket, CPU)
        dim = spec.batch_dim
        (wanted if dim is None else wanted.narrow(dim, 0, rows)).copy_(value)
        assert torch.equal(seen.contiguous().view(torch.uint8), wanted.view(torch.uint8))


class Case:
    """Buffers and two steps per bucket, as after captures: a whole graph, and pieces."""

    def __init__(self, specs, *, backend=None, most_data=CAPACITIES[-1], problem=""):
        self.specs, self.backend = specs, backend or PlayedTape()
        self.backend.most_data = most_data
        if problem:
            self.backend.find = lambda raw: problem
        self.buffers = InputBuffers(InputSet(specs, CPU), 16, backend=self.backend)
        self.steps, self.transports = {}, {}

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

    def path(self, bucket):
        return self.step(bucket).path

    def transport(self, rows, what=""):
        sizes = (16,) if "largest" in what else (1, 2, 4, 8, 16)
        step = self.step(next(size for size in sizes if size >= rows), what)
        known = self.transports.get((rows, id(step)))
        if known is None:
            known = self.transports[rows, id(step)] = transport_of(step.path, rows)
        return known

    def load(self, transport, call):
        """Load a call and overwrite the host's values immediately."""
        given = [
            value.clone() if spec.host else value
            for spec, value in zip(self.specs.values(), call, strict=True)
        ]
        transport.load(self.buffers.inputs.to_arrays(given), False)
        for spec, value in zip(self.specs.values(), given, strict=True):
            if spec.host:
                value.zero_()

    def write(self, transport, call, what):
        """Write a call in place and bring it in."""
        rows, step = transport.num_rows, self.step(transport.bucket, what)
        places = self.buffers.views(rows)
        for index, host in self.buffers.host_rows(rows):
            places[index] = host
        for place, value in zip(places, call, strict=True):
            place.copy_(value)
        transport.load_in_place()
        if step.path.staging is None:  # the source may be overwritten immediately
            for _, host in self.buffers.host_rows(rows):
                host.fill_(1)

    def launch(self, bucket, what=""):
        step = self.step(bucket, what)
        step.graph.replay()
        if step.path.staging is not None:  # such a graph has a copy too
            step.path.staging.queue_copy(bucket)


def run(case, steps):
    for number, (what, rows) in enumerate(steps, 1):
        if what in ("poison", "reset"):
            getattr(case.buffers, what)()
            continue
        transport, call = case.transport(rows, what), call_of(case.specs, rows, number)
        bucket = transport.bucket
        case.backend.code = int(what.startswith("refused"))
        if "in place" in what:
            case.write(transport, call, what)
        else:
            if what == "strided":
                call = [torch.stack([value, value], -1)[..., 0] for value in call]
            case.load(transport, call)
        if what == "not launched":
            continue
        case.launch(bucket, what)
        holds(case.buffers, case.specs, call, rows, bucket)


WAYS = ["call", "strided", "in place", "not launched", "poison", "reset", "refused"]
WAYS += ["refused in place", "largest", "largest in place", "pieces", "pieces in place"]
LOST = "the graph begins with a kernel other than the copy kernel"
CASES = {
    "a node": lambda: Case(SPECS),
    "a node, every type": lambda: Case(EVERY_TYPE),
    "a node, and others": lambda: Case(SPECS | OTHERS),
    # A node up to 8 rows, and the graph's own copy of pinned memory at 16.
    "a node or pinned memory": lambda: Case(HOSTS, most_data=200),
    "a node or pinned memory, mixed": lambda: Case(SPECS | HOSTS, most_data=200),
    "torch or pinned memory": lambda: Case(HOSTS, most_data=200, problem=LOST),
    "torch or pinned memory, mixed": lambda: Case(SPECS | HOSTS, most_data=200, problem=LOST),
    "torch": lambda: Case(SPECS | OTHERS, backend=TapeBackend()),
    "torch, one type": lambda: Case({"y": SPECS["y"]}, backend=TapeBackend()),
}


@pytest.mark.slow_except(
    "a node, every type", "torch or pinned memory, mixed", "a node or pinned memory, mixed"
)
@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(WAYS), st.integers(1, 16)), min_size=2))
def test_a_graph_reads_the_rows_of_its_call_and_fill_behind(make, steps):
    """This holds after any earlier calls, including calls that were never launched."""
    run(make(), steps)


def test_what_a_path_chooses():
    path = Case(SPECS | OTHERS).path(4)
    assert (path.device_inputs, path.host_offsets, path.staging) == ((0, 1, 2), {5: 0}, None)
    case = Case(HOSTS, most_data=200)
    assert [len(case.path(8).host_offsets), case.path(8).staging] == [4, None]
    assert [len(case.path(16).host_offsets), case.path(16).staging] == [0, case.buffers.staging]
    lost = Case(HOSTS, most_data=200, problem=LOST)
    assert type(lost.transport(3)) is CopyTransport
    assert (lost.path(4).node, lost.path(4).staging) == (None, None)


def test_what_is_in_its_place_already_stays():
    case = Case(SPECS)
    call = case.buffers.views(3)
    for view, value in zip(call, call_of(SPECS, 3, 5), strict=True):
        view.copy_(value)
    case.transport(3).load(call, False)
    case.launch(4)
    holds(case.buffers, SPECS, call_of(SPECS, 3, 5), 3, 4)


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
        case.transport(4).load([value], False)
        case.launch(4)
        assert case.buffers.tensors[0].tolist() == [want] * 4 + [0] * 12


def test_a_node_that_cannot_be_set_is_made_up_for(caplog):
    """Torch copies then, and the launch must not copy again; otherwise the call is refused."""
    case = Case(SPECS)
    case.transport(5).load(call_of(SPECS, 5, 1), False)
    case.backend.code = 1
    case.transport(5).load(call_of(SPECS, 5, 2), False)
    case.buffers.tensors[1][1] = 44  # another copy would overwrite it
    case.launch(8)
    assert case.buffers.tensors[1].tolist()[:6] == [2, 44, 4, 0, 1, 7]
    assert "copied without the node" in caplog.text
    case.backend.stop_code = 1
    case.path(8).is_idle = False
    with pytest.raises(ReplayError, match="CUDA error 1"):
        case.transport(5).load(call_of(SPECS, 5, 2), False)


def test_a_thread_without_a_context_gets_one():
    """It gets one before the driver is called, which would end the process."""
    case = Case(SPECS)
    transport, calls = case.transport(5), [call_of(SPECS, 5, number) for number in range(3)]
    case.backend.contexts.clear()
    for call in calls:  # all alive, so each has its own addresses
        thread = threading.Thread(target=transport.load, args=(call, False))
        thread.start()
        thread.join()
    assert case.backend.changes >= 3
    case.launch(8)
    holds(case.buffers, SPECS, calls[-1], 5, 8)


class TestSetOnce:
    """A node that is already correct is not set again."""

    def make(self):
        case = Case(SPECS)
        transport, call = case.transport(5), call_of(SPECS, 5, 2)
        transport.load(call, True)
        return case, transport, call

    def holds_after(self, case, transport, call, changes):
        before = case.backend.changes
        transport.load(call, True)
        assert case.backend.changes - before == changes
        case.launch(8)
        holds(case.buffers, SPECS, call, transport.num_rows, 8)

    def test_other_values_in_the_same_tensors_are_brought_in(self):
        """The node has addresses and reads their values when the graph runs."""
        case, transport, call = self.make()
        for value in call:
            value.add_(3)
        self.holds_after(case, transport, call, 0)

    def test_one_tensor_elsewhere_sets_it(self):
        case, transport, call = self.make()
        call[1] = call[1] + 1
        self.holds_after(case, transport, call, 1)
        self.holds_after(case, transport, call, 0)

    def test_another_size_of_the_same_graph_sets_it(self):
        """A graph serves batches of several sizes with one node."""
        case, transport, call = self.make()
        rows = [value[:4] if value.dim() and len(value) == 5 else value for value in call]
        assert case.path(4) is not case.path(8)
        other = transport_of(case.path(8), 4)
        self.holds_after(case, other, rows, 1)
        self.holds_after(case, transport, call, 1)

    def test_a_step_in_place_between_sets_it(self):
        """The step in place stopped the node."""
        case, transport, call = self.make()
        transport.load_in_place()
        self.holds_after(case, transport, call, 1)

    def test_a_failure_between_sets_it(self):
        """The effect of a refused driver call is unknown."""
        case, transport, call = self.make()
        case.backend.code = 1
        transport.load([value.clone() for value in call], True)
        case.backend.code = 0
        self.holds_after(case, transport, call, 1)

    def test_data_of_the_host_is_taken_each_time(self):
        case = Case(HOSTS)
        for number in (1, 2):
            call = call_of(HOSTS, 5, number)
            case.load(case.transport(5), call)
            case.launch(8)
            holds(case.buffers, HOSTS, call, 5, 8)

    def test_an_interrupt_anywhere_sets_it(self):
        """Includes interrupts before and after the driver's call."""
        case, transport, _ = self.make()
        calls = [call_of(SPECS, 5, number) for number in range(2)]
        places = interrupted(lambda: transport.load(calls[0], True))
        for at in range(places):
            interrupted(lambda at=at: transport.load(calls[at % 2], True), at)
            transport.load(calls[at % 2], True)
            case.launch(8)
            holds(case.buffers, SPECS, calls[at % 2], 5, 8)


# -- through the runner -------------------------------------------------------------------------


def rows_of(rows, number):
    return [
        torch.full((rows, 3), float(number)),
        torch.full((rows,), number),
        torch.full((2,), float(number)),
    ]


def step(x, y, scale):
    return x * 2 + y[:, None], scale + 1


@pytest.fixture
def made(make_runner):
    def make(run=step, specs=SPECS, backend=None, **settings):
        backend = backend or PlayedTape()
        runner = make_runner(run, dict(specs), backend=backend, **settings)
        runner.capture()
        return runner, backend

    return make


def test_many_inputs(made, keys):
    specs = {f"x{index}": StaticInput((None,), "int64", fill=index) for index in range(20)}

    def run(**inputs):
        return sum(inputs.values())

    names = ", ".join(specs)
    scope = {"run": run}
    exec(f"def named({names}): return run(**locals())", scope)  # noqa: S102
    runner, _ = made(scope["named"], specs)
    assert runner.controls.input_path(keys.full(4)) == "node"
    for rows in (3, 8, 5):
        call = [torch.arange(rows) * index for index in range(20)]
        assert torch.equal(runner(*call), sum(call))


def test_steps_in_place_are_not_overwritten_by_an_earlier_call(made):
    """A launch without inputs copies nothing from the previous call."""
    runner, _ = made(outputs="view")
    runner(*rows_of(3, 1))
    runner.buffers["x"][:3], runner.buffers["y"][:3] = 5.0, 6
    assert torch.equal(runner.run_in_place(3)[0], torch.full((3, 3), 16.0))
    assert torch.equal(runner(*rows_of(3, 2))[0], torch.full((3, 3), 6.0))


def test_a_failed_launch_leaves_nothing_behind(made, quiet):
    """Rows that the launch would have filled do not count as filled."""
    runner, backend = made(proves=False)
    runner(*rows_of(8, 1))
    play, backend.play = backend.play, None
    assert torch.equal(runner(*rows_of(5, 2))[0], torch.full((5, 3), 6.0))
    assert runner.stats().replay_failures == 1
    backend.play = play
    runner.buffers["x"][:3], runner.buffers["y"][:3] = 5.0, 6
    assert torch.equal(runner.run_in_place(3)[0], torch.full((3, 3), 16.0))


def test_a_node_that_is_gone_wrong_is_found_by_check_mode(made):
    runner, backend = made(options=RunnerOptions(check=1))
    backend.play = lambda number: None
    call = rows_of(3, 4)
    with pytest.warns(CheckWarning):
        assert torch.equal(runner(*call)[0], step(*call)[0])


def test_why_there_is_no_node(made, make_runner, keys):
    runner, _ = made(backend=TapeBackend())
    assert (
        runner.controls.input_path(keys.full(4)) == "copy: the backend does not support copy nodes"
    )
    backend = PlayedTape()
    backend.problem = "not today"
    runner, _ = made(backend=backend)
    assert runner.controls.input_path(keys.full(4)) == "copy: not today"
    rows = {"x": StaticInput((None, MAX_BYTES // 4), "int64")}
    runner, _ = made(lambda x: x.sum(-1), rows)
    assert "every device input is larger than 256 KiB" in runner.controls.input_path(keys.full(1))
    runner, _ = made([graph_piece(lambda x: x), eager_piece(lambda x: x)], {"x": SPECS["x"]})
    assert "pieces" in runner.controls.input_path(keys.piecewise(4))
    backend = PlayedTape()
    backend.find = lambda raw: "the graph begins with a kernel other than the copy kernel"
    backend.kernel = CopyKernel(
        ctypes.c_void_p(1), backend.launch, backend.change, backend.find, backend.enter
    )
    runner, _ = made(backend=backend)
    assert "other than the copy kernel" in runner.controls.input_path(keys.full(4))
    assert torch.equal(runner(*rows_of(3, 4))[0], step(*rows_of(3, 4))[0])


def test_a_node_that_fails_is_told(made, keys, caplog):
    runner, backend = made()
    runner(*rows_of(3, 1))
    backend.code = 1
    for number in (2, 3):
        assert torch.equal(runner(*rows_of(3, number))[0], step(*rows_of(3, number))[0])
    assert "CUDA error 1" in runner.controls.input_path(keys.full(4))
    assert len(caplog.records) == 1


def test_the_same_arguments_are_looked_at_anew(made):
    """Tensors that were contiguous at one call need not be contiguous at the next."""
    runner, _ = made(lambda x: x + 0, {"x": StaticInput((None, 2), "int64")})
    args = (torch.arange(4).view(2, 2),)
    for _ in range(3):
        assert runner(*args).tolist() == [[0, 1], [2, 3]]
        args[0].t_()
        assert runner(*args).tolist() == [[0, 2], [1, 3]]
        args[0].t_()


def mixed_step(x, y, scale, tokens, half, flags, table):
    return x.sum(-1) + y + tokens, half.float() + scale.sum() + table.sum(), flags.sum()


def test_host_inputs_of_a_node_take_neither_a_copy_of_pinned_memory_nor_an_event(made, monkeypatch):
    for name in ("queue_copy", "record_launch"):
        monkeypatch.setattr(StagingBuffers, name, None)
    runner, backend = made(mixed_step, SPECS | HOSTS, proves=False)
    changes = backend.changes
    for number in range(5):
        runner(*call_of(SPECS | HOSTS, 3, number))
    assert backend.changes == changes + 5


def test_why_host_inputs_do_not_come_by_the_node(made, keys):
    runner, _ = made(mixed_step, SPECS | HOSTS, backend=TapeBackend())
    problem = "the backend does not support copy nodes"
    assert (
        runner.controls.input_path(keys.full(4))
        == f"copy: {problem}; host inputs: staging: {problem}"
    )
    wide = {"x": SPECS["x"], "wide": StaticInput((3, None), "int32", host=True)}
    runner, _ = made(lambda x, wide: x.sum(-1) + wide.sum(0), wide)
    assert "dimension other than 0" in runner.controls.input_path(keys.full(4))
    many = {f"x{index}": StaticInput((None,), "int64", host=True) for index in range(17)}
    scope = {}
    exec(f"def named({', '.join(many)}): return x0 + x16", scope)  # noqa: S102
    runner, _ = made(scope["named"], many)
    assert runner.controls.input_path(keys.full(4)) == (
        "staging: the copy node has room for 16 host inputs, but the graph has 17"
    )
    assert torch.equal(runner(*[torch.full((3,), n) for n in range(17)]), torch.full((3,), 16))
    pieces = [graph_piece(lambda tokens: tokens), eager_piece(lambda x: x)]
    runner, _ = made(pieces, {"tokens": HOSTS["tokens"]})
    assert runner.controls.input_path(keys.piecewise(4)) == "staging: made of pieces"
