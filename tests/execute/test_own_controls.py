"""A step or policy that calls its own runner's controls or ends the program must not hang."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from interrupts import call_elsewhere  # noqa: E402

from dispatchkit import GraphRunner, StaticInput  # noqa: E402
from dispatchkit.backends.capture_guard import is_any_capturing  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.ones(3, 2)
ACTS = {
    "capture": lambda runner: runner.capture(),
    "freeze": lambda runner: runner.freeze(),
    "clear": lambda runner: runner.clear(),
    "invalidate": lambda runner: runner.invalidate(),
    "evict": lambda runner: runner.evict(next(iter(runner.registry))),
    "swap": lambda runner: runner.swap(policy=OneBucketPolicy()),
    "call": lambda runner: runner(x=torch.ones(2, 2)),
    "submit": lambda runner: runner.submit(x=torch.ones(2, 2)).result(),
}


def runner_of(step, **settings):
    inputs = {"x": StaticInput((None, 2), "float32")}
    return GraphRunner(step, inputs, sizes=[2, 4], mode="FULL", backend="tape", **settings)


def assert_unharmed(runner):
    assert torch.equal(runner(x=X), X + 1)
    assert torch.equal(call_elsewhere(lambda: runner(x=X)), X + 1)
    assert not is_any_capturing()
    assert gc.isenabled()


@pytest.mark.slow_except(
    "capture-True",
    "freeze-False",
    "clear-False",
    "invalidate-True",
    "evict-False",
    "swap-True",
    "call-True",
    "submit-False",
)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ACTS)
def test_a_step_that_calls_its_own_runner_hangs_nothing(name, lazy):
    """Includes warmups, captures and eager steps; impossible calls raise an error in the step."""
    runners, is_inside, refused = [], [], []

    def step(x):
        if runners and not is_inside:
            is_inside.append(True)
            try:
                ACTS[name](runners[0])
            except Exception as error:  # noqa: BLE001 - the step continues, like careless code
                refused.append(type(error).__module__)
            finally:
                is_inside.clear()
        return x + 1

    runner = runner_of(step, lazy=lazy)
    runners.append(runner)
    if not lazy:
        runner.capture()
    for _ in range(3):
        assert torch.equal(runner(x=X), X + 1)
    assert set(refused) <= {"dispatchkit.errors"}
    assert_unharmed(runner)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["decide", "step"])
def test_what_ends_a_program_ends_one_call_alone(where, error):
    """The exception leaves that call; later calls of any thread work."""
    raising = []

    class Ending(OneBucketPolicy):
        def decide(self, batch, graphs):
            if raising and where == "decide":
                raise error(where)
            return super().decide(batch, graphs)

    def step(x):
        if raising and where == "step":
            raise error(where)
        return x + 1

    runner = runner_of(step, lazy=True, policy=Ending())
    raising.append(True)
    with pytest.raises(error):
        runner(x=X)
    raising.clear()
    assert_unharmed(runner)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks nothing")
@pytest.mark.parametrize("during", ["a capture", "an eager step"])
def test_a_process_forked_meanwhile_is_free(during):
    """The capturing thread does not exist in the child: its locks are free, the collector is on."""
    inside, go_on = threading.Event(), threading.Event()

    def step(x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(20)
        return x + 1

    runner = runner_of(step)
    begin = runner.capture if during == "a capture" else lambda: runner(x=X, ceiling=0)
    thread = threading.Thread(target=begin)
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if not child:
        is_right = False
        try:
            is_right = not is_any_capturing() and gc.isenabled()
            is_right = is_right and runner.stats().steps >= 0
            is_right = is_right and bool((runner(x=X, ceiling=0) == 2).all())
        finally:
            os._exit(0 if is_right else 1)
    status, end = None, time.monotonic() + 20
    while status is None and time.monotonic() < end:
        found, code = os.waitpid(child, os.WNOHANG)
        status = code if found else None
        time.sleep(0.02)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    go_on.set()
    thread.join(20)
    assert status == 0, "the child hangs" if status is None else "the child is wrong"
    assert_unharmed(runner)
