"""What the choices of a shadow and of the policy in force cost, from measured steps.

A choice that was measured costs what was measured. What nobody ran comes from a cost model
brought to the level of what was measured, or without one from the two nearest measured sizes of
the same mode. Each is kept as a weighted sum of measured times, so that the errors of a
difference add up rightly: what both sides have in common cancels.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping

from dispatchkit.dispatch import CostModel, Decision
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.modes import RuntimeMode

#: A graph; or, of an eager step, its tokens.
Arm = GraphKey | int

MIN_SAMPLES = 3
"""Measured steps that it takes for the price of a graph, or of eager steps of one size."""
EAGER_GROUP = 8
"""Measured eager steps of neighbouring sizes that make one price, where one size has few."""
_TO_SIGMA = 1.4826  # from the median distance to the median, for normal noise
_OF_MEDIAN = 1.2533  # standard error of a median beside that of a mean
_SCALE = "scale"  # stands for the cost model's level among what is estimated


def arm_of(decision: Decision, num_tokens: int) -> Arm:
    """Return what names steps that take the same time."""
    return num_tokens if decision.key is None else decision.key


def _mode_and_size(arm: Arm) -> tuple[RuntimeMode, int]:
    return (RuntimeMode.NONE, arm) if isinstance(arm, int) else (arm.mode, arm.num_tokens)


def _alike(arm: Arm) -> Hashable:
    """Return what choices have in common that differ in size only."""
    return RuntimeMode.NONE if isinstance(arm, int) else (arm.mode, arm.descriptor.axes)


#: A time as a sum of estimated ones: each with its weight.
Form = Mapping[Hashable, float]


class Prices:
    """What each choice costs, as a sum of what was estimated, so that errors add up rightly.

    Args:
        samples: Measured microseconds by choice.
        times: The cost model, if any.
    """

    def __init__(self, samples: Mapping[Arm, list[float]], times: CostModel | None) -> None:
        self._times = times
        self._estimates: dict[Hashable, tuple[float, float]] = {}
        # By what differs in size only: the sizes that have a price, and what it is known by.
        self._ladders: dict[Hashable, dict[float, Hashable]] = defaultdict(dict)
        for arm, values in samples.items():
            if len(values) >= MIN_SAMPLES:
                _, size = _mode_and_size(arm)
                self._estimates[arm] = _median_and_error(values)
                self._ladders[_alike(arm)].setdefault(size, arm)
        for middle, values in _neighbours(samples):
            if middle not in self._ladders[RuntimeMode.NONE]:
                self._estimates["eager", middle] = _median_and_error(values)
                self._ladders[RuntimeMode.NONE][middle] = ("eager", middle)
        self.is_measured: bool = bool(self._estimates)
        if times is not None:
            ratios = [
                statistics.median(values) / model
                for arm, values in samples.items()
                if len(values) >= MIN_SAMPLES and (model := self._model(arm))
            ]
            level = statistics.median(ratios) if ratios else 1.0
            spread = statistics.median(abs(ratio - level) for ratio in ratios) if ratios else 0.0
            self._estimates[_SCALE] = (level, _TO_SIGMA * spread)

    def of(self, arm: Arm) -> Form | None:
        """Return a choice's time; None where nothing tells it."""
        if arm in self._estimates:
            return {arm: 1.0}
        if self._times is not None:
            return {_SCALE: self._model(arm)}
        _, size = _mode_and_size(arm)
        ladder = self._ladders[_alike(arm)]
        if size in ladder:  # another kind of graph of that size
            return {ladder[size]: 1.0}
        if len(ladder) < 2:
            return None
        # On both sides of it. Below the first its price holds; beyond the last, the line through
        # the last two goes on, never downwards: as with a measured curve of a cost model.
        at = min(max(bisect_left(sizes := sorted(ladder), size), 1), len(sizes) - 1)
        below, above = sizes[at - 1], sizes[at]
        share = max(0.0, (size - below) / (above - below))
        if share > 1.0 and self._price(ladder[above]) < self._price(ladder[below]):
            share = 1.0
        return {ladder[below]: 1.0 - share, ladder[above]: share}

    def value(self, form: Form) -> float:
        """Return the microseconds of a sum."""
        return math.fsum(weight * self._estimates[base][0] for base, weight in form.items())

    def error(self, form: Form) -> float:
        """Return the standard error of a sum."""
        return math.hypot(*(weight * self._estimates[base][1] for base, weight in form.items()))

    def _price(self, base: Hashable) -> float:
        return self._estimates[base][0]

    def _model(self, arm: Arm) -> float:
        if self._times is None:
            return 0.0
        mode, size = _mode_and_size(arm)
        captured = None if mode is RuntimeMode.NONE else size
        return self._times.step_us(size, captured, piecewise=mode is RuntimeMode.PIECEWISE)


def _neighbours(samples: Mapping[Arm, list[float]]) -> Iterator[tuple[float, list[float]]]:
    """Yield eager steps in groups of neighbouring sizes: their middle size and their times."""
    eager = sorted(
        (arm, value) for arm, values in samples.items() if isinstance(arm, int) for value in values
    )
    for start in range(0, len(eager) - EAGER_GROUP + 1, EAGER_GROUP):
        group = eager[start : start + EAGER_GROUP]
        yield statistics.fmean(size for size, _ in group), [value for _, value in group]


def _median_and_error(values: list[float]) -> tuple[float, float]:
    """Return the median, which outliers do not move, and its standard error."""
    middle = statistics.median(values)
    sigma = _TO_SIGMA * statistics.median(abs(value - middle) for value in values)
    return middle, _OF_MEDIAN * sigma / math.sqrt(len(values))
