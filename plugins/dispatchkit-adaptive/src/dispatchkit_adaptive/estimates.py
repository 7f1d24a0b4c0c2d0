"""Estimate how long an arm takes, with a robust Kalman filter over the logarithm of its times.

An arm is a way to run a step: with one or more graphs, or eager within one band of sizes. Its time
follows a power law, ``log us = level + slope * log(tokens / top)``, where ``top`` is the arm's
largest number of tokens. A graph has slope 0. The noise is a few percent, but occasionally a step
takes many times as long as usual. A sample that differs from the estimate by ``CLIP`` standard
errors or more therefore does not move the estimate. The level is modeled as a random walk, so old
samples lose weight. A *surprise* is the logarithm of the ratio of a sample to the expected time.
``Watch`` detects jumps of the level from the mean of the latest surprises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

__all__ = ["KNOWN", "Estimate", "Watch"]

#: Minimum number of samples of a known arm; the filter starts at the median of these samples.
KNOWN = 3
#: A sample at least this many standard errors from the estimate does not move the estimate.
CLIP = 3.0
#: Initial relative noise, with the weight of ``KNOWN`` samples, and the lower bound of the noise.
FIRST_NOISE, LEAST_NOISE = 0.10, 0.004
#: Initial slope of a band (halfway between constant and proportional time) and its error.
FIRST_SLOPE, FIRST_SLOPE_ERROR = 0.5, 0.5
#: Numbers of latest surprises whose mean is tested, each with its square root. A mean of more than
#: ``LIMIT`` standard errors indicates a jump. On average, one in 20,000 samples is a false alarm.
#: Three samples detect a jump of at least ``CLIP`` standard errors and at most a factor of 2.5.
WINDOWS = tuple((m, math.sqrt(m)) for m in (3, 4, 8, 16, 32, 64))
LIMIT = 4.5
#: A sample that differs from the estimate by a factor above 2.5 is usually an outlier. Its surprise
#: counts only as ``OUTLIER_EVIDENCE`` standard errors, so it takes four in a row to show a jump.
OUTLIER, OUTLIER_EVIDENCE = math.log(2.5), 0.51 * LIMIT
#: Variance of the median of normal samples, relative to the variance of their mean.
MEDIAN_VARIANCE = math.pi / 2.0
#: Smallest and largest allowed values in a state file. Those of the level correspond to 1e-6 and
#: 1e15 microseconds.
RANGES = {
    "samples": (KNOWN, 10**15),
    "noise": (LEAST_NOISE, 10.0),
    "level": (-14.0, 35.0),
    "slope": (-10.0, 10.0),
    "var_level": (1e-12, 100.0),
    "covariance": (-100.0, 100.0),
    "var_slope": (0.0, 100.0),
}


class Watch:
    """A likelihood-ratio test that uses the latest surprises to detect jumps in the level.

    The mean of the last ``m`` standardized surprises has a standard error of ``1 / sqrt(m)``. If
    the mean over one of the ``WINDOWS`` is more than ``LIMIT`` standard errors from 0, the level
    has jumped.
    """

    def __init__(self) -> None:
        self._sums: list[float] = [0.0]
        self._latest: list[float] = []

    def add(self, standardized: float, surprise: float) -> tuple[float, int]:
        """Add a surprise; return the jump and the number of samples that show it, or 0 and 0."""
        sums, latest = self._sums, self._latest
        sums.append(sums[-1] + standardized)
        latest.append(surprise)
        last, count = sums[-1], len(latest)
        means = [(abs(last - sums[-1 - m]) / root, m) for m, root in WINDOWS if m <= count]
        off, shown = max(means, default=(0.0, 0))
        if off > LIMIT:
            jump = median(latest[-shown:])
            self.clear()
            return jump, shown
        if count >= 2 * WINDOWS[-1][0]:
            del sums[: -WINDOWS[-1][0] - 1], latest[: -WINDOWS[-1][0]]
        return 0.0, 0

    def clear(self) -> None:
        """Discard all surprises."""
        self._sums, self._latest = [0.0], []


class Estimate:
    """The estimated step time of one arm in one regime.

    A regime states which clock measured a step, and whether other work was queued before it.

    Args:
        top: Largest number of tokens of the arm. The level is the logarithm of the step time at
            ``top``.
        memory: Approximate number of recent samples that determine the level.
        over_tokens: Whether the time depends on the number of tokens.

    Attributes:
        samples: Number of measured times.
        noise: Relative standard deviation of a sample.
        last_step: Number of the step in which the last sample was measured; set by the policy.
        surprise: Logarithm of the ratio of the last sample to the expected time.
        surprise_error: Standard error of ``surprise``.
        is_odd: Whether the last sample alone provides more than half of the evidence needed for a
            jump.
    """

    def __init__(self, top: int, memory: int, *, over_tokens: bool) -> None:
        self.samples, self.noise, self.last_step = 0, FIRST_NOISE, 0
        self.surprise, self.surprise_error = 0.0, 1.0
        self.is_odd = False
        self.watch = Watch()
        self._log_top = math.log(top)
        self._drift = 1.0 / (memory * memory)
        self._first: list[tuple[float, float]] = []
        self._level = math.inf
        self._slope, self._var_slope = 0.0, 0.0
        if over_tokens:
            self._slope, self._var_slope = FIRST_SLOPE, FIRST_SLOPE_ERROR**2
        self._var_level, self._covariance = 1.0, 0.0
        self._borrowed = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there are enough samples to compare the arm with others."""
        return self.samples >= KNOWN

    @property
    def is_borrowed(self) -> bool:
        """Whether jumps seen in other arms were applied since the last sample."""
        return self._borrowed != 0.0

    def log_us(self, num_tokens: float) -> float:
        """Return the logarithm of the expected time in microseconds; infinite without samples."""
        return self._level + self._slope * (math.log(num_tokens) - self._log_top)

    def expect(self, num_tokens: float) -> float | None:
        """Return the expected time in microseconds for a number of tokens; None without samples."""
        return math.exp(self.log_us(num_tokens)) if self.samples else None

    def error(self, num_tokens: float) -> float:
        """Return the relative standard error of the expected time for a number of tokens."""
        off = math.log(num_tokens) - self._log_top
        return math.sqrt(self._var_level + off * (2.0 * self._covariance + off * self._var_slope))

    def weight(self, num_tokens: float) -> float:
        """Return the number of samples whose mean would be as precise as the expected time."""
        return (self.noise / self.error(num_tokens)) ** 2

    def largest(self, log_us: float) -> float:
        """Return the largest number of tokens with an expected time of at most ``exp(log_us)``.

        If the slope is negative or practically 0, the result is infinity, or -infinity if the level
        exceeds ``log_us``.
        """
        off = log_us - self._level
        if self._slope <= 1e-3:
            return math.inf if off >= 0.0 else -math.inf
        return math.exp(min(off / self._slope + self._log_top, 700.0))

    def add(self, num_tokens: float, us: float) -> float:
        """Add a sample; return the detected jump of the level (a logarithm), or 0."""
        off, log_us = math.log(num_tokens) - self._log_top, math.log(us)
        self.samples += 1
        self._borrowed = 0.0
        if self.samples <= KNOWN:
            self._first.append((off, log_us - self._slope * off))
            self._level = median(level for _, level in self._first)
            # An error of the slope does not affect the times at the measured sizes, but adds to the
            # error at ``top``.
            off = fmean(one for one, _ in self._first)
            self._covariance = -off * self._var_slope
            self._var_level = MEDIAN_VARIANCE * self.noise**2 / self.samples
            self._var_level += off * off * self._var_slope
            return 0.0
        noise2 = self.noise * self.noise
        self._var_level += self._drift * noise2
        along = self._var_level + off * self._covariance
        along_slope = self._covariance + off * self._var_slope
        total = along + off * along_slope + noise2
        self.surprise_error = error = math.sqrt(total)
        self.surprise = log_us - self._level - self._slope * off
        standardized = min(max(self.surprise / error, -CLIP), CLIP)
        weight = min(KNOWN + self.samples, WINDOWS[-1][0])
        noise2 *= 1.0 + (standardized * standardized - 1.0) / weight
        self.noise = max(LEAST_NOISE, math.sqrt(noise2))
        evidence = self.evidence(LEAST_NOISE)
        self.is_odd = abs(evidence) > 0.5 * LIMIT
        jump, count = self.watch.add(evidence, self.surprise)
        if count:
            self._level += jump
            self._var_level += MEDIAN_VARIANCE * noise2 / count
            return jump
        if abs(standardized) >= CLIP:
            return 0.0
        clipped = self.surprise / total
        self._level += along * clipped
        self._slope += along_slope * clipped
        self._var_level -= along * along / total
        self._covariance -= along * along_slope / total
        self._var_slope -= along_slope * along_slope / total
        return 0.0

    def evidence(self, least_error: float) -> float:
        """Return the last surprise in standard errors, clipped for jump detection.

        Args:
            least_error: Lower bound of the standard error.
        """
        if abs(self.surprise) > OUTLIER:
            return math.copysign(OUTLIER_EVIDENCE, self.surprise)
        return min(max(self.surprise / max(self.surprise_error, least_error), -CLIP), CLIP)

    def borrow(self, jump: float) -> None:
        """Apply a jump seen in other arms.

        Between two samples, the sum of these jumps is limited to ``OUTLIER`` in either direction.
        """
        believed = min(max(self._borrowed + jump, -OUTLIER), OUTLIER)
        jump, self._borrowed = believed - self._borrowed, believed
        self._level += jump
        self._var_level += 0.25 * jump * jump
        self.watch.clear()

    # -- on disk ------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        """Return the estimate as numbers, for ``restore``."""
        return {
            "samples": self.samples,
            "noise": self.noise,
            "level": self._level,
            "slope": self._slope,
            "var_level": self._var_level,
            "covariance": self._covariance,
            "var_slope": self._var_slope,
        }

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Restore an estimate from the return value of ``numbers``.

        Raises:
            ValueError: A field is missing or unknown, or a number is out of range or inconsistent
                with another.
        """
        if set(numbers) != set(self.numbers()):
            given, wanted = ", ".join(sorted(numbers)), ", ".join(sorted(RANGES))
            raise ValueError(f"the fields of its estimate are {given}, not {wanted}")
        for name, (least, most) in RANGES.items():
            value = numbers[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):  # false for NaN
                raise ValueError(f"{name} is {value!r}, not a number from {least} to {most}")
        covariance, limit = numbers["covariance"], numbers["var_level"] * numbers["var_slope"]
        if covariance**2 > limit * (1 + 1e-6):
            raise ValueError(
                f"covariance is {covariance!r}, but its square must be at most {limit!r} "
                "(var_level * var_slope)"
            )
        self.samples, self.noise = int(numbers["samples"]), float(numbers["noise"])
        self._level, self._slope = float(numbers["level"]), float(numbers["slope"])
        self._var_level = float(numbers["var_level"])
        self._covariance = float(numbers["covariance"])
        self._var_slope = float(numbers["var_slope"])
