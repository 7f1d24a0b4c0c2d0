"""Texts of errors about a cell."""

from __future__ import annotations

import pytest

from dispatchkit.dispatch.cells import cell_of_batch, format_modes
from dispatchkit.errors import DescriptorError
from dispatchkit.keys import Batch, DispatchConfig, RuntimeMode


def test_modes_are_named_in_order():
    assert format_modes({RuntimeMode.PIECEWISE, RuntimeMode.FULL}) == "FULL, PIECEWISE"
    assert format_modes([RuntimeMode.NONE]) == "NONE"


def test_empty_batch_has_no_cell():
    with pytest.raises(DescriptorError, match=r"at least 1, got 0\. Empty batches run eager"):
        cell_of_batch(DispatchConfig(sizes=(1, 8)), Batch(0))


def test_query_length_that_is_not_configured_has_no_cell():
    config = DispatchConfig(sizes=(1, 8), query_lens=(1, 2))
    with pytest.raises(DescriptorError, match="one of query_lens 1, 2"):
        cell_of_batch(config, Batch(6, uniform=True, query_len=3))
    assert cell_of_batch(config, Batch(6, uniform=True, query_len=2)) == (2, 2, 0, 6)


def test_mixed_batch_of_short_requests_is_a_varlen_decode_up_to_the_query_length():
    config = DispatchConfig(sizes=(1, 8), query_lens=(4,), varlen_decode=True)
    classes = [cell_of_batch(config, Batch(6, max_query_len=most))[1] for most in (None, 3, 4, 5)]
    assert classes == [0, 2, 2, 0]
    plain = DispatchConfig(sizes=(1, 8), query_lens=(4,))
    assert cell_of_batch(plain, Batch(6, max_query_len=4))[1] == 0
