"""Account for what was won and lost against the base policy, and say what may be risked.

The promise is that the steps so far never cost over one per cent more than those of the base
policy would have. Whatever differs from the base is paid from an account: the allowance that the
promise gives, and the lead that was earned by being faster. An arm may become slower (or the base
faster) at any time, and that is noticed only some measured steps later. So the base is left only
where the account covers an arm that becomes ``DRIFT`` times slower from now on until then.
"""

from __future__ import annotations

import math

import attrs

__all__ = ["DRIFT", "Ledger"]

#: How much slower (or the base faster) an arm may become before it is noticed.
DRIFT = 1.5
#: Measured steps until a change of that size is noticed: those that a CUSUM needs.
NOTICED_AFTER = 4
#: Steps before the promise counts; until then its allowance is already that of so many.
GRACE = 200
#: The share of the promise that is planned with; the rest is for what is known wrongly.
PLANNED = 0.75
#: Standard errors by which a change has to be better.
DOUBT = 1.5
#: Weight of the latest outcome in averages: of about the last ten.
AVERAGING = 0.2


@attrs.define
class Ledger:
    """Costs of the steps so far, in microseconds, as far as they are known.

    Attributes:
        promise: Largest share that may be lost against the base.
        explore: Share of all time that probes may cost.
        steps: Steps accounted for.
        base_us: What the base policy's choices would have cost.
        lead_us: That, less what was spent, over the steps that differed.
        probes_us: What probes cost over the arm that they stood in for.
        differing: Share of the latest steady outcomes that were not the base's arm.
        spacing: Steps from one measured step to the next, on average.
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
        """Return what may be lost from now on; ``typical_us`` is used before any step."""
        mean = self.base_us / self.steps if self.steps else typical_us
        return PLANNED * self.promise * mean * max(self.steps, GRACE) + self.lead_us

    def horizon(self, spacing: float = 0.0) -> float:
        """Return the steps that run before a change is noticed, at a spacing or today's."""
        spacing = spacing or self.spacing
        late = spacing if spacing > 1.5 else 0.0  # outcomes that are read one measured step later
        return NOTICED_AFTER * spacing + late

    def probe_allowance(self) -> float:
        """Return what probes may cost now."""
        return self.explore * self.base_us - self.probes_us

    def steps_for(self, step: int, *, one_shot: bool, is_base: bool) -> float:
        """Return how many steps an outcome stands for, whose arm is the base's or not.

        A one-shot outcome stands for itself; a steady one for all the steps since the last,
        which were not measured but chosen alike.
        """
        # Those before the first outcome were not this policy's.
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
        """Add steps: what each would have cost under the base, and what it did cost."""
        self.steps += steps
        self.base_us += steps * base_us
        self.lead_us += steps * (base_us - own_us)


@attrs.frozen
class Stakes:
    """What leaving the base has to clear, now, in one bucket.

    Attributes:
        margin: Least relative gain for which a choice is left.
        room_us: What may be lost in each step until a change is noticed; 0 or less: nothing.
        lead_us: The part of it that was earned by being faster.
    """

    margin: float
    room_us: float
    lead_us: float

    def gains(self, base_us: float, error: float) -> tuple[float, float]:
        """Return the gains (logarithms of a ratio) to change for, and to stay for.

        Both shrink as the lead grows: then a change need not be sure to be taken, and has to be
        sure to be left.

        Args:
            base_us: What a step takes in the arm to leave.
            error: Relative standard error of the ratio of the two.
        """
        comfort = max(0.0, self.lead_us) / base_us
        change = max(self.margin, DOUBT * error) / (1.0 + comfort)
        return change, -error * comfort / (1.0 + comfort)

    def cover(self, base_us: float, slack: float = 1.0) -> float:
        """Return the gain over the base at which the account covers a change by ``DRIFT``."""
        return math.log(DRIFT) - math.log1p(slack * self.room_us / base_us)
