"""The facades behave as vLLM's classes where the vectors have no cases."""

from __future__ import annotations

import pytest
from vllm_test_helpers import initialized, vllm_config

from dispatchkit import BatchDescriptor as NativeDescriptor
from dispatchkit import CUDAGraphMode, GraphKey, RuntimeMode
from dispatchkit.errors import DispatchkitError

from dispatchkit_vllm import facade
from dispatchkit_vllm.facade import drafter, lora_count, v0_11, v0_11_1, v0_13, v0_33, v0_33_manager

M = CUDAGraphMode
ALL = [v0_11, v0_11_1, v0_13, v0_33, lora_count, drafter]
PADDING = [v0_13, v0_33, lora_count]

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")


def ids(module) -> str:
    return module.__name__.rpartition(".")[2]


# -- live keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("module", ALL, ids=ids)
def test_keys_are_a_live_set_over_the_registry(module):
    dispatcher = initialized(module, vllm_config())
    full = dispatcher.cudagraph_keys[M.FULL]
    some = next(iter(full))
    plain = set(full)
    assert full == plain
    assert plain == full
    assert full != plain - {some}
    assert some in full
    assert len(full) == len(plain)
    full.discard(some)
    assert some not in full
    assert full == plain - {some}
    full.discard(some)  # no longer there, so nothing happens
    with pytest.raises(KeyError):
        full.remove(some)
    full.add(some)
    assert full == plain
    full.clear()
    assert full == set()
    assert not full
    assert len(dispatcher.cudagraph_keys[M.PIECEWISE]) == 4


@pytest.mark.parametrize("module", ALL, ids=ids)
def test_what_is_no_descriptor_is_in_no_set(module):
    keys = initialized(module, vllm_config()).cudagraph_keys[M.FULL]
    assert "text" not in keys
    assert module.BatchDescriptor(0) not in keys
    assert module.BatchDescriptor(-4) not in keys


def test_set_operations_give_sets_of_their_own():
    keys = initialized(v0_13, vllm_config()).cudagraph_keys
    both = keys[M.FULL] | keys[M.PIECEWISE]
    assert type(both) is set
    assert len(both) == 8
    keys[M.FULL] -= set(keys[M.FULL])
    assert len(keys[M.FULL]) == 0


def test_assigning_a_set_replaces_the_live_one_s_content():
    dispatcher = initialized(v0_13, vllm_config())
    wanted = {v0_13.BatchDescriptor(6)}
    dispatcher.cudagraph_keys[M.PIECEWISE] = wanted
    assert dispatcher.cudagraph_keys[M.PIECEWISE] == wanted
    assert GraphKey(RuntimeMode.PIECEWISE, NativeDescriptor(6)) in dispatcher.registry


def test_a_cleared_set_is_seen_by_the_next_dispatch():
    dispatcher = initialized(v0_33, vllm_config())
    assert dispatcher.dispatch(3, True)[0] is M.FULL
    dispatcher.cudagraph_keys[M.FULL].clear()
    assert dispatcher.dispatch(3, True)[0] is M.PIECEWISE
    dispatcher.cudagraph_keys[M.PIECEWISE].clear()
    assert dispatcher.dispatch(3, True) == (M.NONE, v0_33.BatchDescriptor(3))


@pytest.mark.parametrize("module", ALL, ids=ids)
def test_only_full_and_piecewise_hold_keys(module):
    dispatcher = module.CudagraphDispatcher(vllm_config())
    assert set(dispatcher.cudagraph_keys) == {M.FULL, M.PIECEWISE}
    for mode in (M.NONE, M.FULL_AND_PIECEWISE):
        with pytest.raises(AssertionError, match="PIECEWISE or FULL"):
            dispatcher.add_cudagraph_key(mode, module.BatchDescriptor(4))


def test_a_key_added_by_hand_is_dispatched():
    dispatcher = v0_11_1.CudagraphDispatcher(vllm_config())
    dispatcher.add_cudagraph_key(M.FULL, v0_11_1.BatchDescriptor(100))
    assert dispatcher.dispatch(v0_11_1.BatchDescriptor(100)) == (M.NONE, None)
    dispatcher.keys_initialized = True
    assert dispatcher.dispatch(v0_11_1.BatchDescriptor(100, True)) == (
        M.FULL,
        v0_11_1.BatchDescriptor(100),
    )


