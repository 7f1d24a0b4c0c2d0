"""Host inputs that the graph's first node brings in as its own data, on a device that is late."""

from __future__ import annotations

import ctypes
import threading

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from device_steps import SIZES, in_threads, key_of, runner_of  # noqa: E402

from dispatchkit import (  # noqa: E402
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.backends.cuda import copy as cuda_copy  # noqa: E402
from dispatchkit.backends.cuda.copy import CAPACITIES  # noqa: E402
from dispatchkit.backends.cuda.driver import driver_library  # noqa: E402
from dispatchkit.execute.io.staging import Staging  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MEMCPY, KERNEL = 1, 0  # kinds of nodes


def bucket_of(rows, sizes=SIZES):
    return next(size for size in sizes if size >= rows)


def same(got, want):
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0)


def late():
    """Let the device lag behind the host."""
    torch.cuda._sleep(200_000)


def kinds_of_nodes(graph):
    """Return the kinds of a graph's nodes, by the driver."""
    driver, count = driver_library(), ctypes.c_size_t(0)
    raw = ctypes.c_void_p(graph.raw_graph_handle)
    assert driver.cuGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes, kind = (ctypes.c_void_p * count.value)(), ctypes.c_int(-1)
    assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


FORMS = {
    "array": lambda tensor: tensor.numpy().copy(),
    "pinned": lambda tensor: tensor.clone().pin_memory(),
    "ordinary": lambda tensor: tensor.clone(),
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
}
HOST = {
    "tokens": StaticInput((None,), "int64", fill=3, host=True),
    "scale": StaticInput((None, 3), "float32", fill=0.5, host=True),
}


def doubled(tokens, scale):
    return tokens + 1, scale * 2, tokens.sum() + scale.sum()


def call_of(rows, number):
    return torch.full((rows,), number), torch.full((rows, 3), float(number))


def results_of(rows, number, bucket):
    fill = (bucket - rows) * (3 + 1.5)
    total = torch.tensor(number * rows * 4.0 + fill)
    return torch.full((rows,), number + 1), torch.full((rows, 3), 2.0 * number), total


@pytest.mark.parametrize("in_place", [False, True], ids=["call", "in place"])
@pytest.mark.parametrize("form", [*FORMS, "list"])
def test_what_is_overwritten_at_once_was_taken(monkeypatch, form, in_place):
    """Nothing is waited for, and no event is recorded: the node's data is CUDA's own."""
    monkeypatch.setattr(Staging, "note_launch", None)
    runner = runner_of(doubled, HOST)
    assert {runner.input_path(key_of(size)) for size in SIZES} == {"node"}
    kept = []
    for number in range(80):
        rows = number * 7 % 32 + 1
        late()
        values = call_of(rows, number)
        if in_place:
            runner.buffers.wait()
            places = [runner.buffers[name][:rows] for name in HOST]
            for place, value in zip(places, values, strict=True):
                place.copy_(value)
            result = runner.step(rows)
        elif form == "list":
            result = runner(*[value.tolist() for value in values])
            places = []
        else:
            places = [FORMS[form](value) for value in values]
            result = runner(*places)
        for place in places:
            place[...] = -9
        kept.append((rows, number, [one.clone() for one in result]))
    for rows, number, got in kept:
        for one, want in zip(got, results_of(rows, number, bucket_of(rows)), strict=True):
            same(one.float(), want.float())
    # By its first replay a graph that nobody watched turns out to draw nothing.
    assert {runner.launch_path(key_of(size)) for size in SIZES} == {"direct"}
    assert runner.stats().eager_by_reason == {}


def test_such_a_graph_has_no_copy_of_host_memory():
    runner = runner_of(doubled, HOST)
    plain = runner_of(doubled, HOST, backend=CudaBackend(0, copy_node=False))
    assert plain.input_path(key_of(8)) == "staging: switched off"
    kinds = [kinds_of_nodes(one.lifecycle.live()[key_of(8)].graphs[0]) for one in (runner, plain)]
    # Both copy outputs to where graphs share them.
    assert kinds[0].count(MEMCPY) == kinds[1].count(MEMCPY) - 1
    assert kinds[0].count(KERNEL) == kinds[1].count(KERNEL) + 1


def test_every_capacity_and_its_borders():
    """One byte a row: up to the last byte that fits, and one beyond."""
    sizes = sorted({1, *CAPACITIES[1:], *(one + 1 for one in CAPACITIES[1:])})
    runner = runner_of(
        lambda x: (x + 1, x.long().sum()),
        {"x": StaticInput((None,), "uint8", fill=2, host=True)},
        sizes=sizes,
    )
    paths = {size: runner.input_path(key_of(size)) for size in sizes}
    assert paths.pop(sizes[-1]).startswith("staging: ")
    assert set(paths.values()) == {"node"}
    kept = []
    generator = np.random.default_rng(1)
    for rows in [*sizes, *(size - 1 for size in sizes[1:]), 100, 5000, *sizes[::-1]]:
        late()
        x = generator.integers(0, 250, rows, dtype=np.uint8)
        given = x.copy()
        result = runner(given)
        given[:] = 251
        total = int(x.sum(dtype=np.int64)) + 2 * (bucket_of(rows, sizes) - rows)
        kept.append((torch.from_numpy(x) + 1, total, [one.clone() for one in result]))
    for want, total, got in kept:
        same(got[0], want)
        assert int(got[1]) == total


