"""Stand-ins for vLLM's modules: both model runners, a worker, and the classes they look up.

The dispatcher classes are this distribution's facades, which answer as vLLM's do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm_test_helpers import vllm_config

from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.facade import v0_13, v0_33, v0_33_manager

#: Releases whose dispatchers of the first runner differ in form.
FORMS = ("0.12", "0.13", "0.33")


def config(**facts: Any) -> Any:
    """Return a vLLM configuration with the fields that the engine part reads."""
    made = vllm_config(**{key: value for key, value in facts.items() if key not in _OWN})
    made.parallel_config.world_size = facts.get("world_size", 1)
    made.parallel_config.data_parallel_size = facts.get("replicas", 1)
    made.parallel_config.rank = facts.get("rank", 0)
    made.device_config = SimpleNamespace(device_type=facts.get("device", "cpu"))
    made.additional_config = facts.get("additional_config", {})
    return made


_OWN = {"world_size", "replicas", "rank", "device", "additional_config"}


def first_runner(form: str) -> dict[str, ModuleType]:
    """Return the modules of the first runner by name."""
    facade = v0_33 if form == "0.33" else v0_13
    defined = ModuleType("vllm.v1.cudagraph_dispatcher")
    defined.CUDAGraphMode = CUDAGraphMode
    defined.BatchDescriptor = facade.BatchDescriptor
    own: dict[str, Any] = {"__module__": defined.__name__}
    if form == "0.12":

        def dispatch(self, num_tokens, uniform_decode, has_lora, use_cascade_attn=False):
            return facade.CudagraphDispatcher.dispatch(
                self, num_tokens, uniform_decode, has_lora, use_cascade_attn
            )

        own["dispatch"] = dispatch
    defined.CudagraphDispatcher = type("CudagraphDispatcher", (facade.CudagraphDispatcher,), own)
    runner = ModuleType("vllm.v1.worker.gpu_model_runner")
    runner.CudagraphDispatcher = defined.CudagraphDispatcher
    drafter = ModuleType("vllm.v1.spec_decode.eagle")
    drafter.CudagraphDispatcher = defined.CudagraphDispatcher

    class GPUModelRunner:
        """Steps as vLLM's runner: dispatches, with other ranks twice, and runs the model."""

        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config
            self.cudagraph_dispatcher = runner.CudagraphDispatcher(vllm_config)
            self.uniform_decode_query_len = 1
            self.input_batch = SimpleNamespace(lora_id_to_lora_request={})
            self.agreed: int | None = None
            self.ran: list[Any] = []

        def initialize(self, mode: str) -> None:
            self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], 1)

        def _determine_batch_execution_and_padding(
            self, num_tokens, num_reqs, max_num_scheduled_tokens, force_uniform_decode=None
        ):
            uniform = max_num_scheduled_tokens == 1 and num_tokens == num_reqs
            facts = {
                "uniform_decode": uniform if force_uniform_decode is None else force_uniform_decode,
                "has_lora": False,
            }
            dispatch = self.cudagraph_dispatcher.dispatch
            mode, descriptor = dispatch(num_tokens=num_tokens, **facts)
            if self.agreed is not None:
                if form == "0.33":
                    facts["valid_modes"] = {mode}
                mode, descriptor = dispatch(num_tokens=self.agreed, **facts)
            return mode, descriptor, False, None, None

        def _model_forward(self, *args: Any) -> Any:
            self.ran.append(args)
            return args

        def _dummy_run(self, num_tokens, uniform_decode=False):
            found = self._determine_batch_execution_and_padding(
                num_tokens=num_tokens,
                num_reqs=num_tokens,
                max_num_scheduled_tokens=1,
                force_uniform_decode=uniform_decode,
            )
            self._model_forward(found)
            return found[:2]

        def execute_model(self, num_tokens, num_reqs, longest):
            found = self._determine_batch_execution_and_padding(
                num_tokens=num_tokens, num_reqs=num_reqs, max_num_scheduled_tokens=longest
            )
            self._model_forward(found)
            return found[:2]

    runner.GPUModelRunner = GPUModelRunner
    return {module.__name__: module for module in (defined, runner, drafter)}


