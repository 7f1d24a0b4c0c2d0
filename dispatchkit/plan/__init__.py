"""Capture sizes that fit the traffic: planner, cost models, settings for other engines.

Names are loaded on first use. Planning needs numpy (``pip install 'dispatchkit[plan]'``);
hints, cost models and the memory forecast do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dispatchkit.errors import BackendUnavailableError

if TYPE_CHECKING:
    from dispatchkit.plan.costs import (
        BUILTIN_COST_MODELS,
        CostModel,
        Curve,
        load_cost_model,
        save_cost_model,
    )
    from dispatchkit.plan.emitters import EMITTERS, Emitted, emit
    from dispatchkit.plan.hedge import Hedge, HedgeChoice
    from dispatchkit.plan.hints import Hint, free_tokens, hint
    from dispatchkit.plan.memory import MemoryForecast, MemorySample, forecast_memory
    from dispatchkit.plan.planner import plan_sizes
    from dispatchkit.plan.results import Plan, PlannedFamily, RivalResult
    from dispatchkit.plan.rivals import (
        rival_sizes,
        vllm_default_sizes,
        vllm_interactivity_sizes,
    )
    from dispatchkit.plan.scenario import Noise, Scenario, trace_config
    from dispatchkit.plan.simulation import Simulation, simulate, simulate_all
    from dispatchkit.plan.token_budget import TokenBudget

_HOME = {
    "BUILTIN_COST_MODELS": "costs",
    "CostModel": "costs",
    "Curve": "costs",
    "EMITTERS": "emitters",
    "Emitted": "emitters",
    "Hedge": "hedge",
    "HedgeChoice": "hedge",
    "Hint": "hints",
    "MemoryForecast": "memory",
    "MemorySample": "memory",
    "Noise": "scenario",
    "Plan": "results",
    "PlannedFamily": "results",
    "RivalResult": "results",
    "Scenario": "scenario",
    "Simulation": "simulation",
    "TokenBudget": "token_budget",
    "emit": "emitters",
    "forecast_memory": "memory",
    "free_tokens": "hints",
    "hint": "hints",
    "load_cost_model": "costs",
    "plan_sizes": "planner",
    "rival_sizes": "rivals",
    "save_cost_model": "costs",
    "simulate": "simulation",
    "simulate_all": "simulation",
    "trace_config": "scenario",
    "vllm_default_sizes": "rivals",
    "vllm_interactivity_sizes": "rivals",
}

__all__ = [
    "BUILTIN_COST_MODELS",
    "EMITTERS",
    "CostModel",
    "Curve",
    "Emitted",
    "Hedge",
    "HedgeChoice",
    "Hint",
    "MemoryForecast",
    "MemorySample",
    "Noise",
    "Plan",
    "PlannedFamily",
    "RivalResult",
    "Scenario",
    "Simulation",
    "TokenBudget",
    "emit",
    "forecast_memory",
    "free_tokens",
    "hint",
    "load_cost_model",
    "plan_sizes",
    "rival_sizes",
    "save_cost_model",
    "simulate",
    "simulate_all",
    "trace_config",
    "vllm_default_sizes",
    "vllm_interactivity_sizes",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise BackendUnavailableError(
            "Planning needs numpy, which is not installed. Run: pip install 'dispatchkit[plan]'"
        ) from error
    value = getattr(module, name)
    globals()[name] = value  # the next access does not come here
    return value
