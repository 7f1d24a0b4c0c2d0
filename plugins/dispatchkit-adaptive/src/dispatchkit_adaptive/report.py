"""What the policy knows, in words."""

from __future__ import annotations

import math

import attrs

from dispatchkit import GraphKey

from dispatchkit_adaptive.arms import Arm
from dispatchkit_adaptive.buckets import ArmId, Bucket

__all__ = ["ArmReport", "BucketReport", "describe"]


@attrs.frozen
class ArmReport:
    """One arm of a bucket.

    Attributes:
        arm: What it is.
        samples: Samples kept.
        median_us: Time expected at the largest batch seen, microseconds; None if unknown.
        error: Relative standard error of that.
        margin: How much slower it is than the arm in use, relative; negative if faster.
        age: Steps since it was measured last.
    """

    arm: str
    samples: int
    median_us: float | None
    error: float
    margin: float | None
    age: int


@attrs.frozen
class BucketReport:
    """What is known of the batches that have the same arms.

    Attributes:
        sizes: Fewest and most tokens of the batches seen.
        base: What the base policy answers.
        graph: The graph in use, as text; empty without any.
        eager_up_to: Eager is used for at most so many tokens; 0: for none.
        arms: The arms, the one in use first.
        last_probe: Step of the last probe that came back, 0 without any.
    """

    sizes: tuple[int, int]
    base: str
    graph: str
    eager_up_to: float
    arms: tuple[ArmReport, ...]
    last_probe: int

    def __str__(self) -> str:
        low, high = self.sizes
        eager = "never" if self.eager_up_to <= 0 else f"up to {self.eager_up_to:.0f} tokens"
        if math.isinf(self.eager_up_to):
            eager = "always"
        lines = [
            f"{low} to {high} tokens; base: {self.base}",
            f"-> eager {eager}, else {self.graph or 'nothing'}; last probe: step {self.last_probe}",
        ]
        for one in self.arms:
            time = "unknown" if one.median_us is None else f"{one.median_us:.0f} µs"
            gap = "" if one.margin is None else f", {one.margin:+.1%}"
            lines.append(
                f"   {one.arm}: {time} ±{one.error:.1%}{gap}; {one.samples} samples, "
                f"the last {one.age} steps ago"
            )
        return "\n".join(lines)


def describe(bucket: Bucket, known: dict[ArmId, Arm], step: int) -> BucketReport:
    """Put together what is known of a bucket."""
    sizes = [batch.num_tokens for batch in bucket.cells]
    at = max(sizes)
    current = bucket.choice(at)
    in_use = None if current is None else known.get(current)
    now_us = None if in_use is None else in_use.expect(at)
    arms = []
    for ident in sorted(bucket.arms, key=lambda one: one != current):
        arm = known.get(ident)
        us = None if arm is None else arm.expect(at)
        arms.append(
            ArmReport(
                arm=str(ident) if isinstance(ident, GraphKey) else "eager",
                samples=0 if arm is None else len(arm.samples),
                median_us=us,
                error=1.0 if arm is None else arm.error(at),
                margin=None if us is None or not now_us else us / now_us - 1.0,
                age=0 if arm is None else step - arm.last_step,
            )
        )
    return BucketReport(
        sizes=(min(sizes), at),
        base=str(bucket.base),
        graph="" if bucket.key is None else str(bucket.key),
        eager_up_to=bucket.limit if bucket.piece is not None else 0.0,
        arms=tuple(arms),
        last_probe=bucket.last_probe,
    )
