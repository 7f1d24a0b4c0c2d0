"""DispatchConfig: derived limits, numbers as text, and refused settings."""

from __future__ import annotations

import warnings

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import Axis, CaptureSizeWarning, CUDAGraphMode, DispatchConfig

M = CUDAGraphMode


# -- defaults ----------------------------------------------------------------------------


def test_plain_config_ends_at_its_largest_size():
    config = DispatchConfig()
    assert config.mode is M.FULL_AND_PIECEWISE
    assert config.max_num_tokens == config.max_num_seqs == config.max_capture_size == 512
    assert config.query_lens == (1,)
    assert config.max_loras == 0
    assert config.specialize_lora is True
    assert config.specialize_active_loras is config.varlen_decode is False


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 100, 255, 256, 257, 511, 512])
def test_stated_maximum_is_a_capture_size_too(limit):
    """Otherwise a maximum between sizes would run the largest, most common batches eager."""
    config = DispatchConfig(max_num_tokens=limit)
    assert config.sizes[-1] == limit
    assert config.sizes[0] == 1
    assert config.max_num_tokens == limit


def test_large_limit_does_not_make_a_large_ladder():
    config = DispatchConfig(max_num_tokens=8192)
    assert config.max_capture_size == 512
    assert config.max_num_tokens == 8192


def test_given_sizes_set_the_limit():
    config = DispatchConfig(sizes=(16, 4, 4, 8))
    assert config.sizes == (4, 8, 16)
    assert config.max_num_tokens == config.max_num_seqs == 16


def test_explicit_list_is_kept_and_what_it_leaves_out_is_said():
    """Nothing is added; a warning names the range without a graph."""
    with pytest.warns(CaptureSizeWarning, match="17 to 64 tokens run eager .* Add 64"):
        config = DispatchConfig(sizes=(8, 16), max_num_tokens=64)
    assert config.sizes == (8, 16)


def test_no_sizes_mean_no_graphs_and_one_warning():
    """Without sizes, start-up succeeds without graphs and warns once."""
    with pytest.warns(CaptureSizeWarning) as told:
        config = DispatchConfig(sizes=(), max_num_tokens=64)
    assert len(told) == 1
    assert config.max_capture_size == 0


def test_no_sizes_and_no_limit_say_nothing_about_batches():
    with pytest.raises(ConfigError, match="max_num_tokens must be given when sizes are"):
        DispatchConfig(sizes=())


# -- values as users write them -------------------------------------------------------------


def test_text_gives_what_numbers_give():
    """Command line, environment and Python must agree."""
    text = DispatchConfig(
        mode="full-and-piecewise",
        sizes="8, 16,32",
        max_num_tokens="32",
        max_num_seqs=" 16 ",
        query_lens="1,4",
        max_loras="2",
    )
    assert text == DispatchConfig(
        mode=M.FULL_AND_PIECEWISE,
        sizes=[8, 16, 32],
        max_num_tokens=32,
        max_num_seqs=16,
        query_lens=(1, 4),
        max_loras=2,
    )


def test_numpy_numbers_become_plain_ones():
    np = pytest.importorskip("numpy")
    config = DispatchConfig(
        sizes=np.array([4, 8]), max_num_tokens=np.int64(8), max_num_seqs=np.int32(4)
    )
    assert (config.max_num_tokens, config.max_num_seqs) == (8, 4)
    assert type(config.max_num_seqs) is int
    assert {type(size) for size in config.sizes} == {int}


@pytest.mark.parametrize("setting", ["max_num_tokens", "max_num_seqs", "max_loras"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "many", [8], float("inf")])
def test_bad_number_is_refused_with_its_setting(setting, value):
    with pytest.raises(ConfigError) as caught:
        DispatchConfig(**{setting: value})
    assert caught.value.setting == setting
    assert caught.value.value == value
    assert f"{setting} must be a whole number" in str(caught.value)


@pytest.mark.parametrize("setting", ["max_num_tokens", "max_num_seqs"])
def test_zero_is_no_limit(setting):
    with pytest.raises(ConfigError, match=f"{setting} must be a whole number of at least 1, got 0"):
        DispatchConfig(**{setting: 0})


@pytest.mark.parametrize("sizes", [(0,), (-8, 8), (1.5,), (True,), ("x",), (8, None)])
def test_bad_capture_size_is_refused(sizes):
    """Zero, negative, fractional, boolean or not a number: the error names setting and value."""
    with pytest.raises(ConfigError, match=r"^sizes\[[01]\] must be"):
        DispatchConfig(sizes=sizes)


def test_size_above_the_limit_is_refused_before_any_memory_is_taken():
    """Sizes beyond the buffers are refused as a setting."""
    with pytest.raises(ConfigError, match=r"at most max_num_tokens \(16\), got 32"):
        DispatchConfig(sizes=(8, 32), max_num_tokens=16)


@pytest.mark.parametrize("lens", [(), (0,), (-1,), (1, 1), (2.5,), True, None, 3.5, "x", (1, True)])
def test_bad_query_lens_are_refused(lens):
    with pytest.raises(ConfigError) as caught:
        DispatchConfig(query_lens=lens)
    assert caught.value.setting.partition("[")[0] == "query_lens"


