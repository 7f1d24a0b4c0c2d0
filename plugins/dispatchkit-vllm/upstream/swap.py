"""A pytest plugin that replaces the classes imported by vLLM's tests with dispatchkit's classes."""

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
    """Return a subclass whose ``dispatch`` opens a step first, because the tests have no runner."""

    def dispatch(self: Any, *args: Any, **options: Any) -> Any:
        self.controller.open()
        return policy_class.dispatch(self, *args, **options)

    return type(policy_class.__name__, (policy_class,), {"dispatch": dispatch})


def _helpers() -> None:
    """Replace vLLM's test helpers, which import a whole server.

    The tests use only one helper, which runs each GPU test in a new process.
    """
    helpers = ModuleType("tests.utils")
    helpers.create_new_process_for_each_test = lambda *_: lambda test: test  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = helpers


class Swap:
    """Pytest plugin that replaces classes before a test module is imported.

    Args:
        what: ``facade`` for the facade of the release, which decides without vLLM's code, or
            ``engine`` for the class that vLLM uses with ``DISPATCHKIT_POLICY=vllm``.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def pytest_configure(self, config: Any) -> None:
        """Replace the classes."""
        _helpers()
        module = importlib.import_module(DISPATCHER)
        original = module.CudagraphDispatcher
        if self._what == "facade":
            module.CudagraphDispatcher = dispatcher_for(original)
            return
        os.environ["DISPATCHKIT_POLICY"] = "vllm"
        if not first.unsupported_reason(original):
            module.CudagraphDispatcher = _as_steps(first.dispatcher_class(original))
        if any("test_cudagraph_manager" in str(arg) for arg in config.args):
            manager = importlib.import_module(MANAGER)
            manager.CudaGraphManager = _as_steps(second.manager_class(manager.CudaGraphManager))
