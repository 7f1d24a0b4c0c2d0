"""Inside vLLM: a policy chooses graphs of either model runner, only on request."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import inspect
import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
from vllm_test_modules import FORMS, config, first_runner, installed, second_runner, worker_module

from dispatchkit import CellUpdate, Decision, load_plugins
from dispatchkit.errors import BackendUnavailableError, ConfigError, TraceError, UnknownNameError
from dispatchkit.keys import CUDAGraphMode
from dispatchkit.observe import read_trace

from dispatchkit_vllm import engine
from dispatchkit_vllm.engine import controller, core, first, second, timing
from dispatchkit_vllm.engine.settings import EngineSettings

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")

BATCHES = [(1, 1, 1), (3, 3, 1), (3, 1, 3), (5, 2, 4), (7, 7, 1), (8, 8, 1), (9, 3, 4)]


@pytest.fixture(scope="module")
def loaded():
    return load_plugins()


@pytest.fixture(autouse=True)
def clean(monkeypatch, loaded):
    for module in (core, controller):  # each runner loads the plugins, which takes time
        monkeypatch.setattr(module, "load_plugins", lambda: loaded)
    for name in ("POLICY", "POLICY_OPTIONS", "STRICT", "TRACE", "METRICS"):
        monkeypatch.delenv(f"DISPATCHKIT_{name}", raising=False)
    yield
    for log in controller._logs.values():
        log.close()
    controller._logs.clear()
    engine.uninstall()


@pytest.fixture(params=FORMS)
def runner_module(request, monkeypatch) -> ModuleType:
    """Return the first runner's module in each form of its dispatcher."""
    installed(monkeypatch, modules := first_runner(request.param), worker_module())
    return modules["vllm.v1.worker.gpu_model_runner"]


@pytest.fixture
def manager_module(monkeypatch) -> ModuleType:
    installed(monkeypatch, modules := second_runner(), worker_module())
    return modules["vllm.v1.worker.gpu.model_runner"]


def ask(monkeypatch, policy: str, **options: object) -> None:
    monkeypatch.setenv(engine.VARIABLE, policy)
    if options:
        monkeypatch.setenv("DISPATCHKIT_POLICY_OPTIONS", json.dumps(options))
    engine.install()


def first_of(module: ModuleType, mode: str = "FULL_AND_PIECEWISE", **facts: object):
    runner = module.GPUModelRunner(config(**facts))
    runner.initialize(mode)
    return runner


def second_of(module: ModuleType, mode: str = "FULL_AND_PIECEWISE", model=None, **facts: object):
    runner = module.GPUModelRunner(config(**facts), model)
    runner.initialize(mode)
    return runner


def tried(result) -> tuple[str, int]:
    """Return mode and padded size of an answer of either runner."""
    if isinstance(result, tuple):
        return result[0].name, result[1].num_tokens
    return result.cg_mode.name, result.num_tokens


# -- requested or not -----------------------------------------------------------------------


def test_without_a_request_vllm_builds_its_own_classes(runner_module):
    own = runner_module.CudagraphDispatcher
    engine.install()
    runner = first_of(runner_module)
    assert type(runner.cudagraph_dispatcher) is own
    assert not hasattr(runner_module.GPUModelRunner, "dispatchkit_patched")


def test_the_own_rule_answers_as_vllm_does(runner_module, monkeypatch):
    plain = first_of(runner_module)
    expected = [plain.execute_model(*batch) for batch in BATCHES]
    ask(monkeypatch, "vllm")
    runner = first_of(runner_module)
    assert [runner.execute_model(*batch) for batch in BATCHES] == expected
    found = runner.cudagraph_dispatcher.controller
    assert found.core.policy.name == "vllm"
    assert not found.core.fallbacks


def test_a_release_that_tells_uniform_batches_apart_in_any_mode_is_asked_so(monkeypatch):
    """0.17 runs uniform decode eager in mode FULL; later releases use the graph for any batch."""
    installed(monkeypatch, modules := first_runner("0.33"), worker_module())
    module = modules["vllm.v1.worker.gpu_model_runner"]
    own = module.CudagraphDispatcher

    class Apart(own):
        __module__ = own.__module__

        def dispatch(self, num_tokens, uniform_decode=False, *args, **options):
            if uniform_decode:
                return CUDAGraphMode.NONE, self.descriptor_type(num_tokens)
            return super().dispatch(num_tokens, uniform_decode, *args, **options)

        dispatch.__signature__ = inspect.signature(own.dispatch)

    module.CudagraphDispatcher = Apart
    plain = first_of(module, "FULL")
    expected = [plain.execute_model(*batch) for batch in BATCHES]
    assert {tried(one)[0] for one in expected} == {"NONE", "FULL"}
    ask(monkeypatch, "vllm")
    runner = first_of(module, "FULL")
    assert [runner.execute_model(*batch) for batch in BATCHES] == expected
    assert not runner.cudagraph_dispatcher.controller.core.fallbacks


