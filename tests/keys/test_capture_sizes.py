"""Capture sizes: validation, derivation and padding."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError, DescriptorError, UnknownNameError
from dispatchkit.keys.capture_sizes import (
    SIZE_RULES,
    CaptureSizes,
    CaptureSizeWarning,
    check_capture_sizes,
    default_capture_sizes,
    derive_capture_sizes,
    padded_size,
    padding_table,
    round_sizes_for_query_len,
    rounds_for_query_len,
)
from dispatchkit.keys.checks import check_count
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode

size_lists = st.lists(st.integers(1, 300), max_size=12)


# -- validation -----------------------------------------------------------------------------


@given(size_lists)
def test_checked_sizes_are_sorted_and_unique(sizes):
    assert check_capture_sizes(sizes) == tuple(sorted(set(sizes)))


@pytest.mark.parametrize(
    "bad", [0, -1, 2.5, 8.0, True, False, None, "eight", "2.5", [8], np.bool_(1)]
)
def test_a_bad_size_is_refused_with_setting_and_value(bad):
    with pytest.raises(ConfigError, match="sizes") as caught:
        check_capture_sizes([4, bad])
    assert caught.value.setting == "sizes[1]"
    assert caught.value.value is bad


def test_text_and_python_agree():
    assert check_capture_sizes("8, 1,4,8") == check_capture_sizes([8, 1, 4, 8]) == (1, 4, 8)
    assert check_capture_sizes(["8", np.int64(4)]) == (4, 8)
    with pytest.raises(ConfigError, match="sizes"):
        check_capture_sizes("8,0")


def test_one_number_is_no_list():
    with pytest.raises(ConfigError, match="a list of whole numbers"):
        check_capture_sizes(8)


def test_sizes_over_the_limit_are_refused():
    with pytest.raises(ConfigError, match=r"at most max_num_tokens \(32\), got \[48, 64\]"):
        check_capture_sizes([8, 48, 64], limit=32)


def test_sizes_over_the_limit_can_be_trimmed_with_a_warning():
    """They are trimmed with a warning if the caller requests it."""
    with pytest.warns(
        CaptureSizeWarning, match=r"above max_num_tokens \(32\) were dropped from `sizes`: 64"
    ):
        assert check_capture_sizes([8, 32, 64], limit=32, over_limit="trim") == (8, 32)


def test_the_range_without_a_graph_is_named():
    with pytest.warns(CaptureSizeWarning, match="batches of 9 to 32 tokens run eager"):
        assert check_capture_sizes([8], limit=32) == (8,)


def test_no_size_left_is_said_and_is_no_error():
    with pytest.warns(CaptureSizeWarning, match="is empty, so every batch runs eager"):
        assert check_capture_sizes([], limit=32) == ()


def test_sizes_of_uniform_batches_are_described_as_such():
    """Mixed batches have their own sizes, so they do not run eager."""
    for sizes, text in (([], "so uniform batches have no"), ([7], "uniform batches of 8 tokens")):
        with pytest.warns(CaptureSizeWarning, match=f"`uniform_sizes` .*{text}"):
            DispatchConfig(sizes=[8], uniform_sizes=sizes)


def test_a_list_up_to_the_limit_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_capture_sizes([8, 32], limit=32) == (8, 32)


def test_count_keeps_the_number_and_refuses_too_small_ones():
    assert check_count("17", "max_num_seqs") == 17
    assert check_count(0, "warmups", minimum=0) == 0
    with pytest.raises(ConfigError, match="max_num_seqs must be a whole number of at least 1"):
        check_count(0, "max_num_seqs")


# -- the project's default ----------------------------------------------------------------


@given(st.integers(1, 2000), st.none() | st.integers(1, 300), st.integers(1, 9))
def test_the_stated_maximum_is_a_size(max_size, max_num_seqs, query_len):
    sizes = default_capture_sizes(max_size, max_num_seqs=max_num_seqs, query_len=query_len)
    assert sizes[-1] == max_size
    assert sizes[0] >= 1
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(
    ("max_size", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (7, (1, 2, 4, 7)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (300, (1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300)),
    ],
)
def test_default_ladder(max_size, expected):
    """The maximum is always a size; a maximum of 1 gives 1, never 0."""
    assert default_capture_sizes(max_size) == expected


@given(st.integers(1, 60), st.integers(2, 8))
def test_default_holds_whole_requests_of_a_full_decode_batch(max_num_seqs, query_len):
    top = max_num_seqs * query_len
    sizes = default_capture_sizes(2 * top, max_num_seqs=max_num_seqs, query_len=query_len)
    assert top in sizes
    assert query_len in sizes


def test_default_for_a_query_length_has_all_whole_requests_that_fit():
    assert default_capture_sizes(7, query_len=3) == (1, 2, 3, 4, 6, 7)
    assert default_capture_sizes(100, max_num_seqs=3, query_len=5) == (
        *(1, 2, 4, 5, 8, 10, 15),
        *range(16, 97, 8),
        100,
    )


@pytest.mark.parametrize("bad", [0, -3, 1.5, True])
def test_default_refuses_a_bad_maximum(bad):
    with pytest.raises(ConfigError, match="max_size must be"):
        default_capture_sizes(bad)


# -- vLLM's generations -------------------------------------------------------------------


def derive(generation="newest", **settings):
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, **settings}
    return derive_capture_sizes(generation, **settings)


def test_generations_differ_in_order_and_spacing():
    assert derive("0.11", max_num_seqs=6).sizes == (8, 4, 2, 1)
    assert derive("0.11").sizes == (*range(512, 7, -8), 4, 2, 1)
    assert derive("0.13").sizes == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert derive("newest", max_num_seqs=100).sizes == (
        *(1, 2, 4, *range(8, 104, 8), 100),
        *range(104, 201, 8),
    )


def test_only_newest_keeps_the_token_limit_as_a_size():
    assert derive("0.13", max_num_batched_tokens=100).sizes[-1] == 96
    assert derive("newest", max_num_batched_tokens=100).sizes[-1] == 100


def test_newest_ceiling_and_small_steps():
    assert derive(max_num_seqs=1024, ceiling=1024).max_size == 1024
    assert derive(max_num_seqs=1024).max_size == 512
    assert derive(max_num_seqs=4, small_steps=True).sizes == (1, 2, 3, 4, 5, 6, 7, 8)


def test_newest_adds_sizes_of_whole_decode_batches():
    assert derive(max_num_seqs=3, query_len=3).sizes == (1, 2, 3, 4, 6, 8, 9, 16)


def test_oldest_counts_requests_for_its_default_maximum_and_others_their_tokens():
    assert derive("0.11", max_num_seqs=4, query_len=3).sizes == (8, 4, 2, 1)
    assert derive("0.13", max_num_seqs=4, query_len=3).sizes == (1, 2, 4, 8, 16, 24)


def test_no_decode_batch_above_the_maximum_is_a_size():
    assert derive(max_num_seqs=200, query_len=4).max_size == 512
    assert derive(max_num_seqs=3, query_len=3, user_max_size=8).sizes == (1, 2, 4, 8)
    assert derive(max_num_seqs=600).sizes == derive(max_num_seqs=512).sizes
    assert derive(max_num_seqs=513).sizes == derive(max_num_seqs=512).sizes


def test_decode_batches_of_one_and_of_two_tokens_per_request():
    assert derive(max_num_seqs=600, ceiling=500).sizes[-1] == 496
    assert derive(max_num_seqs=3, query_len=2).sizes == (1, 2, 4, 6, 8)


def test_decode_batches_that_just_reach_the_maximum_are_sizes():
    assert derive(max_num_seqs=12, ceiling=12).sizes == (1, 2, 4, 8, 12)
    assert derive(max_num_seqs=4, query_len=3, ceiling=12).sizes == (1, 2, 3, 4, 6, 8, 12)


def test_oldest_has_no_step_above_its_maximum():
    assert derive("0.11", user_max_size=15).sizes == (8, 4, 2, 1)
    assert derive("0.11", user_max_size=16).sizes == (16, 8, 4, 2, 1)


@pytest.mark.parametrize("generation", ["0.13", "newest"])
def test_a_token_limit_of_zero_leaves_no_maximum_and_is_refused(generation):
    with pytest.raises(ConfigError, match=r"max_capture_size must be .* at least 1, got 0"):
        derive(generation, max_num_batched_tokens=0)


def test_a_list_of_which_nothing_is_left_has_no_largest_size():
    assert derive("0.13", user_sizes=[64], max_num_batched_tokens=32) == CaptureSizes((), 0)


def test_small_steps_end_at_32():
    assert derive(max_num_seqs=30, small_steps=True).sizes == (*range(1, 33), 40, 48, 56)


def test_small_maximum_keeps_the_small_sizes_up_to_it():
    assert derive("0.13", user_max_size=2).sizes == (1, 2)
    assert derive("0.11", max_num_seqs=1).sizes == (4, 2, 1)


def test_what_is_over_the_token_limit_goes_but_for_lists_in_the_oldest():
    lists = {"user_sizes": [8, 100, 200], "max_num_batched_tokens": 100}
    assert derive("0.11", **lists).sizes == (200, 100, 8)
    assert derive("0.13", **lists).sizes == derive(**lists).sizes == (8, 100)
    assert derive("0.11", max_num_batched_tokens=20).sizes == (16, 8, 4, 2, 1)


def test_graphs_off_means_no_sizes():
    assert derive(mode=CUDAGraphMode.NONE) == CaptureSizes((), 0)
    assert derive(enforce_eager=True, user_sizes=[4]) == CaptureSizes((), 0)
    assert derive("0.11", enforce_eager=True).sizes == ()
    assert derive("0.11", enforce_eager=True, user_sizes=[4]).sizes == (4,)


def test_tensor_parallel_filter():
    options = {"max_num_seqs": 8, "tensor_parallel_size": 4, "sequence_parallel": True}
    assert derive("0.13", **options).sizes == (4, 8, 16)
    assert derive("newest", **options).sizes == (1, 2, 4, 8, 16)
    assert derive("0.13", **{**options, "tensor_parallel_size": 2}).sizes == (2, 4, 8, 16)
    alone = {"max_num_seqs": 8, "sequence_parallel": True}
    assert derive("0.13", **alone).sizes == (1, 2, 4, 8, 16)  # one rank by default


def test_maximum_and_list_must_agree():
    assert derive("0.13", user_sizes=[4, 8], user_max_size=8).sizes == (4, 8)
    with pytest.raises(ConfigError, match="max_capture_size is 16, but"):
        derive("0.13", user_sizes=[4, 8], user_max_size=16)


def test_an_empty_list_is_an_error():
    with pytest.raises(ConfigError, match="at least one size"):
        derive("0.13", user_sizes=[])


def test_a_lowered_maximum_is_told():
    lowered = derive("0.13", user_max_size=30)
    assert lowered.max_size == 24
    assert lowered.notes == ("max_capture_size was lowered from 30 to 24.",)


def test_unknown_generation_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        derive("0.31")
    assert caught.value.nearest
    assert set(caught.value.known) == set(SIZE_RULES)


# -- rounding -----------------------------------------------------------------------------


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(2, 9))
def test_rounded_sizes_hold_whole_requests_and_stay_below_the_maximum(sizes, query_len):
    try:
        rounded = round_sizes_for_query_len(sizes, query_len)
    except ConfigError:
        assert query_len > max(sizes)
        return
    assert all(size % query_len == 0 for size in rounded.sizes)
    assert rounded.max_size == rounded.sizes[-1] <= max(sizes)


def test_rounding_can_shrink_the_maximum():
    assert round_sizes_for_query_len([1, 2, 4, 8], 3) == round_sizes_for_query_len([6, 3], 3)


def test_rounding_at_the_edges():
    assert round_sizes_for_query_len([], 3) == CaptureSizes((), 0)
    assert round_sizes_for_query_len([5, 8], 4, max_size=4).sizes == (4,), "one request fits"
    assert round_sizes_for_query_len([4, 8], 4, max_size=8).sizes == (4, 8)
    with pytest.raises(ConfigError, match=r"size is 3\. Increase the maximum to at least 4"):
        round_sizes_for_query_len([5, 8], 4, max_size=3)


def test_query_length_one_rounds_nothing():
    assert round_sizes_for_query_len([5, 7], 1).sizes == (5, 7)
    assert round_sizes_for_query_len([7, 5], 1, max_size=9) == CaptureSizes((7, 5), 9)
    ranks = {"tensor_parallel_size": 4, "sequence_parallel": True, "generation": "0.13"}
    assert round_sizes_for_query_len([5, 7], 1, **ranks).sizes == (5, 7)


def test_rounding_with_tensor_parallel_ranks():
    options = {"tensor_parallel_size": 4, "sequence_parallel": True, "generation": "0.13"}
    assert round_sizes_for_query_len([1, 8, 10], 2, **options).sizes == (4, 8)
    with pytest.raises(ConfigError, match="tensor-parallel size"):
        round_sizes_for_query_len([1, 8, 12], 3, **options)
    assert round_sizes_for_query_len([1, 8, 12], 3, tensor_parallel_size=4).sizes == (3, 9, 12)


def test_two_ranks_must_divide_with_the_query_length_too():
    options = {"tensor_parallel_size": 2, "sequence_parallel": True, "generation": "0.13"}
    with pytest.raises(ConfigError, match=r"tensor-parallel size \(2\)"):
        round_sizes_for_query_len([1, 8, 12], 3, **options)
    assert round_sizes_for_query_len([1, 8, 12], 4, **options).sizes == (4, 8, 12)


def test_ranks_count_in_0_13_with_sequence_parallelism_alone_and_in_newest_never():
    ranks = {"tensor_parallel_size": 4}
    for options in ({"generation": "0.13"}, {"generation": "newest", "sequence_parallel": True}):
        assert round_sizes_for_query_len([1, 8, 12], 3, **ranks, **options).sizes == (3, 9, 12)


def test_0_11_1_rounds_without_sequence_parallelism_and_keeps_what_it_cannot_round():
    options = {"tensor_parallel_size": 4, "generation": "0.11.1"}
    assert round_sizes_for_query_len([1, 8, 10], 2, **options).sizes == (4, 8)
    kept = round_sizes_for_query_len([1, 2], 2, **options)
    assert kept.sizes == (1, 2)
    assert kept.notes


def test_which_modes_round():
    assert rounds_for_query_len(CUDAGraphMode.FULL, 3)
    assert rounds_for_query_len(CUDAGraphMode.FULL, 2)
    assert not rounds_for_query_len(CUDAGraphMode.FULL, 3, "0.13")
    assert rounds_for_query_len(CUDAGraphMode.FULL_DECODE_ONLY, 3, "0.13")
    assert not rounds_for_query_len(CUDAGraphMode.FULL_DECODE_ONLY, 3, "0.11")
    assert not rounds_for_query_len(CUDAGraphMode.FULL_DECODE_ONLY, 1)
    assert rounds_for_query_len(CUDAGraphMode.PIECEWISE, 3) is False
    assert rounds_for_query_len(CUDAGraphMode.PIECEWISE, 3, "0.13") is False
    assert rounds_for_query_len(CUDAGraphMode.FULL, 1) is False


# -- padding ------------------------------------------------------------------------------


@given(size_lists)
def test_every_batch_is_padded_to_the_smallest_size_that_holds_it(sizes):
    table = padding_table(sizes)
    assert len(table) == max(sizes, default=0) + 1
    assert table[0] == 0
    for num_tokens in range(1, len(table)):
        assert table[num_tokens] == min(size for size in sizes if size >= num_tokens)


def test_no_tokens_are_padded_to_none():
    assert padded_size(padding_table([4, 8]), 0) == 0


@pytest.mark.parametrize("num_tokens", [-1, 9])
def test_batches_outside_the_table_are_refused(num_tokens):
    with pytest.raises(DescriptorError, match="from 0 to 8"):
        padded_size(padding_table([4, 8]), num_tokens)
    assert padded_size(padding_table([4, 8]), 5) == 8


def test_mode_none_leaves_the_sizes_of_0_11():
    assert derive("0.11", mode=CUDAGraphMode.NONE) == derive("0.11")


@pytest.mark.parametrize("generation", ["0.11", "0.13"])
def test_ranks_change_no_size_without_sequence_parallelism(generation):
    assert derive(generation, tensor_parallel_size=3) == derive(generation)
    assert derive(generation, tensor_parallel_size=3, sequence_parallel=True) != derive(generation)


def test_sizes_are_rounded_for_one_rank_unless_told():
    """2 ranks and 3 tokens have no common multiple to round to."""
    options = {"generation": "0.11.1", "max_size": 9}
    told = round_sizes_for_query_len([3, 8], 3, tensor_parallel_size=1, **options)
    assert round_sizes_for_query_len([3, 8], 3, **options) == told


@pytest.mark.parametrize("sizes", [[16, 32], [], [8]], ids=["trimmed", "empty", "short"])
def test_sizes_are_warned_of_where_they_were_given(sizes):
    with pytest.warns(CaptureSizeWarning) as caught:
        check_capture_sizes(sizes, limit=16, over_limit="trim")
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize(("beyond", "named"), [([17], 17), ([32, 64], [32, 64])])
def test_every_size_above_the_limit_is_named(beyond, named):
    with pytest.raises(ConfigError) as caught:
        check_capture_sizes([8, *beyond], limit=16)
    assert caught.value.value == named