def test_a_contradicting_key_added_by_hand_is_found_by_its_like_only():
    dispatcher = initialized(v0_33, vllm_config(max_loras=2))
    odd = v0_33.BatchDescriptor(4, None, False, True, 0)
    assert dispatcher.dispatch(4, has_lora=True)[0] is M.NONE
    dispatcher.add_cudagraph_key(M.PIECEWISE, odd)
    assert odd in dispatcher.cudagraph_keys[M.PIECEWISE]
    assert dispatcher.dispatch(4, has_lora=True) == (M.PIECEWISE, odd)
    assert dispatcher.dispatch(4)[1] == v0_33.BatchDescriptor(4)


@pytest.mark.parametrize("module", ALL, ids=ids)
def test_keys_initialized_can_be_set_by_hand(module):
    dispatcher = initialized(module, vllm_config())
    dispatcher.keys_initialized = False
    args = (3, False, False) if module in PADDING else (module.BatchDescriptor(4),)
    assert dispatcher.dispatch(*args)[0] is M.NONE
    dispatcher.keys_initialized = True
    assert dispatcher.dispatch(*args)[0] is M.PIECEWISE


# -- quirks that the native interface refuses -----------------------------------------------


@pytest.mark.parametrize("module", PADDING, ids=ids)
def test_a_negative_batch_reads_the_table_from_its_end(module):
    dispatcher = initialized(module, vllm_config())
    mode, descriptor = dispatcher.dispatch(-1, True, False)
    assert (mode, descriptor.num_tokens) == (M.FULL, 8)
    assert dispatcher.dispatch(-9, True, False) == (M.NONE, module.BatchDescriptor(-9))
    with pytest.raises(IndexError):
        dispatcher.dispatch(-10, True, False)


@pytest.mark.parametrize("module", PADDING, ids=ids)
def test_initialising_twice_keeps_the_keys_of_both(module):
    dispatcher = initialized(module, vllm_config(), "FULL")
    dispatcher.initialize_cudagraph_keys(M.PIECEWISE, 1)
    assert dispatcher.dispatch(3, False, False)[0] is M.FULL
    assert len(dispatcher.cudagraph_keys[M.PIECEWISE]) == 4


@pytest.mark.parametrize("module", PADDING, ids=ids)
def test_the_largest_size_is_read_anew_and_the_table_is_not(module):
    config = vllm_config()
    dispatcher = initialized(module, config)
    config.compilation_config.max_cudagraph_capture_size = 4
    assert dispatcher.dispatch(5, False, False)[0] is M.NONE
    config.compilation_config.max_cudagraph_capture_size = 100
    with pytest.raises(IndexError):
        dispatcher.dispatch(9, False, False)


@pytest.mark.parametrize("module", PADDING, ids=ids)
def test_a_fraction_is_a_type_error_and_true_is_one(module):
    dispatcher = initialized(module, vllm_config())
    with pytest.raises(TypeError):
        dispatcher.dispatch(2.5, False, False)
    assert dispatcher.dispatch(True, False, False)[1].num_tokens == 1


def test_invalid_modes_leave_a_mutable_valid_set():
    dispatcher = initialized(v0_33, vllm_config())
    valid, frozen = {M.FULL, M.NONE}, frozenset({M.FULL, M.NONE})
    assert dispatcher.dispatch(3, True, valid_modes=valid, invalid_modes={M.FULL})[0] is M.NONE
    assert valid == {M.NONE}
    dispatcher.dispatch(3, True, valid_modes=frozen, invalid_modes={M.FULL})
    assert frozen == {M.FULL, M.NONE}


def test_an_empty_valid_set_means_all_and_an_emptied_one_is_refused():
    dispatcher = initialized(v0_33, vllm_config())
    assert dispatcher.dispatch(3, True, valid_modes=set())[0] is M.FULL
    with pytest.raises(AssertionError):
        dispatcher.dispatch(3, True, valid_modes={M.FULL}, invalid_modes={M.FULL})


def test_none_is_given_above_the_sizes_though_it_is_left_out():
    dispatcher = initialized(v0_33, vllm_config(mode="FULL_DECODE_ONLY"), "FULL_DECODE_ONLY")
    assert dispatcher.dispatch(9, valid_modes={M.FULL})[0] is M.NONE
    with pytest.raises(AssertionError):
        dispatcher.dispatch(3, valid_modes={M.FULL})


