"""dispatchkit inside vLLM, through the entry point group ``vllm.general_plugins``.

vLLM calls ``install`` in each of its processes. With ``DISPATCHKIT_POLICY`` (or ``policy`` under
``dispatchkit`` in ``additional_config``), a policy chooses among the graphs of vLLM's model runner.
``DISPATCHKIT_TRACE`` records steps, and ``DISPATCHKIT_METRICS`` exports counters. Without these
settings, vLLM uses its own classes, and steps have no overhead.
"""

from __future__ import annotations

import os
import sys

from dispatchkit_vllm.engine import first, second, worker
from dispatchkit_vllm.engine.controller import StepController
from dispatchkit_vllm.engine.core import UnfitPolicyError, check_policy
from dispatchkit_vllm.engine.imports import clear_import_hooks, when_imported
from dispatchkit_vllm.engine.settings import EngineSettings

__all__ = [
    "VARIABLE",
    "EngineSettings",
    "StepController",
    "UnfitPolicyError",
    "install",
    "uninstall",
]

#: Environment variable with the name of the policy.
VARIABLE = "DISPATCHKIT_POLICY"

_ACTIONS = {
    first.MODULE: first.attach,
    second.MODULE: second.attach,
    worker.MODULE: worker.attach,
}


def install() -> None:
    """Patch vLLM's model runners when they are imported.

    Raises:
        UnknownNameError: No policy has the configured name, or an environment variable is unknown.
            The error suggests similar names.
        ConfigError: A setting or an option of the policy is invalid.
    """
    # Without this check, a worker would fail minutes later.
    check_policy(EngineSettings.read(os.environ))
    for module, act in _ACTIONS.items():
        when_imported(module, act)


def uninstall() -> None:
    """Restore vLLM's own classes for runners created after this call."""
    clear_import_hooks()
    for module in (first, second, worker):
        loaded = sys.modules.get(module.MODULE)
        if loaded is not None:
            module.detach(loaded)
