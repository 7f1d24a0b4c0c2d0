"""Repair of a voided capture, with the counters of two torch versions; needs no device."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.capture_guard import run_as_capture  # noqa: E402
from dispatchkit.backends.cuda import destroy  # noqa: E402
from dispatchkit.backends.cuda import driver as cuda_driver  # noqa: E402
from dispatchkit.backends.cuda import repair as cuda_repair  # noqa: E402
from dispatchkit.backends.cuda.capture import CaptureAttempt  # noqa: E402
from dispatchkit.backends.cuda.destroy import PendingDestroy, destroy_later, destroy_pending  # noqa: E402
from dispatchkit.backends.cuda.pool import CudaPool  # noqa: E402


class Device:
    """Imitates torch's counters of captures as torch 2.11 or 2.13 keeps them."""

    def __init__(self, version):
        self.version = version
        self.has_driver = True
        self.capturing = False
        self.void = False
        self.users = {}  # pool: number of graphs
        self.opened = set()  # pools that allocations go to
        self.host_opened = set()
        self.draws_refused = False
        self.destroyed = []

    def begin_stream(self, stream, mode):
        if not self.has_driver:
            raise cuda_driver.DriverCallError("no driver")
        assert not self.capturing
        self.capturing = True

    def leave_stream(self, stream):
        if not self.has_driver:
            raise cuda_driver.DriverCallError("no driver")
        self.capturing = False

    def close(self, index, pool):
        if pool not in self.opened:
            raise RuntimeError("not currently recording")
        self.opened.remove(pool)


def make_graph_class(device):
    class Graph:
        def __init__(self, keep_graph=False):
            self.pool = None
            self.ended = False

        def register_generator_state(self, generator):
            pass

        def capture_begin(self, pool, capture_error_mode):
            if device.version == "2.11":
                device.draws_refused = True
            if device.users.get(pool) == 0:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            device.users[pool] = device.users.get(pool, 0) + 1
            assert pool not in device.opened
            device.opened.add(pool)
            if pool in device.host_opened:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            device.host_opened.add(pool)
            device.capturing, device.void, self.pool = True, False, pool

        def capture_end(self):
            assert device.capturing
            device.capturing = False
            void, device.void = device.void, False
            if void and device.version == "2.11":
                raise RuntimeError("operation failed due to a previous error during capture")
            if self.pool not in device.opened:
                raise RuntimeError("capture_end() called before capture_begin().")
            device.opened.remove(self.pool)
            device.host_opened.remove(self.pool)
            if void:
                raise RuntimeError("operation failed due to a previous error during capture")
            device.draws_refused = False
            self.ended = True

        def instantiate(self):
            pass

        def reset(self):
            if self.ended:
                device.users[self.pool] -= 1
                self.ended = False
            device.destroyed.append(self)

    return Graph


class Stream:
    device_index = 0
    cuda_stream = 17


def zeros_on_the_host(*shape, device):
    return torch.full(shape, 0.0)


@pytest.fixture(params=["2.11", "2.13"])
def device(request, monkeypatch):
    device = Device(request.param)
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make_graph_class(device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    monkeypatch.setattr(torch, "zeros", zeros_on_the_host)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.close, raising=False)
    monkeypatch.setattr(cuda_repair, "begin_stream_capture", device.begin_stream)
    monkeypatch.setattr(cuda_repair, "leave_stream_capture", device.leave_stream)
    monkeypatch.setattr(cuda_repair, "_undestroyable", [])
    monkeypatch.setattr(destroy, "_pending", type(destroy._pending)())
    return device


def attempt(pool, failure=None, *, void=False, device=None):
    """Capture once; return the attempt and its error."""
    one = CaptureAttempt(Stream(), pool, [], "thread_local")
    wrong = one.begin()
    if wrong is None:
        if void:
            device.void = True
        wrong = one.end(failure)
    return one, wrong


def test_a_good_capture_counts_until_its_graph_is_buried(device):
    pool = CudaPool()
    one, wrong = attempt(pool)
    assert wrong is None
    assert device.users == {one.handle: 1}
    PendingDestroy(one.graph, pool, one.handle).destroy()
    assert device.users == {one.handle: 0}


