"""dispatchkit inside vLLM: the entry point of the group ``vllm.general_plugins``.

vLLM calls ``install`` in each of its processes. With ``DISPATCHKIT_POLICY`` (or ``policy`` under
``dispatchkit`` in ``additional_config``), a policy chooses among the graphs of vLLM's model
runner; with ``DISPATCHKIT_TRACE`` and ``DISPATCHKIT_METRICS``, steps are recorded and counted.
Without any of them vLLM uses its own classes, and nothing is added to a step.
"""

from __future__ import annotations

import os
import sys

from dispatchkit_vllm.engine import first, second, worker
from dispatchkit_vllm.engine.core import UnfitPolicyError, check_policy
from dispatchkit_vllm.engine.imports import forget_imports, when_imported
from dispatchkit_vllm.engine.settings import EngineSettings
from dispatchkit_vllm.engine.station import Station

__all__ = [
    "VARIABLE",
    "EngineSettings",
    "Station",
    "UnfitPolicyError",
    "install",
    "uninstall",
]

#: The environment variable that names the policy.
VARIABLE = "DISPATCHKIT_POLICY"

_ACTIONS = {
    first.MODULE: first.attach,
    second.MODULE: second.attach,
    worker.MODULE: worker.attach,
}


def install() -> None:
    """Patch vLLM's model runners as soon as they are imported.

    Raises:
        UnknownNameError: No policy has the given name; the message suggests similar ones.
        ConfigError: A setting or an option of the policy is invalid.
    """
    # Check here: a worker would fail minutes later.
    check_policy(EngineSettings.read(os.environ))
    for module, act in _ACTIONS.items():
        when_imported(module, act)


def uninstall() -> None:
    """Restore vLLM's own classes for runners that are created from now on."""
    forget_imports()
    for module in (first, second, worker):
        loaded = sys.modules.get(module.MODULE)
        if loaded is not None:
            module.detach(loaded)
