"""Policies, decisions, hard constraints and the dispatcher."""

from dispatchkit.dispatch.axes import PlainView, declares_axes
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.cost_model import CostModel, StepCost, decision_us, find_cost_model
from dispatchkit.dispatch.decision import (
    CalibrationRun,
    CellUpdate,
    Decision,
    Outcome,
    Part,
    Reason,
    format_keys,
)
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.dispatch.explain import Explanation, MeasuredTime, explain
from dispatchkit.dispatch.lanes import (
    LANE_TRAITS,
    KeyedLanePolicy,
    KeyPlacement,
    KeyPlacementPolicy,
    LanePolicy,
    Lanes,
    LaneState,
    PendingStep,
    PrioritizedLanePolicy,
    lane_fault,
    lane_priorities,
    lanes_by_key,
    needs_key,
)
from dispatchkit.dispatch.packing import Packer, PackingLimits, pack_items
from dispatchkit.dispatch.policy import (
    TRAITS,
    CalibratedPolicy,
    DescribedPolicy,
    ExplainingPolicy,
    GraphView,
    LearningPolicy,
    PacedPolicy,
    Policy,
    PolicyParts,
    policy_name,
    policy_traits,
)
from dispatchkit.dispatch.splitting import MAX_PARTS, greedy_parts
from dispatchkit.dispatch.table import Row

__all__ = [
    "LANE_TRAITS",
    "MAX_PARTS",
    "TRAITS",
    "CalibratedPolicy",
    "CalibrationRun",
    "CellUpdate",
    "CostModel",
    "Decision",
    "DescribedPolicy",
    "Dispatcher",
    "ExplainingPolicy",
    "Explanation",
    "GraphView",
    "KeyPlacement",
    "KeyPlacementPolicy",
    "KeyedLanePolicy",
    "LanePolicy",
    "LaneState",
    "Lanes",
    "LearningPolicy",
    "MeasuredTime",
    "Outcome",
    "PacedPolicy",
    "Packer",
    "PackingLimits",
    "Part",
    "PendingStep",
    "PlainView",
    "Policy",
    "PolicyParts",
    "PrioritizedLanePolicy",
    "Reason",
    "Row",
    "StepCost",
    "broken_constraint",
    "decision_us",
    "declares_axes",
    "explain",
    "find_cost_model",
    "format_keys",
    "greedy_parts",
    "lane_fault",
    "lane_priorities",
    "lanes_by_key",
    "needs_key",
    "pack_items",
    "policy_name",
    "policy_traits",
]
