"""What may be risked: the account kept against the base policy.

The promise is that the steps so far never cost over one per cent more than those of the base
policy would have. Whatever differs from the base is paid from an account: the allowance that
the promise gives, and the lead that was earned by being faster. A step that differs may turn
out slower than it was (times change), and that is noticed only some measured steps later. So
a cell leaves the base only if the account covers its arm becoming ``DRIFT`` times slower from
now on until that is noticed.
"""

from __future__ import annotations

import attrs

__all__ = ["DRIFT", "Ledger"]

#: How much slower (or the base faster) an arm may become before it is noticed.
DRIFT = 1.5
#: Measured steps until a change of that size is noticed.
NOTICED_AFTER = 4
#: Steps before the promise counts; until then its allowance is already that of so many.
GRACE = 200


@attrs.define
class Ledger:
    """Costs of the steps so far, in microseconds, as far as they are known.

    Attributes:
        promise: Largest share that may be lost against the base.
        explore: Share of all time that probes may cost.
        explore_far: The same for arms that are far behind.
        steps: Steps accounted for.
        base_us: What the base policy's choices would have cost.
        lead_us: That, less what was spent, over the steps that differed.
        probes_us: What probes cost over the arm that they stood in for.
        far_probes_us: The same for arms far behind.
        spacing: Steps from one measured step to the next, on average.
    """

    promise: float
    explore: float
    explore_far: float = 0.0001
    steps: float = 0.0
    base_us: float = 0.0
    lead_us: float = 0.0
    probes_us: float = 0.0
    far_probes_us: float = 0.0
    spacing: float = 1.0
    last_step: int = 0
    unaccounted: float = 0.0

    def allowance(self, typical_us: float) -> float:
        """Return what may be lost from now on; ``typical_us`` is used before any step."""
        mean = self.base_us / self.steps if self.steps else typical_us
        return self.promise * mean * max(self.steps, GRACE) + self.lead_us

    @property
    def horizon(self) -> float:
        """Steps that run before a change is noticed."""
        return self.horizon_at(self.spacing)

    def horizon_at(self, spacing: float) -> float:
        """Return the same for another number of steps from one measured step to the next."""
        late = spacing if spacing > 1.5 else 0.0
        return NOTICED_AFTER * spacing + late

    def probe_allowance(self, *, far: bool) -> float:
        """Return what probes may cost now."""
        if far:
            return self.explore_far * self.base_us - self.far_probes_us
        return self.explore * self.base_us - self.probes_us

    def pay_probe(self, us: float, *, far: bool) -> None:
        """Note what a probe is expected to cost over the arm it stands in for."""
        if far:
            self.far_probes_us += us
        else:
            self.probes_us += us

    def steps_told(self, step: int, *, one_shot: bool) -> float:
        """Return how many steps an outcome stands for.

        A one-shot outcome stands for itself; a steady one for all the steps since the last,
        which were not measured but chosen alike.
        """
        # Those before the first outcome were not this policy's.
        passed = max(1, step - self.last_step) if step and self.last_step else 1
        self.last_step = max(step, self.last_step)
        self.unaccounted += passed
        if one_shot:
            self.unaccounted -= 1
            return 1.0
        told, self.unaccounted = self.unaccounted, 0.0
        self.spacing += 0.2 * (told - self.spacing)
        return told

    def account(self, steps: float, base_us: float, own_us: float) -> None:
        """Add steps: what each would have cost under the base, and what it did cost."""
        self.steps += steps
        self.base_us += steps * base_us
        self.lead_us += steps * (base_us - own_us)