def test_the_second_runner_s_own_rule_answers_as_vllm_does(manager_module, monkeypatch):
    plain = second_of(manager_module)
    batches = [(n, reqs, 1 if longest == 1 else None) for n, reqs, longest in BATCHES]
    expected = [plain.execute_model(*batch) for batch in batches]
    ask(monkeypatch, "vllm")
    runner = second_of(manager_module)
    assert [runner.execute_model(*batch) for batch in batches] == expected
    assert runner.cudagraph_manager.controller.core is not None


def test_options_of_the_policy_act_in_both_runners(monkeypatch):
    installed(monkeypatch, modules := {**first_runner("0.33"), **second_runner()})
    ask(monkeypatch, "threshold", max_tokens=4)
    runner = first_of(modules[first.MODULE])
    assert [tried(runner.execute_model(n, n, 1)) for n in (3, 4, 5)] == [
        ("FULL", 4),
        ("FULL", 4),
        ("NONE", 5),
    ]
    other = second_of(modules[second.MODULE])
    assert [tried(other.execute_model(n, n, 1)) for n in (3, 4, 5)] == [
        ("FULL", 4),
        ("FULL", 4),
        ("NONE", 5),
    ]
    assert other.execute_model(5, 2, None).num_reqs == 2


def test_additional_config_asks_too_and_wins(runner_module, monkeypatch):
    ask(monkeypatch, "threshold", max_tokens=4)
    settings = {"dispatchkit": {"policy_options": {"max_tokens": 2}}}
    runner = first_of(runner_module, additional_config=settings)
    assert tried(runner.execute_model(4, 4, 1)) == ("NONE", 4)
    monkeypatch.delenv(engine.VARIABLE)
    monkeypatch.delenv("DISPATCHKIT_POLICY_OPTIONS")
    settings = {"dispatchkit": {"policy": "threshold", "policy_options": {"min_tokens": 2}}}
    runner = first_of(runner_module, additional_config=settings)
    assert tried(runner.execute_model(1, 1, 1)) == ("NONE", 1)


@pytest.mark.parametrize(
    ("variables", "error", "names"),
    [
        ({"POLICY": "vlllm"}, UnknownNameError, "vllm"),
        ({"POLICY": "threshold", "POLICY_OPTIONS": '{"max_token": 4}'}, ConfigError, "max_token"),
        (
            {"POLICY": "threshold", "POLICY_OPTIONS": '{"min_tokens": -1}'},
            ConfigError,
            "min_tokens",
        ),
        ({"POLICY": "threshold", "POLICY_OPTIONS": "[1]"}, ConfigError, "policy_options"),
        ({"POLICY": "threshold", "POLICY_OPTIONS": "{"}, ConfigError, "policy_options"),
        ({"POLICY_OPTIONS": '{"min_tokens": 1}'}, ConfigError, "policy_options"),
        ({"POLICY": "vllm", "STRICT": "perhaps"}, ConfigError, "strict"),
        (
            {"POLICY": "vllm", "POLICY_OPTION": "{}"},
            UnknownNameError,
            "mean 'DISPATCHKIT_POLICY_OPT",
        ),
        ({"POLICIES": "vllm"}, UnknownNameError, "Did you mean 'DISPATCHKIT_POLICY'"),
    ],
)
def test_wrong_settings_stop_the_start_by_name(variables, error, names, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"DISPATCHKIT_{name}", value)
    with pytest.raises(error, match=names):
        engine.install()


def test_an_unknown_setting_of_additional_config_is_named():
    with pytest.raises(UnknownNameError, match="policy_option"):
        EngineSettings.read({}, {"dispatchkit": {"policy_option": {}}})


def test_drafters_keep_vllm_s_dispatcher(runner_module, monkeypatch):
    ask(monkeypatch, "threshold", max_tokens=4)
    drafter = sys.modules["vllm.v1.spec_decode.eagle"].CudagraphDispatcher
    assert drafter is sys.modules["vllm.v1.cudagraph_dispatcher"].CudagraphDispatcher
    assert not hasattr(drafter(config()), "controller")


def test_uninstalling_puts_the_own_classes_back(runner_module, monkeypatch):
    own = runner_module.CudagraphDispatcher
    ask(monkeypatch, "vllm")
    engine.install()
    assert runner_module.CudagraphDispatcher.replaces is own
    engine.uninstall()
    engine.uninstall()
    assert runner_module.CudagraphDispatcher is own