def test_adapters_without_configuration_are_refused():
    dispatcher = initialized(v0_33, vllm_config())
    with pytest.raises(AssertionError, match="must be 0 without lora_config"):
        dispatcher.dispatch(3, has_lora=True, num_active_loras=1)


def test_a_failed_initialisation_leaves_a_part_of_the_keys():
    config = vllm_config((2, 4, 6), query_len=4, max_num_seqs=8)
    dispatcher = v0_13.CudagraphDispatcher(config)
    with pytest.raises(AssertionError, match="multiples of 4"):
        dispatcher.initialize_cudagraph_keys(M.FULL_DECODE_ONLY, 4)
    assert dispatcher.cudagraph_keys[M.FULL] == {v0_13.BatchDescriptor(4, 1, True, False)}
    assert not dispatcher.keys_initialized
    assert dispatcher.dispatch(4, True, False)[0] is M.NONE


def test_a_compile_size_that_would_be_padded_is_refused():
    dispatcher = v0_33.CudagraphDispatcher(vllm_config(compile_sizes=[3]))
    with pytest.raises(ValueError, match="compile_sizes contains 3"):
        dispatcher.initialize_cudagraph_keys(M.FULL)


@pytest.mark.parametrize("module", ALL, ids=ids)
def test_a_piecewise_mode_needs_a_split_model(module):
    with pytest.raises(AssertionError, match="compiled in pieces"):
        module.CudagraphDispatcher(vllm_config(piecewise=False))
    module.CudagraphDispatcher(vllm_config(piecewise=False, mode="FULL"))


def test_0_11_reads_the_level_of_compilation():
    config = vllm_config()
    del config.compilation_config.is_attention_compiled_piecewise
    v0_11.CudagraphDispatcher(config)
    config.compilation_config.splitting_ops_contain_attention = lambda: False
    with pytest.raises(AssertionError, match="compiled in pieces"):
        v0_11.CudagraphDispatcher(config)
    config.compilation_config.splitting_ops_contain_attention = lambda: True
    config.compilation_config.level = 2
    with pytest.raises(AssertionError, match="compiled in pieces"):
        v0_11.CudagraphDispatcher(config)


@pytest.mark.parametrize("module", PADDING, ids=ids)
def test_a_configuration_may_leave_out_what_the_sizes_tell(module):
    config = vllm_config()
    for name in ("max_cudagraph_capture_size", "bs_to_padded_graph_size", "pass_config"):
        delattr(config.compilation_config, name)
    dispatcher = initialized(module, config)
    assert dispatcher.dispatch(8, True, False)[0] is M.FULL
    assert dispatcher.dispatch(9, True, False)[0] is M.NONE


def test_0_11_says_once_that_keys_are_missing(caplog):
    dispatcher = v0_11.CudagraphDispatcher(vllm_config())
    for _ in range(3):
        assert dispatcher.dispatch(v0_11.BatchDescriptor(4)) == (M.NONE, None)
    assert len(caplog.records) == 1


def test_a_ready_descriptor_is_not_padded():
    dispatcher = initialized(v0_11_1, vllm_config())
    assert dispatcher.dispatch(v0_11_1.BatchDescriptor(3, True)) == (M.NONE, None)


def test_cascade_attention_is_never_full():
    dispatcher = initialized(v0_11_1, vllm_config())
    four = v0_11_1.BatchDescriptor(4, True)
    assert dispatcher.dispatch(four) == (M.FULL, four)
    assert dispatcher.dispatch(four, use_cascade_attn=True) == (M.PIECEWISE, four.non_uniform)


# -- a failed graph is not dispatched -----------------------------------------------------


@pytest.mark.parametrize("module", ALL, ids=ids)
def test_a_key_whose_capture_failed_falls_to_the_next_mode(module):
    dispatcher = initialized(module, vllm_config())
    for key in dispatcher.registry:
        if key.mode is RuntimeMode.FULL:
            dispatcher.registry.failed(key, "out of memory")
    if module in PADDING:
        answer = dispatcher.dispatch(3, True, False)
    else:
        facts = (True, 1) if module is drafter else (True,)
        answer = dispatcher.dispatch(module.BatchDescriptor(4, *facts))
    assert answer[0] is M.PIECEWISE


# -- variants -----------------------------------------------------------------------------


