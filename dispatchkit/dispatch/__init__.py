"""Who decides, and how: policies, decisions, hard constraints and the dispatcher."""

from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.decision import CellUpdate, Decision, Outcome, Reason
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.dispatch.explain import Explanation, MeasuredTime, StepCost, explain
from dispatchkit.dispatch.policy import (
    TRAITS,
    GraphView,
    LearningPolicy,
    Policy,
    policy_name,
    policy_traits,
)

__all__ = [
    "TRAITS",
    "CellUpdate",
    "Decision",
    "Dispatcher",
    "Explanation",
    "GraphView",
    "LearningPolicy",
    "MeasuredTime",
    "Outcome",
    "Policy",
    "Reason",
    "StepCost",
    "broken_constraint",
    "explain",
    "policy_name",
    "policy_traits",
]
