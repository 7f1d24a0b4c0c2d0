"""vLLM's wrapper classes capture and replay FULL and PIECEWISE, nested, equal to eager."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from vllm_test_helpers import initialized, vllm_config  # noqa: E402

from dispatchkit.errors import ReplayError  # noqa: E402

from dispatchkit_vllm import facade  # noqa: E402
from dispatchkit_vllm.facade import _wrapper, v0_11, v0_11_1, v0_13, v0_33  # noqa: E402
from dispatchkit_vllm.wrapper import BackendDevice, set_forward_context  # noqa: E402

RELEASES = [v0_11, v0_11_1, v0_13, v0_33]
SIZES = (8, 4, 2, 1)


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    before = list(_wrapper._device)
    facade.use_device(BackendDevice(request.param))
    yield torch.device("cuda" if request.param == "cuda" else "cpu")
    _wrapper._device[:] = before


class Model(torch.nn.Module):
    """Two captured pieces around an eager one, as a model split at attention."""

    def __init__(self, module, device, width=16):
        super().__init__()
        first, second = (torch.nn.Linear(width, width, device=device) for _ in range(2))
        self.inputs = torch.zeros(max(SIZES), width, device=device)
        self.between = torch.zeros(max(SIZES), width, device=device)
        options = module.CUDAGraphOptions(weak_ref_output=False)
        self.before = module.CUDAGraphWrapper(
            lambda x: torch.relu(first(x)), None, "PIECEWISE", options
        )
        self.after = module.CUDAGraphWrapper(lambda x: second(x) + x, None, "PIECEWISE")

    def forward(self, num_tokens):
        hidden = self.before(self.inputs[:num_tokens])
        attended = torch.cumsum(hidden, dim=0, out=self.between[:num_tokens])
        return self.after(attended)


@pytest.mark.parametrize("module", RELEASES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_dispatched_steps_equal_eager(module, device):
    """As in vLLM's runner: dispatch, set the context, run; captured first, largest first."""
    torch.manual_seed(0)
    model = Model(module, device).eval()
    whole = module.CUDAGraphWrapper(model, None, "FULL")
    dispatcher = initialized(module, vllm_config(sorted(SIZES)))

    def step(num_tokens, mode, descriptor):
        with torch.no_grad(), set_forward_context(mode, descriptor):
            return whole(num_tokens)

    step(max(SIZES), "NONE", None)  # warms libraries up
    for mode, keys in dispatcher.cudagraph_keys.items():
        for key in sorted(keys, reverse=True, key=lambda key: key.num_tokens):
            step(key.num_tokens, mode, key)
    runs = {"FULL": 0, "PIECEWISE": 0}
    for index in range(12):
        num_tokens, uniform = 1 + index % 8, index % 3 > 0
        padded = min(size for size in SIZES if size >= num_tokens)
        model.inputs.normal_()
        expected = step(padded, "NONE", None).clone()
        if module in (v0_13, v0_33):
            mode, key = dispatcher.dispatch(num_tokens, uniform, False)
        else:
            mode, key = dispatcher.dispatch(module.BatchDescriptor(padded, uniform))
        got = step(key.num_tokens, mode, key)
        torch.testing.assert_close(got[:num_tokens], expected[:num_tokens])
        runs[mode.name] += 1
    assert min(runs.values()) > 0
    assert len(whole.concrete_cudagraph_entries) == len(SIZES)
    assert len(model.before.concrete_cudagraph_entries) == len(SIZES)


def test_old_wrappers_ask_for_the_context_and_new_ones_look_first(device):
    old = v0_13.CUDAGraphWrapper(lambda: 1, None, "FULL")
    with pytest.raises(AssertionError, match="No forward context"):
        old()
    assert v0_33.CUDAGraphWrapper(lambda: 1, None, "FULL")() == 1


def test_unwrapping_old_and_new(device):
    def innermost() -> int:
        return 1

    inner = v0_33.CUDAGraphWrapper(innermost, None, "PIECEWISE")
    assert v0_33.CUDAGraphWrapper(inner, None, "FULL").unwrap() is innermost
    inner = v0_11.CUDAGraphWrapper(innermost, None, "PIECEWISE")
    assert v0_11.CUDAGraphWrapper(inner, None, "FULL").unwrap() is inner


