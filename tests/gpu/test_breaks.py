"""Steps with graph breaks on a device: as on the tape, with compiled code, and in one pool."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "execute"))

from break_cases import WIDTH, BreakCases  # noqa: E402

from dispatchkit import GraphRunner, RunnerOptions, StaticInput, eager_region  # noqa: E402
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.options import MemoryOptions  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # torch's own warnings when it loads inductor
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]

PROGRAMS = [
    ["matmul", "eager", "matmul", "two", "matmul", "into", "first"],
    ["break", "break", "matmul", "nested", "break", "first", "eager"],
    ["into", "into", "eager", "eager"],
    ["matmul", "first"],
    ["eager", "matmul", "break", "matmul", "into", "first", "matmul", "nested", "two"],
]


@pytest.fixture
def backend():
    return CudaBackend()


class TestBreaks(BreakCases):
    @pytest.mark.parametrize("layers", PROGRAMS, ids="-".join)
    def test_programs_with_breaks_anywhere_equal_eager(self, backend, layers):
        BreakCases.test_programs_with_breaks_anywhere_equal_eager(self, backend, layers)


def test_segments_survive_what_the_allocator_does_meanwhile(backend):
    """Between replays, other keys are captured and evicted, and memory is freed."""
    case = TestBreaks()
    weights = case.weights(backend)

    @eager_region
    def attend(out, x):
        out.copy_(x.softmax(-1))

    def step(x):
        for weight in weights:
            x = x @ weight
            out = torch.empty_like(x)
            attend(out, x)
            x = x + out
        return x

    runner = case.make(backend, step, sizes=(64, 512, 2048))
    assert not runner.capture().failed
    for turn in range(3):
        torch.cuda.empty_cache()
        churn = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        for number in (64, 2000, 3, 512):
            x = case.rows(backend, number, turn)
            torch.testing.assert_close(runner(x), step(x), rtol=1e-4, atol=1e-5)
        del churn
        key = sorted(runner.registry, key=lambda one: one.num_tokens)[turn]
        runner.evict(key)
        assert not runner.capture().failed
    sizes = []
    for _ in range(4):
        runner.invalidate()
        assert not runner.capture().failed
        sizes.append(runner.num_bytes)
    assert sizes[0] == sizes[-1], sizes


def test_compiled_parts_stay_compiled_around_a_break(backend):
    """The step has a region that reads on the host too."""
    case = TestBreaks()
    weight = case.weights(backend)[0]

    @torch.compile(dynamic=True)
    def fused(x):
        return (x @ weight).relu() * 2 + x

    @eager_region
    def clip(out, x):
        out.copy_(x.clamp(max=x.amax().item() + 1))

    def step(x):
        out = torch.empty_like(x)
        clip(out, fused(x))
        return fused(out)

    runner = case.make(backend, step)
    assert not runner.capture().failed
    case.check(backend, runner, step)


def test_a_budget_holds_with_segments(backend):
    case = TestBreaks()
    weight = case.weights(backend)[0]
    scale = eager_region(lambda x: x * 2)
    options = RunnerOptions(memory=MemoryOptions(max_bytes=64 << 20))
    runner = case.make(backend, lambda x: scale(x @ weight) + x, sizes=(64, 512), options=options)
    assert not runner.capture().failed
    assert runner.num_bytes <= 64 << 20
    x = case.rows(backend, 100)
    torch.testing.assert_close(runner(x), (x @ weight) * 2 + x, rtol=1e-4, atol=1e-5)


def test_draws_in_segments_and_between_them_are_eagers(backend):
    between = eager_region(lambda x: x + torch.rand_like(x))

    def step(x):
        x = x + torch.rand_like(x)
        return between(x) + torch.rand_like(x)

    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    runner = GraphRunner(step, inputs, sizes=(4,), mode="PIECEWISE", backend=backend)
    assert not runner.capture().failed
    x = torch.zeros(4, WIDTH, device="cuda")
    for seed in range(3):
        torch.cuda.manual_seed(seed)
        want = step(x)
        torch.cuda.manual_seed(seed)
        torch.testing.assert_close(runner(x), want)
    assert runner.stats().steps_by_mode["PIECEWISE"] == 3


def test_what_segments_give_to_calls_serves_all_sizes(backend):
    """Memory is no more than the largest size needs alone, in any order of replays."""
    case, layers = TestBreaks(), 6
    weights = case.weights(backend)

    @eager_region
    def mix(out, left, right):
        out.copy_(torch.sin(left) + right)

    def step(x):
        x, first = x * 1, x + 1
        for number in range(layers):
            left, right = x @ weights[number % 3], x * 2
            out = torch.empty_like(x)
            mix(out, left, right)
            x = out + first + left  # used across a break
        return x

    num_bytes = {}
    for sizes in ((1 << 16,), tuple((1 << 16) - 1024 * number for number in range(8))):
        runner = case.make(backend, step, sizes=sorted(sizes))
        assert not runner.capture().failed
        num_bytes[len(sizes)] = runner.num_bytes
        numbers = [size - over for size in sizes for over in (0, 7)] * 2
        for seed, number in enumerate(reversed(numbers)):
            noise = torch.full((1 << 16, WIDTH), float("nan"), device="cuda")
            x = case.rows(backend, number, seed)
            torch.testing.assert_close(runner(x), step(x), rtol=1e-4, atol=1e-5)
            del noise
        assert runner.stats().steps_by_mode["PIECEWISE"] == len(numbers)
    assert num_bytes[8] <= 1.5 * num_bytes[1], num_bytes
