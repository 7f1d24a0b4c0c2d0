"""Who decides, and how: policies, decisions, hard constraints and the dispatcher."""

from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.decision import CellUpdate, Decision, Outcome, Reason
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.dispatch.explain import Explanation, explain
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
    "Outcome",
    "Policy",
    "Reason",
    "broken_constraint",
    "explain",
    "policy_name",
    "policy_traits",
]
