"""vLLM's own runner on this core: the entry point of the group ``vllm.general_plugins``.

With ``DISPATCHKIT_POLICY`` set to a policy's name, the runner's dispatcher becomes one that
is backed by that policy. Without it nothing changes. vLLM calls ``install`` in each of its
processes, possibly more than once.

What is swapped is a class, in every loaded module that names it: the runner looks the name
up in its own module when it is built, whichever of the two was imported first.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from dispatchkit import load_plugins
from dispatchkit.errors import BackendUnavailableError

from dispatchkit_vllm.facade import v0_13, v0_33

__all__ = ["DISPATCHER", "VARIABLE", "install", "uninstall"]

#: The environment variable that names the policy.
VARIABLE = "DISPATCHKIT_POLICY"
#: The name that vLLM's runner looks up.
DISPATCHER = "CudagraphDispatcher"
_MODULE = "vllm.v1.cudagraph_dispatcher"
# The release's own rule goes by this name; it needs no policy in front of the facade.
_OWN_RULE = "vllm"

_log = logging.getLogger(__name__)


def install() -> None:
    """Swap the dispatcher that vLLM's runner builds, if a policy is asked for.

    Raises:
        UnknownNameError: No policy goes by that name; it names the nearest ones.
        BackendUnavailableError: The installed vLLM keeps its dispatcher elsewhere, or has
            one that is not known here.
    """
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return
    original = _original()
    replacement = _replacement(original, name)
    _rebind(_current(), replacement)
    _log.info("vLLM's %s is backed by dispatchkit's policy %r.", DISPATCHER, name)


def uninstall() -> None:
    """Put vLLM's own dispatcher back, where it was swapped."""
    current = _current()
    _rebind(current, getattr(current, "replaces", current))


def _current() -> Any:
    try:
        return getattr(importlib.import_module(_MODULE), DISPATCHER)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"{VARIABLE} is set, but {_MODULE}.{DISPATCHER} cannot be imported ({error}). "
            f"Known are vLLM 0.13 and 0.33; unset {VARIABLE} for others."
        ) from error


def _original() -> Any:
    current = _current()
    return getattr(current, "replaces", current)


def _replacement(original: Any, name: str) -> type[Any]:
    """Return a dispatcher of the installed release's form, backed by a policy."""
    defined = sys.modules[original.__module__]
    descriptor_type, mode_type = defined.BatchDescriptor, defined.CUDAGraphMode
    fields = getattr(descriptor_type, "__annotations__", {})
    if "num_active_loras" in fields:
        facade: type[Any] = v0_33.CudagraphDispatcher
    elif "num_reqs" in fields:
        facade = v0_13.CudagraphDispatcher
    else:
        raise BackendUnavailableError(
            f"vLLM's batch descriptor has the fields {sorted(fields)}, which is neither that "
            f"of 0.13 nor of 0.33. Unset {VARIABLE}, or install one of these releases."
        )
    plugins = load_plugins()
    plugins.get_policy(name)  # a wrong name is told now, not when the runner is built

    def build(self: Any, vllm_config: Any) -> None:
        policy = None if name == _OWN_RULE else plugins.create_policy(name)
        facade.__init__(self, vllm_config, policy)

    return type(
        DISPATCHER,
        (facade,),
        {
            "__init__": build,
            "__module__": __name__,
            "__doc__": f"vLLM's dispatcher, backed by dispatchkit's policy {name!r}.",
            "mode_type": mode_type,
            "descriptor_type": descriptor_type,
            "breaks_graphs": staticmethod(_breaks_graphs),
            "replaces": original,
            "policy_name": name,
        },
    )


def _breaks_graphs() -> bool:
    try:
        module = importlib.import_module("vllm.compilation.breakable_cudagraph")
    except ImportError:
        return False  # releases before it have no such graphs
    return bool(module.is_breakable_cudagraph_enabled())


def _rebind(old: Any, new: Any) -> None:
    for module in _modules_of_vllm():
        if vars(module).get(DISPATCHER) is old:
            setattr(module, DISPATCHER, new)


def _modules_of_vllm() -> Iterator[Any]:
    for name, module in tuple(sys.modules.items()):
        if name == "vllm" or name.startswith("vllm."):
            yield module
