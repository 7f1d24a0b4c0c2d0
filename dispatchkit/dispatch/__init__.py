"""Who decides, and how: policies, decisions, hard constraints and the dispatcher."""

from dispatchkit.dispatch.axes import PlainView, knows_axes
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.cost_model import CostModel, StepCost, find_cost_model
from dispatchkit.dispatch.decision import CalibrationRun, CellUpdate, Decision, Outcome, Reason
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.dispatch.explain import Explanation, MeasuredTime, explain
from dispatchkit.dispatch.lanes import (
    LANE_TRAITS,
    HomedLanePolicy,
    KeyedLanePolicy,
    KeyHomes,
    LanePolicy,
    Lanes,
    LaneStep,
    LaneView,
    PrioritizedLanePolicy,
    lane_fault,
    lane_homes,
    lane_priorities,
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
from dispatchkit.dispatch.table import Row

__all__ = [
    "LANE_TRAITS",
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
    "HomedLanePolicy",
    "KeyHomes",
    "KeyedLanePolicy",
    "LanePolicy",
    "LaneStep",
    "LaneView",
    "Lanes",
    "LearningPolicy",
    "MeasuredTime",
    "Outcome",
    "PacedPolicy",
    "Packer",
    "PackingLimits",
    "PlainView",
    "Policy",
    "PolicyParts",
    "PrioritizedLanePolicy",
    "Reason",
    "Row",
    "StepCost",
    "broken_constraint",
    "checked_bins",
    "explain",
    "find_cost_model",
    "knows_axes",
    "lane_fault",
    "lane_homes",
    "lane_priorities",
    "needs_key",
    "policy_name",
    "policy_traits",
]
