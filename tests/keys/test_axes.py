"""Axes and variants: buckets of values, and one number for all buckets and adapters."""

from __future__ import annotations

import pytest

from dispatchkit.errors import ConfigError, DescriptorError
from dispatchkit.keys import Axis
from dispatchkit.keys import axes as axes_module
from dispatchkit.keys.axes import Variants

AXES = (Axis("length", (16, 64)), Axis("kind", (1, 3), exact=True))


def test_buckets_are_sorted_and_one_number_is_a_list_of_one():
    assert Axis("a", (64, 16, 16)).buckets == (16, 64)
    assert Axis("a", 7).buckets == (7,)
    assert Axis("a", "7").buckets == (7,)
    assert Axis("a", [0]).buckets == (0,)


@pytest.mark.parametrize("bad", [(), (-1,), (1.5,), None, (True,)])
def test_buckets_that_are_none_are_refused(bad):
    with pytest.raises(ConfigError, match="bucket"):
        Axis("a", bad)


@pytest.mark.parametrize("bad", ["", "1a", "a b", 7, None])
def test_name_must_be_one_that_an_argument_could_have(bad):
    with pytest.raises(ConfigError, match="a valid Python identifier"):
        Axis(bad, (1,))


@pytest.mark.parametrize("lookup", [0, 64, 65], ids=["searched", "searched-just", "looked-up"])
def test_value_goes_to_the_bucket_that_holds_it(monkeypatch, lookup):
    """Small axes have a table; axes with large values are searched."""
    monkeypatch.setattr(axes_module, "_MAX_LOOKUP", lookup)
    upward, exact = Axis("length", (16, 64)), Axis("kind", (16, 64), exact=True)
    assert len(upward._lookup) == (65 if lookup > 64 else 0)
    values = (0, 1, 15, 16, 17, 63, 64, 65)
    assert [upward.index(value) for value in values] == [1, 1, 1, 1, 2, 2, 2, 0]
    assert [exact.index(value) for value in values] == [0, 0, 0, 1, 0, 0, 2, 0]


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1", None])
def test_value_that_is_no_count_is_refused(bad):
    with pytest.raises(DescriptorError, match="length must be a non-negative whole number"):
        AXES[0].index(bad)


def test_each_variant_stands_for_other_facts_and_back():
    variants = Variants(AXES, 1)
    assert variants.count == 2 * 3 * 3
    facts = [variants.facts(number) for number in range(variants.count)]
    assert len(set(facts)) == variants.count
    assert facts[0] == (0, (None, None))
    assert [variants.of_buckets(*each) for each in facts] == [*range(variants.count)]


def test_values_and_their_buckets_are_the_same_variant():
    variants = Variants(AXES, 1)
    values = {"length": 17, "kind": 3}
    assert variants.of_values(1, values) == variants.of_buckets(1, (64, 3))
    assert variants.of_values(0, {"length": 65, "kind": 2}) == 0
    assert variants.combinations() == [(16, 1), (16, 3), (64, 1), (64, 3)]


def test_variant_knows_the_values_it_was_made_of_and_a_plain_number_its_buckets():
    variants = Variants(AXES, 1)
    made = variants.of_values(1, {"kind": 3, "length": 17})
    assert variants.values(made) == (17, 3)
    assert variants.values(int(made)) == (64, 3)
    assert variants.values(0) == (65, 4), "outside, and as near as can be"


@pytest.mark.parametrize("loras", [-1, 2, True, 1.0])
def test_adapters_beyond_the_limit_have_no_variant(loras):
    """With axes, one more adapter would be another bucket."""
    variants = Variants(AXES, 1)
    for make in (
        lambda: variants.of_buckets(loras, (16, 1)),
        lambda: variants.of_values(loras, {"length": 16, "kind": 1}),
    ):
        with pytest.raises(DescriptorError, match=r"a whole number from 0 to 1 \(max_loras\)"):
            make()
    assert Variants((), 1).of_buckets(2, ()) == 2, "without axes its caller checks"


@pytest.mark.parametrize("values", [{}, {"length": 1}, {"length": 1, "kind": 1, "more": 1}])
def test_a_value_is_given_for_each_axis_and_no_other(values):
    with pytest.raises(DescriptorError, match=r"one value for each axis \(kind, length\)"):
        Variants(AXES, 0).of_values(0, values)


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ((16,), r"one bucket per axis \(length, kind\)"),
        ((17, 1), r"one of its buckets \(16, 64\)"),
        ((None, 2), r"one of its buckets \(1, 3\)"),
    ],
)
def test_buckets_that_there_are_not_are_refused(buckets, said):
    with pytest.raises(DescriptorError, match=said):
        Variants(AXES, 0).of_buckets(0, buckets)


def test_axis_is_told_by_its_name_and_buckets_alone():
    assert repr(AXES[0]) == "Axis(name='length', buckets=(16, 64), exact=False)"
