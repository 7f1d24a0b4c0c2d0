"""What is known of one arm: a bounded history of times, read robustly.

An arm is a way to run a step: the graph of a key, whose time does not depend on the real
number of tokens, or eager, whose time is a line over it within one bucket. Noise is some per
cent, and now and then a step takes many times as long as usual, so that means are of no use:
the level is a median, the line a resistant one, and what is far off is dropped.

Times change, too. A level is watched by the median of its latest samples over windows of
several lengths. A large change shows in four samples, a small one takes more; the history is
then moved to the new level, which keeps the slope that was learnt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

import attrs

__all__ = ["Arm", "Line", "fit_line"]

#: Times this much above or below what is expected are dropped, unless they come in a row.
OUTLIER = 2.5
#: So many of them in a row are no outliers.
_OUTLIERS_IN_A_ROW = 4
#: Latest samples the level is read from.
_LEVEL_WINDOW = 128
# Windows in which a change is looked for, and how many standard errors count as one.
_CHANGE_WINDOWS = (
    *((3, 4.5), (4, 4.5), (8, 4.6), (16, 4.4)),
    *((32, 4.2), (64, 4.0), (128, 4.0)),
)
# A median of k normal samples has 1.25 times the standard error of their mean.
_MEDIAN_ERROR = 1.2533
# How many times slower, or as fast, an arm is taken for without a sample of its own.
_MOST_SLOWER, _MOST_FASTER = OUTLIER, 1.6
# Samples from which on a time can be told to be usual.
_WELL_KNOWN = 16
# Noise that is assumed until it can be measured, and the least that is believed.
_FIRST_NOISE, _LEAST_NOISE = 0.10, 0.004


@attrs.frozen
class Line:
    """Time over tokens: ``at`` tokens take ``us``, each further one ``slope``.

    Attributes:
        at: Tokens in the middle of what was measured.
        us: Microseconds there.
        slope: Microseconds per token, never negative.
        low: Fewest tokens measured.
        high: Most tokens measured.
        center: Tokens where it is known best.
        tilt: Standard error of the slope, microseconds per token, for noise of one.
        is_sloped: The slope was measured. Where it was not, more tokens are taken to cost
            in proportion and fewer to cost the same, so that nothing is promised.
    """

    at: float
    us: float
    slope: float = 0.0
    low: float = 0.0
    high: float = 0.0
    center: float = 0.0
    tilt: float = 0.0
    is_sloped: bool = True

    def __call__(self, num_tokens: float) -> float:
        """Return the time for a number of tokens."""
        off = num_tokens - self.at
        if not self.is_sloped and off > 0:
            return self.us * num_tokens / self.at
        return max(self.us + self.slope * off, 0.25 * self.us)

    def largest(self, limit_us: float) -> float:
        """Return up to how many tokens it takes at most a time; -inf if none do."""
        if not self.is_sloped:
            return self.at * limit_us / self.us if limit_us >= self.us else -math.inf
        if self.slope <= 0.0:
            return math.inf if self.us <= limit_us else -math.inf
        return self.at + (limit_us - self.us) / self.slope


def fit_line(samples: Iterable[tuple[float, float]]) -> Line:
    """Fit a line to (tokens, microseconds) that outliers do not bend.

    A resistant line through the medians of the outer thirds of the range comes first; least
    squares on what is near to it, weighted for noise in proportion, sharpen it.
    """
    points = sorted(samples)
    low, high = points[0][0], points[-1][0]
    middle, level = median(n for n, _ in points), median(us for _, us in points)
    if high - low < 0.02 * high or len(points) < 4:
        return Line(middle, level, 0.0, low, high, middle, is_sloped=False)
    # Thirds of the range, not of the samples: most of these may be of one size.
    third = (high - low) / 3
    left = [point for point in points if point[0] <= low + third]
    right = [point for point in points if point[0] >= high - third]
    n0, n1 = median(n for n, _ in left), median(n for n, _ in right)
    y0, y1 = median(us for _, us in left), median(us for _, us in right)
    middle = (n0 + n1) / 2
    slope = (y1 - y0) / (n1 - n0)
    at = y0 + slope * (middle - n0)
    center, tilt = middle, at / (n1 - n0)
    for cut in (1.6, 1.35):
        near = [
            (n, us) for n, us in points if 1 / cut < us / max(at + slope * (n - middle), 1e-9) < cut
        ]
        if len(near) < max(4, len(points) // 2):
            break
        at, slope, center, tilt = _least_squares(near, middle, at)
    # A step of twice the tokens takes at most about twice as long, and never less time.
    slope = min(max(slope, 0.0), 2.0 * at / middle)
    return Line(middle, max(at, 1e-9), slope, low, high, center, tilt)


def _least_squares(
    points: Sequence[tuple[float, float]], middle: float, level: float
) -> tuple[float, float, float, float]:
    """Return the level at ``middle``, the slope, where the line is known best, and its tilt."""
    weights = [1.0 / (us * us) for _, us in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    if spread <= 0.0:
        return level, 0.0, mean_n, 0.0
    slope = (
        sum(w * (n - mean_n) * (y - mean_y) for w, (n, y) in zip(weights, points, strict=True))
        / spread
    )
    return mean_y + slope * (middle - mean_n), slope, mean_n, 1.0 / math.sqrt(spread)


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle three fifths: nearly as exact as a mean, and robust."""
    ordered = sorted(values)
    cut = max(len(ordered) // 5, len(ordered) > 2)
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


class Arm:
    """The times of one arm in one regime.

    Args:
        history_size: Samples kept.
        over_tokens: Times are a line over tokens, rather than one level.

    Attributes:
        samples: (tokens, microseconds), oldest first, at today's level.
        fresh: How many of the latest were measured since the last change.
        last_step: Number of the step that was measured last.
    """

    def __init__(self, history_size: int, *, over_tokens: bool) -> None:
        self.samples: list[tuple[float, float]] = []
        self.fresh = 0
        self.last_step = 0
        self._borrowed = 1.0
        self.noise = _FIRST_NOISE
        self._history_size = history_size
        self._over_tokens = over_tokens
        self._shape: Line | None = None
        self._scale = 1.0
        self._fitted_at = 0
        self._added = 0
        self._ratios: deque[float] = deque(maxlen=_CHANGE_WINDOWS[-1][0])
        self._outliers: list[tuple[float, float]] = []
        # Of each sample: its time in times of the shape, and its quarter of the range.
        self._levels: list[float] = []
        self._quarters: list[int] = []

    @property
    def line(self) -> Line | None:
        """The time over tokens as it is now; None without any sample."""
        shape = self._shape
        if shape is None:
            return None
        scale = self._scale
        return Line(
            at=shape.at,
            us=shape.us * scale,
            slope=shape.slope * scale,
            low=shape.low,
            high=shape.high,
            center=shape.center,
            tilt=shape.tilt * scale,
            is_sloped=shape.is_sloped,
        )

    def expect(self, num_tokens: float) -> float | None:
        """Return the time expected for a number of tokens; None without any sample."""
        return None if self._shape is None else self._shape(num_tokens) * self._scale

    def error(self, num_tokens: float) -> float:
        """Return the relative standard error of what is expected for a number of tokens."""
        count, shape = min(self.fresh, _LEVEL_WINDOW, len(self.samples)), self._shape
        if not count or shape is None:
            return 1.0
        level = 1.07 * self.noise / math.sqrt(count)
        if not self._over_tokens:
            return level
        # Beyond the middle of what was measured, the slope's own error counts ever more.
        off = abs(num_tokens - shape.center)
        return math.hypot(level, self.noise * off * shape.tilt / shape(num_tokens))

    @property
    def is_suspicious(self) -> bool:
        """The last sample was far from what was expected; another one would tell."""
        if self._outliers:
            return len(self._outliers) < _OUTLIERS_IN_A_ROW
        return bool(self._ratios) and abs(math.log(self._ratios[-1])) > 2.2 * self.noise

    def latest(self) -> float:
        """Return the latest few samples in times of what was expected; 1 without any."""
        recent = list(self._ratios)[-4:]
        return sum(recent) / len(recent) if recent else 1.0

    def add(self, num_tokens: float, us: float, *, watch: bool = True) -> float | None:
        """Take a sample.

        Args:
            num_tokens: Tokens of the step.
            us: Microseconds it took.
            watch: Look for a change of level. What lies outside the range measured before
                is never evidence of one.

        Returns:
            The factor by which the level has changed, when this sample shows that it has;
            None otherwise.
        """
        expected = self.expect(num_tokens)
        shape = self._shape
        inside = not self._over_tokens or (
            shape is not None and 0.99 * shape.low <= num_tokens <= 1.01 * shape.high
        )
        if not inside:
            self._fitted_at = -1  # a wider range: fit anew
        if watch and inside and expected is not None and len(self.samples) >= 4:
            ratio = us / expected
            if not 1 / OUTLIER < ratio < OUTLIER:
                self._outliers.append((num_tokens, us))
                if len(self._outliers) < _OUTLIERS_IN_A_ROW:
                    return None
                return self._move(self._outliers)
            self._outliers.clear()
            self._ratios.append(ratio)
        self._take(num_tokens, us)
        found = self._change() if watch else 0
        if found:
            return self._move(self.samples[-found:])
        self._read()
        return None

    def is_usual(self, num_tokens: float, us: float) -> bool:
        """Tell whether a time is what is well known already."""
        shape = self._shape
        if shape is None or self.fresh < _WELL_KNOWN or self._outliers:
            return False
        if self._over_tokens and not shape.low <= num_tokens <= shape.high:
            return False
        return abs(us / (shape(num_tokens) * self._scale) - 1.0) < 2.0 * self.noise

    def add_usual(self, samples: Iterable[tuple[float, float]]) -> None:
        """Take samples that show no change."""
        for num_tokens, us in samples:
            self._ratios.append(us / (self.expect(num_tokens) or us))
            self._take(num_tokens, us)
        self._read()

    def shift(self, factor: float, latest: Sequence[tuple[float, float]] = ()) -> None:
        """Move all samples but the latest, which show the change, to another level."""
        if self._shape is None:
            return
        older = [pair for pair in self.samples if pair not in latest]
        self._outliers = []
        self._replace([*((n, us * factor) for n, us in older), *latest], fresh=max(len(latest), 4))

    def borrow(self, factor: float) -> None:
        """Believe a change that was measured on another arm, within bounds.

        One after the other, such changes would lead anywhere as long as this arm itself is not
        measured.
        """
        believed = min(max(self._borrowed * factor, 1.0 / _MOST_FASTER), _MOST_SLOWER)
        self.shift(believed / self._borrowed)
        self._borrowed = believed

    # -- inside -------------------------------------------------------------------------

    def _take(self, num_tokens: float, us: float) -> None:
        self.samples.append((num_tokens, us))
        if self._shape is not None:
            self._levels.append(us / self._shape(num_tokens))
            self._quarters.append(self._quarter(num_tokens))
        if len(self.samples) > self._history_size:
            spare = self._spare()
            del self.samples[spare], self._levels[spare], self._quarters[spare]
        self._added += 1
        self._borrowed = 1.0
        self.fresh = min(self.fresh + 1, len(self.samples))

    def _spare(self) -> int:
        """Return the index of the oldest sample that the line can do without.

        It is of the quarter of the range that has most samples: traffic of one size would
        otherwise push out all that tells the slope.
        """
        if not self._over_tokens:
            return 0
        quarters = self._quarters
        fullest = max(range(4), key=quarters.count)
        return quarters.index(fullest)

    def _quarter(self, num_tokens: float) -> int:
        """Return which quarter of the measured range a number of tokens is in."""
        shape = self._shape
        if shape is None or shape.high <= shape.low:
            return 0
        return min(3, int((num_tokens - shape.low) * 4 / (shape.high - shape.low)))

    def _fit(self) -> Line:
        """Fit the line; what is from before a change counts only where nothing newer is."""
        old = len(self.samples) - self.fresh
        if old <= 0 or self._shape is None:
            return fit_line(self.samples)
        quarters = [self._quarter(n) for n, _ in self.samples]
        renewed = {each for each in range(4) if quarters[old:].count(each) >= 4}
        return fit_line(
            pair
            for index, (pair, quarter) in enumerate(zip(self.samples, quarters, strict=True))
            if index >= old or quarter not in renewed
        )

    def _change(self) -> int:
        """Return how many of the latest samples show a change; 0 if none do."""
        ratios = list(self._ratios)
        for window, errors in _CHANGE_WINDOWS:
            if len(ratios) < window:
                break
            # A small change takes many samples, and is not looked for after each.
            if window > 8 and self._added % (window // 8):
                continue
            middle = median(ratios[-window:])
            limit = errors * _MEDIAN_ERROR * self.noise / math.sqrt(window)
            if abs(math.log(middle)) > max(limit, 0.02):
                return window
        return 0

    def _move(self, latest: Sequence[tuple[float, float]]) -> float:
        """Make the latest samples the level, and bring the older ones to it."""
        shape, old = self._shape, self._scale
        latest = list(latest)
        self._outliers = []
        if shape is None:
            return 1.0
        factor = median(us / (shape(n) * old) for n, us in latest)
        self.shift(factor, latest)
        self.fresh = len(latest)
        self._read()
        return factor

    def _replace(self, samples: Iterable[tuple[float, float]], fresh: int) -> None:
        self.samples = list(samples)[-self._history_size :]
        self._levels = []
        self.fresh = fresh
        self._ratios.clear()
        self._read()

    def _read(self) -> None:
        count = len(self.samples)
        due = self._fitted_at < 0 or self._added - self._fitted_at >= max(4, min(count, 64) // 4)
        if self._shape is None or (self._over_tokens and due) or not self._levels:
            if self._over_tokens:
                self._shape = self._fit()
            elif self._shape is None:
                self._shape = Line(1.0, self.samples[-1][1])
            self._fitted_at = self._added
            shape = self._shape
            self._levels = [us / shape(n) for n, us in self.samples]
            self._quarters = [self._quarter(n) for n, _ in self.samples]
        window = max(1, min(self.fresh, _LEVEL_WINDOW))
        latest = self._levels[-window:]
        self._scale = middle_mean(latest)
        if len(latest) >= 8 and self._added % 4 == 0:
            spread = 1.4826 * median(abs(level / self._scale - 1.0) for level in latest)
            # Slowly, since the spread of few samples is itself noisy.
            self.noise = max(_LEAST_NOISE, 0.6 * self.noise + 0.4 * spread)