def test_a_pool_is_never_captured_into_after_its_last_graph(device):
    pool = CudaPool()
    first, _ = attempt(pool)
    second, _ = attempt(pool)
    assert first.handle == second.handle
    PendingDestroy(first.graph, pool, first.handle).destroy()
    third, wrong = attempt(pool)
    assert (third.handle, wrong) == (first.handle, None)
    for one in (second, third):
        PendingDestroy(one.graph, pool, one.handle).destroy()
    fourth, wrong = attempt(pool)
    assert wrong is None
    assert fourth.handle != first.handle


def test_an_exception_of_python_leaves_a_pool_whole(device):
    pool = CudaPool()
    kept, _ = attempt(pool)
    failure = ValueError("on purpose")
    failed, wrong = attempt(pool, failure)
    assert wrong is failure
    assert device.users == {kept.handle: 1}
    assert failed.graph in device.destroyed
    assert attempt(pool)[0].handle == kept.handle


@pytest.mark.parametrize("failure", [None, ValueError("on purpose")])
def test_after_a_voided_capture_graphs_go_on_and_draws_work(device, failure):
    pool = CudaPool()
    kept, _ = attempt(pool)
    voided, wrong = attempt(pool, failure, void=True, device=device)
    assert isinstance(wrong, ValueError if failure else RuntimeError)
    assert not device.capturing
    assert not device.draws_refused
    assert device.opened == device.host_opened == set()
    again, wrong = attempt(pool)
    assert wrong is None
    assert again.handle == kept.handle
    # 2.13 ends all but the user count, which cannot be repaired safely.
    leaked = 0 if device.version == "2.11" else 1
    assert device.users[kept.handle] == 2 + leaked
    assert (voided.graph in device.destroyed) == (leaked == 0)


def test_a_pool_pinned_by_a_voided_capture_stays_usable_without_graphs(device):
    pool = CudaPool()
    attempt(pool, void=True, device=device)
    for _ in range(3):
        one, wrong = attempt(pool)
        assert wrong is None
        PendingDestroy(one.graph, pool, one.handle).destroy()
    assert sum(count > 0 for count in device.users.values()) == (device.version == "2.13")


def test_without_a_driver_the_pool_is_given_up_or_pinned_and_it_is_said(device, caplog):
    device.has_driver = False
    pool = CudaPool()
    kept, _ = attempt(pool)
    voided, wrong = attempt(pool, void=True, device=device)
    assert isinstance(wrong, RuntimeError)
    assert "stays reserved" in caplog.text
    assert not device.draws_refused
    assert device.opened == set()
    again, wrong = attempt(pool)
    assert wrong is None
    assert (again.handle == kept.handle) == (device.version == "2.13")
    assert voided.graph not in device.destroyed
    assert cuda_repair._undestroyable[0] is voided.graph
    alive = weakref.ref(voided.graph)
    del voided
    cuda_repair._undestroyable.clear()  # as at the interpreter's exit
    gc.collect()
    assert alive() is not None


def test_a_capture_that_cannot_begin_costs_the_pool_and_no_draws(device, caplog):
    pool = CudaPool()
    kept, _ = attempt(pool)
    device.host_opened.add(kept.handle)  # another library records into it
    one, wrong = attempt(pool)
    assert isinstance(wrong, RuntimeError)
    assert not device.draws_refused
    assert device.opened == set()
    assert one.graph not in device.destroyed
    assert attempt(pool)[1] is None
    PendingDestroy(kept.graph, pool, kept.handle).destroy()


def test_a_device_that_captures_no_more_is_said_loudly(device, caplog, monkeypatch):
    device.has_driver = False
    monkeypatch.setattr(cuda_repair, "_capture_small_graph", lambda *args: False)
    attempt(CudaPool(), void=True, device=device)
    assert [record.levelname for record in caplog.records if record.levelno > 30] == ["CRITICAL"]


def test_a_graph_let_go_of_in_a_capture_is_destroyed_after_it(device):
    pool = CudaPool()
    one, _ = attempt(pool)

    def capture():
        destroy_later(PendingDestroy(one.graph, pool, one.handle))
        assert device.destroyed == []

    run_as_capture("cuda:0", capture)
    destroy_pending()
    assert device.destroyed == [one.graph]


def test_a_missing_driver_library_is_a_typed_error(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    cuda_driver.driver_library.cache_clear()
    try:
        with pytest.raises(cuda_driver.DriverCallError, match=r"libcuda|nvcuda"):
            cuda_driver.leave_stream_capture(0)
    finally:
        cuda_driver.driver_library.cache_clear()
