"""The policy ``threshold`` passes the kit, and its options have the documented meaning."""

from __future__ import annotations

import pytest

from dispatchkit import DispatchConfig, Dispatcher, load_plugins
from dispatchkit.errors import ConfigError
from dispatchkit.keys import CaptureSizeWarning
from dispatchkit.testing import PolicyTests

from dispatchkit_threshold import ThresholdPolicy

SIZES = (8, 16, 32, 64)


class TestPlain(PolicyTests):
    def make_policy(self) -> ThresholdPolicy:
        return ThresholdPolicy()


@pytest.mark.slow
class TestLimited(PolicyTests):
    max_examples = 20

    def make_policy(self) -> ThresholdPolicy:
        return ThresholdPolicy(3, 20, max_waste=0.4)


@pytest.mark.slow
class TestPiecewiseFirst(PolicyTests):
    max_examples = 20

    def make_policy(self) -> ThresholdPolicy:
        return ThresholdPolicy(prefer_piecewise=True)


def dispatcher(policy: ThresholdPolicy, mode: str = "FULL_AND_PIECEWISE") -> Dispatcher:
    config = DispatchConfig(mode=mode, sizes=SIZES)
    return Dispatcher(policy, config, lazy=True, strict=True)


def test_batches_outside_the_limits_run_eager_with_the_reason() -> None:
    table = dispatcher(ThresholdPolicy(4, 32))
    answers = {n: table.dispatch(n).reason for n in (3, 4, 32, 33)}
    assert answers == {
        3: "below_min_tokens",
        4: "hit",
        32: "hit",
        33: "above_max_tokens",
    }


def test_a_batch_that_may_use_no_graph_is_told_so() -> None:
    """The reason is not a missing key: the key exists, but the step was not allowed to use it."""
    assert dispatcher(ThresholdPolicy()).dispatch(8, ceiling=0).reason == "ceiling"


def test_sizes_that_no_batch_could_get_are_not_declared() -> None:
    config = DispatchConfig(sizes=SIZES, mode="PIECEWISE")
    assert [key.num_tokens for key in ThresholdPolicy(9, 20).declare(config)] == [16, 32]
    assert [key.num_tokens for key in ThresholdPolicy(9, 16).declare(config)] == [16]


def test_a_bucket_that_is_too_far_is_left_alone() -> None:
    table = dispatcher(ThresholdPolicy(max_waste=0.25))
    assert table.dispatch(12).padded_num_tokens == 16
    assert table.dispatch(11).reason == "padding_limit"
    assert table.dispatch(64).reason == "hit"


def test_no_waste_at_all_means_exact_sizes() -> None:
    table = dispatcher(ThresholdPolicy(max_waste=0))
    assert [n for n in range(1, 65) if table.dispatch(n).key is not None] == list(SIZES)


def test_preference_of_piecewise_holds_for_uniform_batches() -> None:
    full = dispatcher(ThresholdPolicy()).dispatch(8, 8, uniform=1)
    pieces = dispatcher(ThresholdPolicy(prefer_piecewise=True)).dispatch(8, 8, uniform=1)
    assert (full.mode.name, pieces.mode.name) == ("FULL", "PIECEWISE")


def test_options_are_taken_as_text() -> None:
    policy = load_plugins().create_policy(
        "threshold",
        min_tokens="2",
        max_tokens="16",
        prefer_piecewise="yes",
        max_waste="0.5",
        split="no",
    )
    shown = "ThresholdPolicy(2, 16, prefer_piecewise=True, max_waste=0.5, split=False)"
    assert repr(policy) == shown


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 8, "max_tokens": 4}, "max_tokens"),
        ({"max_waste": 1.5}, "max_waste"),
        ({"max_waste": float("nan")}, "max_waste"),
        ({"max_waste": True}, "max_waste"),
        ({"prefer_piecewise": "perhaps"}, "prefer_piecewise"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting) as caught:
        ThresholdPolicy(**options)
    assert caught.value.setting == setting


def test_the_limit_of_tokens_leaves_each_kind_of_batch_the_graph_it_is_padded_to():
    """Uniform batches have only sizes of whole requests: 24 is the size for 12 of them."""
    config = DispatchConfig(sizes=(8, 16, 24), max_num_tokens=24, query_lens=3)
    dispatcher = Dispatcher(ThresholdPolicy(1, 12), config, lazy=True)
    assert str(dispatcher.dispatch(12, 4, 1).key) == "FULL tokens=24 reqs=8 uniform=3"
    assert dispatcher.dispatch(12).padded_num_tokens == 16


@pytest.mark.slow
class TestSplit(PolicyTests):
    max_examples = 20

    def make_policy(self) -> ThresholdPolicy:
        return ThresholdPolicy(split=True)


def split_of(policy: ThresholdPolicy, num_tokens: int, **facts: int) -> list[tuple[int, int]]:
    with pytest.warns(CaptureSizeWarning):
        config = DispatchConfig(mode="FULL", sizes=SIZES, max_num_tokens=1000)
    table = Dispatcher(policy, config, lazy=True, strict=True, may_split=True)
    parts = table.dispatch(num_tokens, **facts).parts
    return [(part.key.num_tokens, part.num_tokens) for part in parts]


def test_a_batch_above_the_largest_size_is_cut_where_that_was_asked_for() -> None:
    asked, plain = ThresholdPolicy(split="yes"), ThresholdPolicy()
    assert split_of(asked, 70) == [(64, 64), (8, 6)]
    assert split_of(asked, 128) == [(64, 64), (64, 64)]
    assert split_of(asked, 200) == [(64, 64), (64, 64), (64, 64), (8, 8)]
    assert split_of(asked, 64) == split_of(plain, 70) == []
    assert split_of(asked, 70, uniform=1) == []  # its rows belong to requests


def test_what_is_cut_keeps_the_limits() -> None:
    assert split_of(ThresholdPolicy(split=True, max_tokens=100), 101) == []
    wasteful = ThresholdPolicy(split=True, max_waste=0)
    assert split_of(wasteful, 71) == []
    assert split_of(wasteful, 72) == [(64, 64), (8, 8)]
    assert split_of(wasteful, 24) == [(16, 16), (8, 8)]  # with no waste, two graphs serve it
    assert split_of(ThresholdPolicy(split=True), 24) == []
    assert split_of(ThresholdPolicy(split=True), 9 * 64) == []  # too many parts to pay off
