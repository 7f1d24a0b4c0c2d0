"""Capture sizes for real traffic: planning, simulation, calibration and reports.

Names are imported on first use. Only ``dispatchkit_plan.calibration`` imports torch, because it
runs models. Hints, cost models and ``forecast_memory`` import neither torch nor numpy. Reports are
in ``dispatchkit_plan.report``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dispatchkit_plan.calibration.calibrate import calibrate, load_runner
    from dispatchkit_plan.calibration.capture_memory import forecast
    from dispatchkit_plan.calibration.graph_memory import MemoryMeter, forecast_graph_memory
    from dispatchkit_plan.commands.accounting import explain_trace
    from dispatchkit_plan.costs import (
        BUILTIN_COST_MODELS,
        CostModel,
        Curve,
        load_cost_model,
        save_cost_model,
    )
    from dispatchkit_plan.emitters import EMITTERS, EngineSettings, emit
    from dispatchkit_plan.grid import GridPlan, GridProduct, plan_grid
    from dispatchkit_plan.grid_policy import GridPolicy
    from dispatchkit_plan.hedge import Hedge, HedgeChoice
    from dispatchkit_plan.hints import Hint, free_tokens, hint
    from dispatchkit_plan.memory import MemoryForecast, MemorySample, forecast_memory
    from dispatchkit_plan.own_sizes import OwnSize, OwnSizesPlan, plan_own_sizes
    from dispatchkit_plan.planner import plan_sizes
    from dispatchkit_plan.ranks import Exchange, RankSimulation, simulate_ranks
    from dispatchkit_plan.report.write import write_report
    from dispatchkit_plan.results import Plan, PlannedFamily, RivalResult
    from dispatchkit_plan.rivals import (
        rival_sizes,
        vllm_default_sizes,
        vllm_interactivity_sizes,
    )
    from dispatchkit_plan.scenario import Noise, Scenario
    from dispatchkit_plan.simulation import Simulation, simulate, simulate_all
    from dispatchkit_plan.swap_forecast import SwapForecast, forecast_swap
    from dispatchkit_plan.token_budget import TokenBudget
    from dispatchkit_plan.traffic import read_steps, read_workload

_LAZY_NAMES = {
    "BUILTIN_COST_MODELS": "costs",
    "CostModel": "costs",
    "Curve": "costs",
    "EMITTERS": "emitters",
    "EngineSettings": "emitters",
    "Exchange": "ranks",
    "GridPlan": "grid",
    "GridPolicy": "grid_policy",
    "GridProduct": "grid",
    "Hedge": "hedge",
    "HedgeChoice": "hedge",
    "Hint": "hints",
    "MemoryForecast": "memory",
    "MemoryMeter": "calibration.graph_memory",
    "MemorySample": "memory",
    "Noise": "scenario",
    "OwnSize": "own_sizes",
    "OwnSizesPlan": "own_sizes",
    "Plan": "results",
    "PlannedFamily": "results",
    "RankSimulation": "ranks",
    "RivalResult": "results",
    "Scenario": "scenario",
    "Simulation": "simulation",
    "SwapForecast": "swap_forecast",
    "TokenBudget": "token_budget",
    "calibrate": "calibration.calibrate",
    "emit": "emitters",
    "explain_trace": "commands.accounting",
    "forecast": "calibration.capture_memory",
    "forecast_graph_memory": "calibration.graph_memory",
    "forecast_memory": "memory",
    "forecast_swap": "swap_forecast",
    "free_tokens": "hints",
    "hint": "hints",
    "load_cost_model": "costs",
    "load_runner": "calibration.calibrate",
    "plan_grid": "grid",
    "plan_own_sizes": "own_sizes",
    "plan_sizes": "planner",
    "read_steps": "traffic",
    "read_workload": "traffic",
    "rival_sizes": "rivals",
    "save_cost_model": "costs",
    "simulate": "simulation",
    "simulate_all": "simulation",
    "simulate_ranks": "ranks",
    "vllm_default_sizes": "rivals",
    "vllm_interactivity_sizes": "rivals",
    "write_report": "report.write",
}

__all__ = [
    "BUILTIN_COST_MODELS",
    "EMITTERS",
    "CostModel",
    "Curve",
    "EngineSettings",
    "Exchange",
    "GridPlan",
    "GridPolicy",
    "GridProduct",
    "Hedge",
    "HedgeChoice",
    "Hint",
    "MemoryForecast",
    "MemoryMeter",
    "MemorySample",
    "Noise",
    "OwnSize",
    "OwnSizesPlan",
    "Plan",
    "PlannedFamily",
    "RankSimulation",
    "RivalResult",
    "Scenario",
    "Simulation",
    "SwapForecast",
    "TokenBudget",
    "calibrate",
    "emit",
    "explain_trace",
    "forecast",
    "forecast_graph_memory",
    "forecast_memory",
    "forecast_swap",
    "free_tokens",
    "hint",
    "load_cost_model",
    "load_runner",
    "plan_grid",
    "plan_own_sizes",
    "plan_sizes",
    "read_steps",
    "read_workload",
    "rival_sizes",
    "save_cost_model",
    "simulate",
    "simulate_all",
    "simulate_ranks",
    "vllm_default_sizes",
    "vllm_interactivity_sizes",
    "write_report",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY_NAMES)