TYPES = ("int64", "int32", "int16", "uint8", "bool", "float64", "float32", "float16")


@pytest.mark.parametrize("form", ["pinned", "ordinary", "strided"])
def test_every_type(form):
    dtypes = (*TYPES, "bfloat16", "complex64", "float8_e4m3fn")
    specs = {
        f"x{index}": StaticInput((None, 3) if index % 2 else (None,), dtype, fill=1, host=True)
        for index, dtype in enumerate(dtypes)
    } | {"fixed": StaticInput((5,), "int64", host=True)}
    scope = {}
    results = ", ".join(f"{name}.clone()" for name in specs)
    exec(f"def named({', '.join(specs)}): return {results}", scope)  # noqa: S102
    runner = runner_of(scope["named"], specs)
    assert runner.input_path(key_of(32)) == "node"
    for number in range(20):
        rows = number * 7 % 32 + 1
        values = []
        for spec in specs.values():
            shape = spec.sized(rows)
            whole = torch.arange(shape.numel()).add(number).remainder(2).view(shape)
            values.append(whole.float().to(spec.dtype))
        given = [FORMS[form](value) for value in values]
        late()
        got = [one.clone() for one in runner(*given)]
        for value in given:
            value.zero_()
        for one, value in zip(got, values, strict=True):
            assert (one.dtype, one.shape) == (value.dtype, value.shape)
            same(one.view(torch.uint8), value.view(torch.uint8))


# -- with inputs on the device --------------------------------------------------------------------

MIXED = {
    "x": StaticInput((None, 3), "float32", fill=-1),
    "tokens": StaticInput((None,), "int64", fill=7, host=True),
    "y": StaticInput((None,), "int32", fill=2),
    "flags": StaticInput((None,), "bool", fill=True, host=True),
    "table": StaticInput((4,), "float32", host=True),
}
LARGE = {"large": StaticInput((None, 1 << 13), "float32", fill=1)}  # not for the node


def mixed(x, tokens, y, flags, table):
    total = x.sum() + tokens.sum() + y.sum() + flags.sum() + table.sum()
    return x + tokens[:, None], y + flags, total


def mixed_large(x, tokens, y, flags, table, large):
    first, second, total = mixed(x, tokens, y, flags, table)
    return first, second, total + large.sum()


def mixed_call(specs, rows, number):
    made = {}
    for name, spec in specs.items():
        value = torch.arange(spec.sized(rows).numel()).add(number).remainder(4)
        value = value.view(spec.sized(rows)).to(spec.dtype)
        made[name] = value if spec.host else value.to(DEVICE)
    return made


def padded(specs, call, bucket):
    """Return a call as a graph sees it."""
    made = {}
    for name, spec in specs.items():
        full, value = spec.full(bucket, torch.device(DEVICE)), call[name]
        (full if spec.batch_dim is None else full[: len(value)]).copy_(value)
        made[name] = full
    return made


def write(runner, specs, call, rows):
    runner.buffers.wait()
    for name, spec in specs.items():
        place = runner.buffers[name]
        (place if spec.batch_dim is None else place[:rows]).copy_(call[name])


def wanted(run, specs, call, rows, bucket):
    want = run(**padded(specs, call, bucket))
    return [one[:rows] if one.dim() else one for one in want]


WAYS = {
    "by the node": {},
    "by pinned memory": {"most": 100},
    "by torch": {"problem": "the graph begins with another kernel"},
}


@pytest.fixture(params=list(WAYS))
def way(request, monkeypatch):
    """Let only little data fit, or let no node be found in its graph."""
    given = WAYS[request.param]
    if "most" in given:
        made = CudaBackend.copy_node

        def copy_node(self, num_regions, num_bytes, data_bytes=0):
            if data_bytes > given["most"]:
                return "too many bytes for this test"
            return made(self, num_regions, num_bytes, data_bytes)

        monkeypatch.setattr(CudaBackend, "copy_node", copy_node)
    if "problem" in given:
        monkeypatch.setattr(cuda_copy, "_first_node", lambda *_: given["problem"])
    return request.param


