"""Report what the policy does once a worker has its graphs, or why it cannot act.

The worker warms up afterwards. The second model runner's warmup steps look like those of
requests, and must not be treated as such.
"""

from __future__ import annotations

import functools
import sys
from types import MethodType, ModuleType
from typing import Any

from dispatchkit.errors import BackendUnavailableError

from dispatchkit_vllm.engine import first, second
from dispatchkit_vllm.engine.core import check_policy
from dispatchkit_vllm.engine.log import log
from dispatchkit_vllm.engine.station import as_dummy, settings_of

__all__ = ["MODULE", "attach", "detach", "why_not"]

MODULE = "vllm.v1.worker.worker_base"
_WRAPPER, _METHOD = "WorkerWrapperBase", "initialize_from_config"
_WARM_UP = "compile_or_warm_up_model"


def attach(module: ModuleType) -> None:
    """Have workers report once their graphs are known."""
    wrapper = getattr(module, _WRAPPER)
    own = getattr(wrapper, _METHOD)
    if hasattr(own, "replaces"):
        return

    @functools.wraps(own)
    def initialize_from_config(self: Any, *args: Any, **options: Any) -> Any:
        found = own(self, *args, **options)
        report(getattr(self.worker, "model_runner", None), self.vllm_config)
        if not settings_of(self.vllm_config).is_empty:
            _leave_out_warm_up(self.worker)
        return found

    initialize_from_config.replaces = own  # type: ignore[attr-defined]
    setattr(wrapper, _METHOD, initialize_from_config)


def detach(module: ModuleType) -> None:
    """Stop workers from reporting."""
    wrapper = getattr(module, _WRAPPER)
    own = getattr(wrapper, _METHOD)
    setattr(wrapper, _METHOD, getattr(own, "replaces", own))


def _leave_out_warm_up(worker: Any) -> None:
    """Decide, record and measure nothing while a worker warms up."""
    own = getattr(type(worker), _WARM_UP, None)
    if own is not None:
        warm_up = as_dummy(own, lambda one: _station(getattr(one, "model_runner", None)))
        setattr(worker, _WARM_UP, MethodType(warm_up, worker))


def report(runner: Any, vllm_config: Any) -> None:
    """Log what is active in a model runner.

    Raises:
        BackendUnavailableError: The configured policy cannot act there, and the settings are
            strict.
        UnknownNameError: No policy has the configured name.
        ConfigError: A setting or an option of the policy is invalid.
    """
    settings = settings_of(vllm_config)
    if settings.is_empty:
        return
    reason = why_not(runner)
    station = _station(runner)
    if station is not None and not reason:
        if station.summary:
            log.info("%s", station.summary)
        if station.log is not None:
            log.info("Steps are recorded to %s.", station.log.path)
        return
    check_policy(settings)  # nothing created it here, and wrong options must always stop the start
    asked = f"Policy {settings.policy!r}" if settings.policy else "A recorder"
    text = f"{asked} is configured but cannot act: {reason}. vLLM's own dispatcher decides."
    if settings.strict:
        raise BackendUnavailableError(
            f"{text} Unset DISPATCHKIT_STRICT to start all the same, or DISPATCHKIT_POLICY."
        )
    log.warning("%s", text)


def why_not(runner: Any) -> str:
    """Return why the configured policy does not act in a runner; empty if it does."""
    station = _station(runner)
    if station is not None:
        step = getattr(type(runner), first._STEP, None)  # noqa: SLF001 - the same package
        if hasattr(runner, "cudagraph_dispatcher") and not hasattr(step, "__wrapped__"):
            return f"{type(runner).__name__} overrides how its steps are decided"
        return str(station.why_not)
    version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        unknown = first.why_unknown(type(dispatcher)) or "its runner imported the class early"
        return f"vLLM {version} is not supported: {unknown}"
    module = sys.modules.get(type(runner).__module__)
    if module is not None and hasattr(module, second.MANAGER):
        unknown = second.why_unknown(module) or "it built no graph manager"
        return f"vLLM {version} is not supported in its second model runner: {unknown}"
    if hasattr(runner, "cudagraph_manager"):
        return f"vLLM {version} is not supported in its second model runner, as before 0.20"
    return f"{type(runner).__module__}.{type(runner).__name__} has no CUDA graph dispatcher"


def _station(runner: Any) -> Any:
    for name in ("cudagraph_dispatcher", "cudagraph_manager"):
        station = getattr(getattr(runner, name, None), "station", None)
        if station is not None:
            return station
    return None
