"""Options of a runner: records that can be printed, compared, pickled and changed."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import attrs
import pytest

from dispatchkit import (
    Axis,
    BufferOptions,
    CaptureOptions,
    CUDAGraphMode,
    DispatchConfig,
    LaneOptions,
    MemoryOptions,
    RunnerOptions,
)
from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import CaptureSizeWarning
from dispatchkit.options import GROUPS, names_of, refuse_moved, with_settings

NAMES = {kind.__name__: kind for kind in (Axis, RunnerOptions, DispatchConfig, *GROUPS.values())}
FULL = RunnerOptions(
    config=DispatchConfig(
        mode="FULL",
        sizes=[4, 8],
        max_num_seqs=4,
        query_lens=(1, 2),
        axes=[Axis("length", (16, 64)), Axis("kind", (1, 3), exact=True)],
    ),
    policy_options={"max_tokens": 8},
    device="cuda:1",
    strict=True,
    check="first",
    sample_every=4,
    rows_independent=True,
    capture=CaptureOptions(
        warmups=2,
        capture_after=3,
        state_limit_bytes=1 << 20,
        prove_rows=False,
        break_on_unsafe=True,
    ),
    memory=MemoryOptions(max_graphs=4, max_bytes=1 << 30, eviction="benefit"),
    buffers=BufferOptions(
        row_count="rows", buffer_rows=64, output_batch_dims={"logits": 0}, share_outputs=False
    ),
    lanes=LaneOptions(
        lane_policy="least-loaded", lane_policy_options={"window": 2}, disjoint_state=True
    ),
)


# -- common to all records ------------------------------------------------------------------


@pytest.mark.parametrize("options", [RunnerOptions(), FULL, *map(attrs.evolve, [FULL.memory])])
def test_options_print_as_the_call_that_makes_them(options: Any) -> None:
    """Defaults are omitted for readability."""
    assert eval(repr(options), dict(NAMES)) == options  # noqa: S307 - the text is our own
    assert repr(RunnerOptions()) == "RunnerOptions()"
    limited = RunnerOptions(memory=MemoryOptions(max_bytes=2**30))
    assert repr(limited) == "RunnerOptions(memory=MemoryOptions(max_bytes=1073741824))"


def test_the_full_example_sets_every_option() -> None:
    """The tests here must cover all options."""
    for kind, record in [(RunnerOptions, FULL), *((type(one), one) for one in _groups(FULL))]:
        if kind is not DispatchConfig:
            fresh = kind()
            same = [n for n in names_of(kind) if getattr(record, n) == getattr(fresh, n)]
            assert same == []


def _groups(options: RunnerOptions) -> list[Any]:
    return [getattr(options, group) for group in GROUPS]


@pytest.mark.parametrize(
    "how",
    [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), attrs.evolve],  # noqa: S301
)
def test_copies_are_equal_and_hash_alike(how: Any) -> None:
    twin = how(FULL)
    assert twin == FULL
    assert hash(twin) == hash(FULL)
    assert attrs.evolve(twin, strict=False) != FULL


@pytest.mark.parametrize("name", [name for kind in GROUPS.values() for name in names_of(kind)])
def test_settings_are_changed_in_their_group(name: str) -> None:
    group = next(group for group, kind in GROUPS.items() if name in names_of(kind))
    value = getattr(getattr(FULL, group), name)
    changed = with_settings(RunnerOptions(), {name: value})
    assert getattr(getattr(changed, group), name) == value
    others = [one for one in GROUPS if one != group]
    assert all(getattr(changed, one) == GROUPS[one]() for one in others)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="max_bytes"):
        with_settings(RunnerOptions(), {"max_byte": 1})


# -- accepted values ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("strict", "no", "True or False"),
        ("share_outputs", 1, "True or False"),
        ("disjoint_state", None, "True or False"),
        ("check", -1, "'first'"),
        ("check", "second", "'first'"),
        ("check", True, "'first'"),
        ("sample_every", 0, "at least 1"),
        ("warmups", -1, "at least 0"),
        ("warmups", 1.5, "a whole number"),
        ("capture_after", True, "a whole number"),
        ("state_limit_bytes", -1, "at least 0"),
        ("max_graphs", -1, "at least 0"),
        ("max_bytes", "many", "a whole number"),
        ("eviction", "oldest", "benefit, lru"),
        ("buffer_rows", 0, "at least 1"),
        ("row_count", 3, "a name"),
        ("lane_policy", "", "a name"),
        ("policy_options", ["a"], "a dictionary"),
        ("lane_policy_options", 3, "a dictionary"),
        ("capture", MemoryOptions(), "a CaptureOptions"),
        ("config", {"max_num_seqs": 3}, "a DispatchConfig"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=allowed) as caught:
        with_settings(RunnerOptions(), {name: value})
    assert caught.value.setting == name


# -- requested and derived configuration ----------------------------------------------------


def test_evolve_derives_anew_from_what_was_asked_for() -> None:
    """Derived sizes and limits follow the others, and there is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = DispatchConfig(max_num_tokens=8)
        assert attrs.evolve(config, max_num_tokens=16) == DispatchConfig(max_num_tokens=16)
        sized = DispatchConfig(sizes=(2, 4))
        assert attrs.evolve(sized, sizes=(2, 16)).max_num_tokens == 16
        large = DispatchConfig(max_num_tokens=4096)  # its sizes end at 512
        assert attrs.evolve(large, mode="FULL").sizes == large.sizes


