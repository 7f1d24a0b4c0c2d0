"""Facade and native policy agree on random configurations with the same meaning.

They differ intentionally where upstream asserts or reads a table from its end; the facade's
exception identifies these batches.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_test_helpers import vllm_config

from dispatchkit import BatchDescriptor, DispatchConfig, Dispatcher, RuntimeMode
from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm import VllmPolicy
from dispatchkit_vllm.facade import lora_count, v0_11_1, v0_13, v0_33, v0_33_manager

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")

modes = st.sampled_from([mode.name for mode in CUDAGraphMode])
size_lists = st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted)
setups = st.fixed_dictionaries(
    {
        "sizes": size_lists,
        "mode": modes,
        "max_num_seqs": st.integers(1, 24),
        "query_len": st.integers(1, 4),
        "max_loras": st.integers(0, 3),
        "specialize_lora": st.booleans(),
        "specialize_active_lora": st.booleans(),
    }
)
batches = st.lists(
    st.tuples(st.integers(1, 48), st.booleans(), st.integers(0, 4), st.integers(1, 2)),
    min_size=1,
    max_size=12,
)


def whole(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with sizes of whole requests, as from a configuration layer."""
    query_len = setup["query_len"]
    sizes = sorted({-(-size // query_len) * query_len for size in setup["sizes"]})
    return {**setup, "sizes": sizes}


def native(dialect: str, setup: dict[str, Any], max_loras: int) -> Dispatcher:
    sizes = tuple(setup["sizes"])
    config = DispatchConfig(
        mode=setup["mode"],
        sizes=sizes,
        max_num_tokens=max(sizes[-1], 48),
        max_num_seqs=setup["max_num_seqs"],
        query_lens=(setup["query_len"],),
        max_loras=max_loras,
        specialize_lora=setup["specialize_lora"],
        specialize_active_loras=setup["specialize_active_lora"],
    )
    return Dispatcher(VllmPolicy(dialect), config, lazy=True)


def facade(module: Any, setup: dict[str, Any]) -> Any:
    config = vllm_config(**setup)
    dispatcher = module.CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[setup["mode"]], setup["query_len"])
    return dispatcher


def same(answer: Any, decision: Any) -> bool:
    """Return whether a facade's answer and a native decision name the same mode and graph."""
    mode, descriptor = answer
    if mode.name != decision.mode.name:
        return False
    if decision.key is None:
        return True
    key: BatchDescriptor = decision.key.descriptor
    facts = (key.num_tokens, key.num_reqs, key.uniform, key.has_lora)
    return tuple(facts) == (
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.uniform,
        descriptor.has_lora,
    )


@given(setups.map(whole), batches)
def test_newest(setup, asked):
    most = setup["max_loras"] + 1 if setup["max_loras"] else 0
    theirs, ours = facade(v0_33, setup), native("vllm", setup, most)
    assert len(theirs.registry) == len(ours.registry)
    for num_tokens, uniform, loras, ceiling in asked:
        loras = min(loras, most)
        valid = {CUDAGraphMode[mode.name] for mode in RuntimeMode if mode <= ceiling}
        answer = theirs.dispatch(num_tokens, uniform, loras > 0, loras, valid_modes=valid)
        decision = ours.dispatch(num_tokens, 0, uniform, loras, ceiling)
        assert same(answer, decision), (answer, decision)
        if decision.key is not None:
            assert answer[1].num_active_loras == decision.key.descriptor.num_active_loras


@pytest.mark.parametrize(
    ("module", "dialect"), [(v0_13, "vllm@0.13"), (lora_count, "vllm-lora-count")]
)
@given(setups.map(whole), batches)
def test_padding_dispatchers(module, dialect, setup, asked):
    counts = module is lora_count
    most = setup["max_loras"] if counts else min(setup["max_loras"], 1)
    theirs, ours = facade(module, setup), native(dialect, setup, most)
    for num_tokens, uniform, loras, ceiling in asked:
        loras = min(loras, most)
        options = {"num_active_loras": loras} if counts else {}
        answer = theirs.dispatch(num_tokens, uniform, loras > 0, ceiling == 1, **options)
        decision = ours.dispatch(num_tokens, 0, uniform, loras, ceiling)
        assert same(answer, decision), (answer, decision)


@given(setups.map(whole), batches)
def test_0_11_line_padded_by_its_caller(setup, asked):
    most = min(setup["max_loras"], 1)
    theirs, ours = facade(v0_11_1, setup), native("vllm@0.11.1", setup, most)
    table = theirs.compilation_config.bs_to_padded_graph_size
    for num_tokens, uniform, loras, ceiling in asked:
        loras = min(loras, most)
        padded = table[num_tokens] if num_tokens < len(table) else num_tokens
        descriptor = v0_11_1.BatchDescriptor(padded, uniform, loras > 0)
        mode, key = theirs.dispatch(descriptor, ceiling == 1)
        decision = ours.dispatch(num_tokens, 0, uniform, loras, ceiling)
        assert mode.name == decision.mode.name
        if key is not None:
            assert (key.num_tokens, key.uniform_decode, int(key.has_lora)) == (
                decision.key.num_tokens,
                decision.key.descriptor.uniform,
                decision.key.descriptor.num_active_loras,
            )


@given(setups, batches, st.booleans())
def test_manager(setup, asked, varlen):
    most = setup["max_loras"] + 1 if setup["max_loras"] else 0
    manager = v0_33_manager.CudaGraphManager(
        vllm_config(**setup),
        "cpu",
        CUDAGraphMode[setup["mode"]],
        setup["query_len"],
        varlen_decode=varlen,
    )
    manager.graphs_captured = True
    config = native("vllm", setup, most).config
    config = DispatchConfig(
        mode=config.mode,
        sizes=config.sizes,
        max_num_tokens=config.max_num_tokens,
        max_num_seqs=config.max_num_seqs,
        query_lens=config.query_lens,
        varlen_decode=varlen,
        max_loras=most,
        specialize_lora=config.specialize_lora,
        specialize_active_loras=config.specialize_active_loras,
    )
    ours = Dispatcher(VllmPolicy("vllm@0.33-manager"), config, lazy=True)
    for num_tokens, uniform, loras, _ in asked:
        loras = min(loras, most)
        query_len = setup["query_len"] if uniform else None
        num_reqs = min(num_tokens, setup["max_num_seqs"])
        answer = manager.dispatch(num_reqs, num_tokens, query_len, loras, query_len)
        decision = ours.dispatch(num_tokens, num_reqs, uniform, loras)
        assert answer.cg_mode.name == decision.mode.name
        assert answer.num_tokens == decision.padded_num_tokens


@given(setups, batches)
def test_where_upstream_asserts_the_native_policy_goes_on(setup, asked):
    """A bucket of partial requests stops vLLM; the native policy runs the batch PIECEWISE."""
    most = setup["max_loras"] + 1 if setup["max_loras"] else 0
    ours = native("vllm@0.13", setup, most)
    for num_tokens, uniform, loras, ceiling in asked:
        decision = ours.dispatch(num_tokens, 0, uniform, min(loras, most), ceiling)
        key = decision.key
        if key is not None and key.descriptor.uniform:
            assert key.num_tokens % setup["query_len"] == 0
