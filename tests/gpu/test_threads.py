"""Captures concurrent with other threads, and interrupted captures, on a device."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from device_steps import in_threads  # noqa: E402

from dispatchkit import GraphRunner, StaticInput, eager_region  # noqa: E402
from dispatchkit.backends.capture_guard import is_any_capturing  # noqa: E402
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.backends.cuda.segmented import CudaSegments  # noqa: E402
from dispatchkit.backends.optional import features_of  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "execute"))
from interrupts import KEPT, call_elsewhere, interrupted  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Steps run eager"),
    pytest.mark.filterwarnings("ignore:The step draws random numbers"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DRAWN = 64
NUM_CAPTURES = 1000


class Worker:
    """A thread that draws, samples and multiplies while others capture."""

    def __init__(self, index):
        self.own = torch.Generator(device="cuda").manual_seed(index)
        self.probs = torch.rand(50, device="cuda", generator=self.own)
        self.square = torch.rand(64, 64, device="cuda", generator=self.own)
        self.product = self.square @ self.square
        self.seed = index
        self.drawn, self.samples, self.is_right = [], [], torch.ones((), device="cuda").bool()

    def step(self):
        self.drawn.append(torch.rand(DRAWN, device="cuda"))
        self.samples.append(torch.multinomial(self.probs, 4, generator=self.own))
        self.is_right &= (self.square @ self.square == self.product).all()

    def assert_as_alone(self):
        """Check that a generator's draws equal those without captures."""
        own = torch.Generator(device="cuda").manual_seed(self.seed)
        torch.rand(50, device="cuda", generator=own)
        torch.rand(64, 64, device="cuda", generator=own)
        again = [torch.multinomial(self.probs, 4, generator=own) for _ in self.samples]
        assert torch.equal(torch.stack(again), torch.stack(self.samples))
        assert self.is_right