def test_a_module_that_is_imported_later_is_found(tmp_path, monkeypatch):
    (tmp_path / "later_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    engine.when_imported("later_module", lambda module: seen.append(module.value))
    assert not seen
    import later_module

    assert seen == [1]
    assert later_module.__loader__ is later_module.__spec__.loader
    assert later_module.__loader__.get_source("later_module") == "value = 1\n"
    del sys.modules["later_module"]


def test_the_entry_point_names_the_function():
    (found,) = (
        each
        for each in importlib.metadata.entry_points(group="vllm.general_plugins")
        if each.name == "dispatchkit"
    )
    assert found.load() is engine.install


# -- settings that cannot act ---------------------------------------------------------------


def started(runner, mode: str = "FULL_AND_PIECEWISE"):
    base = sys.modules["vllm.v1.worker.worker_base"]
    wrapper = base.WorkerWrapperBase(runner)
    wrapper.initialize_from_config(mode)
    return wrapper.worker


def test_the_start_says_what_decides(runner_module, monkeypatch, caplog):
    ask(monkeypatch, "threshold", max_tokens=4)
    with caplog.at_level(logging.INFO, "vllm"):
        started(runner_module.GPUModelRunner(config()))
    assert "Policy 'threshold' decides" in caplog.text
    assert "8 graphs (2 never chosen for batches of exactly their size)" in caplog.text


def test_a_mode_without_graphs_is_said(runner_module, monkeypatch, caplog, tmp_path):
    ask(monkeypatch, "threshold")
    started(runner_module.GPUModelRunner(config(mode="NONE")), "NONE")
    assert "cannot act: vLLM captures no graphs (cudagraph mode NONE)" in caplog.text
    monkeypatch.setenv("DISPATCHKIT_STRICT", "1")
    monkeypatch.setenv("DISPATCHKIT_TRACE", str(tmp_path / "steps.csv"))  # a trace takes effect
    remove = r"DISPATCHKIT_STRICT\), or remove the setting policy \(DISPATCHKIT_POLICY\)"
    with pytest.raises(BackendUnavailableError, match=remove):
        started(runner_module.GPUModelRunner(config(mode="NONE")), "NONE")


@pytest.mark.parametrize(
    ("given", "error", "names"),
    [
        ({"policy": "treshold"}, UnknownNameError, "threshold"),
        ({"policy": "threshold", "policy_options": {"max_token": 4}}, ConfigError, "max_token"),
    ],
)
def test_wrong_settings_stop_the_start_where_nothing_could_act(given, error, names, manager_module):
    """Otherwise errors would first appear on the GPU machine."""
    engine.install()
    settings = config(mode="NONE", additional_config={"dispatchkit": given})
    of_another_kind = SimpleNamespace(vllm_config=settings, initialize=lambda mode: None)
    for runner in (manager_module.GPUModelRunner(settings), of_another_kind):
        with pytest.raises(error, match=names):
            started(runner, "NONE")


def test_a_dispatcher_of_another_form_is_left_alone_and_said(runner_module, monkeypatch, caplog):
    class Strange(runner_module.CudagraphDispatcher):
        def dispatch(self, num_tokens, uniform_decode, has_lora, rows=0, disable_full=False):
            return None

    runner_module.CudagraphDispatcher = Strange
    ask(monkeypatch, "threshold")
    runner = runner_module.GPUModelRunner(config())
    assert type(runner.cudagraph_dispatcher) is Strange
    started(runner)
    assert "vLLM 0.0.test is not supported" in caplog.text
    assert "rows" in caplog.text


def test_a_dispatcher_that_takes_ready_descriptors_is_named():
    class Old:
        def initialize_cudagraph_keys(self): ...

        def dispatch(self, batch_descriptor): ...

    assert "before 0.12" in first.unsupported_reason(Old)


def test_a_second_runner_of_another_form_is_said(manager_module, monkeypatch, caplog):
    class Old:
        def __init__(self, *args): ...

        def capture(self, model): ...

        def get_cudagraph_size(self): ...

    manager_module.ModelCudaGraphManager = Old
    ask(monkeypatch, "threshold")
    started(manager_module.GPUModelRunner(config()))
    assert "second model runner" in caplog.text
    assert "has no ModelCudaGraphManager, as in releases before 0.20" in caplog.text


def test_another_runner_is_said(runner_module, monkeypatch, caplog):
    ask(monkeypatch, "threshold")
    other = SimpleNamespace(vllm_config=config(), initialize=lambda mode: None)
    started(other)
    assert "has no CUDA graph dispatcher" in caplog.text
    assert "remove the setting policy (DISPATCHKIT_POLICY)" in caplog.text
    monkeypatch.setenv("DISPATCHKIT_TRACE", "steps.csv")
    started(other)
    named = "remove the settings policy and trace (DISPATCHKIT_POLICY, DISPATCHKIT_TRACE)"
    assert named in caplog.text


def test_a_runner_that_decides_in_its_own_way_is_said(runner_module, monkeypatch, caplog):
    ask(monkeypatch, "threshold")

    class Own(runner_module.GPUModelRunner):
        def _determine_batch_execution_and_padding(self): ...

    started(Own(config()))
    assert "Own overrides _determine_batch_execution_and_padding" in caplog.text


@pytest.mark.parametrize("policy", ["vllm@0.13", "vllm-drafter", "vllm-lora-count"])
def test_a_policy_whose_keys_do_not_fit_is_refused(policy, monkeypatch):
    installed(monkeypatch, modules := first_runner("0.33"))
    ask(monkeypatch, policy)
    with pytest.raises(engine.UnfitPolicyError, match="which this runner does not capture"):
        first_of(modules[first.MODULE], mode="FULL")


@pytest.mark.slow_except("0.12-composite", "0.13-adaptive", "0.33-threshold", "0.12-vllm@0.33")
@pytest.mark.parametrize("policy", ["vllm@0.33", "threshold", "adaptive", "composite"])
def test_policies_that_build_on_the_release_s_rule_fit_everywhere(
    runner_module, policy, monkeypatch
):
    options = {"members": "vllm"} if policy == "composite" else {}
    ask(monkeypatch, policy, **options)
    for mode in ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE", "FULL_DECODE_ONLY"):
        runner = first_of(runner_module, mode)
        assert runner.cudagraph_dispatcher.controller.core is not None


# -- faulty answers do not stop the engine --------------------------------------------------


class Stubborn:
    """Chooses by a function of the batch."""

    name = "stubborn"

    def __init__(self, choose):
        self.choose = choose

    def declare(self, config):
        return self.base.declare(config)

    def decide(self, batch, graphs):
        return self.choose(batch, graphs)


def stubborn(monkeypatch, choose) -> None:
    """Create the test's policy for any requested name."""

    def make(settings, rule):
        policy = Stubborn(choose)
        policy.base = rule
        return policy

    monkeypatch.setattr(controller, "make_policy", make)
    ask(monkeypatch, "vllm")


def test_eager_where_it_is_not_allowed_takes_vllm_s_graph_and_is_counted(monkeypatch):
    installed(monkeypatch, modules := first_runner("0.33"))
    stubborn(monkeypatch, lambda batch, graphs: Decision.eager("never"))
    runner = first_of(modules[first.MODULE])
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.controller.open()
    mode, _ = dispatcher.dispatch(3, True, valid_modes={CUDAGraphMode.FULL})
    assert mode is CUDAGraphMode.FULL
    assert dispatcher.controller.core.fallbacks == {core.EAGER_REFUSED: 1}


def test_a_policy_that_raises_where_eager_is_not_allowed_is_counted_as_failed(monkeypatch, caplog):
    calls = []

    def choose(batch, graphs):
        if calls:
            raise RuntimeError("no idea")
        return Decision.eager("trial")

    installed(monkeypatch, modules := first_runner("0.33"))
    stubborn(monkeypatch, choose)
    runner = modules[first.MODULE].GPUModelRunner(config())
    monkeypatch.setattr(core.PolicyCore, "fill", lambda self: calls.append(1) or 0)
    runner.initialize("FULL_AND_PIECEWISE")
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.controller.open()
    with pytest.warns(RuntimeWarning, match="no idea"):
        mode, _ = dispatcher.dispatch(3, True, valid_modes={CUDAGraphMode.FULL})
    assert mode is CUDAGraphMode.FULL
    assert dispatcher.controller.core.fallbacks == {"policy_error": 1}
    assert caplog.text.count("). vLLM's own dispatcher decides instead") == 1
    assert ": no idea (test_engine.py:" in caplog.text


def test_a_policy_that_raises_while_serving_costs_no_step(runner_module, monkeypatch, caplog):
    calls = []

    def choose(batch, graphs):
        if batch.num_tokens == 3 and calls:
            raise RuntimeError("no idea")
        return Decision.eager("trial")

    stubborn(monkeypatch, choose)
    plain = runner_module.CudagraphDispatcher.replaces(config())
    plain.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    runner = runner_module.GPUModelRunner(config())
    monkeypatch.setattr(core.PolicyCore, "fill", lambda self: calls.append(1) or 0)
    runner.initialize("FULL_AND_PIECEWISE")
    with pytest.warns(RuntimeWarning, match="no idea"):
        assert tried(runner.execute_model(3, 3, 1)) == ("FULL", 4)
    assert tried(runner.execute_model(2, 2, 1)) == ("NONE", 2)
    assert runner.cudagraph_dispatcher.controller.core.fallbacks == {"policy_error": 1}
    assert ": no idea (test_engine.py:" in caplog.text


def test_dummy_runs_and_captures_are_answered_by_vllm(runner_module, monkeypatch):
    ask(monkeypatch, "threshold", max_tokens=4)
    runner = first_of(runner_module)
    assert tried(runner._dummy_run(8, uniform_decode=True)) == ("FULL", 8)
    assert tried(runner._dummy_run(8)) == ("PIECEWISE", 8)
    assert tried(runner.execute_model(8, 8, 1)) == ("NONE", 8)


def test_dummy_runs_of_the_second_runner_are_answered_by_vllm(manager_module, monkeypatch):
    ask(monkeypatch, "threshold", max_tokens=4)
    runner = second_of(manager_module)
    assert tried(runner._dummy_run(8)) == ("PIECEWISE", 8)
    assert tried(runner.execute_model(8, 8, None)) == ("NONE", 8)


def test_steps_that_a_worker_warms_up_with_are_none(manager_module, monkeypatch, tmp_path):
    monkeypatch.setenv("DISPATCHKIT_TRACE", str(tmp_path / "steps.csv"))
    ask(monkeypatch, "threshold", max_tokens=4)
    worker = started(manager_module.GPUModelRunner(config()))
    assert tried(worker.compile_or_warm_up_model()) == ("PIECEWISE", 8)
    assert tried(worker.model_runner.execute_model(8, 8, None)) == ("NONE", 8)
    found = worker.model_runner.cudagraph_manager.controller.log
    found.flush()
    assert len(read_trace(found.path)) == 1


@pytest.mark.parametrize("policy", ["threshold", "vllm"])
def test_ranks_that_agreed_on_a_size_pad_alike(runner_module, policy, monkeypatch):
    options = {"prefer_piecewise": True} if policy == "threshold" else {}
    ask(monkeypatch, policy, **options)
    runner = first_of(runner_module, replicas=2, world_size=2)
    runner.agreed = 8
    assert runner.execute_model(3, 3, 1)[1].num_tokens == 8


def test_ranks_of_the_second_runner_pad_alike(manager_module, monkeypatch):
    ask(monkeypatch, "threshold", max_tokens=4)
    runner = second_of(manager_module, replicas=2)
    runner.dp_size = 2
    assert tried(runner.execute_model(3, 3, 1)) == ("FULL", 8)


def test_microbatches_stay_vllm_s(manager_module, monkeypatch):
    ask(monkeypatch, "threshold")
    manager = second_of(manager_module).cudagraph_manager
    manager.controller.open()
    assert manager.dispatch(4, 4, 1, num_ubatches=2).cg_mode.name == "NONE"
    assert manager.controller.is_open


def test_nothing_is_decided_before_the_second_runner_captured(manager_module, monkeypatch):
    ask(monkeypatch, "vllm")
    runner = manager_module.GPUModelRunner(config())
    manager = runner.cudagraph_manager = manager_module.ModelCudaGraphManager(
        runner.vllm_config, "cpu", CUDAGraphMode.FULL, 1
    )
    assert manager.controller.core is not None
    manager.controller.open()
    assert manager.dispatch(4, 4, 1).cg_mode.name == "NONE"


def test_released_graphs_of_the_second_runner_are_not_chosen(manager_module, monkeypatch):
    """Elastic expert parallelism releases all graphs and captures them again later."""
    ask(monkeypatch, "vllm")
    runner = second_of(manager_module)
    manager = runner.cudagraph_manager
    assert tried(runner.execute_model(3, 3, 1)) == ("FULL", 4)
    manager._graphs_captured = False
    assert tried(runner.execute_model(3, 3, 1)) == ("NONE", 3)
    manager.capture(runner.model)
    assert tried(runner.execute_model(3, 3, 1)) == ("FULL", 4)


def test_the_table_is_filled_ahead(runner_module, monkeypatch):
    ask(monkeypatch, "threshold")
    runner = first_of(runner_module)
    dispatcher = runner.cudagraph_dispatcher.controller.core.dispatcher
    before = dispatcher.num_filled_cells
    for batch in BATCHES:
        runner.execute_model(*batch)
    assert dispatcher.num_filled_cells == before >= 2 * 2 * 8


@pytest.mark.parametrize("policy", ["vllm", "threshold", "composite", "adaptive"])
def test_the_second_runner_calls_nothing_for_a_ready_answer(policy, manager_module, monkeypatch):
    options = {"max_tokens": 4} if policy == "threshold" else {}
    ask(monkeypatch, policy, **options)
    runner = second_of(manager_module)
    manager = runner.cudagraph_manager
    # Includes eager batches, if their requests match their tokens.
    batches = [(1, 1, 1), (3, 3, 1), (8, 8, 1), (7, 2, None)]
    expected = [runner.execute_model(*batch) for batch in batches]
    assert [found.num_reqs for found in expected[:3]] == [1, 4, 8]

    def asked(*facts):
        raise AssertionError(f"the policy was asked: {facts}")

    monkeypatch.setattr(manager.controller.core, "ask", asked)
    monkeypatch.setattr(manager.controller.core.dispatcher, "dispatch", asked)
    assert [runner.execute_model(*batch) for batch in batches] == expected
    assert expected[3].num_reqs == (2 if policy == "threshold" else None)


def test_a_batch_above_every_graph_is_answered_as_by_vllm(manager_module, monkeypatch):
    plain = second_of(manager_module, max_loras=2)
    batches = [(9, 3, None, 0), (100, 1, 100, 0), (40, 40, 1, 2), (9, 9, 1, 1)]
    expected = [plain.execute_model(*batch) for batch in batches]
    ask(monkeypatch, "vllm")
    runner = second_of(manager_module, max_loras=2)
    assert [runner.execute_model(*batch) for batch in batches] == expected
    assert not runner.cudagraph_manager.controller.core.fallbacks


@pytest.mark.parametrize("form", [{}, {"slots": True}, {"factory": True}])
def test_an_eager_step_s_descriptor_is_what_its_class_makes(form):
    slots = form.get("slots", False)

    @dataclasses.dataclass(frozen=True, slots=slots)
    class Descriptor:
        cg_mode: str
        num_tokens: int
        num_reqs: int
        num_active_loras: int = 0
        notes: tuple = dataclasses.field(
            **({"default_factory": tuple} if form else {"default": ()})
        )

    make = second._make_eager_factory(Descriptor, "NONE")
    for facts in ((3, 2, 0), (600, 5, 2)):
        made, expected = make(*facts), Descriptor("NONE", *facts)
        assert made == expected
        assert hash(made) == hash(expected)
        assert repr(made) == repr(expected)
        assert dataclasses.replace(made, num_tokens=4) == dataclasses.replace(
            expected, num_tokens=4
        )


def test_adapters_are_looked_up_by_the_graphs_that_serve_them(manager_module, monkeypatch):
    facts = {"max_loras": 4, "specialize_active_lora": True}
    batches = [
        (tokens, tokens, uniform, loras)
        for tokens in (1, 3, 8)
        for uniform in (1, None)
        for loras in range(6)
    ]
    plain = second_of(manager_module, **facts)
    expected = [plain.execute_model(*batch) for batch in batches]
    ask(monkeypatch, "vllm")
    runner = second_of(manager_module, **facts)
    assert [runner.execute_model(*batch) for batch in batches] == expected


# -- outcomes ---------------------------------------------------------------------------


class Learner:
    """Records outcomes, and runs slow batches eager."""

    name = "learner"

    def __init__(self, base):
        self.base = base
        self.told = []

    def declare(self, config):
        return self.base.declare(config)

    def decide(self, batch, graphs):
        return self.base.decide(batch, graphs)

    def observe(self, outcome):
        self.told.append(outcome)
        if outcome.elapsed_us > 1e6:
            return [CellUpdate(outcome.batch, Decision.eager("slow"))]
        return None


class FakeClock:
    """A clock whose steps take the times that the test sets."""

    name = "device"

    def __init__(self):
        self.us = 10.0
        self.done = True

    def is_busy(self):
        return False

    def new_mark(self):
        return object()

    def set_mark(self, mark):
        pass

    def is_reached(self, mark):
        return self.done

    def elapsed_us(self, start, end):
        return self.us


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(controller.StepController, "_clock", lambda self, policy: made)
    monkeypatch.setattr(controller, "make_policy", lambda settings, rule: Learner(rule))
    return made


def test_outcomes_reach_a_policy_that_learns(runner_module, clock, monkeypatch):
    ask(monkeypatch, "vllm")
    runner = first_of(runner_module)
    policy = runner.cudagraph_dispatcher.controller.core.policy
    runner._dummy_run(4, uniform_decode=True)
    assert not policy.told
    clock.done = False
    runner.execute_model(3, 3, 1)
    assert not policy.told  # read later, without waiting
    clock.done, clock.us = True, 2e6
    for _ in range(timing.SAMPLE_EVERY):
        assert tried(runner.execute_model(3, 3, 1)) == ("FULL", 4) or policy.told
    assert len(policy.told) == 2
    assert policy.told[0].batch.num_tokens == 3
    assert policy.told[0].decision.key.num_tokens == 4
    assert (policy.told[0].step, policy.told[1].step) == (1, 1 + timing.SAMPLE_EVERY)
    assert tried(runner.execute_model(3, 3, 1)) == ("NONE", 3)


@pytest.mark.parametrize(("pace", "interval"), [(3, 3), (0, 1), ("fast", 1), (None, 1)])
def test_a_policy_sets_the_interval_of_measurements(
    runner_module, clock, monkeypatch, pace, interval
):
    """An invalid pace is a fault of the policy, and stops no step of the engine."""
    monkeypatch.setattr(Learner, "pace", 1, raising=False)
    ask(monkeypatch, "vllm")
    runner = first_of(runner_module)
    core = runner.cudagraph_dispatcher.controller.core
    core.policy.pace = pace  # an invalid pace would be refused at startup
    for _ in range(timing.SAMPLE_EVERY * interval + 1):
        runner.execute_model(3, 3, 1)
    assert [one.step for one in core.policy.told] == [1, 1 + timing.SAMPLE_EVERY * interval]


def test_a_pass_that_raises_is_not_measured(runner_module, clock, monkeypatch):
    def fails(self, *args):
        raise RuntimeError("out of memory")

    runner_module.GPUModelRunner._model_forward = fails
    ask(monkeypatch, "vllm")
    runner = first_of(runner_module)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(3, 3, 1)
    assert runner.cudagraph_dispatcher.controller.timer._running is None


def test_a_replay_that_raises_is_not_measured(manager_module, clock, monkeypatch):
    def fails(self, desc):
        raise RuntimeError("launch failed")

    ask(monkeypatch, "vllm")
    runner = second_of(manager_module)
    base = type(runner.cudagraph_manager).__mro__[1]  # vLLM's own class
    monkeypatch.setattr(base, "run_fullgraph", fails)
    with pytest.raises(RuntimeError, match="launch failed"):
        runner.execute_model(3, 3, 1)
    timer = runner.cudagraph_manager.controller.timer
    timer.end()  # as after a pass that vLLM decides
    assert not runner.cudagraph_manager.controller.core.policy.told


def test_outcomes_of_the_second_runner(manager_module, clock, monkeypatch):
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def forward(self, inputs):
            return inputs

    ask(monkeypatch, "vllm")
    monkeypatch.setattr(timing, "SAMPLE_EVERY", 1)
    runner = second_of(manager_module, model=Model())
    policy = runner.cudagraph_manager.controller.core.policy
    assert not policy.told  # silent while it captured
    runner._dummy_run(4)
    assert not policy.told
    for batch in ((3, 3, 1), (3, 1, None), (9, 9, None), (9, 9, None)):
        runner.execute_model(*batch)
    assert [str(outcome.decision.mode.name) for outcome in policy.told] == ["FULL", "PIECEWISE"]
    eager = second_of(manager_module, "FULL_DECODE_ONLY", model=Model())
    told = eager.cudagraph_manager.controller.core.policy.told
    eager.execute_model(3, 1, None)
    eager.execute_model(5, 5, 1)
    assert [outcome.decision.mode.name for outcome in told] == ["NONE", "FULL"]


def test_a_policy_that_learns_later_is_told_of_eager_steps_too(manager_module, clock, monkeypatch):
    """Eager steps are measured only while the active policy learns."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(timing, "SAMPLE_EVERY", 1)
    ask(monkeypatch, "vllm")
    model = torch.nn.Identity()
    runner = manager_module.GPUModelRunner(config(), model)
    manager = runner.cudagraph_manager = manager_module.ModelCudaGraphManager(
        runner.vllm_config, "cpu", CUDAGraphMode.FULL_DECODE_ONLY, 1
    )
    learner = manager.controller.core
    manager.controller.activate(None)
    manager.capture(model)
    runner.execute_model(3, 1, None)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    manager.controller.activate(learner)
    runner.execute_model(3, 1, None)
    runner._dummy_run(3)
    assert [outcome.batch.num_tokens for outcome in learner.policy.told] == [3]
    manager.controller.activate(None)
    assert not model._forward_hooks


@pytest.mark.slow_except("0.33")
def test_a_policy_that_learns_is_refused_on_several_ranks(runner_module, monkeypatch):
    ask(monkeypatch, "adaptive")
    with pytest.raises(ConfigError, match="does not learn, because there are 4 ranks"):
        first_of(runner_module, world_size=2, replicas=2)
    ask(monkeypatch, "composite", members="vllm,adaptive")
    with pytest.raises(ConfigError, match="does not learn, because there are 4 ranks"):
        first_of(runner_module, world_size=2, replicas=2)
    ask(monkeypatch, "composite", members="vllm,threshold")
    assert first_of(runner_module, world_size=2, replicas=2).cudagraph_dispatcher.controller.core


# -- traces and counts ------------------------------------------------------------------


def test_every_step_is_recorded_and_no_other(runner_module, monkeypatch, tmp_path):
    path = tmp_path / "steps.csv.gz"
    monkeypatch.setenv("DISPATCHKIT_TRACE", str(path))
    engine.install()
    runner = first_of(runner_module)
    for batch in BATCHES:
        runner.execute_model(*batch)
        runner._dummy_run(4)
    found = runner.cudagraph_dispatcher.controller
    assert found.core is None
    found.log.flush()
    rows = read_trace(path)
    assert [(row.num_tokens, row.num_reqs, row.uniform_decode) for row in rows] == [
        (tokens, reqs, longest == 1) for tokens, reqs, longest in BATCHES
    ]


def test_a_trace_of_the_second_runner(manager_module, monkeypatch, tmp_path):
    path = tmp_path / "steps.csv"
    monkeypatch.setenv("DISPATCHKIT_TRACE", str(path))
    engine.install()
    runner = second_of(manager_module)
    runner.execute_model(3, 3, 1)
    runner._dummy_run(4)
    runner.execute_model(9, 2, None)
    runner.cudagraph_manager.controller.log.flush()
    assert [(row.num_tokens, row.uniform_decode) for row in read_trace(path)] == [
        (3, True),
        (9, False),
    ]


def test_what_was_written_is_whole_rows_at_any_time(tmp_path):
    log = controller.StepLog(tmp_path / "steps.csv.gz")
    for part in range(3):
        for step in range(100):
            log.add(1 + step, 1, False, 0)
        log.flush()
        text = gzip.decompress(log.path.read_bytes()).decode()
        assert text.endswith("\n")
        assert len(read_trace(log.path)) == 100 * (part + 1)
    log.close()


def test_each_rank_has_a_file_and_an_older_one_is_kept(tmp_path, monkeypatch):
    installed(monkeypatch, modules := first_runner("0.33"))
    monkeypatch.setenv("DISPATCHKIT_TRACE", str(tmp_path / "steps.csv.gz"))
    (tmp_path / "steps-rank1.csv.gz").write_text("older")
    engine.install()
    runner = first_of(modules[first.MODULE], world_size=2, rank=1)
    assert runner.cudagraph_dispatcher.controller.log.path.name == "steps-rank1.csv.gz"
    assert (tmp_path / "steps-rank1.csv.gz~").read_text() == "older"


def test_a_path_that_cannot_be_written_stops_the_start(runner_module, monkeypatch, tmp_path):
    monkeypatch.setenv("DISPATCHKIT_TRACE", str(tmp_path / "missing" / "steps.csv"))
    engine.install()
    with pytest.raises(TraceError, match="DISPATCHKIT_TRACE"):
        first_of(runner_module)


def test_recording_that_fails_later_stops_no_step(tmp_path, caplog):
    log = controller.StepLog(tmp_path / "steps.csv")
    log._file.close()
    for _ in range(2):
        log.add(1, 1, True, 0)
        log.flush()
    assert caplog.text.count("Recording to") == 1
    assert not log._rows


def test_steps_are_counted_by_mode_and_reason(runner_module, monkeypatch, tmp_path):
    path = tmp_path / "engine.prom"
    monkeypatch.setenv("DISPATCHKIT_METRICS", str(path))
    ask(monkeypatch, "threshold", max_tokens=4)
    runner = first_of(runner_module)
    for batch in BATCHES:
        runner.execute_model(*batch)
    runner._dummy_run(4)
    counts = runner.cudagraph_dispatcher.controller.counts
    rows = {
        (row.mode, row.reason): (row.steps, row.real_tokens, row.padded_tokens)
        for row in counts.read()
    }
    assert counts.policy == "threshold"
    assert rows == {
        ("FULL", "hit"): (2, 4, 5),
        ("PIECEWISE", "hit"): (1, 3, 4),
        ("NONE", "above_max_tokens"): (3, 20, 20),
        ("NONE", "vllm"): (1, 9, 9),
    }


def test_counts_name_no_policy_that_does_not_act(runner_module, monkeypatch, tmp_path):
    path = tmp_path / "engine.prom"
    monkeypatch.setenv("DISPATCHKIT_METRICS", str(path))
    ask(monkeypatch, "threshold")
    runner = runner_module.GPUModelRunner(config(mode="NONE"))
    runner.initialize("NONE")
    runner.execute_model(1, 1, 1)
    assert runner.cudagraph_dispatcher.controller.counts.policy == ""
