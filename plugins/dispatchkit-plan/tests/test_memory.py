"""The forecast of graph memory: its error bar contains the true value; refused values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError

from dispatchkit_plan.memory import SEGMENT_BYTES, MemorySample, forecast_memory

MIB = 1 << 20


@given(
    sizes=st.sets(st.integers(1, 512), min_size=3, max_size=40).map(lambda s: sorted(s)[::-1]),
    fixed=st.integers(0, 200_000),
    per_token=st.integers(0, 4000),
    pool=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_a_forecast_is_never_below_what_grows_with_size(sizes, fixed, per_token, pool, data):
    """For any increments that grow with size, the truth is within the bar and below the top."""
    true = {size: fixed + per_token * size for size in sizes}
    true[sizes[0]] = pool
    taken = [sizes[0], *data.draw(st.sets(st.sampled_from(sizes[1:]), min_size=1))]
    reserved, samples = 0, []
    for size in sorted(taken, reverse=True):
        reserved += true[size]
        samples.append(MemorySample(size, reserved))
    forecast = forecast_memory(samples, sizes)
    actual = sum(true.values())
    assert forecast.low_bytes <= actual <= forecast.high_bytes
    assert forecast.low_bytes <= forecast.expected_bytes <= forecast.high_bytes
    if {sizes[1], sizes[-1]} <= set(taken):  # straight lines are met exactly
        assert forecast.expected_bytes == pytest.approx(actual, rel=1e-6, abs=50)


def test_captured_sizes_are_not_forecast():
    """With every size measured, nothing is estimated, and there is no bar."""
    samples = [MemorySample(64, 100), MemorySample(8, 130), MemorySample(1, 131)]
    forecast = forecast_memory(samples, [1, 8, 64])
    assert forecast.low_bytes == forecast.expected_bytes == forecast.high_bytes == 131
    assert forecast.per_graph_bytes == ((8, 30), (1, 1))
    assert str(forecast).startswith("3 sizes: 0.00 MiB (0.00 to 0.00)")
    more = forecast_memory(samples, [1, 4, 8, 64])
    assert more.high_bytes == 131 + 30 + SEGMENT_BYTES


@given(
    sizes=st.sets(st.integers(1, 512), min_size=3, max_size=40).map(lambda s: sorted(s)[::-1]),
    kept_per_token=st.integers(0, 4000),
    work_per_token=st.integers(1, 100_000),
    data=st.data(),
)
def test_what_graphs_only_work_with_is_counted_once(sizes, kept_per_token, work_per_token, data):
    """A pool of whole segments: shared working memory, and the memory that each graph keeps."""

    def reserved(captured):
        kept = sum(size * kept_per_token for size in captured)
        used = captured[0] * work_per_token + kept
        return -(-used // SEGMENT_BYTES) * SEGMENT_BYTES, kept

    between = data.draw(st.sets(st.sampled_from(sizes[1:])))
    taken = sorted({sizes[0], sizes[-1], *between}, reverse=True)
    samples = [
        MemorySample(size, *reserved(taken[: count + 1])) for count, size in enumerate(taken)
    ]
    actual, _ = reserved(sizes)
    forecast = forecast_memory(samples, sizes)
    assert forecast.low_bytes <= actual
    assert actual <= forecast.high_bytes
    if kept_per_token == 0:
        assert forecast.expected_bytes == actual


def test_a_pool_that_grew_once_is_not_taken_to_grow_with_each_graph():
    """One small size needs other scratch memory, which its neighbours share."""
    sizes = [512, 384, 256, 128, 64, 1]
    samples = [
        MemorySample(512, 24 * MIB, 16),
        MemorySample(128, 28 * MIB, 16),
        MemorySample(1, 28 * MIB, 16),
    ]
    forecast = forecast_memory(samples, sizes)
    assert (forecast.expected_bytes, forecast.high_bytes) == (28 * MIB, 30 * MIB)
    unknown = forecast_memory([MemorySample(s.size, s.reserved_bytes) for s in samples], sizes)
    assert unknown.high_bytes > 32 * MIB  # nothing indicates that the growth was shared


def test_the_driver_takes_blocks_as_the_graphs_come():
    """The first block was half full; after it, each size takes a block."""
    blocks = [0, 1, 2, 3, 4]
    samples = [
        MemorySample(size, 10, 0, count * MIB)
        for size, count in zip((512, 128, 32, 8, 1), blocks, strict=True)
    ]
    forecast = forecast_memory(samples, range(1, 513), segment_bytes=MIB)
    assert forecast.driver_bytes == (4 + 507) * MIB
    assert forecast.driver_high_bytes == round((4 + 507 * 4 / 3) * MIB)


def test_a_driver_that_took_nothing_yet_may_take_a_block_for_each_lot_of_samples():
    samples = [MemorySample(8, 10, 0), MemorySample(4, 10, 0)]
    forecast = forecast_memory(samples, [8, 6, 4, 2], segment_bytes=MIB)
    assert (forecast.driver_bytes, forecast.driver_high_bytes) == (0, MIB)
    assert forecast_memory(samples, [8, 4], segment_bytes=MIB).driver_high_bytes == 0


@pytest.mark.parametrize(
    ("samples", "sizes", "message"),
    [
        ([(8, 10)], [8, 4], "at least two samples"),
        ([(4, 10), (8, 20)], [8, 4], "distinct and in descending order"),
        ([(8, 20), (4, 10)], [8, 4], "non-decreasing order"),
        ([(8, 10), (4, 20)], [16, 8, 4], "first sample must be 16, the largest value in sizes"),
        ([(8, 10), (4, 20)], [], "at least one size"),
    ],
)
def test_samples_that_say_nothing_are_refused(samples, sizes, message):
    with pytest.raises(ConfigError, match=message):
        forecast_memory([MemorySample(*sample) for sample in samples], sizes)
