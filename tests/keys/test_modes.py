"""Modes behave as vLLM's enum, and every downgrade has a reason."""

from __future__ import annotations

import enum
import itertools

import pytest

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys.modes import (
    ALLOWED_MODES,
    AttentionSupport,
    CUDAGraphMode,
    ModeResolution,
    RuntimeMode,
    allowed_modes_code,
    resolve_mode,
)

M = CUDAGraphMode
LEVELS = tuple(AttentionSupport)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "separate", "piecewise", "full", "largest", "without"),
    [
        (M.NONE, M.NONE, M.NONE, False, False, False, M.NONE, M.NONE),
        (M.PIECEWISE, M.PIECEWISE, M.PIECEWISE, False, True, False, M.PIECEWISE, M.NONE),
        (M.FULL, M.FULL, M.FULL, False, False, True, M.FULL, M.FULL),
        (M.FULL_DECODE_ONLY, M.FULL, M.NONE, True, False, True, M.FULL, M.FULL_DECODE_ONLY),
        (M.FULL_AND_PIECEWISE, M.FULL, M.PIECEWISE, True, True, True, M.FULL, M.FULL_DECODE_ONLY),
    ],
)
def test_mode_properties(mode, decode, mixed, separate, piecewise, full, largest, without):
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is separate
    assert mode.requires_piecewise_compilation() is piecewise
    assert mode.has_piecewise_cudagraphs() is piecewise
    assert mode.has_full_cudagraphs() is full
    assert mode.max_cudagraph_mode() is largest
    assert mode.without_piecewise() is without


def test_values_are_those_of_vllm():
    assert [m.value for m in M] == [0, 1, 2, (2, 0), (2, 1)]


def test_only_none_is_false_and_text_is_the_name():
    assert [bool(m) for m in M] == [False, True, True, True, True]
    assert f"{M.FULL_AND_PIECEWISE}" == "FULL_AND_PIECEWISE"
    assert f"{RuntimeMode.FULL}" == "FULL"


def test_has_mode_refuses_a_pair():
    assert M.FULL_DECODE_ONLY.has_mode(M.NONE)
    assert not M.FULL_DECODE_ONLY.has_mode(M.PIECEWISE)
    with pytest.raises(AssertionError, match="FULL_AND_PIECEWISE"):
        M.FULL.has_mode(M.FULL_AND_PIECEWISE)


def test_runtime_modes_are_the_single_ones():
    assert M.valid_runtime_modes == {M.NONE, M.PIECEWISE, M.FULL}
    assert [M.is_valid_runtime_mode(m) for m in M] == [True, True, True, False, False]
    assert M.PIECEWISE.runtime_mode is RuntimeMode.PIECEWISE
    with pytest.raises(ConfigError, match="runtime mode must be"):
        _ = M.FULL_DECODE_ONLY.runtime_mode


@pytest.mark.parametrize("mode", list(M))
def test_parse_takes_members_names_and_values(mode):
    foreign = enum.Enum("ForeignMode", {mode.name: 7})
    for given in (mode, mode.name, f" {mode.name.lower()} ", mode.value, foreign[mode.name]):
        assert M.parse(given) is mode
    assert M.parse(mode.name.replace("_", "-")) is mode


@pytest.mark.parametrize("given", ["FUL", "full_and_peicewise", 9, True, None, (1, 2)])
def test_parse_refuses_what_is_no_mode(given):
    with pytest.raises(UnknownNameError):
        M.parse(given)


def test_misspelt_mode_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        M.parse("full_and_peicewise")
    assert caught.value.nearest[0] == "FULL_AND_PIECEWISE"


def test_runtime_parse_refuses_a_pair():
    assert RuntimeMode.parse("piecewise") is RuntimeMode.PIECEWISE
    assert RuntimeMode.parse(M.FULL) is RuntimeMode.FULL
    assert RuntimeMode.parse(RuntimeMode.NONE) is RuntimeMode.NONE
    with pytest.raises(ConfigError):
        RuntimeMode.parse("FULL_DECODE_ONLY")


def test_first_codes_are_ceilings():
    for ceiling in RuntimeMode:
        assert ALLOWED_MODES[ceiling] == {m for m in RuntimeMode if m <= ceiling}


def test_codes_cover_every_set_of_modes_once():
    sets = {
        frozenset(some) for size in (1, 2, 3) for some in itertools.combinations(RuntimeMode, size)
    }
    assert len(ALLOWED_MODES) == len(sets)
    assert set(ALLOWED_MODES) == sets
    for modes in sets:
        assert ALLOWED_MODES[allowed_modes_code(modes)] == modes


def test_code_of_valid_less_invalid_leaves_the_callers_set_alone():
    valid = {"FULL", "NONE"}
    assert allowed_modes_code(valid, {M.FULL}) == 0
    assert valid == {"FULL", "NONE"}
    assert allowed_modes_code() == 2
    assert allowed_modes_code(invalid=[RuntimeMode.NONE]) == 5
    for wrong in (3, "FULL"):
        with pytest.raises(ConfigError, match=r"(in)?valid must be a list of runtime modes, got"):
            allowed_modes_code(wrong)
        with pytest.raises(ConfigError, match="invalid must be a list of runtime modes"):
            allowed_modes_code(invalid=wrong)


@pytest.mark.parametrize(
    ("valid", "invalid"), [([], []), (["FULL"], ["FULL"]), (None, list(M)[:3])]
)
def test_no_mode_left_is_an_error(valid, invalid):
    with pytest.raises(ConfigError, match="at least one of NONE, PIECEWISE, FULL"):
        allowed_modes_code(valid, invalid)


