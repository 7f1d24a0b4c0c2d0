"""Hedging: plan for traffic similar to the trace rather than for the trace itself.

Sizes that are optimal for one trace overfit that trace. If sizes are planned on one minute of
traffic, a size that first occurs in the next minute may be padded to the largest graph. The planner
therefore optimizes for a mixture of histograms: the trace's histogram, variants of this histogram
in which each size is spread over its neighborhood, and a histogram of all sizes with weights
proportional to 1/size.

The share of each histogram is found by validation. The trace is divided into blocks. Each block
after the first is held out once: for each mixture in a short list, sizes are planned on the earlier
blocks and judged on the held-out block. The mixtures are then averaged. Mixtures with a lower
excess cost have more weight: a mixture with 1.03 times the lowest excess has about 40% of the
weight of the best mixture.
Validation uses only the steps that the plan is made from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np

from dispatchkit.errors import ConfigError, counted

from dispatchkit_plan.objective import Objective
from dispatchkit_plan.optimal import FloatArray, IntArray, size_curve

__all__ = [
    "FALLBACK_HEDGE",
    "HEDGE_CANDIDATES",
    "MIN_VALIDATION_STEPS",
    "NO_HEDGE",
    "Hedge",
    "HedgeChoice",
    "choose_hedge",
]

MIN_VALIDATION_STEPS = 300
"""Minimum number of steps for validation: 50 in each of 6 blocks."""

_BLOCKS = 6
# Numbers of sizes for which a hedge is judged.
_PLAN_SIZES = range(8, 65)
# A mixture with e^x times the lowest excess has the relative weight exp(-30 x).
_SHARPNESS = 30.0
# Percentage points added to an excess before its logarithm is taken, because log(0) is not finite.
_SMOOTH_PCT = 0.3
_MAX_CANDIDATES = 512


@attrs.frozen
class Hedge:
    """A mixture of the trace's histogram and similar histograms.

    Attributes:
        own: Share of the trace's own histogram.
        spread: (width, share) pairs. Each size is spread evenly over the sizes within ±width, a
            fraction of the size.
        prior: Share of a histogram that contains every size, with a weight proportional to 1/size.
    """

    own: float
    spread: tuple[tuple[float, float], ...] = ()
    prior: float = 0.0

    def __attrs_post_init__(self) -> None:
        shares = [self.own, self.prior, *(share for _, share in self.spread)]
        setting = "own, prior and the shares in spread"
        allowed = "non-negative numbers that sum to 1"
        if not all(isinstance(share, int | float) for share in shares):
            raise ConfigError(setting, shares, allowed)
        if min(shares) < 0 or not abs(sum(shares) - 1) <= 1e-6:
            raise ConfigError(setting, shares, allowed)
        for width, _ in self.spread:
            if not 0 < width < 1:
                raise ConfigError("width in spread", width, "greater than 0 and less than 1")

    def apply(self, demand: FloatArray, *, weight: float | None = None) -> FloatArray:
        """Return the histogram to plan for.

        Args:
            demand: Number of batches of each size, 0 to N. Shape (N + 1,).
            weight: Total of the prior's histogram, in batches, before it is multiplied by its
                share; by default, the total of ``demand``.
        """
        top = len(demand) - 1
        total = float(demand[1:].sum())
        mixed = self.own * demand
        for width, share in self.spread:
            if share:
                mixed = mixed + share * _spread(demand, width)
        if self.prior:
            sizes = np.arange(1, top + 1)
            mixed[1:] += (
                self.prior
                * (total if weight is None else weight)
                * ((1 / sizes) / (1 / sizes).sum())
            )
        mixed[0] = 0.0
        return mixed

    def to_json(self) -> dict[str, object]:
        """Return the rounded shares as JSON values."""
        return {
            "own": round(self.own, 4),
            "spread": [[width, round(share, 4)] for width, share in self.spread if share],
            "prior": round(self.prior, 4),
        }


def _spread(demand: FloatArray, width: float) -> FloatArray:
    """Spread each size evenly over the integers within ±width, a fraction of the size."""
    top = len(demand) - 1
    sizes = np.flatnonzero(demand[1:]) + 1
    low = np.maximum(1, np.ceil(sizes * (1 - width) - 1e-9)).astype(np.int64)
    high = np.minimum(top, np.floor(sizes * (1 + width) + 1e-9)).astype(np.int64)
    share = demand[sizes] / (high - low + 1)
    edges = np.zeros(top + 2)
    np.add.at(edges, low, share)
    np.add.at(edges, high + 1, -share)
    spread: FloatArray = np.maximum(np.cumsum(edges)[: top + 1], 0.0)
    return spread


NO_HEDGE = Hedge(own=1.0)
"""No hedge: plan for the trace itself."""

FALLBACK_HEDGE = Hedge(own=0.6, spread=((0.25, 0.38),), prior=0.02)
"""Hedge for traces that are too short for validation, or whose order of steps is unknown."""

_WIDTHS = (0.12, 0.25, 0.5)
HEDGE_CANDIDATES: tuple[Hedge, ...] = tuple(
    Hedge(own=(1 - prior) * (1 - share), spread=((width, (1 - prior) * share),), prior=prior)
    for prior in (0.003, 0.03)
    for width, share in [
        (_WIDTHS[0], 0.0),
        *((width, share) for width in _WIDTHS for share in (0.4, 1.0)),
    ]
)
"""Candidates for validation; all include a small share of every size."""


@attrs.frozen
class HedgeChoice:
    """The hedge of a plan, and the reason for its choice.

    Attributes:
        hedge: Chosen mixture.
        validated: Whether the hedge was validated on held-out blocks of the trace.
        expected_excess_pct: (number of sizes, mean excess on the held-out blocks in percent) pairs
            of the best mixture; empty if not validated.
        reason: Explanation of the choice, in words.
    """

    hedge: Hedge
    validated: bool
    reason: str
    expected_excess_pct: tuple[tuple[int, float], ...] = ()


def choose_hedge(steps: IntArray, candidates: IntArray, objective: Objective) -> HedgeChoice:
    """Return the average of the candidate hedges, weighted by their results in validation.

    With fewer than ``MIN_VALIDATION_STEPS`` steps, return ``FALLBACK_HEDGE``.

    Args:
        steps: Number of tokens of each step, in order; each is at most the largest candidate.
            Shape (steps,).
        candidates: Sizes that may be captured.
        objective: Objective by which hedges are compared.
    """
    if len(steps) < MIN_VALIDATION_STEPS:
        return HedgeChoice(
            FALLBACK_HEDGE,
            validated=False,
            reason=(
                f"The default hedge is used, because the plan is based on only "
                f"{counted(len(steps), 'step')}. Validating a hedge requires "
                f"{counted(MIN_VALIDATION_STEPS, 'step')}."
            ),
        )
    top = int(candidates[-1])
    considered = _thinned(candidates, steps)
    edges = [len(steps) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    blocks = [
        np.bincount(steps[start:end], minlength=top + 1).astype(np.float64)
        for start, end in itertools.pairwise(edges)
    ]
    levels = [k for k in _PLAN_SIZES if k <= len(considered)] or [len(considered)]
    excess = np.array(
        [
            [
                _excesses(
                    hedge.apply(sum_of(blocks[:at])), considered, objective, blocks[at], levels
                )
                for hedge in HEDGE_CANDIDATES
            ]
            for at in range(1, _BLOCKS)
        ]
    )  # (folds, hedges, levels)
    score = np.log(excess + _SMOOTH_PCT).mean(axis=(0, 2))
    weights = np.exp(-_SHARPNESS * (score - score.min()))
    weights /= weights.sum()
    best = int(score.argmin())
    return HedgeChoice(
        _average(HEDGE_CANDIDATES, weights),
        validated=True,
        reason=(
            f"Weighted average of {len(HEDGE_CANDIDATES)} hedges; a hedge with less excess cost "
            f"has more weight. Each was validated on {_BLOCKS - 1} held-out blocks of the trace."
        ),
        expected_excess_pct=tuple(
            (k, float(value)) for k, value in zip(levels, excess[:, best].mean(axis=0), strict=True)
        ),
    )


def sum_of(blocks: Sequence[FloatArray]) -> FloatArray:
    """Return the sum of histograms."""
    total: FloatArray = np.sum(blocks, axis=0)
    return total


def _thinned(candidates: IntArray, steps: IntArray) -> IntArray:
    """Return at most ``_MAX_CANDIDATES`` candidates, to limit the time of validation."""
    if len(candidates) <= _MAX_CANDIDATES:
        return candidates
    kept = np.linspace(0, len(candidates) - 1, _MAX_CANDIDATES // 2).astype(np.int64)
    sizes, counts = np.unique(steps, return_counts=True)
    common = sizes[np.argsort(-counts, kind="stable")][: _MAX_CANDIDATES // 2]
    at_least = np.searchsorted(candidates, common)
    thinned: IntArray = candidates[np.unique(np.concatenate([kept, at_least]))]
    return thinned


def _excesses(
    demand: FloatArray,
    candidates: IntArray,
    objective: Objective,
    held_out: FloatArray,
    levels: Sequence[int],
) -> list[float]:
    curve = size_curve(
        candidates, objective.costs(candidates, demand), levels[-1], monotone=objective.monotone
    )
    return [objective.excess_pct(curve.sizes(k), held_out) for k in levels]


def _average(hedges: Sequence[Hedge], weights: FloatArray) -> Hedge:
    spread = dict.fromkeys(_WIDTHS, 0.0)
    for hedge, weight in zip(hedges, weights, strict=True):
        for width, share in hedge.spread:
            spread[width] += float(weight) * share
    own = float(sum(w * h.own for h, w in zip(hedges, weights, strict=True)))
    prior = float(sum(w * h.prior for h, w in zip(hedges, weights, strict=True)))
    total = own + prior + sum(spread.values())
    return Hedge(
        own=own / total,
        spread=tuple((width, share / total) for width, share in spread.items()),
        prior=prior / total,
    )