@pytest.mark.parametrize(
    ("run", "specs"), [(mixed, MIXED), (mixed_large, MIXED | LARGE)], ids=["small", "large too"]
)
def test_host_and_device_inputs_by_calls_and_in_place_in_turn(way, run, specs):
    runner = runner_of(run, specs)
    paths = {
        "by the node": ("node", "node"),
        "by pinned memory": ("node", "node; host inputs: staging: too many bytes for this test"),
        "by torch": ("copy: the graph begins with another kernel",) * 2,
    }
    assert tuple(runner.input_path(key_of(size)) for size in (4, 32)) == paths[way]
    kept = []
    for number in range(90):
        rows = number * 7 % 32 + 1
        call = mixed_call(specs, rows, number)
        want = wanted(run, specs, call, rows, bucket_of(rows))
        late()
        if number % 3 == 1:
            write(runner, specs, call, rows)
            got = runner.step(rows)
        else:
            got = runner(**call, ceiling=0 if number % 11 == 5 else 2)
            if number % 11 == 5:
                want = wanted(run, specs, call, rows, rows)
        for name, spec in specs.items():
            if spec.host:
                call[name].zero_()
        kept.append(([one.clone() for one in got], want))
    for got, want in kept:
        for one, other in zip(got, want, strict=True):
            same(one, other)


def test_a_kernel_that_cannot_be_loaded_is_told(monkeypatch):
    """As on a driver that knows no parameters of this size."""
    load = cuda_copy.copy_kernel
    monkeypatch.setattr(
        cuda_copy,
        "copy_kernel",
        lambda index, capacity=0: "an old driver" if capacity else load(index),
    )
    runner = runner_of(mixed, MIXED)
    assert runner.input_path(key_of(8)) == "node; host inputs: staging: an old driver"
    call = mixed_call(MIXED, 5, 3)
    for one, other in zip(runner(**call), wanted(mixed, MIXED, call, 5, 8), strict=True):
        same(one, other)


def test_a_driver_that_refuses_to_set_the_node_for_a_while():
    runner = runner_of(mixed, MIXED)
    refuses = []

    def refusing(make):
        def setter(*given):
            set_node = make(*given)
            return lambda values: 1 if refuses else set_node(values)

        return setter

    for step in runner.lifecycle.live().values():
        node = step.input_path.node
        node.setter = refusing(node.setter)
    for number in range(40):
        rows = number * 7 % 32 + 1
        call = mixed_call(MIXED, rows, number)
        want = wanted(mixed, MIXED, call, rows, bucket_of(rows))
        refuses[:] = [True] * (number % 5 in (2, 3))
        late()
        if number % 2:
            write(runner, MIXED, call, rows)
            got = runner.step(rows)
        else:
            got = runner(**call)
        for one, other in zip(got, want, strict=True):
            same(one, other)
    assert runner.input_path(key_of(32)) == "copy: the node failed with CUDA error 1"


# -- threads and lanes ----------------------------------------------------------------------------


def test_host_inputs_from_several_threads_and_streams():
    runner = runner_of(doubled, HOST)
    results, failures = [], []

    def work(first):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for number in range(first, first + 60):
                    rows = number * 7 % 32 + 1
                    values = [value.numpy().copy() for value in call_of(rows, number)]
                    torch.cuda._sleep(20_000)
                    results.append((rows, number, runner(*values)))
                    for value in values:
                        value[...] = -5
        except Exception as error:  # noqa: BLE001 - told below
            failures.append(error)

    in_threads(3, lambda index: work(100 * index))
    torch.cuda.synchronize()
    assert failures == []
    for rows, number, got in results:
        for one, want in zip(got, results_of(rows, number, bucket_of(rows)), strict=True):
            same(one.float(), want.float())


def test_a_step_in_place_from_a_thread_that_did_nothing_else():
    runner = runner_of(doubled, HOST)
    for name, value in zip(HOST, call_of(5, 4), strict=True):
        runner.buffers[name][:5] = value
    found = []
    thread = threading.Thread(target=lambda: found.append(runner.step(5)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    for one, want in zip(found[0], results_of(5, 4, 8), strict=True):
        same(one.float(), want.float())


def test_host_inputs_of_several_lanes():
    runner = runner_of(doubled, HOST, lanes=3)
    handles = []
    for number in range(90):
        rows = number * 7 % 32 + 1
        values = [value.numpy().copy() for value in call_of(rows, number)]
        late()
        handles.append((rows, number, runner.submit(*values)))
        for value in values:
            value[...] = -5
    for rows, number, handle in handles:
        got = handle.result()
        for one, want in zip(got, results_of(rows, number, bucket_of(rows)), strict=True):
            same(one.float(), want.float())


def test_host_inputs_of_graphs_captured_anew_and_under_check_mode():
    runner = runner_of(
        lambda tokens, scale: (tokens + 1, scale * 2),
        HOST,
        options=RunnerOptions(check=1, strict=True),
    )
    for number in range(12):
        if number == 6:
            runner.invalidate("for a test")
            runner.capture()
        rows = number * 7 % 32 + 1
        late()
        got = runner(*call_of(rows, number))
        for one, want in zip(got, results_of(rows, number, rows)[:2], strict=True):
            same(one, want)
    assert runner.input_path(key_of(8)) == "node"