def test_drafter_plans_a_batch():
    config = vllm_config(uniform_sizes=[3, 6], max_num_seqs=8)
    dispatcher = drafter.CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(M.FULL_AND_PIECEWISE, [1, 3])
    assert dispatcher.uniform_cudagraph_capture_sizes == {1: [1, 2, 4, 8], 3: [3, 6]}
    assert dispatcher.caculate_uniform_decode(6, 2, 3) == (True, 3)
    assert dispatcher.calculate_uniform_decode(5, 2, 3) == (False, 0)
    assert dispatcher.fast_plan(5, 2, 3)[::2] == (M.PIECEWISE, 8)
    assert dispatcher.fast_plan(6, 2, 3)[::2] == (M.FULL, 6)
    sizes, descriptors, mode = dispatcher.get_capture_cases(True, 3)
    assert (sizes, mode) == ([6, 3], M.FULL)
    assert descriptors[0] == drafter.BatchDescriptor(6, True, 3)


@pytest.mark.parametrize("bad", [0, [], [1, 0], [2.5], ["3"]])
def test_drafter_refuses_bad_query_lengths(bad):
    dispatcher = drafter.CudagraphDispatcher(vllm_config())
    with pytest.raises(AssertionError):
        dispatcher.initialize_cudagraph_keys(M.FULL, bad)


def test_manager_dispatches_after_capture_only():
    manager = v0_33_manager.CudaGraphManager(vllm_config(), "cpu", M.FULL_AND_PIECEWISE, 1)
    assert manager.needs_capture()
    assert manager.dispatch(3, 3, 1, 0).cg_mode is M.NONE
    manager.graphs_captured = True
    answer = manager.dispatch(3, 3, 1, 0)
    assert (answer.cg_mode, answer.num_tokens, answer.num_reqs) == (M.FULL, 4, 4)
    assert manager.dispatch(3, 3, 1, 0, num_ubatches=2).cg_mode is M.NONE


def test_manager_takes_the_cases_of_adapters_it_is_given():
    manager = v0_33_manager.CudaGraphManager(
        vllm_config(), "cpu", M.PIECEWISE, 1, lora_capture_cases=[0, 2, 5]
    )
    manager.graphs_captured = True
    counts = [manager.dispatch(3, 4, None, loras).num_active_loras for loras in (0, 1, 2, 3, 9)]
    assert counts == [0, 2, 2, 5, 5]


def test_the_package_carries_the_names_of_the_0_11_line():
    assert facade.CudagraphDispatcher is v0_11_1.CudagraphDispatcher
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = facade.no_such_name


def test_a_descriptor_that_names_no_batch_cannot_be_a_key():
    dispatcher = v0_33.CudagraphDispatcher(vllm_config())
    with pytest.raises(DispatchkitError):
        dispatcher.add_cudagraph_key(M.FULL, v0_33.BatchDescriptor(0))


def test_the_manager_has_graphs_for_each_length_of_dynamic_speculative_decoding():
    config = vllm_config((2, 4, 6, 8), query_len=4, max_num_seqs=8)
    config.speculative_config.uses_dynamic_speculative_decoding = lambda: True
    schedule = [(1, 2, 3), (3, 4, 2), (5, 6, 1), (7, 8, 0), (9, 20, 5)]
    config.speculative_config.num_speculative_tokens_per_batch_size = schedule
    manager = v0_33_manager.CudaGraphManager(config, "cpu", "FULL_AND_PIECEWISE", 4)
    manager.graphs_captured = True
    full = manager.capture_descs[manager.mode_type["FULL"]]
    assert {one.uniform_token_count for one in full} == {1, 2, 3, 4}
    assert len({one.num_tokens for one in full}) < len(full)
    for one in full:
        assert manager.dispatch(one.num_reqs, one.num_tokens, one.uniform_token_count, 0) == one
    assert manager.dispatch(2, 5, None, 0).cg_mode.name == "PIECEWISE"
    assert manager.dispatch(1, 5, 5, 0).cg_mode.name == "PIECEWISE"


def test_a_schedule_that_begins_later_drafts_nothing_before():
    config = vllm_config((1, 2, 4, 8), query_len=3, max_num_seqs=8)
    config.speculative_config.uses_dynamic_speculative_decoding = lambda: True
    config.speculative_config.num_speculative_tokens_per_batch_size = [(3, 8, 2)]
    manager = v0_33_manager.CudaGraphManager(config, "cpu", "FULL_DECODE_ONLY", 3)
    full = manager.capture_descs[manager.mode_type["FULL"]]
    assert {one.uniform_token_count for one in full} == {1, 3}