def test_evolve_warns_of_what_is_new_alone() -> None:
    with pytest.warns(CaptureSizeWarning, match="9 to 64"):
        config = DispatchConfig(sizes=(4, 8), max_num_tokens=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = attrs.evolve(config, mode=CUDAGraphMode.FULL)
        pickle.loads(pickle.dumps(attrs.evolve(again, max_num_seqs=2)))  # noqa: S301
        RunnerOptions(config=again)
    with pytest.warns(CaptureSizeWarning, match="9 to 32"):
        attrs.evolve(again, max_num_tokens=32)


def test_configurations_are_equal_if_the_same_holds() -> None:
    given = DispatchConfig(sizes=(1, 2, 4, 8), max_num_tokens=8)
    derived = DispatchConfig(max_num_tokens=8)
    assert given == derived
    assert hash(given) == hash(derived)
    assert repr(derived) == "DispatchConfig(max_num_tokens=8)"
    # Without a limit, a larger batch is no error.
    assert DispatchConfig(sizes=(1, 2, 4, 8)) != given
    assert attrs.evolve(derived, max_num_seqs=8) != derived


# -- keywords that moved ------------------------------------------------------------------


def written_for(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_moved(arguments)
    return str(caught.value).partition("Write: ")[2]


@pytest.mark.parametrize("name", [name for kind in GROUPS.values() for name in names_of(kind)])
def test_a_moved_keyword_is_refused_with_what_to_write(name: str) -> None:
    group = next(group for group, kind in GROUPS.items() if name in names_of(kind))
    value = getattr(getattr(FULL, group), name)
    if name in ("sizes", "mode", "max_num_tokens", "axes"):
        refuse_moved({name: value})  # arguments of the runner itself
        return
    wanted = with_settings(RunnerOptions(), {name: value})
    made = eval(f"dict({written_for(**{name: value})})", dict(NAMES))  # noqa: S307
    assert made == ({} if wanted == RunnerOptions() else {"options": wanted})


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "lanes"])
def test_a_group_of_options_is_refused_with_what_to_write(group: str) -> None:
    value = getattr(FULL, group)
    made = eval(f"dict({written_for(**{group: value})})", dict(NAMES))  # noqa: S307
    assert made == {"options": attrs.evolve(RunnerOptions(), **{group: value})}
    with pytest.raises(ConfigError, match=rf" Omit: {group}=\w+\(\) \(default\)$"):
        refuse_moved({group: GROUPS[group]()})


def test_several_moved_keywords_join_options_that_are_given() -> None:
    text = written_for(
        sizes=(1, 2), max_bytes=2**30, query_len=2, check=1, options=RunnerOptions(strict=True)
    )
    assert text == (
        "options=RunnerOptions(config=DispatchConfig(query_lens=(2,)), strict=True, check=1, "
        "memory=MemoryOptions(max_bytes=1073741824))"
    )


def test_a_moved_keyword_that_is_the_default_is_to_be_left_out() -> None:
    """A default needs no replacement; next to another keyword it is named separately."""
    with pytest.raises(ConfigError, match=r" Omit: warmups=1 \(default\)$"):
        refuse_moved({"warmups": 1})
    text = written_for(warmups=1, strict=True)
    assert text == "options=RunnerOptions(strict=True)\nOmit: warmups=1 (default)"


def test_keywords_that_did_not_move_pass() -> None:
    refuse_moved({"sizes": (1,), "policy": "vllm", "state": [], "nonsense": 3})
