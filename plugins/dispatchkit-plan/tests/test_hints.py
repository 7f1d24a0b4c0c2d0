"""Free capacity of a step, and the memory that graphs will need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import DescriptorError
from dispatchkit.keys import padding_table

from dispatchkit_plan.hints import free_tokens, hint

ladders = st.sets(st.integers(1, 200), min_size=1, max_size=12).map(sorted)


@given(sizes=ladders, num_tokens=st.integers(0, 300))
def test_adding_what_is_free_keeps_the_bucket(sizes, num_tokens):
    """One more token would change it; removing ``shrink_by`` reaches the next smaller bucket."""
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
        "from dispatchkit_plan import BUILTIN_COST_MODELS, forecast_memory, free_tokens\n"
        "assert free_tokens([0, 1, 2, 4, 4], 3) == 1\n"
        "assert not {'numpy', 'torch'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
