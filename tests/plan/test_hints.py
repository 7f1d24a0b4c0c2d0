"""How much more fits a step for free, and what graphs will take in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError, DescriptorError
from dispatchkit.keys import padding_table
from dispatchkit.plan.hints import free_tokens, hint
from dispatchkit.plan.memory import SEGMENT_BYTES, MemorySample, forecast_memory

ladders = st.sets(st.integers(1, 200), min_size=1, max_size=12).map(sorted)


@given(sizes=ladders, num_tokens=st.integers(0, 300))
def test_adding_what_is_free_keeps_the_bucket(sizes, num_tokens):
    """One more token would change it; leaving out ``shrink_by`` reaches the next smaller."""
    table = padding_table(sizes)
    advice = hint(table, num_tokens)
    assert advice.free_tokens == free_tokens(table, num_tokens)
    if num_tokens > sizes[-1]:
        assert (advice.bucket, advice.free_tokens) == (None, 0)
        assert advice.shrink_by == num_tokens - sizes[-1]
        return
    assert advice.bucket == table[num_tokens] == num_tokens + advice.free_tokens
    smaller = [size for size in sizes if size < num_tokens]
    if num_tokens and smaller and table[num_tokens] > smaller[-1]:
        assert advice.shrink_by == num_tokens - smaller[-1]
    elif not smaller:
        assert advice.shrink_by is None


def test_requests_count_their_tokens_and_the_servers_limit():
    table = padding_table([8, 32])
    assert hint(table, 10, query_len=4).free_requests == 5
    assert hint(table, 10, query_len=4, num_reqs=3, max_num_seqs=6).free_requests == 3
    assert hint(table, 10, query_len=4, num_reqs=9, max_num_seqs=6).free_requests == 0


def test_impossible_questions_are_refused():
    with pytest.raises(DescriptorError, match="num_tokens"):
        hint(padding_table([8]), -1)
    with pytest.raises(DescriptorError, match="query_len"):
        hint(padding_table([8]), 1, query_len=0)
    with pytest.raises(DescriptorError, match="num_reqs"):
        hint(padding_table([8]), 1, max_num_seqs=4)


def test_hints_costs_and_forecasts_need_no_numpy():
    code = (
        "import sys\n"
        "from dispatchkit.plan import BUILTIN_COST_MODELS, forecast_memory, free_tokens\n"
        "assert free_tokens([0, 1, 2, 4, 4], 3) == 1\n"
        "assert not {'numpy', 'torch'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    sizes=st.sets(st.integers(1, 512), min_size=3, max_size=40).map(lambda s: sorted(s)[::-1]),
    fixed=st.integers(0, 200_000),
    per_token=st.integers(0, 4000),
    pool=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_a_forecast_is_never_below_what_grows_with_size(sizes, fixed, per_token, pool, data):
    """For any increment that grows with the size: inside the bar, never above the top."""
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
    """With every size measured there is nothing to guess and no bar."""
    samples = [MemorySample(64, 100), MemorySample(8, 130), MemorySample(1, 131)]
    forecast = forecast_memory(samples, [1, 8, 64])
    assert forecast.low_bytes == forecast.expected_bytes == forecast.high_bytes == 131
    assert forecast.per_graph_bytes == ((8, 30), (1, 1))
    more = forecast_memory(samples, [1, 4, 8, 64])
    assert more.high_bytes == 131 + 30 + SEGMENT_BYTES


@pytest.mark.parametrize(
    ("samples", "sizes", "message"),
    [
        ([(8, 10)], [8, 4], "at least 2"),
        ([(4, 10), (8, 20)], [8, 4], "largest size first"),
        ([(8, 20), (4, 10)], [8, 4], "never shrinks"),
        ([(8, 10), (4, 20)], [16, 8, 4], "first of all the largest"),
        ([(8, 10), (4, 20)], [], "first of all the largest"),
    ],
)
def test_samples_that_say_nothing_are_refused(samples, sizes, message):
    with pytest.raises(ConfigError, match=message):
        forecast_memory([MemorySample(*sample) for sample in samples], sizes)
