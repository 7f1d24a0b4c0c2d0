"""The entry point for vLLM swaps the class that its runner looks up, and only on request."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest
from vllm_test_helpers import vllm_config

from dispatchkit.errors import BackendUnavailableError, UnknownNameError
from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm import VllmPolicy, engine
from dispatchkit_vllm.facade import v0_13, v0_33

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")


@pytest.fixture(params=[v0_13, v0_33], ids=["0.13", "0.33"])
def release(request, monkeypatch) -> ModuleType:
    """Modules shaped like a release of vLLM, with a runner that was imported already."""
    defined = ModuleType(engine._MODULE)
    defined.CUDAGraphMode = CUDAGraphMode
    defined.BatchDescriptor = request.param.BatchDescriptor
    defined.CudagraphDispatcher = type(
        "CudagraphDispatcher", (), {"__module__": engine._MODULE, "__init__": lambda *_: None}
    )
    runner = ModuleType("vllm.v1.worker.gpu_model_runner")
    runner.CudagraphDispatcher = defined.CudagraphDispatcher
    other = ModuleType("elsewhere.runner")
    other.CudagraphDispatcher = defined.CudagraphDispatcher
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (defined, runner, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(engine.VARIABLE, raising=False)
    defined.facade = request.param
    return defined


def runner_class() -> type:
    return sys.modules["vllm.v1.worker.gpu_model_runner"].CudagraphDispatcher


def test_without_the_variable_nothing_changes(release):
    original = release.CudagraphDispatcher
    engine.install()
    assert release.CudagraphDispatcher is original
    assert runner_class() is original


def test_the_runner_finds_a_dispatcher_backed_by_the_policy(release, monkeypatch):
    original = release.CudagraphDispatcher
    monkeypatch.setenv(engine.VARIABLE, "vllm@0.33")
    engine.install()
    assert runner_class() is release.CudagraphDispatcher is not original
    assert sys.modules["elsewhere.runner"].CudagraphDispatcher is original
    dispatcher = runner_class()(vllm_config())
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    assert isinstance(dispatcher._core.policy, VllmPolicy)
    assert dispatcher._core.policy.name == "vllm@0.33"
    mode, descriptor = dispatcher.dispatch(3, True, False)
    assert mode is CUDAGraphMode.FULL
    assert descriptor in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    assert isinstance(descriptor, release.BatchDescriptor)
    assert dispatcher.dispatch(9, True, False)[0] is CUDAGraphMode.NONE


def test_the_own_rule_is_the_release_s_facade(release, monkeypatch):
    monkeypatch.setenv(engine.VARIABLE, "vllm")
    engine.install()
    assert issubclass(runner_class(), release.facade.CudagraphDispatcher)
    dispatcher = runner_class()(vllm_config())
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    assert dispatcher._core.policy.dialect is release.facade.CudagraphDispatcher.dialect


def test_installing_again_changes_the_policy_and_uninstalling_puts_the_original_back(
    release, monkeypatch
):
    original = release.CudagraphDispatcher
    for name in ("vllm", "vllm@0.13", "vllm@0.13"):
        monkeypatch.setenv(engine.VARIABLE, name)
        engine.install()
        assert runner_class().policy_name == name
        assert runner_class().replaces is original
    engine.uninstall()
    assert runner_class() is release.CudagraphDispatcher is original
    engine.uninstall()
    assert runner_class() is original


def test_an_unknown_policy_stops_with_the_nearest_names(release, monkeypatch):
    original = release.CudagraphDispatcher
    monkeypatch.setenv(engine.VARIABLE, "vlllm")
    with pytest.raises(UnknownNameError) as caught:
        engine.install()
    assert "vllm" in caught.value.nearest
    assert runner_class() is original


def test_an_unknown_release_is_refused(release, monkeypatch):
    monkeypatch.setenv(engine.VARIABLE, "vllm")
    release.BatchDescriptor = type("BatchDescriptor", (), {"__annotations__": {"rows": int}})
    with pytest.raises(BackendUnavailableError, match=r"neither that of 0\.13 nor of 0\.33"):
        engine.install()


def test_a_vllm_without_the_module_is_refused(monkeypatch):
    monkeypatch.setenv(engine.VARIABLE, "vllm")
    monkeypatch.setitem(sys.modules, engine._MODULE, None)
    with pytest.raises(BackendUnavailableError, match="cannot be imported"):
        engine.install()


def test_graphs_that_can_be_broken_need_no_split_model(release, monkeypatch):
    monkeypatch.setenv(engine.VARIABLE, "vllm")
    engine.install()
    with pytest.raises(AssertionError):
        runner_class()(vllm_config(piecewise=False))
    breakable = ModuleType("vllm.compilation.breakable_cudagraph")
    breakable.is_breakable_cudagraph_enabled = lambda: True
    monkeypatch.setitem(sys.modules, "vllm.compilation", ModuleType("vllm.compilation"))
    monkeypatch.setitem(sys.modules, breakable.__name__, breakable)
    runner_class()(vllm_config(piecewise=False))


def test_the_entry_point_names_the_function():
    (found,) = (
        each
        for each in importlib.metadata.entry_points(group="vllm.general_plugins")
        if each.name == "dispatchkit"
    )
    assert found.load() is engine.install
