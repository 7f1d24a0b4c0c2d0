"""The native rule: the graph of each batch, and the reasons of eager steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit import (
    BatchDescriptor,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    Reason,
    RuntimeMode,
    allowed_modes_code,
    load_plugins,
)
from dispatchkit.errors import ConfigError, DescriptorError, NoGraphError, UnknownNameError

from dispatchkit_vllm import DIALECTS, VllmPolicy

# Sizes that leave some batches eager are tested too.
pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
CASCADE = int(PIECEWISE)  # the ceiling of a batch with cascade attention


def dispatcher(dialect: str = "vllm", *, captured: bool = True, **settings) -> Dispatcher:
    settings = {"sizes": (1, 2, 4, 8, 16), "max_num_seqs": 8, **settings}
    made = Dispatcher(VllmPolicy(dialect), DispatchConfig(**settings))
    if captured:
        for key in made.registry:
            made.registry.captured(key, "graph")
    return made


def full(size: int, **facts) -> GraphKey:
    return GraphKey(FULL, BatchDescriptor(size, **facts))


def piecewise(size: int, **facts) -> GraphKey:
    return GraphKey(PIECEWISE, BatchDescriptor(size, **facts))


def test_uniform_decode_gets_full_and_mixed_gets_piecewise():
    made = dispatcher()
    assert made.dispatch(3, 3, True).key == full(4, num_reqs=4, uniform=True, query_len=1)
    assert made.dispatch(3, 2, False).key == piecewise(4)
    assert made.dispatch(9, 8, True).key == piecewise(16)  # more than a decode batch can have


def test_cascade_attention_is_never_full():
    assert dispatcher().dispatch(3, 3, True, 0, CASCADE).key == piecewise(4)
    only_full = dispatcher(mode="FULL_DECODE_ONLY").dispatch(3, 3, True, 0, CASCADE)
    assert (only_full.mode, only_full.reason) == (NONE, Reason.CEILING)


@pytest.mark.parametrize(
    ("mode", "uniform", "key"),
    [
        ("NONE", True, None),
        ("PIECEWISE", True, piecewise(4)),
        ("PIECEWISE", False, piecewise(4)),
        ("FULL", True, full(4, num_reqs=4)),
        ("FULL", False, full(4, num_reqs=4)),
        ("FULL_DECODE_ONLY", True, full(4, num_reqs=4, uniform=True, query_len=1)),
        ("FULL_DECODE_ONLY", False, None),
    ],
)
def test_configured_mode_decides_what_exists(mode, uniform, key):
    assert dispatcher(mode=mode).dispatch(3, 0, uniform).key == key


def test_every_eager_step_has_its_reason():
    made = dispatcher(max_num_tokens=32)
    made.registry.failed(full(4, num_reqs=4, uniform=True, query_len=1), "out of memory")
    assert made.dispatch(17).reason == Reason.ABOVE_LARGEST
    assert made.dispatch(0).reason == Reason.EMPTY_BATCH
    assert dispatcher(mode="NONE").dispatch(3).reason == Reason.MODE_NONE
    for tokens in (3, 17):
        only_decode = dispatcher(mode="FULL_DECODE_ONLY", max_num_tokens=32)
        assert only_decode.dispatch(tokens).reason == Reason.MODE_NONE
    assert dispatcher(captured=False).dispatch(3).reason == Reason.NOT_CAPTURED


def test_a_failed_key_falls_to_the_next_mode_and_never_to_a_larger_bucket():
    made = dispatcher()
    made.registry.failed(full(4, num_reqs=4, uniform=True, query_len=1), "out of memory")
    assert made.dispatch(3, 3, True).key == piecewise(4)
    made.registry.evicted(piecewise(4))
    last = made.dispatch(3, 3, True)
    assert (last.key, last.reason) == (None, Reason.EVICTED)
    made.registry.captured(piecewise(4), "graph")
    made.registry.set_enabled(False, mode=PIECEWISE)
    assert made.dispatch(3, 2).reason == Reason.DISABLED


def test_graphs_of_an_earlier_configuration_are_not_looked_for():
    made = dispatcher(mode="FULL")
    assert made.dispatch(3).mode is FULL
    made.swap(config=DispatchConfig(sizes=(1, 2, 4, 8, 16), mode="PIECEWISE"))
    assert full(4, num_reqs=4) in made.registry
    assert made.dispatch(3).reason == Reason.NOT_CAPTURED
    made.registry.captured(piecewise(4), "graph")
    assert made.dispatch(3).key == piecewise(4)


@pytest.mark.parametrize("bad", [-1, 2.5, 99, "3", None])
def test_what_is_no_batch_is_refused(bad):
    with pytest.raises(DescriptorError):
        dispatcher(max_num_tokens=16).dispatch(bad)


def test_no_graph_and_no_eager_is_an_error_above_the_sizes_too():
    made = dispatcher(max_num_tokens=32, mode="FULL_DECODE_ONLY")
    for num_tokens in (3, 20):
        with pytest.raises(NoGraphError):
            made.dispatch(num_tokens, 0, False, 0, allowed_modes_code(["FULL"]))


def test_more_requests_than_the_graph_holds_take_the_next_mode():
    made = dispatcher(mode="FULL", max_num_seqs=4)
    assert made.dispatch(8, 4).key == full(8, num_reqs=4)
    made = dispatcher("vllm@0.13", mode="FULL", max_num_seqs=4)
    assert made.dispatch(8, 4).key == full(8)


def test_uniform_keys_hold_whole_requests_only():
    """Graphs contain no partial requests."""
    for name in DIALECTS:
        made = dispatcher(name, query_lens=(3,), sizes=(1, 2, 4, 6, 8, 9, 16))
        uniform = [key.descriptor for key in made.registry if key.descriptor.uniform]
        assert uniform, name
        assert all(each.num_tokens % 3 == 0 for each in uniform), name
        for num_reqs in range(1, 6):
            made.dispatch(3 * num_reqs, num_reqs, True)  # no batch raises


@pytest.mark.parametrize(
    ("dialect", "sizes"),
    [
        ("vllm", (3, 6, 9, 15)),
        ("vllm@0.13", (3, 6, 9, 15)),
        ("vllm@0.11.1", (3, 6, 9, 15)),
        ("vllm@0.11", (1, 2, 4, 8, 9, 15)),
    ],
)
def test_sizes_are_rounded_as_the_release_does(dialect, sizes):
    made = dispatcher(dialect, query_lens=(3,), sizes=(1, 2, 4, 8, 9, 15))
    assert tuple(sorted({key.num_tokens for key in made.registry})) == sizes


def test_plain_full_is_rounded_by_the_newest_release_only():
    settings = {"mode": "FULL", "query_lens": (3,), "sizes": (1, 2, 4, 8)}
    assert {k.num_tokens for k in dispatcher("vllm", **settings).registry} == {3, 6}
    assert {k.num_tokens for k in dispatcher("vllm@0.13", **settings).registry} == {1, 2, 4, 8}


def test_a_request_larger_than_every_size_leaves_the_sizes_as_they_are():
    made = dispatcher(query_lens=(32,), max_num_tokens=64)
    assert not any(key.descriptor.uniform for key in made.registry)
    assert made.dispatch(9).key == piecewise(16)


# -- adapters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "settings", "cases"),
    [
        ("vllm", {}, {0, 5}),
        ("vllm", {"specialize_active_loras": True}, {0, 1, 2, 4, 5}),
        ("vllm", {"specialize_lora": False, "specialize_active_loras": True}, {5}),
        ("vllm@0.33-manager", {"specialize_lora": False}, {0, 5}),
        ("vllm@0.33-manager", {"specialize_active_loras": True}, {0, 1, 2, 4, 5}),
        ("vllm@0.13", {}, {0, 5}),
        ("vllm@0.11.1", {"specialize_lora": False}, {5}),
        ("vllm@0.11", {}, {0}),
        ("vllm-lora-count", {}, {0, 1, 2, 3, 4, 5}),
        ("vllm-lora-count", {"specialize_lora": False}, {1, 2, 3, 4, 5}),
        ("vllm-lora-count", {"query_lens": (2,)}, {0, 5}),
    ],
)
def test_captured_counts_of_adapters(dialect, settings, cases):
    """Impossible counts are not captured."""
    made = dispatcher(dialect, max_loras=5, **settings)
    assert {key.descriptor.num_active_loras for key in made.registry} == cases


def test_a_count_takes_the_next_captured_one():
    """The number of adapters is part of the key; a number above the limit is refused."""
    made = dispatcher(max_loras=5, specialize_active_loras=True)
    chosen = [made.dispatch(3, 2, False, loras).key for loras in range(6)]
    assert [key.descriptor.num_active_loras for key in chosen] == [0, 1, 2, 4, 4, 5]


def test_without_graphs_for_no_adapters_such_batches_run_eager():
    made = dispatcher(max_loras=2, specialize_lora=False)
    assert made.dispatch(3).reason == Reason.NO_KEY
    assert made.dispatch(3, 0, False, 1).key == piecewise(4, num_active_loras=2)


# -- variants -----------------------------------------------------------------------------


def test_manager_searches_each_mode_for_itself():
    made = dispatcher("vllm@0.33-manager", query_lens=(3,), sizes=(1, 2, 4, 8, 16))
    assert made.dispatch(4, 2, False).key == piecewise(4)
    assert made.dispatch(6, 2, True).key == full(6, num_reqs=2, uniform=True, query_len=3)
    assert made.dispatch(9, 3, True).key == full(9, num_reqs=3, uniform=True, query_len=3)


def test_manager_serves_requests_of_varying_length():
    made = dispatcher("vllm@0.33-manager", query_lens=(3,), varlen_decode=True)
    varying = made.config.num_query_classes - 1
    assert made.dispatch(7, 4, varying).key == full(8, num_reqs=8, max_query_len=3)
    assert made.dispatch(7, 4, False).key == piecewise(8)


def test_drafter_knows_several_query_lengths():
    made = dispatcher(
        "vllm-drafter", query_lens=(1, 3), uniform_sizes=(3, 6, 12), max_num_tokens=16
    )
    assert made.dispatch(3, 3, 1).key == full(4, uniform=True, query_len=1)
    assert made.dispatch(9, 3, 2).key == full(12, uniform=True, query_len=3)
    assert made.dispatch(15, 5, 2).key == piecewise(16)
    assert made.dispatch(9, 3, 2, 0, CASCADE).key == piecewise(16)


def test_drafter_finds_the_larger_plain_graph_that_upstream_misses():
    """A policy may choose a larger FULL graph that fits."""
    made = dispatcher("vllm-drafter", mode="FULL", query_lens=(3,), uniform_sizes=(3, 6))
    assert made.dispatch(6, 2, True).key == full(8)


@given(st.integers(1, 16), st.booleans(), st.integers(0, 2))
def test_0_33_is_the_newest(num_tokens, uniform, ceiling):
    newest, named = _pair()
    asked = (num_tokens, 0, uniform, 0, ceiling)
    assert newest.dispatch(*asked).key == named.dispatch(*asked).key


def _pair(made: list[Dispatcher] = []) -> list[Dispatcher]:  # noqa: B006 - made once
    if not made:
        made += [dispatcher("vllm"), dispatcher("vllm@0.33")]
    return made


# -- names --------------------------------------------------------------------------------


def test_every_dialect_is_a_policy_that_can_be_chosen_by_name():
    plugins = load_plugins()
    for name, dialect in DIALECTS.items():
        policy = plugins.create_policy(name)
        assert isinstance(policy, VllmPolicy)
        assert (policy.name, policy.dialect) == (name, dialect)


def test_an_unknown_dialect_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        VllmPolicy("vllm@0.31")
    assert "vllm@0.13" in caught.value.nearest
    with pytest.raises(ConfigError, match=r"a Dialect or the name of one, .*, got 3"):
        VllmPolicy(3)
