"""A signal's exception may come at any instruction; afterwards no lock is held."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from interrupts import KEPT, call_elsewhere, interrupted  # noqa: E402

from dispatchkit import (  # noqa: E402
    GraphRunner,
    StaticInput,
    StepState,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.capture_guard import capturing_device, is_any_capturing  # noqa: E402
from dispatchkit.execute.io.outputs import SharedMemory  # noqa: E402

# An interrupt in ``__del__`` is lost: Python prints it and continues.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Steps run eager"),
    pytest.mark.filterwarnings("ignore:The step draws random numbers"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def make(step, **settings):
    inputs = {"x": StaticInput((None, 8), "float32")}
    settings = {"sizes": [4], "mode": "FULL", "backend": "tape", **settings}
    return GraphRunner(step, inputs, **settings)


WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def product(x):
    return x @ WEIGHT


WAYS = {
    "replay": (lambda: make(product), lambda runner: runner(x=X)),
    "eager": (lambda: make(product), lambda runner: runner(x=X, ceiling=0)),
    "in place": (lambda: make(product), lambda runner: runner.run_in_place(3)),
    "pieces": (
        lambda: make(
            [graph_piece(product), eager_piece(lambda h: h + 1), graph_piece(lambda h: h - 1)],
            mode="PIECEWISE",
        ),
        lambda runner: runner(x=X),
    ),
    "lanes": (lambda: make(product, lanes=2), lambda runner: runner.submit(x=X).result()),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_interrupt_of_a_step_holds_a_lock(way):
    """At each place of a step in turn: other threads continue, and so does this one."""
    build, call = WAYS[way]
    runner = build()
    runner.capture()
    call(runner)
    want = runner(x=X).clone()
    with ThreadPoolExecutor(1) as other:
        num_places = interrupted(lambda: call(runner))
        assert num_places > 5
        for at in range(num_places):
            interrupted(lambda: call(runner), at)
            assert torch.is_grad_enabled()
            is_free = other.submit(runner._lock.acquire, timeout=5).result()
            assert is_free, f"lock held after an interrupt at {at}"
            other.submit(runner._lock.release).result()
    assert torch.equal(call_elsewhere(lambda: runner(x=X)), want)


def counting(x):
    """Return a step that writes and draws, and is watched during its warmup."""
    COUNT.add_(1)
    return x @ WEIGHT + torch.rand(1, generator=GENERATOR) * 0


COUNT = torch.zeros(())
GENERATOR = torch.Generator().manual_seed(0)
STATE = StepState([COUNT], generators=[GENERATOR])

CAPTURES = {
    "ahead": (lambda: make(product), lambda runner: runner.capture()),
    "lazily": (lambda: make(product, lazy=True), lambda runner: runner(x=X)),
    "with state": (
        lambda: make(counting, state=StepState([COUNT], generators=[GENERATOR])),
        lambda runner: runner.capture(),
    ),
    "warmed up": (lambda: make(product), lambda runner: runner.controls.warm_up()),
}


@pytest.mark.slow_except("7-lazily", "7-with state")
@pytest.mark.parametrize("way", CAPTURES)
@pytest.mark.parametrize("number", [7, pytest.param(100, marks=pytest.mark.slow)])
def test_no_interrupt_of_a_capture_stops_others_for_good(way, number, is_nightly):
    """Wherever it comes, later captures and calls of any thread work as before."""
    build, begin = CAPTURES[way]
    num_places = interrupted(lambda: begin(build()))
    assert num_places > 500
    number *= 10 if is_nightly else 1
    for at in [*range(0, num_places, -(-num_places // number)), num_places - 1]:
        runner = build()
        interrupted(lambda runner=runner: begin(runner), at)
        assert not capturing_device()
        assert not is_any_capturing()
        assert gc.isenabled()
        assert torch.is_grad_enabled()
        assert not torch._C._len_torch_dispatch_stack()
        assert not torch._C._len_torch_function_stack()
        assert not torch.is_inference_mode_enabled()
        assert torch.equal(call_elsewhere(lambda runner=runner: runner(x=X)), X @ WEIGHT)
        runner.capture(again=True)
        assert torch.equal(runner(x=X), X @ WEIGHT)
        assert runner.stats().steps_by_mode["FULL"], f"not captured after an interrupt at {at}"
        KEPT.clear()  # frees the objects of its frames and changes no mode
        assert torch.is_grad_enabled(), f"gradients off for what was left at {at}"


def test_what_an_interrupt_has_left_changes_no_mode_when_it_is_freed():
    """Graphs' memory is freed outside inference mode and with gradients off."""

    def take():
        SharedMemory(torch.device("cpu")).tensor_at("x", (2,), torch.float32)

    for at in range(interrupted(take)):
        with torch.no_grad():
            interrupted(take, at)
        assert torch.is_grad_enabled()
        KEPT.clear()
        assert torch.is_grad_enabled(), f"off for what was left at {at}"


@pytest.mark.parametrize("change", ["captured", "evicted"])
def test_a_table_that_was_told_of_no_change_is_asked_anew(change, monkeypatch):
    """A step finds an outdated plan without an answer, and must not ask for it again."""
    runner = make(product, lazy=True)
    (key,) = runner.registry
    if change == "evicted":
        runner(x=X)
    runner.dispatcher.dispatch(3)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner.registry, "_notify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.capture() if change == "captured" else runner.evict(key)
    assert torch.equal(call_elsewhere(lambda: runner(x=X)), X @ WEIGHT)
    runner.capture()
    assert torch.equal(runner(x=X), X @ WEIGHT)
