"""Packers: every item once, within the limits, at most at the promised cost."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.dispatch import PackingLimits, pack_items
from dispatchkit.errors import ConfigError, PolicyError

from dispatchkit_packing import CheapestPacking, first_fit_decreasing

lengths = st.lists(st.integers(1, 40), max_size=12)
limits = st.builds(
    PackingLimits,
    st.sets(st.integers(1, 32), min_size=1).map(lambda sizes: tuple(sorted(sizes))),
    st.none() | st.integers(1, 5),
)


@pytest.mark.parametrize("packer", [first_fit_decreasing, CheapestPacking()])
@given(lengths=lengths, limits=limits)
def test_bins_hold_each_item_once_within_the_limits(packer, lengths, limits):
    bins = pack_items(packer, lengths, limits)
    assert sorted(item for one in bins for item in one) == list(range(len(lengths)))
    for one in bins:
        assert len(one) == 1 or sum(lengths[item] for item in one) <= limits.max_tokens
        assert limits.max_items is None or len(one) <= limits.max_items


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=5))
def test_first_fit_decreasing_is_near_the_fewest_bins(lengths):
    """At most 11/9 of the fewest bins plus 6/9, compared with every division."""
    top = 10
    fewest = min(
        len(set(division))
        for division in product(range(len(lengths)), repeat=len(lengths))
        if all(
            sum(length for length, one in zip(lengths, division, strict=True) if one == which)
            <= top
            for which in set(division)
        )
    )
    found = first_fit_decreasing(lengths, PackingLimits((top,)))
    assert len(found) <= 11 / 9 * fewest + 6 / 9


@given(lengths=lengths, limits=limits, per_step=st.integers(0, 100))
def test_the_cheapest_costs_no_more_than_first_fit(lengths, limits, per_step):
    def cost(num_tokens):
        return num_tokens + per_step

    def total(bins):
        tokens = [sum(lengths[item] for item in one) for one in bins]
        return sum(cost(min((s for s in limits.sizes if s >= n), default=n)) for n in tokens)

    cheapest = CheapestPacking(cost)(lengths, limits)
    assert total(cheapest) <= total(first_fit_decreasing(lengths, limits))


def test_small_bins_are_taken_where_a_step_costs_nothing():
    """33 tokens are padded to 64 in one bin, or to 32 and 8 in two."""
    items, limits = [32, 1], PackingLimits((8, 32, 64))
    assert CheapestPacking(lambda n: n)(items, limits) == [[0], [1]]
    assert CheapestPacking(lambda n: n + 64)(items, limits) == [[0, 1]]


def test_a_cost_that_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="a function that takes a number of tokens"):
        CheapestPacking(3)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([[0], [1]], "must contain each index from 0 to 2 exactly once"),
        ([[0, 1], [1, 2]], "must contain each index from 0 to 2 exactly once"),
        ([[0, 1, 3]], "must contain each index from 0 to 2 exactly once"),
        ([[0, 1], [2], []], "a bin without items"),
        ([[0, 1, 2]], "put 12 tokens into a bin; the limit is 8"),
        ([["0"], [1], [2]], "must contain each index from 0 to 2 exactly once"),
        (7, "raised TypeError"),
    ],
)
def test_an_answer_that_cannot_be_run_is_refused(answer, problem):
    with pytest.raises(PolicyError, match=problem):
        pack_items(lambda lengths, limits: answer, [4, 4, 4], PackingLimits((8,)))


@pytest.mark.parametrize("answer", [[[0]], [["0"]]])
def test_bins_without_items_to_pack_are_refused(answer):
    with pytest.raises(PolicyError, match="no items to pack, so return no bins"):
        pack_items(lambda lengths, limits: answer, [], PackingLimits((8,)))


def test_too_many_items_are_refused():
    with pytest.raises(PolicyError, match="put 2 items into a bin; the limit is 1"):
        pack_items(lambda lengths, limits: [[0, 1]], [1, 1], PackingLimits((8,), 1))


def test_a_packer_that_raises_is_named():
    def packer(lengths, limits):
        raise ValueError("no")

    with pytest.raises(PolicyError, match="'packer': pack raised ValueError: no"):
        pack_items(packer, [1], PackingLimits((8,)))
