"""Results of the demo, as plain records that do not need torch."""

from __future__ import annotations

import math
from typing import Any

import attrs

from dispatchkit.demo.traffic import Traffic


@attrs.frozen(kw_only=True)
class KindTimes:
    """Statistics of all steps of one kind that ran in one runtime mode.

    Attributes:
        kind: ``decode`` or ``mixed``, from the trace.
        mode: Runtime mode of the steps.
        steps: Number of steps.
        num_tokens: Number of tokens of these steps, before padding.
        padding: Number of padding tokens.
        eager_ms: Median time of an eager step in milliseconds.
        dispatched_ms: Median time of a dispatched step in milliseconds.
    """

    kind: str
    mode: str
    steps: int
    num_tokens: int
    padding: int
    eager_ms: float
    dispatched_ms: float


@attrs.frozen(kw_only=True)
class Difference:
    """A step whose results differ from those of the eager run by more than the tolerance.

    Attributes:
        step: Number of the step, from 0.
        mode: Runtime mode of the step.
        num_tokens: Number of tokens of the step, before padding.
        worst: Largest absolute difference; NaN if a result is NaN or the shapes differ.
    """

    step: int
    mode: str
    num_tokens: int
    worst: float


@attrs.frozen(kw_only=True)
class Comparison:
    """Comparison of eager and dispatched results.

    Attributes:
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        steps: Number of compared steps.
        different: Steps with differences above the tolerance.
        worst: Largest absolute difference over all steps.
        caches_differ: Whether the final caches differ by more than the tolerance.
        worst_cache: Largest absolute difference between the final caches.
    """

    atol: float
    rtol: float
    steps: int
    different: tuple[Difference, ...]
    worst: float
    caches_differ: bool
    worst_cache: float

    @property
    def is_equal(self) -> bool:
        """Whether all results and the final caches agree within the tolerance."""
        return not self.different and not self.caches_differ


@attrs.frozen(kw_only=True)
class Batch1:
    """Times of decoding a single request.

    Launch overhead matters most in such small steps.

    Attributes:
        eager_us: Time of an eager step in microseconds: the median of several means. Each mean is
            over a series of steps, timed from the first launch until the device is idle again.
        dispatched_us: Time of a dispatched step in microseconds, measured in the same way.
        mode: Runtime mode of the step.
        ratio: Eager time divided by dispatched time.
    """

    eager_us: float
    dispatched_us: float
    mode: str
    ratio: float


@attrs.frozen(kw_only=True)
class DemoReport:
    """The results that ``dispatchkit demo`` prints.

    Attributes:
        policy: Name of the policy of the dispatched run.
        policy_origin: Distribution, version and entry point of the policy.
        backend: Name of the backend that ran the steps.
        device: Name of the device, and versions of its driver and libraries.
        trace: Name of the replayed trace.
        model: Sizes of the decoder and its cache.
        traffic: The steps and requests, and counts of the omitted parts of the trace.
        times: Statistics by kind of step and runtime mode.
        eager_reasons: Number of eager steps by reason.
        num_tokens: Number of tokens of all steps, before padding.
        padding: Number of padding tokens.
        capture: Number of graphs and their memory in bytes, duration of the captures, failed
            captures, and whether captures were lazy.
        comparison: Comparison of dispatched and eager results.
        batch1: Times of decoding a single request.
        seconds: Duration of the run.
    """

    policy: str
    policy_origin: str
    backend: str
    device: dict[str, str]
    trace: str
    model: dict[str, int]
    traffic: Traffic
    times: tuple[KindTimes, ...]
    eager_reasons: dict[str, int]
    num_tokens: int
    padding: int
    capture: dict[str, Any]
    comparison: Comparison
    batch1: Batch1
    seconds: float

    @property
    def is_tape(self) -> bool:
        """Whether the backend is the tape, which simulates a device."""
        return self.backend == "tape"

    def meaning(self) -> list[str]:
        """Return sentences that explain the results on this device."""
        compared = self.comparison
        equal = (
            "All dispatched steps and the final caches match the eager run within the tolerance."
        )
        if compared.different:
            equal = "Some dispatched steps did NOT match the eager run. Do not trust their results."
        elif compared.caches_differ:
            equal = (
                "All dispatched steps match the eager run, but the final caches do NOT. Do not "
                "trust the dispatched results."
            )
        if self.is_tape:
            tape = (
                "The tape has the semantics of CUDA graphs on a CPU. It runs the same operations "
                "one by one, at the padded size, without running the Python code of the step "
                "again. These times do not predict times on a GPU."
            )
            gpu = "For meaningful times, use --device cuda on a machine with a GPU."
            return [equal, tape, gpu]
        launches = (
            "A FULL replay launches all kernels of a step with one call, whereas an eager step "
            "launches each kernel from Python. "
        )
        if self.batch1.mode == "NONE":
            launches += "In this run, a single request also ran eager when dispatched."
        else:
            share = f"{1 / self.batch1.ratio:.0%}"
            launches += f"When dispatched, a single request takes {share} of its eager time."
        limits = (
            "Steps with more tokens have longer kernels and gain less. PIECEWISE steps still "
            "launch attention from Python, and padding costs time."
        )
        return [equal, launches, limits]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, with None for NaN and infinity."""
        traffic = attrs.asdict(self.traffic, filter=lambda field, _: field.name != "steps")
        made = attrs.asdict(self, filter=lambda field, _: field.name != "traffic")
        value = {
            "ok": self.comparison.is_equal,
            **made,
            "traffic": {"num_steps": len(self.traffic.steps), **traffic},
            "meaning": self.meaning(),
        }
        return {name: _finite(each) for name, each in value.items()}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity in a value with None, because JSON lacks them."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
