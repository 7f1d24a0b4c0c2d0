"""Why a step ran eager: the executor's own reasons beside those of policies."""

from __future__ import annotations

from dispatchkit.dispatch import Reason
from dispatchkit.execute.guard import FACTS

#: Its key has not been asked for often enough to be captured yet.
CAPTURE_PENDING = "capture_pending"
#: Reason of a step inside a capture that somebody else began; it is recorded there.
INSIDE_CAPTURE = "inside_capture"
#: Reason of an eager step whose replay failed before it had any effect.
REPLAY_FAILED = "replay_failed"
#: Reason of a step whose replay gave something else than eager, whose result was taken.
CHECK_FAILED = "check_failed"
#: Reasons that are a loss the user may want to know of; the others are what was asked for.
DOWNGRADES = frozenset(
    {
        Reason.ABOVE_LARGEST,
        Reason.NO_KEY,
        Reason.NOT_CAPTURED,
        Reason.CAPTURE_FAILED,
        Reason.EVICTED,
        Reason.STALE,
        Reason.TOO_MANY_REQS,
        Reason.OUTSIDE_AXIS,
        Reason.PIECEWISE_UNSUPPORTED,
        Reason.NOT_MINE,
        Reason.POLICY_ERROR,
        REPLAY_FAILED,
        *FACTS,
    }
)


class EagerStepWarning(RuntimeWarning):
    """Steps run eager that a graph was wanted for; told once for each reason."""
