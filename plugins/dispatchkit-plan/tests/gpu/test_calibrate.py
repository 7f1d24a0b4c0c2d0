"""Calibration and the memory forecast on a device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    BufferOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.demo.decoder import DecoderShape  # noqa: E402
from dispatchkit.demo.models import decoder, mlp  # noqa: E402

from dispatchkit_plan.calibration.calibrate import calibrate  # noqa: E402
from dispatchkit_plan.calibration.graph_memory import MemoryMeter, forecast_graph_memory  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = DecoderShape(num_slots=64, cache_len=32)
SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("pace", ["queued", "waited"])
def test_a_decoder_is_measured_in_both_modes_and_left_as_it_was(pace):
    runner = decoder("cuda", shape=SHAPE, sizes=SIZES, max_num_tokens=128)
    runner.capture()
    graphs, stats = runner.lanes[0].lifecycle.live(), runner.stats()
    model = calibrate(runner, pace=pace, samples=2)
    assert model.clock == "device"
    assert [size for size, _ in model.graph_us.points] == list(SIZES)
    assert [size for size, _ in model.piecewise_us.points] == list(SIZES)
    assert model.eager_us.last == 128
    assert all(us > 0 for _, us in (*model.graph_us.points, *model.eager_us.points))
    assert sum(num_bytes for _, num_bytes in model.graph_bytes.points) > 0
    assert (runner.lanes[0].lifecycle.live(), runner.stats()) == (graphs, stats)


def test_what_the_step_changes_is_put_back():
    cache = torch.zeros(4, device="cuda")

    def step(rows):
        cache.add_(1)
        return rows * torch.rand((), device="cuda") + cache[0]

    torch.cuda.manual_seed(7)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(7)
    inputs = {"rows": StaticInput((None, 4), "float32")}
    calibrate(
        step,
        inputs=inputs,
        sizes=[1, 2, 4],
        mode="FULL",
        samples=1,
        options=RunnerOptions(device="cuda"),
    )
    assert cache.tolist() == [0.0] * 4
    assert torch.equal(torch.rand(3, device="cuda"), expected)


@pytest.mark.parametrize("share_outputs", [True, False])
def test_a_forecast_is_never_below_what_the_graphs_take(share_outputs):
    def make() -> GraphRunner:
        return mlp(
            "cuda",
            num_layers=4,
            width=512,
            sizes=range(8, 257, 8),
            options=RunnerOptions(buffers=BufferOptions(share_outputs=share_outputs)),
        )

    runner = make()
    forecast = forecast_graph_memory(runner)
    assert runner.num_bytes == 0
    meter = MemoryMeter(runner)
    runner.capture()
    assert meter.pool_bytes() == runner.num_bytes
    assert meter.pool_bytes() <= forecast.high_bytes
