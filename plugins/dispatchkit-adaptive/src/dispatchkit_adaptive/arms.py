"""Estimate how long one arm takes: a robust Kalman filter over the logarithm of its times.

An arm is a way to run a step: a graph, or eager within one band of sizes. Its time is a power
law of the number of tokens, ``log us = level + slope * log(tokens / top)``; a graph has no slope.
Noise is some per cent, and now and then a step takes many times as long as usual, so a sample
moves the estimate by at most ``CLIP`` standard errors. A random walk of the level makes old samples
fade; a cumulative sum of the surprises (CUSUM) finds jumps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

__all__ = ["KNOWN", "Arm", "Watch"]

#: Samples from which on an arm counts as known; their median is where the filter starts.
KNOWN = 3
#: Standard errors by which a single sample counts at most.
CLIP = 3.0
#: Relative noise assumed at first, with the weight of ``KNOWN`` samples, and the least believed.
FIRST_NOISE, LEAST_NOISE = 0.10, 0.004
#: What a band's slope is before it is measured: between constant and proportional time.
FIRST_SLOPE, FIRST_SLOPE_ERROR = 0.5, 0.5
#: Surprises whose mean is looked at, with the square root of how many, and how many standard errors
#: it has to be off: once in 20,000 samples without a jump, and after three samples at a large one.
WINDOWS = tuple((m, math.sqrt(m)) for m in (3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
LIMIT = 4.5
#: What is this far off (2.5 times) is as a rule an outlier, and counts for so many standard errors:
#: only four of them in a row are a jump.
OUTLIER, OUTLIER_EVIDENCE = math.log(2.5), 0.51 * LIMIT
#: A median of k normal samples has the variance of a mean of k / 1.57.
MEDIAN_VARIANCE = math.pi / 2.0
#: What an estimate on disk may be: times of 1e-6 to 1e15 microseconds.
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
    """Find a jump of a level by the likelihood ratio of its latest surprises.

    The mean of the last ``m`` standardized surprises has a standard error of ``1 / sqrt(m)``. There
    was a jump where it is ``LIMIT`` of those off for one of the ``WINDOWS``.
    """

    def __init__(self) -> None:
        self._sums: list[float] = [0.0]
        self._latest: list[float] = []

    def add(self, standardized: float, surprise: float) -> tuple[float, int]:
        """Take a surprise; return the jump and how many samples show it, or 0 and 0."""
        sums, latest = self._sums, self._latest
        sums.append(sums[-1] + standardized)
        latest.append(surprise)
        last, count = sums[-1], len(latest)
        most, shown = LIMIT, 0
        for window, root in WINDOWS:
            if window > count:
                break
            off = abs(last - sums[-1 - window]) / root
            if off > most:
                most, shown = off, window
        if shown:
            jump = median(latest[-shown:])
            self.clear()
            return jump, shown
        if count >= 2 * WINDOWS[-1][0]:
            del sums[: -WINDOWS[-1][0] - 1], latest[: -WINDOWS[-1][0]]
        return 0.0, 0

    @property
    def is_suspicious(self) -> bool:
        """The last one or two surprises are halfway to a jump."""
        sums = self._sums
        if len(sums) < 2:
            return False
        last = abs(sums[-1] - sums[-2])
        both = abs(sums[-1] - sums[-3]) / math.sqrt(2.0) if len(sums) > 2 else 0.0
        return max(last, both) > 0.5 * LIMIT

    def clear(self) -> None:
        """Forget what was seen: the level has been moved."""
        self._sums, self._latest = [0.0], []


class Arm:
    """The time of one arm in one regime.

    Args:
        top: Most tokens of the arm, where its level is.
        memory: About how many of the latest samples make the level.
        over_tokens: The time depends on the number of tokens.

    Attributes:
        samples: Samples taken.
        noise: Relative standard deviation of a sample.
        last_step: Number of the step that was measured last.
        surprise: How far the last sample was from what was expected, logarithm of the ratio.
        surprise_error: Standard error of that.
    """

    def __init__(self, top: int, memory: int, *, over_tokens: bool) -> None:
        self.samples, self.noise, self.last_step = 0, FIRST_NOISE, 0
        self.surprise, self.surprise_error = 0.0, 1.0
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
        """There are enough samples to compare it with others."""
        return self.samples >= KNOWN

    def log_us(self, num_tokens: float) -> float:
        """Return the logarithm of the microseconds expected; infinite without any sample."""
        return self._level + self._slope * (math.log(num_tokens) - self._log_top)

    def expect(self, num_tokens: float) -> float | None:
        """Return the microseconds expected for a number of tokens; None without any sample."""
        return math.exp(self.log_us(num_tokens)) if self.samples else None

    def error(self, num_tokens: float) -> float:
        """Return the relative standard error of what is expected for a number of tokens."""
        off = math.log(num_tokens) - self._log_top
        return math.sqrt(self._var_level + off * (2.0 * self._covariance + off * self._var_slope))

    def weight(self, num_tokens: float) -> float:
        """Return how many samples of this size would tell as much as is known."""
        return (self.noise / self.error(num_tokens)) ** 2

    def largest(self, log_us: float) -> float:
        """Return up to how many tokens it takes at most a time; -inf if none do."""
        off = log_us - self._level
        if self._slope <= 1e-3:
            return math.inf if off >= 0.0 else -math.inf
        return math.exp(min(off / self._slope + self._log_top, 700.0))

    def add(self, num_tokens: float, us: float) -> float:
        """Take a sample; return by how much the level has jumped (a logarithm), 0 if it has not."""
        off, log_us = math.log(num_tokens) - self._log_top, math.log(us)
        self.samples += 1
        self._borrowed = 0.0
        if self.samples <= KNOWN:
            self._first.append((off, log_us - self._slope * off))
            self._level = median(level for _, level in self._first)
            # It is known where it was measured, and at the top as well as the slope is.
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
        jump, count = self.watch.add(self.evidence(LEAST_NOISE), self.surprise)
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
        """Return the last surprise in standard errors, as far as it may speak for a jump."""
        if abs(self.surprise) > OUTLIER:
            return math.copysign(OUTLIER_EVIDENCE, self.surprise)
        return min(max(self.surprise / max(self.surprise_error, least_error), -CLIP), CLIP)

    def borrow(self, jump: float) -> None:
        """Expect a jump that was seen in other arms, at most ``OUTLIER`` until the next sample."""
        believed = min(max(self._borrowed + jump, -OUTLIER), OUTLIER)
        jump, self._borrowed = believed - self._borrowed, believed
        self._level += jump
        self._var_level += 0.25 * jump * jump
        self.watch.clear()

    # -- on disk ------------------------------------------------------------------------

    def estimate(self) -> dict[str, float]:
        """Return what is known, as numbers; see ``restore``."""
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
        """Take over what ``estimate`` returned.

        Raises:
            ValueError: A number is missing, out of range, or contradicts another.
        """
        if set(numbers) != set(self.estimate()):
            raise ValueError(f"estimate of {sorted(numbers)}")
        for name, (least, most) in RANGES.items():
            value = numbers[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):  # NaN is in no range
                raise ValueError(f"{name} {value!r}")
        if numbers["covariance"] ** 2 > numbers["var_level"] * numbers["var_slope"] * (1 + 1e-6):
            raise ValueError(f"covariance {numbers['covariance']!r}")
        self.samples, self.noise = int(numbers["samples"]), float(numbers["noise"])
        self._level, self._slope = float(numbers["level"]), float(numbers["slope"])
        self._var_level = float(numbers["var_level"])
        self._covariance = float(numbers["covariance"])
        self._var_slope = float(numbers["var_slope"])
