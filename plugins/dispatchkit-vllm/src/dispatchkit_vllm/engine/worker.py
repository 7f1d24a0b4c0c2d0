"""Once a worker has initialized its model runner, log the policy, or why no policy acts.

Afterwards, the worker warms up and captures. In the second model runner, warmup steps look like
steps that serve requests, so they are treated as dummy runs.
"""

from __future__ import annotations

import functools
import sys
from types import MethodType, ModuleType
from typing import Any

from dispatchkit.errors import BackendUnavailableError

from dispatchkit_vllm.engine import first, second
from dispatchkit_vllm.engine.controller import as_dummy_run, settings_of
from dispatchkit_vllm.engine.core import check_policy
from dispatchkit_vllm.engine.log import log

__all__ = ["MODULE", "attach", "detach", "inactive_reason"]

MODULE = "vllm.v1.worker.worker_base"
_WRAPPER, _METHOD = "WorkerWrapperBase", "initialize_from_config"
_WARM_UP = "compile_or_warm_up_model"


def attach(module: ModuleType) -> None:
    """Make each worker call ``report`` once it has initialized its model runner."""
    wrapper = getattr(module, _WRAPPER)
    own = getattr(wrapper, _METHOD)
    if hasattr(own, "replaces"):
        return

    @functools.wraps(own)
    def initialize_from_config(self: Any, *args: Any, **options: Any) -> Any:
        found = own(self, *args, **options)
        report(getattr(self.worker, "model_runner", None), self.vllm_config)
        if not settings_of(self.vllm_config).is_empty:
            _suspend_during_warm_up(self.worker)
        return found

    initialize_from_config.replaces = own  # type: ignore[attr-defined]
    setattr(wrapper, _METHOD, initialize_from_config)


def detach(module: ModuleType) -> None:
    """Restore vLLM's method, so that workers no longer call ``report``."""
    wrapper = getattr(module, _WRAPPER)
    own = getattr(wrapper, _METHOD)
    setattr(wrapper, _METHOD, getattr(own, "replaces", own))


def _suspend_during_warm_up(worker: Any) -> None:
    """Treat a worker's warmup as a dummy run."""
    own = getattr(type(worker), _WARM_UP, None)
    if own is not None:
        warm_up = as_dummy_run(own, lambda one: _controller_of(getattr(one, "model_runner", None)))
        setattr(worker, _WARM_UP, MethodType(warm_up, worker))


def report(runner: Any, vllm_config: Any) -> None:
    """Log the active policy and the trace file of a model runner, or why they have no effect.

    Raises:
        BackendUnavailableError: With ``strict``: the configured policy cannot act, or steps cannot
            be recorded or counted.
        UnknownNameError: No policy has the configured name, or a setting is unknown.
        ConfigError: A setting or an option of the policy is invalid.
    """
    settings = settings_of(vllm_config)
    if settings.is_empty:
        return
    reason = inactive_reason(runner)
    controller = _controller_of(runner)
    if controller is not None and not reason:
        if controller.summary:
            log.info("%s", controller.summary)
        if controller.log is not None:
            log.info("Steps are recorded to %s.", controller.log.path)
        return
    check_policy(settings)  # no policy was created, but invalid options must raise an error
    names = [
        name for name in ("policy", "policy_options", "trace", "metrics") if getattr(settings, name)
    ]
    text = f"Steps cannot be recorded or counted: {reason}."
    if settings.policy:
        text = f"Policy {settings.policy!r} is configured but cannot act: {reason}."
        # If only the policy cannot act, the other settings take effect.
        if controller is not None and reason == controller.inactive_reason:
            names = [name for name in names if name.startswith("policy")]
    variables = ", ".join(f"DISPATCHKIT_{name.upper()}" for name in names)
    remove = f"remove the setting {names[0]} ({variables})"
    if len(names) > 1:
        remove = f"remove the settings {', '.join(names[:-1])} and {names[-1]} ({variables})"
    if settings.strict:
        raise BackendUnavailableError(
            f"{text} To start anyway, turn off the setting strict (DISPATCHKIT_STRICT), or "
            f"{remove}."
        )
    if settings.policy:
        text += " vLLM's own dispatcher decides."
    log.warning("%s To avoid this warning, %s.", text, remove)


def inactive_reason(runner: Any) -> str:
    """Return why the configured policy does not act in a runner, or ""."""
    controller = _controller_of(runner)
    if controller is not None:
        step = getattr(type(runner), first._STEP, None)  # noqa: SLF001 - the same package
        if hasattr(runner, "cudagraph_dispatcher") and not hasattr(step, "__wrapped__"):
            return f"{type(runner).__name__} overrides {first._STEP}"  # noqa: SLF001
        return str(controller.inactive_reason)
    version = getattr(sys.modules.get("vllm"), "__version__", "(unknown version)")
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        unknown = first.unsupported_reason(type(dispatcher))
        if unknown:
            return f"vLLM {version} is not supported: {unknown}"
        return f"vLLM's runner imported {first.DISPATCHER} before dispatchkit was loaded"
    module = sys.modules.get(type(runner).__module__)
    if module is not None and hasattr(module, second.MANAGER):
        unknown = second.unsupported_reason(module)
        if unknown:
            return f"the second model runner of vLLM {version} is not supported: {unknown}"
        return f"the second model runner of vLLM {version} created no {second.MANAGER}"
    if hasattr(runner, "cudagraph_manager"):
        return (
            f"the second model runner of vLLM {version} is not supported: "
            f"{type(runner).__module__} has no {second.MANAGER}, as in releases before 0.20"
        )
    return f"{type(runner).__module__}.{type(runner).__name__} has no CUDA graph dispatcher"


def _controller_of(runner: Any) -> Any:
    for name in ("cudagraph_dispatcher", "cudagraph_manager"):
        controller = getattr(getattr(runner, name, None), "controller", None)
        if controller is not None:
            return controller
    return None
