"""Names of graphs, and the batches that they cover."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import DescriptorError, DispatchkitError
from dispatchkit.keys import (
    ALLOWED_MODES,
    Batch,
    BatchDescriptor,
    CUDAGraphMode,
    GraphKey,
    RuntimeMode,
    allowed_modes_code,
)
from dispatchkit.testing import batches, configs, graph_keys

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


def covers(batch, mode=FULL, **facts):
    return GraphKey(mode, BatchDescriptor(**facts)).covers(batch)


# -- refused keys ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, None, "8", float("nan")])
def test_descriptor_refuses_impossible_tokens(value):
    with pytest.raises(DescriptorError) as caught:
        BatchDescriptor(value)
    assert (caught.value.field, str(caught.value.value)) == ("num_tokens", str(value))
    assert "a whole number of at least 1" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_reqs", 0),
        ("num_reqs", -2),
        ("num_reqs", False),
        ("num_active_loras", -1),
        ("num_active_loras", 0.5),
        ("query_len", -1),
        ("max_query_len", 0),
    ],
)
def test_descriptor_refuses_impossible_facts_by_name(field, value):
    with pytest.raises(DescriptorError) as caught:
        BatchDescriptor(8, **{field: value})
    assert caught.value.field == field


def test_descriptor_refuses_more_requests_than_tokens():
    with pytest.raises(
        DescriptorError, match=r"num_reqs must be from 1 to num_tokens \(8\), got 9"
    ):
        BatchDescriptor(8, num_reqs=9)
    assert BatchDescriptor(8, num_reqs=8).num_reqs == 8


def test_query_len_of_a_graph_that_is_not_uniform_is_refused():
    """Flag and number contradict each other, and each alone would mean another graph."""
    with pytest.raises(DescriptorError, match="query_len must be 0 for a graph that is not"):
        BatchDescriptor(8, query_len=2)


def test_errors_are_value_errors_and_of_the_project():
    assert issubclass(DescriptorError, ValueError)
    assert issubclass(DescriptorError, DispatchkitError)


@pytest.mark.parametrize("mode", [RuntimeMode.NONE, 2, "FULL", None, CUDAGraphMode.FULL])
def test_key_takes_a_runtime_mode_that_has_graphs(mode):
    """A plain 2 equals FULL, but look-ups for FULL would not find it."""
    with pytest.raises(DescriptorError, match=r"RuntimeMode\.PIECEWISE or RuntimeMode.FULL"):
        GraphKey(mode, BatchDescriptor(8))


def test_key_takes_a_descriptor():
    with pytest.raises(DescriptorError, match="a BatchDescriptor, got 8"):
        GraphKey(FULL, 8)


@pytest.mark.parametrize("code", [-1, len(ALLOWED_MODES), True, None, "FULL", 1.0])
def test_batch_takes_a_code_of_allowed_modes(code):
    with pytest.raises(DescriptorError, match="Use allowed_modes_code"):
        Batch(8, allowed=code)


@pytest.mark.parametrize("field", ["num_tokens", "num_reqs", "num_active_loras", "query_len"])
def test_batch_refuses_negative_facts(field):
    with pytest.raises(DescriptorError) as caught:
        Batch(**{"num_tokens": 8, field: -1})
    assert caught.value.field == field


# -- one name per graph ------------------------------------------------------------------


def test_uniform_graph_without_a_length_is_of_one_token_per_request():
    """Equal graphs must have equal keys; otherwise one is captured twice and often missed."""
    short, long = BatchDescriptor(8, uniform=True), BatchDescriptor(8, uniform=True, query_len=1)
    assert short == long
    assert hash(short) == hash(long)
    assert short.query_len == 1


@given(st.data())
def test_equal_facts_are_equal_keys_with_equal_text(data):
    """Captures and look-ups build keys by one function."""
    config = data.draw(configs())
    one, two = data.draw(graph_keys(config)), data.draw(graph_keys(config))
    assert (one == two) is (str(one) == str(two))
    copied = attrs.evolve(one, descriptor=attrs.evolve(one.descriptor))
    assert copied == one
    assert hash(copied) == hash(one)
    assert {one: 1}[copied] == 1


def test_key_reads_well():
    key = GraphKey(
        FULL, BatchDescriptor(8, num_reqs=4, uniform=True, query_len=2, num_active_loras=3)
    )
    assert str(key) == "FULL tokens=8 reqs=4 uniform=2 loras=3"
    varlen = GraphKey(FULL, BatchDescriptor(8, max_query_len=4, axes=(2, 0)))
    assert str(varlen) == "FULL tokens=8 max_query_len=4 axes=2,0"
    assert key.num_tokens == 8


def test_keys_cannot_be_changed():
    key = GraphKey(FULL, BatchDescriptor(8))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        key.mode = PIECEWISE
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        key.descriptor.num_tokens = 9


def test_relaxed_form_serves_any_mixture():
    own = BatchDescriptor(8, num_reqs=4, uniform=True, query_len=2, num_active_loras=3)
    assert own.relaxed() == BatchDescriptor(8, num_active_loras=3)
    assert own.relaxed().relaxed() == own.relaxed()
    assert own.has_lora
    assert BatchDescriptor(8, num_active_loras=1).has_lora
    assert not BatchDescriptor(8).has_lora


# -- covers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, True), (7, True), (8, True), (9, False)])
def test_bucket_is_never_smaller_than_the_batch(num_tokens, expected):
    assert covers(Batch(num_tokens), num_tokens=8) is expected


@pytest.mark.parametrize(
    ("own", "needs", "expected"),
    [(4, 4, True), (4, 5, False), (4, None, True), (None, 8, True), (4, 1, True)],
)
def test_requests_are_a_bound_where_both_are_known(own, needs, expected):
    assert covers(Batch(8, num_reqs=needs), num_tokens=8, num_reqs=own) is expected


@pytest.mark.parametrize(
    ("own", "needs", "expected"), [(0, 0, True), (2, 0, True), (2, 2, True), (2, 3, False)]
)
def test_adapters_are_a_bound(own, needs, expected):
    assert covers(Batch(8, num_active_loras=needs), num_tokens=8, num_active_loras=own) is expected


def test_uniform_graph_serves_its_own_length_alone():
    graph = {"num_tokens": 8, "uniform": True, "query_len": 2}
    assert covers(Batch(8, uniform=True, query_len=2, max_query_len=2), **graph)
    assert not covers(Batch(8, uniform=True, query_len=4, max_query_len=4), **graph)
    assert not covers(Batch(8, uniform=True, query_len=1, max_query_len=1), **graph)
    assert not covers(Batch(8), **graph)


def test_mixed_graph_serves_uniform_batches_too():
    assert covers(Batch(8, uniform=True, query_len=2, max_query_len=2), PIECEWISE, num_tokens=8)


def test_varying_decode_graph_needs_a_known_bound():
    """An unknown longest request may be longer than the captured one."""
    graph = {"num_tokens": 8, "max_query_len": 4}
    assert covers(Batch(8, max_query_len=4), **graph)
    assert covers(Batch(8, uniform=True, query_len=2, max_query_len=2), **graph)
    assert not covers(Batch(8, max_query_len=5), **graph)
    assert not covers(Batch(8), **graph)


def test_axes_must_be_the_same_buckets():
    assert covers(Batch(8, axes=(3,)), num_tokens=8, axes=(3,))
    assert not covers(Batch(8, axes=(2,)), num_tokens=8, axes=(3,))
    assert not covers(Batch(8), num_tokens=8, axes=(3,))


@given(st.data())
def test_larger_graph_covers_what_a_smaller_one_does(data):
    """Covering is monotone in every bound; otherwise padding could lose a batch."""
    config = data.draw(configs())
    key, batch = data.draw(graph_keys(config)), data.draw(batches(config))
    own = key.descriptor
    larger = attrs.evolve(
        own,
        num_tokens=own.num_tokens + data.draw(st.integers(0, 9)),
        num_active_loras=own.num_active_loras + data.draw(st.integers(0, 2)),
        num_reqs=data.draw(st.sampled_from([own.num_reqs, None])),
    )
    if key.covers(batch):
        assert GraphKey(key.mode, larger).covers(batch)


@given(st.data())
def test_smaller_batch_is_covered_too(data):
    config = data.draw(configs())
    key, batch = data.draw(graph_keys(config)), data.draw(batches(config))
    if key.covers(batch) and batch.num_tokens > 1:
        fewer = attrs.evolve(batch, num_tokens=batch.num_tokens - 1, num_reqs=None)
        assert key.covers(fewer)


# -- allowed modes -----------------------------------------------------------------------


@pytest.mark.parametrize("code", range(len(ALLOWED_MODES)))
def test_batch_allows_what_its_code_says(code):
    batch = Batch(8, allowed=code)
    assert batch.allowed_modes == ALLOWED_MODES[code]
    assert [mode for mode in RuntimeMode if batch.allows(mode)] == sorted(ALLOWED_MODES[code])
    assert allowed_modes_code(batch.allowed_modes) == code


def test_a_batch_is_written_in_words():
    assert str(Batch(1, allowed=0)) == "1 token, mixed; allowed: NONE"
    decode = Batch(8, 4, uniform=True, query_len=2, num_active_loras=1, axes=(16, None))
    assert str(decode) == (
        "8 tokens, 4 requests, uniform decode (2 tokens per request), 1 adapter, "
        "axes (16, outside all buckets); allowed: NONE, PIECEWISE, FULL"
    )


def test_ceiling_is_the_runtime_mode_itself():
    """Cascade attention passes "at most PIECEWISE" without a table of codes."""
    assert Batch(8, allowed=int(PIECEWISE)).allowed_modes == {RuntimeMode.NONE, PIECEWISE}


@pytest.mark.parametrize("axes", [0, "ab", {1}, ([1],), ({},), None])
def test_axes_that_cannot_be_part_of_a_key_are_refused(axes):
    """Otherwise the first look-up would raise an error that does not mention axes."""
    for kind in (Batch, BatchDescriptor):
        with pytest.raises(DescriptorError, match="axes"):
            kind(8, axes=axes)
    assert BatchDescriptor(8, axes=[2, 3]).axes == (2, 3)
