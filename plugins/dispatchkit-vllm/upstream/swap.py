"""A pytest plugin: puts dispatchkit's classes where vLLM's own tests import them from."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from dispatchkit_vllm.engine import first, second
from dispatchkit_vllm.facade import dispatcher_for

DISPATCHER, MANAGER = "vllm.v1.cudagraph_dispatcher", "vllm.v1.worker.gpu.cudagraph_utils"


def _as_steps(policy_class: type[Any]) -> type[Any]:
    """Let each call of ``dispatch`` be a step, since the tests have no runner."""

    def dispatch(self: Any, *args: Any, **options: Any) -> Any:
        self.station.open()
        return policy_class.dispatch(self, *args, **options)

    return type(policy_class.__name__, (policy_class,), {"dispatch": dispatch})


def _helpers() -> None:
    """Stand in for vLLM's test helpers, which import a whole server.

    The one used here starts a process for tests that need a GPU.
    """
    helpers = ModuleType("tests.utils")
    helpers.create_new_process_for_each_test = lambda *_: lambda test: test  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = helpers


class Swap:
    """Puts classes there before a test module is imported.

    Args:
        what: ``facade``, the facade of the release, which decides without vLLM's code; or
            ``engine``, what ``DISPATCHKIT_POLICY=vllm`` builds, each call being a step.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def pytest_configure(self, config: Any) -> None:
        """Put them there."""
        _helpers()
        module = importlib.import_module(DISPATCHER)
        original = module.CudagraphDispatcher
        if self._what == "facade":
            module.CudagraphDispatcher = dispatcher_for(original)
            return
        os.environ["DISPATCHKIT_POLICY"] = "vllm"
        if not first.why_unknown(original):
            module.CudagraphDispatcher = _as_steps(first.dispatcher_class(original))
        if any("test_cudagraph_manager" in str(arg) for arg in config.args):
            manager = importlib.import_module(MANAGER)
            manager.CudaGraphManager = _as_steps(second.manager_class(manager.CudaGraphManager))
