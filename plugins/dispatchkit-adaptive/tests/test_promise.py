"""The promise: the policy is never more than one percent slower than its base.

Costs are simulated, and every step goes through the real dispatcher. An adversary changes the
time of one arm by a factor of at most 1.5 per 1,000 steps, suddenly or gradually, at the worst
moments that hypothesis finds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from dispatchkit import DispatchConfig, GraphKey, load_plugins

from dispatchkit_adaptive import AdaptivePolicy
from dispatchkit_plan.costs import load_cost_model
from dispatchkit_plan.scenario import Noise

sys.path.insert(0, str(Path(__file__).parent))
from rehearsal import rehearse

PLUGINS = load_plugins()
SIZES = (512, 768, 1024, 2048)
CONFIG = DispatchConfig(mode="FULL", sizes=SIZES)
MLP = load_cost_model("mlp-h100")
DRIFT = 1.5


@attrs.frozen
class Change:
    """A change of one arm by a factor, sudden or gradual over 1,000 steps."""

    arm: int  # size of a graph, or 0 for eager
    at: int
    factor: float
    at_once: bool

    def __call__(self, step: int) -> float:
        if step < self.at:
            return 1.0
        return self.factor if self.at_once else self.factor ** min(1.0, (step - self.at) / 1000)


@st.composite
def adversaries(draw: st.DrawFn) -> tuple[list[Change], int]:
    """Return changes, at most one per 1,000 steps, and the number of steps."""
    first = draw(st.integers(0, 400))
    changes = [
        Change(
            draw(st.sampled_from((0, 0, *SIZES))),
            first + 1000 * index,
            draw(st.sampled_from((DRIFT, 1 / DRIFT)) | st.floats(1 / DRIFT, DRIFT)),
            draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 2)))
    ]
    return changes, changes[-1].at + draw(st.integers(200, 700))


def costs(
    changes: list[Change], ratio: float | None
) -> Callable[[int, int, GraphKey | None], float]:
    """Return costs of the MLP, or with eager at a share of the graph's time in mid-bucket."""

    def cost(step: int, num_tokens: int, key: GraphKey | None) -> float:
        arm = 0 if key is None else key.num_tokens
        us = MLP.eager_us(num_tokens) if key is None else MLP.graph_us(arm)
        if key is None and ratio is not None:
            top = next(size for size in SIZES if size >= num_tokens)
            us = ratio * MLP.graph_us(top) * (0.25 + num_tokens / top)
        for change in changes:
            if change.arm == arm:
                us *= change(step)
        return us

    return cost


def traffic(kind: int, steps: int, seed: int) -> list[int]:
    """Return the sizes of steps: one size, four sizes, or random sizes."""
    chance = random.Random(seed)
    few = [chance.randint(385, 2048) for _ in range((1, 4, steps)[kind])]
    return [chance.choice(few) for _ in range(steps)]


@hypothesis.settings(max_examples=max(3, hypothesis.settings.default.max_examples // 10))
@hypothesis.given(
    adversaries(), st.none() | st.floats(0.7, 1.1), st.integers(0, 2), st.integers(0, 10**6)
)
def test_no_prefix_is_far_behind_the_base_under_adversaries(
    adversary: tuple[list[Change], int], ratio: float | None, kind: int, seed: int
) -> None:
    changes, steps = adversary
    result = rehearse(
        AdaptivePolicy(plugins=PLUGINS, seed=seed),
        CONFIG,
        traffic(kind, steps, seed),
        costs(changes, ratio),
        PLUGINS.create_policy("vllm"),
        seed=seed,
    )
    assert result.worst_prefix_pct is not None
    assert result.worst_prefix_pct <= 1.0


@pytest.mark.slow_except("1-0")
@pytest.mark.parametrize(("sample_every", "delay"), [(1, 0), (16, 32)])
def test_most_of_what_the_pad_rule_loses_is_won(sample_every: int, delay: int) -> None:
    """Padding is 29% slower than the best choices; sparse and late measurements suffice too."""
    result = rehearse(
        AdaptivePolicy(plugins=PLUGINS),
        CONFIG,
        traffic(2, 1500, 1),
        costs([], None),
        PLUGINS.create_policy("vllm"),
        sample_every=sample_every,
        delay=delay,
    )
    assert result.over_oracle_pct < (0.5 if sample_every == 1 else 3.0)
    assert result.worst_prefix_pct is not None
    assert result.worst_prefix_pct <= 1.0


def test_without_noise_calibration_alone_finds_every_winner() -> None:
    result = rehearse(
        AdaptivePolicy(plugins=PLUGINS),
        CONFIG,
        traffic(2, 300, 3),
        costs([], None),
        PLUGINS.create_policy("vllm"),
        noise=Noise(0.0, 0.0),
    )
    assert result.over_oracle_pct < 0.3


@pytest.mark.slow
def test_where_graphs_always_win_next_to_nothing_is_spent() -> None:
    """Eager takes twice as long, so it is rarely probed and never used."""
    result = rehearse(
        AdaptivePolicy(plugins=PLUGINS),
        CONFIG,
        traffic(2, 1500, 4),
        lambda step, n, key: 1000.0 * n / 512 * 2 if key is None else 1000.0 * key.num_tokens / 512,
        PLUGINS.create_policy("vllm"),
    )
    assert result.total_us <= 1.002 * result.base_us


def test_eager_that_slows_midway_is_left() -> None:
    slow = [Change(0, 700, DRIFT, at_once=True)]
    result = rehearse(
        AdaptivePolicy(plugins=PLUGINS),
        CONFIG,
        traffic(2, 1500, 5),
        costs(slow, None),
        PLUGINS.create_policy("vllm"),
    )
    assert result.over_oracle_pct < 1.5


@pytest.mark.slow
def test_same_seed_same_rehearsal() -> None:
    def run() -> object:
        return rehearse(
            AdaptivePolicy(plugins=PLUGINS, seed=2),
            CONFIG,
            traffic(1, 300, 6),
            costs([], None),
            PLUGINS.create_policy("vllm"),
            seed=9,
        )

    assert run() == run()
