"""Reports on what the policy has learned."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from dispatchkit import Batch
from dispatchkit.errors import counted

from dispatchkit_adaptive.arms import Arm
from dispatchkit_adaptive.buckets import Bucket
from dispatchkit_adaptive.estimates import Estimate

__all__ = ["ArmReport", "BucketReport", "describe"]


@attrs.frozen
class ArmReport:
    """The report on one arm of a bucket.

    Attributes:
        arm: The arm's name: eager, or its graphs.
        samples: Number of measured times; 0 if there are too few for ``median_us``.
        median_us: Expected time in microseconds for the largest batch of the bucket; None if there
            are too few samples.
        error: Relative standard error of ``median_us``; 1 if ``median_us`` is None.
        margin: Time relative to the arm in use, minus 1: positive if slower, negative if faster,
            None if unknown.
        age: Number of steps since the arm's last sample; 0 if ``median_us`` is None.
    """

    arm: str
    samples: int
    median_us: float | None
    error: float
    margin: float | None
    age: int


@attrs.frozen
class BucketReport:
    """The report on a bucket: its choice, and the estimates of its arms.

    Attributes:
        sizes: Smallest and largest number of tokens among the batches decided so far.
        kind: The kind of the batches, and the modes that they allow.
        base: The base policy's decision.
        graph: The graph or graphs in use, as text; empty if there are none.
        eager_up_to: Number of tokens up to which eager is used; 0 if it is not used.
        arms: Reports on the arms, starting with the arm in use for the largest batch.
        last_probe: Step of the last probe with an outcome; 0 if there was none.
    """

    sizes: tuple[int, int]
    kind: str
    base: str
    graph: str
    eager_up_to: int
    arms: tuple[ArmReport, ...]
    last_probe: int

    def __str__(self) -> str:
        low, high = self.sizes
        graph = self.graph or "nothing"
        sizes = counted(high, "token") if low == high else f"{low:,} to {counted(high, 'token')}"
        if self.eager_up_to < low:
            choice = graph
        elif self.eager_up_to >= high:
            choice = "eager"
        else:
            choice = f"eager up to {counted(self.eager_up_to, 'token')}, then {graph}"
        lines = [
            f"{sizes}, {self.kind}; base policy: {self.base}",
            f"-> {choice}; last probe: "
            + (f"step {self.last_probe}" if self.last_probe else "none"),
        ]
        for one in self.arms:
            if one.median_us is None:
                lines.append(f"   {one.arm}: too few samples to compare")
                continue
            gap = ""
            if one.margin:
                how = "slower" if one.margin > 0 else "faster"
                gap = f", {abs(one.margin):.1%} {how} than {self.arms[0].arm}"
            lines.append(
                f"   {one.arm}: {one.median_us:.0f} µs ±{one.error:.1%}{gap}; "
                f"{counted(one.samples, 'sample')}, the latest {counted(one.age, 'step')} ago"
            )
        return "\n".join(lines)


def describe(bucket: Bucket, known: Mapping[Arm, Estimate], step: int) -> BucketReport:
    """Return the report on a bucket."""
    low, high = bucket.sizes
    current = bucket.choice(high)
    in_use = known.get(current)
    arms = []
    for arm in sorted(bucket.arms, key=lambda one: one is not current):
        one = known.get(arm)
        gap = None if one is None or in_use is None else one.log_us(high) - in_use.log_us(high)
        arms.append(
            ArmReport(
                arm=arm.name,
                samples=0 if one is None else one.samples,
                median_us=None if one is None else one.expect(high),
                error=1.0 if one is None else one.error(high),
                margin=None if gap is None else math.expm1(gap),
                age=0 if one is None else step - one.last_step,
            )
        )
    return BucketReport(
        sizes=(low, high),
        kind=_kind(bucket.example),
        base=str(bucket.base),
        graph="" if bucket.graph is None else bucket.graph.name,
        eager_up_to=_eager_up_to(bucket, low, high),
        arms=tuple(arms),
        last_probe=bucket.last_probe,
    )


def _kind(batch: Batch) -> str:
    """Return the kind of a batch as text, with its adapters, axes and allowed modes."""
    parts = [f"uniform={batch.query_len}" if batch.uniform else "mixed"]
    if not batch.uniform and batch.max_query_len is not None:
        parts.append(f"max_query_len={batch.max_query_len}")
    if batch.num_active_loras:
        parts.append(f"loras={batch.num_active_loras}")
    if batch.axes:
        parts.append("axes=" + "x".join("?" if one is None else str(one) for one in batch.axes))
    allowed = sorted(batch.allowed_modes, key=int)
    return ", ".join([*parts, "/".join(mode.name for mode in allowed) + " allowed"])


def _eager_up_to(bucket: Bucket, low: int, high: int) -> int:
    """Return the size up to which batches of ``low`` to ``high`` tokens run eager, or 0."""
    if not bucket.choice(low).is_eager:
        return 0
    return high if bucket.choice(high).is_eager else int(bucket.limit)
