"""Account for time saved and lost relative to the base policy, and limit the time at risk.

The policy promises that, at any time, all steps together have taken only slightly longer (by
default, at most one percent) than with the base policy. Time lost in steps that differ from the
base is paid from an account, which contains the loss that the promise allows and the time saved so
far. An arm may become slower (or the base faster) at any time, and the policy notices only several
measured steps later. The policy therefore leaves the base only if the account would cover a
slowdown by a factor of ``DRIFT`` during these steps.
"""

from __future__ import annotations

import math

import attrs

__all__ = ["DRIFT", "Ledger"]

#: Unnoticed slowdown of an arm (or speedup of the base) that the account must cover, as a factor.
DRIFT = 1.5
#: Number of measured steps until a change by a factor of ``DRIFT`` is noticed; see ``Watch``.
NOTICED_AFTER = 4
#: With fewer steps, the allowance is computed as if there had been this many.
GRACE = 200
#: Share of the promise that may be spent; the rest is a reserve for errors of the estimates.
PLANNED = 0.75
#: Number of standard errors by which an arm must be faster than the arm in use to replace it.
DOUBT = 1.5
#: Weight of the latest outcome in moving averages, which cover about ten outcomes.
AVERAGING = 0.2


@attrs.define
class Ledger:
    """The known costs of the steps so far, in microseconds.

    Attributes:
        promise: Largest share of time that may be lost compared with the base.
        explore: Share of all time that probes may cost.
        steps: Number of steps accounted for.
        base_us: Time that the choices of the base policy would have taken.
        lead_us: Time saved compared with the base; negative if time was lost.
        probes_us: Additional time of probes, compared with the arms in use.
        differing: Moving average of the share of outcomes that did not use the base's arm. One-shot
            outcomes are excluded.
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
        """Return the time in microseconds that may be lost from now on.

        Before the first step, a step is assumed to take ``typical_us``.
        """
        mean = self.base_us / self.steps if self.steps else typical_us
        return PLANNED * self.promise * mean * max(self.steps, GRACE) + self.lead_us

    def horizon(self, spacing: float = 0.0) -> float:
        """Return the number of steps until a slowdown or speedup is noticed.

        Args:
            spacing: Number of steps from one measured step to the next; 0 for the current average.
        """
        spacing = spacing or self.spacing
        late = spacing if spacing > 1.5 else 0.0  # outcomes are processed in the next measured step
        return NOTICED_AFTER * spacing + late

    def probe_allowance(self) -> float:
        """Return the time in microseconds that probes may still cost."""
        return self.explore * self.base_us - self.probes_us

    def steps_for(self, step: int, *, one_shot: bool, is_base: bool) -> float:
        """Return the number of steps that an outcome represents.

        A one-shot outcome represents one step. Any other outcome represents all steps, except
        measured one-shot steps, since the previous outcome that was not one-shot. The unmeasured
        steps among them were decided in the same way.
        ``is_base`` says whether the outcome used the base's arm.
        """
        # Steps before the first outcome may have been decided by another policy.
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
        """Add steps that took ``own_us`` each and would have taken ``base_us`` with the base."""
        self.steps += steps
        self.base_us += steps * base_us
        self.lead_us += steps * (base_us - own_us)


@attrs.frozen
class Stakes:
    """The conditions for changing the choice of a bucket.

    Attributes:
        margin: Smallest relative gain for which the choice is changed if no time was saved earlier.
        room_us: Microseconds that each step may lose until a slowdown is noticed. If ``room_us`` is
            not positive, the base is used.
        lead_us: The part of ``room_us`` that comes from time saved earlier.
    """

    margin: float
    room_us: float
    lead_us: float

    def gains(self, base_us: float, error: float) -> tuple[float, float]:
        """Return the gains (as logarithms) required to change arms, and to keep the new arm.

        Both decrease as ``lead_us`` grows: if much time has been saved, less evidence is enough for
        a change, and more evidence is needed to go back.

        Args:
            base_us: Step time of the arm in use, in microseconds.
            error: Relative standard error of the ratio of the two arms' times.
        """
        comfort = max(0.0, self.lead_us) / base_us
        change = max(self.margin, DOUBT * error) / (1.0 + comfort)
        return change, -error * comfort / (1.0 + comfort)

    def cover(self, base_us: float, slack: float = 1.0) -> float:
        """Return the smallest gain for which the account covers a slowdown by ``DRIFT``.

        The gain is a logarithm.

        Args:
            base_us: Step time of the base's arm, in microseconds.
            slack: Factor by which ``room_us`` is multiplied.
        """
        return math.log(DRIFT) - math.log1p(slack * self.room_us / base_us)
