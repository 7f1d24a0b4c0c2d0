"""Account for time saved and lost against the base policy, and limit what may be risked.

The promise is that the steps so far never cost more than one per cent above the choices of the base
policy. Steps that differ from the base are paid from an account: the allowance of the promise, plus
the time saved so far. An arm may become slower (or the base faster) at any time, which is noticed
only several measured steps later. So the policy leaves the base only if the account covers an arm
that becomes ``DRIFT`` times slower from now on until then.
"""

from __future__ import annotations

import math

import attrs

__all__ = ["DRIFT", "Ledger"]

#: Factor by which an arm may become slower (or the base faster) before it is noticed.
DRIFT = 1.5
#: Measured steps until a change of that size is noticed; see ``estimates.Watch``.
NOTICED_AFTER = 4
#: Minimum number of steps from which the allowance is computed.
GRACE = 200
#: Share of the promise that is used; the rest is kept for errors of the estimates.
PLANNED = 0.75
#: Standard errors by which another arm must be faster.
DOUBT = 1.5
#: Weight of the latest outcome in averages, which cover about the last ten.
AVERAGING = 0.2


@attrs.define
class Ledger:
    """The known costs of the steps so far, in microseconds.

    Attributes:
        promise: Largest share of time that may be lost against the base.
        explore: Share of all time that probes may cost.
        steps: Number of steps accounted for.
        base_us: What the base policy's choices would have cost.
        lead_us: Time saved against the base in the steps that differed; negative if lost.
        probes_us: Additional time of probes over the arm that they replaced.
        differing: Share of the latest steady outcomes that did not use the base's arm.
        spacing: Average number of steps from one measured step to the next.
    """

    promise: float
    explore: float
    steps: float = 0.0
    base_us: float = 0.0
    lead_us: float = 0.0
    probes_us: float = 0.0
    differing: float = 0.0
    spacing: float = 1.0
    _last_step: int = 0
    _unaccounted: float = 0.0

    def allowance(self, typical_us: float) -> float:
        """Return what may be lost from now on; before the first step, steps take ``typical_us``."""
        mean = self.base_us / self.steps if self.steps else typical_us
        return PLANNED * self.promise * mean * max(self.steps, GRACE) + self.lead_us

    def horizon(self, spacing: float = 0.0) -> float:
        """Return the steps until a change is noticed, at the given or the current spacing."""
        spacing = spacing or self.spacing
        late = spacing if spacing > 1.5 else 0.0  # outcomes are then read one measured step later
        return NOTICED_AFTER * spacing + late

    def probe_allowance(self) -> float:
        """Return what probes may cost now."""
        return self.explore * self.base_us - self.probes_us

    def steps_for(self, step: int, *, one_shot: bool, is_base: bool) -> float:
        """Return the number of steps that an outcome represents; ``is_base`` for the base's arm.

        A one-shot outcome represents itself. A steady one represents all steps since the last
        one, which were chosen in the same way but not measured.
        """
        # Steps before the first outcome were not decided by this policy.
        passed = max(1, step - self._last_step) if step and self._last_step else 1
        self._last_step = max(step, self._last_step)
        self._unaccounted += passed
        if one_shot:
            self._unaccounted -= 1
            return 1.0
        steps, self._unaccounted = self._unaccounted, 0.0
        self.differing += AVERAGING * ((not is_base) - self.differing)
        self.spacing += AVERAGING * (steps - self.spacing)
        return steps

    def account(self, steps: float, base_us: float, own_us: float) -> None:
        """Add steps, with what each would have cost under the base and what it did cost."""
        self.steps += steps
        self.base_us += steps * base_us
        self.lead_us += steps * (base_us - own_us)


@attrs.frozen
class Stakes:
    """The current conditions for leaving the base in one bucket.

    Attributes:
        margin: Least relative gain for which a choice is changed.
        room_us: What may be lost in each step until a change is noticed; nothing if 0 or less.
        lead_us: The part of ``room_us`` that was earned by being faster.
    """

    margin: float
    room_us: float
    lead_us: float

    def gains(self, base_us: float, error: float) -> tuple[float, float]:
        """Return the gains (logarithms of a ratio) required to change, and to stay.

        Both shrink as the lead grows: a change then need not be certain to be made, and must be
        certain to be undone.

        Args:
            base_us: Microseconds of a step in the arm to leave.
            error: Relative standard error of the ratio of the two arms.
        """
        comfort = max(0.0, self.lead_us) / base_us
        change = max(self.margin, DOUBT * error) / (1.0 + comfort)
        return change, -error * comfort / (1.0 + comfort)

    def cover(self, base_us: float, slack: float = 1.0) -> float:
        """Return the gain over the base at which the account covers a slowdown by ``DRIFT``."""
        return math.log(DRIFT) - math.log1p(slack * self.room_us / base_us)
