"""Host inputs that the graph's first node holds as its own data, on a lagging device."""

from __future__ import annotations

import ctypes
import threading

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from device_steps import SIZES, key_of, runner_of  # noqa: E402

from dispatchkit import (  # noqa: E402
    StaticInput,
)
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.backends.cuda import copy as cuda_copy  # noqa: E402
from dispatchkit.backends.cuda.copy import CAPACITIES  # noqa: E402
from dispatchkit.backends.cuda.driver import driver_library  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MEMCPY, KERNEL = 1, 0  # kinds of nodes


def bucket_of(rows, sizes=SIZES):
    return next(size for size in sizes if size >= rows)


def same(got, want):
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0)


def late():
    """Make the device lag behind the host."""
    torch.cuda._sleep(200_000)


def kinds_of_nodes(graph):
    """Return the driver's kinds of a graph's nodes."""
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


def test_such_a_graph_has_no_copy_of_host_memory():
    runner = runner_of(doubled, HOST)
    plain = runner_of(doubled, HOST, backend=CudaBackend(0, copy_node=False))
    why = "the backend was created with copy_node=False"
    assert plain.controls.input_path(key_of(8)) == f"staging: {why}"
    kinds = [
        kinds_of_nodes(one.lanes[0].lifecycle.live()[key_of(8)].graphs[0])
        for one in (runner, plain)
    ]
    # Both copy outputs to memory shared by graphs.
    assert kinds[0].count(MEMCPY) == kinds[1].count(MEMCPY) - 1
    assert kinds[0].count(KERNEL) == kinds[1].count(KERNEL) + 1


def test_every_capacity_and_its_borders():
    """With one byte per row: up to the last byte that fits, and one more."""
    sizes = sorted({1, *CAPACITIES[1:], *(one + 1 for one in CAPACITIES[1:])})
    runner = runner_of(
        lambda x: (x + 1, x.long().sum()),
        {"x": StaticInput((None,), "uint8", fill=2, host=True)},
        sizes=sizes,
    )
    paths = {size: runner.controls.input_path(key_of(size)) for size in sizes}
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


# -- drivers and threads --------------------------------------------------------------------------


def test_a_kernel_that_cannot_be_loaded_is_told(monkeypatch):
    """Simulates a driver that does not support parameters of this size."""
    load = cuda_copy.copy_kernel
    monkeypatch.setattr(
        cuda_copy,
        "copy_kernel",
        lambda index, capacity: load(index, capacity) if capacity < 100 else "an old driver",
    )
    specs = {"x": StaticInput((None, 3), "float32")} | HOST
    runner = runner_of(lambda x, tokens, scale: (x + scale, tokens * 2), specs)
    assert runner.controls.input_path(key_of(8)) == "node; host inputs: staging: an old driver"
    x, (tokens, scale) = torch.ones(5, 3, device=DEVICE), call_of(5, 3)
    for one, want in zip(runner(x, tokens, scale), (scale + 1, tokens * 2), strict=True):
        same(one, want)


def test_a_step_in_place_from_a_thread_that_did_nothing_else():
    runner = runner_of(doubled, HOST)
    for name, value in zip(HOST, call_of(5, 4), strict=True):
        runner.buffers[name][:5] = value
    found = []
    thread = threading.Thread(target=lambda: found.append(runner.run_in_place(5)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    for one, want in zip(found[0], results_of(5, 4, 8), strict=True):
        same(one.float(), want.float())