def capture_lazily(number):
    """Capture a step without draws several times; return whether results equal eager's."""
    weight = torch.randn(32, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def step(x):
        return torch.relu(x @ weight)

    sizes = range(1, 101)
    runner = GraphRunner(
        step,
        {"x": StaticInput((None, 32), "float32")},
        sizes=sizes,
        mode="FULL",
        lazy=True,
        backend=CudaBackend(0),
    )
    x = torch.randn(100, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    while runner.stats().captures < number:
        runner.clear()
        for size in sizes:
            torch.testing.assert_close(runner(x=x[:size]), step(x[:size]))
    assert runner.stats().capture_failures == 0


def test_threads_draw_and_sample_while_steps_are_captured():
    """No thread fails, no number repeats, and together they draw eager's numbers."""
    workers = [Worker(index) for index in range(8)]
    done = threading.Event()
    torch.cuda.manual_seed(5)

    def work(index):
        if index == len(workers):
            try:
                capture_lazily(NUM_CAPTURES)
            finally:
                done.set()
            return
        while not done.is_set():
            workers[index].step()

    in_threads(len(workers) + 1, work)
    for worker in workers:
        worker.assert_as_alone()
    drawn = torch.stack([one for worker in workers for one in worker.drawn])
    assert len(drawn) > NUM_CAPTURES
    assert len(drawn.flatten(1)[:, :4].unique(dim=0)) == len(drawn), "numbers were drawn twice"
    torch.cuda.manual_seed(5)
    eager = torch.stack([torch.rand(DRAWN, device="cuda") for _ in range(len(drawn))])
    assert torch.equal(drawn.unique(dim=0), eager.unique(dim=0))


def test_a_draw_that_no_warmup_shows_is_captured_all_the_same():
    """Torch refuses the capture, which is repeated with the generator's own state."""
    backend = CudaBackend(0)
    unwatched = features_of(backend).unwatched_captures
    stream, pool = backend.new_stream(), backend.new_pool()

    def run():
        return torch.rand(8, device="cuda")

    backend.warmup(run, stream=stream)
    graph = unwatched.capture(run, stream=stream, pool=pool, draws=False)
    torch.cuda.manual_seed(3)
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    second = graph.outputs.clone()
    torch.cuda.manual_seed(3)
    assert torch.equal(first, run())
    assert torch.equal(second, run())


# torch's own warning, in the first product of a thread without tensors.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA")
@pytest.mark.parametrize("draws", [False, True])
def test_no_interrupt_of_a_capture_stops_others_for_good(draws):
    """Wherever a signal's exception comes, later captures, draws and calls work."""
    weight = torch.randn(8, 8, device="cuda")
    x = torch.randn(3, 8, device="cuda")

    def step(x):
        return x @ weight + (torch.rand(1, device="cuda") * 0 if draws else 0)

    def build():
        inputs = {"x": StaticInput((None, 8), "float32")}
        backend = CudaBackend(0)
        return GraphRunner(step, inputs, sizes=[4], mode="FULL", backend=backend)

    build().capture()
    num_places = interrupted(lambda: build().capture())
    for at in [*range(0, num_places, -(-num_places // 150)), num_places - 1]:
        runner = build()
        interrupted(lambda runner=runner: runner.capture(), at)
        assert not is_any_capturing()
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream().cuda_stream == 0
        assert gc.isenabled()
        assert not torch._C._len_torch_dispatch_stack()
        torch.rand(4, device="cuda")
        torch.testing.assert_close(call_elsewhere(lambda runner=runner: runner(x=x)), x @ weight)
        runner.capture(again=True)
        torch.testing.assert_close(runner(x=x), x @ weight)
        assert runner.stats().steps_by_mode["FULL"], f"not captured after an interrupt at {at}"
    KEPT.clear()


def test_no_interrupt_at_the_beginning_of_a_segment_leaves_a_capture_open():
    """The capture ends if a signal's exception comes right after torch began it."""
    double = eager_region(lambda x: x * 2)
    x = torch.randn(3, 8, device="cuda")

    def build():
        inputs = {"x": StaticInput((None, 8), "float32")}
        return GraphRunner(
            lambda x: double(x + 1) - 1, inputs, sizes=[4], mode="PIECEWISE", backend=CudaBackend(0)
        )

    build().capture()
    num_places = interrupted(lambda: build().capture(), within=CudaSegments.begin)
    assert num_places > 10
    for at in range(num_places):
        runner = build()
        interrupted(lambda runner=runner: runner.capture(), at, within=CudaSegments.begin)
        assert not is_any_capturing(), at
        assert not torch.cuda.is_current_stream_capturing()
        runner.capture(again=True)
        torch.testing.assert_close(runner(x=x), (x + 1) * 2 - 1)
        assert runner.stats().steps_by_mode["PIECEWISE"], f"not captured after {at}"
    KEPT.clear()


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("served", [True, False])
def test_an_engine_in_inference_mode_replays(captured, served):
    """Its cache is created inside; it is captured and served inside, outside, or alternately."""
    with torch.inference_mode():
        cache = torch.zeros(16, 2, device="cuda")
        weight = torch.randn(2, 2, device="cuda")

    def step(x):
        cache[: x.shape[0]] += x
        return cache[: x.shape[0]] @ weight

    runner = GraphRunner(
        step,
        {"x": StaticInput((None, 2), "float32")},
        sizes=[4, 8],
        mode="FULL",
        state=[cache],
        backend=CudaBackend(0),
    )
    with torch.inference_mode(captured):
        assert runner.capture().failed == {}
    assert not cache.any()
    total = torch.zeros(16, 2, device="cuda")
    for rows in (3, 8, 5):
        x = torch.randn(rows, 2, device="cuda")
        total[:rows] += x
        with torch.inference_mode(served):
            result = runner(x=x)
        torch.testing.assert_close(result, total[:rows] @ weight.clone())
    assert runner.stats().steps_by_mode["FULL"] == 3