def second_runner() -> dict[str, ModuleType]:
    """Return the modules of the second runner by name."""
    defined = ModuleType("vllm.v1.worker.gpu.cudagraph_utils")
    defined.CUDAGraphMode = v0_33_manager.CUDAGraphMode
    defined.BatchExecutionDescriptor = v0_33_manager.BatchExecutionDescriptor

    class ModelCudaGraphManager(v0_33_manager.CudaGraphManager):
        """Dispatches as vLLM's manager does; its graphs are names."""

        __module__ = defined.__name__

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._capture_descs = self.capture_descs
            self.replayed: list[Any] = []

        @property
        def _graphs_captured(self) -> bool:
            return self.graphs_captured

        @_graphs_captured.setter
        def _graphs_captured(self, value: bool) -> None:
            self.graphs_captured = value

        def capture(self, model: Any, *args: Any) -> None:
            for _ in self._capture_descs:
                model("captured")
            self._graphs_captured = True

        def run_fullgraph(self, descriptor: Any) -> str:
            self.replayed.append(descriptor)
            return "full"

        def run_pw_graph(self, model: Any, inputs: Any) -> Any:
            return model(inputs)

    defined.ModelCudaGraphManager = ModelCudaGraphManager
    runner = ModuleType("vllm.v1.worker.gpu.model_runner")
    runner.ModelCudaGraphManager = ModelCudaGraphManager

    def dispatch_cg_and_sync_dp(
        cudagraph_manager,
        num_reqs,
        num_tokens,
        uniform_token_count,
        dp_size=1,
        dp_rank=0,
        need_eager=False,
        num_active_loras=0,
    ):
        if need_eager:
            none = defined.CUDAGraphMode["NONE"]
            return defined.BatchExecutionDescriptor(none, num_tokens, num_reqs), None
        descriptor = cudagraph_manager.dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras=num_active_loras
        )
        if dp_size > 1:
            descriptor = cudagraph_manager.dispatch(
                num_reqs, 8, uniform_token_count, num_active_loras=num_active_loras
            )
        return descriptor, None

    runner.dispatch_cg_and_sync_dp = dispatch_cg_and_sync_dp

    class GPUModelRunner:
        """Steps as vLLM's second runner does."""

        def __init__(self, vllm_config: Any, model: Any = None) -> None:
            self.vllm_config = vllm_config
            self.model = model or (lambda inputs: inputs)
            self.cudagraph_manager: Any = None
            self.dp_size = 1

        def initialize(self, mode: str, **options: Any) -> None:
            self.cudagraph_manager = runner.ModelCudaGraphManager(
                self.vllm_config, "cpu", CUDAGraphMode[mode], 1, **options
            )
            self.cudagraph_manager.capture(self.model)

        def execute_model(self, num_tokens, num_reqs, uniform, loras=0):
            found, _ = runner.dispatch_cg_and_sync_dp(
                self.cudagraph_manager,
                num_reqs,
                num_tokens,
                uniform,
                self.dp_size,
                0,
                num_active_loras=loras,
            )
            manager = self.cudagraph_manager
            if found.cg_mode.name == "FULL":
                manager.run_fullgraph(found)
            elif found.cg_mode.name == "PIECEWISE":
                manager.run_pw_graph(self.model, "pieces")
            else:
                self.model("eager")
            return found

        def _dummy_run(self, num_tokens, **options: Any):
            return self.execute_model(num_tokens, num_tokens, None)

    runner.GPUModelRunner = GPUModelRunner
    return {module.__name__: module for module in (defined, runner)}


def worker_module() -> dict[str, ModuleType]:
    """Return the module of vLLM's worker by name."""
    module = ModuleType("vllm.v1.worker.worker_base")

    class Worker:
        """Warms up by a step that looks like a request's, as the second runner does."""

        def __init__(self, runner: Any) -> None:
            self.model_runner = runner

        def compile_or_warm_up_model(self) -> Any:
            return self.model_runner.execute_model(8, 8, None)

    class WorkerWrapperBase:
        """Holds a worker and allocates its KV cache."""

        def __init__(self, runner: Any) -> None:
            self.worker = Worker(runner)
            self.vllm_config = runner.vllm_config

        def initialize_from_config(self, mode: str) -> None:
            self.worker.model_runner.initialize(mode)

    module.WorkerWrapperBase = WorkerWrapperBase
    return {module.__name__: module}


def installed(monkeypatch: Any, *groups: dict[str, ModuleType]) -> Iterator[None]:
    """Install modules under vLLM's names."""
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.spec_decode"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    sys.modules["vllm"].__version__ = "0.0.test"
    for group in groups:
        for name, module in group.items():
            monkeypatch.setitem(sys.modules, name, module)
