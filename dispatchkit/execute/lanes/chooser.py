"""LaneChooser: calls the lane policy and validates its answers."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.dispatch import (
    Dispatcher,
    LanePolicy,
    LaneState,
    PendingStep,
    lane_fault,
    policy_name,
)
from dispatchkit.errors import PolicyError, describe_exception


class LaneChooser:
    """Chooses the lane of each step.

    Args:
        policy: Lane policy to call for each step.
        origin: Source of the lane policy, for error messages.
        router: Dispatcher for lane policies that need keys, otherwise None. It decides as if every
            declared graph were captured, and its keys are used only to choose lanes.
    """

    def __init__(self, policy: LanePolicy, origin: str, router: Dispatcher | None) -> None:
        self._policy, self._origin, self._router = policy, origin, router

    def choose(
        self, batch: tuple[int, int, int, int, int], priority: int, lanes: Sequence[LaneState]
    ) -> int:
        """Return the index of the lane for a step.

        Raises:
            PolicyError: The policy raised or returned an invalid lane.
        """
        key = None if self._router is None else self._router.dispatch(*batch).key
        try:
            answer = self._policy.choose(PendingStep(batch[0], key, priority), lanes)
        except Exception as error:
            raise self._fault(describe_exception(error)) from error
        if type(answer) is int and 0 <= answer < len(lanes):
            return answer
        fault = lane_fault(answer, len(lanes))
        if fault:
            raise self._fault(fault, answer)
        return int(answer)

    def _fault(self, problem: str, answer: object = None) -> PolicyError:
        name = policy_name(self._policy)
        return PolicyError(name, "choose", problem, origin=self._origin, value=answer)
