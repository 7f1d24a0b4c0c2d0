"""NVTX ranges on a device: steps are unchanged, and a profiler sees the ranges."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput  # noqa: E402
from dispatchkit.execute import NvtxRanges  # noqa: E402
from dispatchkit.observe import Timeline  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [NvtxRanges, Timeline])
def test_watched_steps_compute_what_unwatched_ones_do(make: type) -> None:
    runner = GraphRunner(
        lambda x: x * 2 + 1,
        {"x": StaticInput((None,), "float32")},
        sizes=(4, 8),
        mode="FULL",
        backend="cuda",
    )
    runner.capture()
    x = torch.randn(7, device="cuda")
    plain = runner(x)
    runner.taps.watch_steps(make())
    watched = runner(x)
    assert torch.equal(plain, watched)
    assert runner.stats().steps_by_mode["FULL"] == 2