def test_the_wrapper_s_own_names_stay_its_own(device):
    model = torch.nn.Linear(2, 2, device=device)
    options = v0_33.CUDAGraphOptions(gc_disable=True)
    config = vllm_config()
    wrapper = v0_33.CUDAGraphWrapper(model, config, "FULL", options)
    assert wrapper.vllm_config is config
    assert wrapper.cudagraph_options is options
    assert wrapper.cudagraph_wrapper is wrapper
    assert not hasattr(model, "vllm_config")
    wrapper.training = False
    assert model.training is False


def test_cleared_graphs_of_all_wrappers(device):
    first, second = (v0_33.CUDAGraphWrapper(lambda x: x + 1, None, "FULL") for _ in range(2))
    x = torch.ones(2, device=device)
    with set_forward_context("FULL", "key"):
        first(x)
        second(x)
    v0_33.CUDAGraphWrapper.clear_all_graphs()
    assert first.concrete_cudagraph_entries == second.concrete_cudagraph_entries == {}


def test_the_device_is_chosen_by_name(device):
    facade.use_device("tape")
    assert facade.current_device().backend.name == "tape"


def test_entries_hold_graphs_that_replay_and_dicts_that_stay(device):
    wrapper = v0_33.CUDAGraphWrapper(lambda x: x + 1, None, "FULL")
    x = torch.ones(2, device=device)
    with set_forward_context("FULL", "key"):
        wrapper(x)
    held = wrapper.concrete_cudagraph_entries
    entry = held["key"]
    x.fill_(5)
    entry.cudagraph.replay()
    assert entry.output.tolist() == [6, 6]
    wrapper.clear_graphs()
    assert held == {}
    assert wrapper.concrete_cudagraph_entries is held
    with pytest.raises(ReplayError, match="has not been captured yet"):
        entry.cudagraph.replay()
    with set_forward_context("FULL", "key"):
        wrapper(x)
        assert wrapper(x).tolist() == [6, 6]


@pytest.mark.parametrize("module", RELEASES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_wrapper_of_a_combined_mode_runs_its_callable(module, device):
    combined = module.CUDAGraphMode.FULL_AND_PIECEWISE
    wrapper = module.CUDAGraphWrapper(lambda x: x + 1, None, combined)
    assert wrapper.runtime_mode is combined
    for mode in ("FULL", "PIECEWISE", "NONE"):
        with set_forward_context(mode, "key"):
            assert wrapper(torch.ones(1, device=device)).tolist() == [2]
    assert wrapper.concrete_cudagraph_entries == {}


@pytest.mark.parametrize("module", RELEASES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_wrapper_whose_pool_was_taken_captures_into_one_of_its_own(module, device):
    wrapper = module.CUDAGraphWrapper(lambda x: x * 3, None, "FULL")
    other = module.CUDAGraphWrapper(lambda x: x * 5, None, "FULL")
    assert wrapper.graph_pool is other.graph_pool is not None
    wrapper.graph_pool = None
    x = torch.ones(2, device=device)
    with set_forward_context("FULL", "key"):
        for _ in range(2):
            wrapper(x)
            other(x)
        x.fill_(2)
        assert wrapper(x).tolist() == [6, 6]
        assert other(x).tolist() == [10, 10]


def test_old_wrappers_clear_nothing_and_new_ones_do(device):
    class Model:
        def __call__(self):
            return 1

        def clear_graphs(self):
            return "the model's own"

    assert v0_13.CUDAGraphWrapper(Model(), None, "FULL").clear_graphs() == "the model's own"
    assert not hasattr(v0_11.CUDAGraphWrapper(lambda: 1, None, "FULL"), "clear_graphs")
    assert not hasattr(v0_13.CUDAGraphWrapper, "clear_all_graphs")
    assert v0_33.CUDAGraphWrapper(Model(), None, "FULL").clear_graphs() is None


def test_under_vllm_s_own_context_a_wrapper_says_whose_it_reads(device, monkeypatch, caplog):
    context = ModuleType("vllm.forward_context")
    context.is_forward_context_available = lambda: True
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    monkeypatch.setattr(_wrapper._context_warning, "has_warned", False)
    wrapper = v0_33.CUDAGraphWrapper(lambda: 1, None, "FULL")
    assert wrapper() == wrapper() == 1
    assert caplog.text.count("vLLM's forward context is set") == 1
    with pytest.raises(AssertionError, match=r"dispatchkit_vllm\.wrapper\.set_forward_context"):
        v0_13.CUDAGraphWrapper(lambda: 1, None, "FULL")()