def test_resolve_keeps_what_is_supported():
    for mode in M:
        resolution = resolve_mode(mode)
        assert (resolution.mode, resolution.reasons) == (mode, ())


@pytest.mark.parametrize(
    ("mode", "support", "options", "expected"),
    [
        (M.FULL, "UNIFORM_BATCH", {}, M.FULL_AND_PIECEWISE),
        (M.FULL, "UNIFORM_BATCH", {"splits_attention": False}, M.FULL_DECODE_ONLY),
        (M.FULL_AND_PIECEWISE, "NEVER", {}, M.PIECEWISE),
        (M.FULL_AND_PIECEWISE, "NEVER", {"fully_compiled": False}, M.NONE),
        (M.FULL_DECODE_ONLY, "UNIFORM_SINGLE_TOKEN_DECODE", {"query_len": 3}, M.PIECEWISE),
        (
            M.FULL_DECODE_ONLY,
            "UNIFORM_SINGLE_TOKEN_DECODE",
            {"query_len": 3, "splits_attention": False},
            M.NONE,
        ),
        (M.FULL_AND_PIECEWISE, "ALWAYS", {"captures_piecewise": False}, M.FULL_DECODE_ONLY),
        (M.PIECEWISE, "ALWAYS", {"captures_piecewise": False}, M.NONE),
        (M.NONE, "NEVER", {}, M.NONE),
        (M.PIECEWISE, "NEVER", {}, M.PIECEWISE),
    ],
)
def test_resolve_steps_down(mode, support, options, expected):
    assert resolve_mode(mode, support, **options).mode is expected


@pytest.mark.parametrize("mode", list(M))
@pytest.mark.parametrize("support", LEVELS)
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("splits", [True, False])
def test_a_mode_changes_exactly_when_a_reason_is_given(mode, support, query_len, splits):
    """Downgrades always have a reason, and other results never do."""
    try:
        resolution = resolve_mode(mode, support, query_len=query_len, splits_attention=splits)
    except ConfigError:
        assert (mode, support) == (M.FULL, AttentionSupport.NEVER)
        return
    assert (resolution.mode is not mode) == bool(resolution.reasons)
    if resolution.reasons:
        assert resolution.reasons[0].startswith(f"{mode} -> ")
        assert f"-> {resolution.mode}:" in resolution.reasons[-1]
    if support is AttentionSupport.NEVER:
        assert not resolution.mode.has_full_cudagraphs()
    assert resolution.rounds_sizes == (query_len > 1 and resolution.mode.decode_mode() is M.FULL)


def test_uniform_batches_of_several_tokens_need_just_that_support():
    for query_len, support in ((3, "UNIFORM_BATCH"), (1, "UNIFORM_SINGLE_TOKEN_DECODE")):
        resolved = resolve_mode("FULL_DECODE_ONLY", support, query_len=query_len)
        assert (str(resolved.mode), resolved.reasons) == ("FULL_DECODE_ONLY", ())
        assert resolved.rounds_sizes is (query_len > 1)
    down = resolve_mode("FULL_DECODE_ONLY", "UNIFORM_SINGLE_TOKEN_DECODE", query_len=2)
    assert str(down.mode) == "PIECEWISE"


def test_two_tokens_per_request_are_rounded_for():
    assert resolve_mode("FULL_DECODE_ONLY", "UNIFORM_BATCH", query_len=2).rounds_sizes is True


def test_full_for_mixed_batches_is_refused_where_attention_is_never_captured():
    with pytest.raises(
        ConfigError,
        match=r"^Mode FULL is not possible, because attention cannot be captured\. Use NONE or P",
    ):
        resolve_mode(M.FULL, "NEVER")


def test_the_weakest_attention_group_counts():
    groups = [AttentionSupport.ALWAYS, "uniform_batch"]
    assert resolve_mode(M.FULL, groups).mode is M.FULL_AND_PIECEWISE


def test_support_levels_have_vllms_numbers():
    assert [*map(int, AttentionSupport)] == [0, 1, 2, 3]


def test_nothing_is_rounded_unless_it_is_said():
    assert ModeResolution(M.FULL).rounds_sizes is False


def test_what_is_no_support_level_is_refused_by_name():
    with pytest.raises(UnknownNameError, match="attention support"):
        resolve_mode("FULL", 7)


def test_unknown_support_level_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        resolve_mode(M.FULL, "uniform_bach")
    assert "UNIFORM_BATCH" in caught.value.nearest


@pytest.mark.parametrize("parse", [M.parse, RuntimeMode.parse])
def test_unknown_mode_is_shown_as_it_was_written(parse):
    with pytest.raises(UnknownNameError, match="got 'piecwise'") as caught:
        parse("piecwise")
    assert caught.value.nearest[0] == "PIECEWISE"


def test_runtime_parse_offers_runtime_modes_alone():
    with pytest.raises(UnknownNameError) as caught:
        RuntimeMode.parse("x")
    assert caught.value.known == ("FULL", "NONE", "PIECEWISE")


def test_decode_batch_has_one_token_per_request_unless_told():
    resolved = resolve_mode("FULL_DECODE_ONLY", "UNIFORM_SINGLE_TOKEN_DECODE")
    assert resolved.mode is M.FULL_DECODE_ONLY
    assert resolved.reasons == ()