def test_unknown_mode_gets_the_nearest_names():
    """An unknown word is refused, never ignored."""
    with pytest.raises(UnknownNameError) as caught:
        DispatchConfig(mode="full_and_peicewise")
    assert "FULL_AND_PIECEWISE" in caught.value.nearest


@pytest.mark.parametrize("flag", ["varlen_decode", "specialize_lora", "specialize_active_loras"])
def test_flag_is_a_bool(flag):
    """The text "false" is true in Python."""
    with pytest.raises(ConfigError, match=f"{flag} must be True or False"):
        DispatchConfig(**{flag: "false"})


def test_uniform_sizes_are_named_in_their_own_error():
    with pytest.raises(ConfigError, match=r"uniform_sizes\[0\] must be"):
        DispatchConfig(max_num_tokens=16, uniform_sizes=(0,))
    with pytest.raises(ConfigError, match=r"uniform_sizes must be at most max_num_tokens"):
        DispatchConfig(max_num_tokens=16, uniform_sizes=(32,))


def test_unknown_setting_is_refused():
    """A misspelt setting is never ignored."""
    with pytest.raises(UnknownNameError, match=r"^DispatchConfig has no setting 'max_tokens'; "):
        DispatchConfig(max_tokens=8)


def test_config_cannot_be_changed_and_evolves():
    config = DispatchConfig(max_num_tokens=16)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.max_num_tokens = 32
    assert attrs.evolve(config, max_loras=2).max_loras == 2
    assert attrs.evolve(config) == config


# -- query classes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lens", "varlen", "expected"),
    [
        ((1,), False, [(False, 0, None), (True, 1, 1)]),
        ((4,), True, [(False, 0, None), (True, 4, 4), (False, 0, 4)]),
        ((3, 1), False, [(False, 0, None), (True, 3, 3), (True, 1, 1)]),
    ],
)
def test_uniform_argument_counts_query_classes(lens, varlen, expected):
    config = DispatchConfig(max_num_tokens=16, query_lens=lens, varlen_decode=varlen)
    assert config.num_query_classes == len(expected)
    assert [config.query_class(index) for index in range(len(expected))] == expected
    assert config.query_len == lens[0]


def test_true_and_false_are_query_classes():
    """Most callers pass uniform=True."""
    config = DispatchConfig(max_num_tokens=16, query_lens=3)
    assert config.query_class(True) == (True, 3, 3)
    assert config.query_class(False) == (False, 0, None)


@given(
    sizes=st.lists(st.integers(1, 300), max_size=12),
    limit=st.integers(1, 300),
    seqs=st.none() | st.integers(1, 300),
)
def test_accepted_config_is_in_order_and_within_its_limits(sizes, limit, seqs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        try:
            config = DispatchConfig(sizes=sizes, max_num_tokens=limit, max_num_seqs=seqs)
        except ConfigError:
            assert max(sizes, default=0) > limit
            return
    assert config.sizes == tuple(sorted(set(sizes)))
    assert config.max_capture_size <= config.max_num_tokens == limit
    assert config.max_num_seqs == (limit if seqs is None else seqs)


def test_derived_sizes_hold_whole_requests_and_a_full_batch():
    """A ladder for one query length lacks sizes for most batches of another."""
    config = DispatchConfig(max_num_tokens=64, max_num_seqs=10, query_lens=(3, 2))
    assert set(config.sizes) >= {3, 6, 12, 24, 30, 2, 4, 8, 16, 20, 64}
    assert DispatchConfig(max_num_tokens=64).sizes == (1, 2, 4, *range(8, 65, 8))
    assert DispatchConfig(max_num_tokens=600, max_num_seqs=70).max_capture_size == 512
    assert 70 in DispatchConfig(max_num_tokens=600, max_num_seqs=70).sizes


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "x"])
def test_a_bad_number_of_requests_is_named_though_sizes_are_derived(bad):
    with pytest.raises(ConfigError) as caught:
        DispatchConfig(max_num_tokens=16, max_num_seqs=bad)
    assert caught.value.setting == "max_num_seqs"


def test_settings_are_given_by_name():
    message = r"settings of DispatchConfig must be given by name .*, got \('FULL',\)"
    with pytest.raises(ConfigError, match=message):
        DispatchConfig("FULL")


@pytest.mark.parametrize(
    "axes", [(Axis("kind", 1), Axis("kind", (1, 3))), ["kind"], [Axis("kind", 1), None], "kind", 7]
)
def test_axes_that_are_none_or_have_the_same_name_are_refused(axes):
    with pytest.raises(
        ConfigError, match=r"Axis objects with different names|axes\[\d\] must be an Axis"
    ):
        DispatchConfig(sizes=(8,), axes=axes)


def test_sizes_of_uniform_batches_are_sorted_and_unique():
    config = DispatchConfig(sizes=(8, 16), uniform_sizes=[16, 8, 8])
    assert config.uniform_sizes == (8, 16)
