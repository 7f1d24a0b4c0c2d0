"""Policies, decisions, hard constraints and the dispatcher."""

from dispatchkit.dispatch.axes import PlainView, knows_axes
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.cost_model import CostModel, StepCost, decided_us, find_cost_model
from dispatchkit.dispatch.decision import (
    CalibrationRun,
    CellUpdate,
    Decision,
    Outcome,
    Part,
    Reason,
    named_graphs,
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
from dispatchkit.dispatch.packing import Packer, PackingLimits, checked_bins
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
    "checked_bins",
    "decided_us",
    "explain",
    "find_cost_model",
    "greedy_parts",
    "knows_axes",
    "lane_fault",
    "lane_priorities",
    "lanes_by_key",
    "named_graphs",
    "needs_key",
    "policy_name",
    "policy_traits",
]
