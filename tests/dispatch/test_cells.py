"""Texts of errors about a cell."""

from __future__ import annotations

import pytest

from dispatchkit.dispatch.cells import cell_of_batch, cell_of_call, format_modes
from dispatchkit.errors import DescriptorError
from dispatchkit.keys import Batch, DispatchConfig, RuntimeMode


def test_modes_are_named_in_order():
    assert format_modes({RuntimeMode.PIECEWISE, RuntimeMode.FULL}) == "FULL, PIECEWISE"
    assert format_modes([RuntimeMode.NONE]) == "NONE"


def test_empty_batch_has_no_cell():
    with pytest.raises(
        DescriptorError, match=r"at least 1, got 0\. Empty batches always run eager"
    ):
        cell_of_batch(DispatchConfig(sizes=(1, 8)), Batch(0))


def test_query_length_that_is_not_configured_has_no_cell():
    config = DispatchConfig(sizes=(1, 8), query_lens=(1, 2))
    with pytest.raises(
        DescriptorError, match=r"one of 1, 2 \(query_lens\), got 3\. Add the length"
    ):
        cell_of_batch(config, Batch(6, uniform=True, query_len=3))
    assert cell_of_batch(config, Batch(6, uniform=True, query_len=2)) == (2, 2, 0, 6)


def test_mixed_batch_of_short_requests_is_a_varlen_decode_up_to_the_query_length():
    config = DispatchConfig(sizes=(1, 8), query_lens=(4,), varlen_decode=True)
    classes = [cell_of_batch(config, Batch(6, max_query_len=most))[1] for most in (None, 3, 4, 5)]
    assert classes == [0, 2, 2, 0]
    plain = DispatchConfig(sizes=(1, 8), query_lens=(4,))
    assert cell_of_batch(plain, Batch(6, max_query_len=4))[1] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((8, 9, 0), r"from 0 to 8 \(the number of tokens\), got 9\. Each request has"),
        ((16, 13, 0), r"from 0 to 12 \(max_num_seqs\), got 13\. Raise max_num_seqs"),
        ((0, 1, 0), r"num_reqs must be 0 \(the number of tokens\), got 1"),
        ((8, 0, 2), r"from 0 to 1 \(the number of query lengths\), got 2\. Pass 0 for a mixed"),
    ],
)
def test_a_limit_is_named_with_the_setting_that_raises_it(call, message):
    config = DispatchConfig(sizes=(1, 16), max_num_seqs=12)
    with pytest.raises(DescriptorError, match=message):
        cell_of_call(config, *call, loras=0, ceiling=2)


def test_varlen_decode_is_one_more_value_of_uniform():
    config = DispatchConfig(sizes=(1, 8), query_lens=(4,), varlen_decode=True)
    with pytest.raises(DescriptorError, match=r"to 2 \(.* lengths, plus 1 for varlen_decode\)"):
        cell_of_call(config, 8, 0, 3, 0, 2)
