"""On a device, a batch split over several graphs: one step with eager's rows in order."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import (  # noqa: E402
    BufferOptions,
    Decision,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    StepState,
)
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.dispatch import greedy_parts  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.keys import CaptureSizeWarning  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WIDTH = 64
COUNTS = (33, 40, 64, 71, 32, 5, 100)


class SplitPolicy(OneBucketPolicy):
    """Splits batches that no graph covers."""

    timed = False

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        parts = greedy_parts(batch, graphs, RuntimeMode.FULL) if answer.key is None else ()
        return Decision.split(parts, timed=self.timed) if parts else answer


class TimedSplitPolicy(SplitPolicy):
    """Measures split batches. It learns, so it serves only one lane."""

    timed = True

    def __init__(self):
        self.told = []

    def observe(self, outcome):
        self.told.append(outcome)


def make(step, inputs=None, dtype="float32", **settings):
    settings.setdefault("options", RunnerOptions(rows_independent=True))
    settings.setdefault("policy", SplitPolicy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return GraphRunner(
            step,
            inputs or {"x": StaticInput((None, WIDTH), dtype)},
            sizes=(4, 8, 32),
            max_num_tokens=128,
            mode="FULL",
            backend=CudaBackend(0),
            **settings,
        )


def batch(rows, dtype=torch.float32):
    return torch.randn(rows, WIDTH, device=DEVICE).to(dtype)


def same(got, want, tolerance=1e-3):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


class Network(nn.Module):
    """A decoder block without attention."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network(dtype):
    return Network().to(DEVICE, dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", ["owned", "view"])
@pytest.mark.parametrize("lazy", [False, True])
def test_rows_are_those_of_eager_however_many_come(dtype, outputs, lazy):
    """Results do not change when the next step runs."""
    model = network(dtype)
    runner = make(model, dtype=dtype, outputs=outputs, lazy=lazy)
    if not lazy:
        assert runner.capture().failed == {}
    kept = []
    for count in COUNTS:
        x = batch(count, dtype)
        got = runner(x)
        if count > 32:
            kept.append((got, model(x)))
        else:
            same(got, model(x), 2e-2)
    for got, want in kept:
        same(got, want, 2e-2)
    stats = runner.stats()
    assert (stats.steps, stats.steps_by_mode["NONE"]) == (len(COUNTS), 0)


def test_a_side_stream_lanes_and_host_inputs_serve_parts_in_order():
    """Parts run in order on any stream of the call."""
    inputs = {
        "x": StaticInput((None, WIDTH), "float32"),
        "scale": StaticInput((None,), "float32", host=True),
    }

    def step(x, scale):
        return x * scale[:, None]

    runner = make(step, inputs, lanes=2)
    assert runner.capture().failed == {}
    stream = torch.cuda.Stream()
    for count in COUNTS:
        x, scale = batch(count), torch.rand(count)
        want = step(x, scale.to(DEVICE))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = runner(x, scale.numpy())
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(got, want)
        handles = [runner.submit(x, scale.numpy()) for _ in range(3)]
        for handle in handles:
            assert torch.equal(handle.result(), want)


def test_slots_of_a_cache_are_written_by_each_row_once():
    """Padding writes to the sink, and no part writes to rows of another."""
    cache = torch.zeros(129, WIDTH, device=DEVICE)
    inputs = {
        "x": StaticInput((None, WIDTH), "float32"),
        "slot": StaticInput((None,), "int64", fill=128),
    }

    def step(x, slot):
        cache[slot] = x + cache[slot] * 0
        return cache[slot] * 2

    runner = make(step, inputs, state=StepState([cache]))
    assert runner.capture().failed == {}
    for count in COUNTS:
        before, slot = cache.clone(), torch.randperm(128, device=DEVICE)[:count]
        x = batch(count)
        assert torch.equal(runner(x, slot), x * 2)
        before[slot] = x
        assert torch.equal(cache[:128], before[:128])
    assert runner.stats().steps_by_mode["NONE"] == 0


def test_rows_that_see_each_other_are_not_split():
    """Includes a mean over real rows, which two tails do not detect, and draws per part."""

    def masked_mean(x, rows):
        real = (torch.arange(x.shape[0], device=x.device) < rows)[:, None]
        return x - (x * real).sum(0) / rows

    options = RunnerOptions(rows_independent=True, buffers=BufferOptions(row_count="rows"))
    for step, own, exact in (
        (masked_mean, options, lambda x: masked_mean(x, torch.tensor(len(x), device=DEVICE))),
        (lambda x: x.cumsum(0), RunnerOptions(rows_independent=True), lambda x: x.cumsum(0)),
    ):
        runner = make(step, options=own)
        assert runner.capture().failed == {}
        x = batch(40)
        with pytest.warns(EagerStepWarning, match="rows_not_independent"):
            same(runner(x), exact(x))
    runner = make(lambda x: nn.functional.dropout(x, 0.5))
    assert runner.capture().failed == {}
    with pytest.warns(EagerStepWarning, match="rows_not_independent"):
        runner(batch(40))


def test_a_split_step_is_timed_as_a_whole():
    """Events surround all parts on the device."""
    runner = make(network(torch.float32), policy=TimedSplitPolicy())
    assert runner.capture().failed == {}
    for _ in range(40):
        runner(batch(40))
    runner.drain(wait=True)
    told = runner.dispatcher.policy.told
    assert len(told) > 1
    assert all(one.clock == "device" and len(one.decision.parts) == 2 for one in told)
    assert all(one.elapsed_us > 0 for one in told)
