"""Memory of graphs is freed with them, even if an error is kept."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.capture_errors import clear_frames, clear_traceback  # noqa: E402
from dispatchkit.errors import ReplayError  # noqa: E402

WIDTH = 64
INPUT = {"x": StaticInput((None, WIDTH), "float32")}
KEPT = RuntimeError("the same one each time")


class Step:
    """Fails in captures on demand, with an error that it keeps."""

    def __init__(self, backend):
        self.backend, self.fails = backend, False

    def __call__(self, x):
        y = torch.tanh(x) * 2
        if self.fails and self.backend.is_capturing():
            raise KEPT
        return y


@pytest.fixture
def step(backend):
    return Step(backend)


@pytest.fixture(autouse=True)
def _no_collector():
    """Disable the collector, which would hide memory that only a collection frees."""
    gc.freeze()  # so that explicit collections skip existing objects
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def pieces_of(step):
    return [graph_piece(lambda x: x + 1), eager_piece(lambda h: h.cumsum(0)), graph_piece(step)]


@pytest.mark.parametrize("split", [False, True], ids=["full", "pieces"])
def test_error_that_a_step_keeps_holds_no_memory_of_graphs(make_runner, step, quiet, split):
    """An error's frames hold functions, which hold outputs and intermediates."""
    mode = "PIECEWISE" if split else "FULL"
    runner = make_runner(pieces_of(step) if split else step, INPUT, mode=mode, lazy=True)
    runner(torch.zeros(8, WIDTH))
    step.fails = True
    runner(torch.zeros(4, WIDTH))
    assert runner.stats().capture_failures == 1
    held = runner.num_bytes
    runner.clear()
    runner.swap(max_bytes=held // 4)
    assert runner.num_bytes == 0
    assert KEPT.__traceback__ is None


@pytest.mark.parametrize("split", [False, True], ids=["full", "pieces"])
def test_failed_capture_alone_leaves_no_memory(make_runner, step, quiet, split):
    mode = "PIECEWISE" if split else "FULL"
    runner = make_runner(
        pieces_of(step) if split else step,
        INPUT,
        mode=mode,
        options=RunnerOptions(memory=MemoryOptions(max_bytes=1 << 20)),
    )
    step.fails = True
    assert runner.capture().failed
    assert runner.num_bytes == 0


def test_error_of_a_replay_holds_no_memory_of_graphs(make_runner, backend, quiet):
    total = torch.zeros(WIDTH)

    def step(x):
        total.add_(x.sum(0))
        return x * 2

    runner = make_runner(step, INPUT, mode="FULL", state=[total])
    runner.capture()
    backend.replay_fault = "before"
    with pytest.raises(ReplayError) as kept:
        runner(torch.ones(3, WIDTH))
    held = runner.num_bytes
    runner.clear()
    runner.swap(max_bytes=held // 4)
    assert runner.num_bytes == 0
    assert kept.value.__cause__ is not None


def test_limit_frees_what_only_a_ring_of_references_holds(make_runner, quiet):
    """This includes results that outlive their pool."""
    runner = make_runner(lambda x: x * 2, INPUT, mode="FULL", outputs="view", lazy=True)
    ring = [runner(torch.zeros(8, WIDTH))]
    ring.append(ring)
    runner.clear()
    del ring
    limit = runner.num_bytes // 2
    assert limit > 0
    runner.swap(max_bytes=limit)
    assert runner.num_bytes == 0


def test_limit_counts_results_that_somebody_still_has(make_runner, quiet):
    """Memory that cannot be freed is reported, and nothing more is captured."""
    runner = make_runner(lambda x: x * 2, INPUT, mode="FULL", outputs="view", lazy=True)
    kept = runner(torch.ones(8, WIDTH))
    held = kept.untyped_storage().nbytes()
    runner.swap(max_bytes=held + 16)
    runner.clear()
    runner.swap(max_bytes=held - 16)
    assert runner.num_bytes == held
    runner(torch.ones(2, WIDTH))
    assert runner.num_bytes == held
    assert runner.lanes[0].lifecycle.num_graphs() == 0
    assert bool((kept == 2).all())


def test_capture_while_an_error_is_handled_leaves_that_one_whole(make_runner, step, quiet):
    """The caller's error in the context of the capture's error stays complete."""
    runner = make_runner(step, INPUT, mode="FULL", lazy=True)
    step.fails = True

    def fail():
        mine = "the caller's"
        raise ValueError(mine)

    def fall_back():
        try:
            fail()
        except ValueError:
            runner(torch.zeros(8, WIDTH))
            raise

    with pytest.raises(ValueError, match="the caller's") as info:
        fall_back()
    assert runner.stats().capture_failures == 1
    assert info.traceback[-1].frame.f_locals["mine"] == "the caller's"


# -- clearing errors ------------------------------------------------------------------------


ALIVE = weakref.WeakSet()


class Holder:
    """An object that a frame or a function holds."""

    def __init__(self):
        ALIVE.add(self)


def failing(*, joins):
    held = Holder()

    def fail():
        mine = held
        raise KeyError(id(mine))

    try:
        try:
            fail()
        except KeyError as first:
            raise ValueError("from it") from first
    except ValueError as second:
        if joins:
            raise ExceptionGroup("several", [second, OSError("another")]) from None
        try:
            raise TypeError("while it was handled")
        except TypeError as third:
            third.__cause__ = OSError("another cause")
            raise


def caught(**options):
    try:
        failing(**options)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return error


@pytest.mark.parametrize("joins", [False, True], ids=["context beside cause", "group"])
def test_path_of_an_error_and_of_all_behind_it_is_forgotten(joins):
    error = caught(joins=joins)
    clear_traceback(error, None)
    assert error.__traceback__ is None
    assert not ALIVE


def test_frames_are_cleared_and_the_place_is_still_told():
    error = caught(joins=False)
    clear_frames(error, None)
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == ["caught", "failing"]


def test_what_the_caller_handles_is_not_touched():
    theirs = ValueError("the caller's")
    try:
        raise theirs
    except ValueError:
        clear_traceback(caught(joins=False), sys.exception())
    assert theirs.__traceback__ is not None
