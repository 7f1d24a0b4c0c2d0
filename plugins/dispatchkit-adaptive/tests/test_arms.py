"""What is known of one arm: robust levels and lines, and changes that are noticed."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st

from dispatchkit_adaptive.arms import Arm, fit_line


def feed(arm: Arm, cost: Callable[[int], float], sizes: list[int], seed: int = 0) -> list[float]:
    """Add noisy samples; return the changes that were noticed."""
    chance = random.Random(seed)
    found = []
    for n in sizes:
        us = cost(n) * max(0.2, chance.gauss(1.0, 0.1)) * (10 if chance.random() < 0.01 else 1)
        factor = arm.add(n, us)
        if factor is not None:
            found.append(factor)
    return found


def sizes(low: int, high: int, count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(low, high) for _ in range(count)]


def test_level_is_found_through_noise_and_outliers() -> None:
    arm = Arm(64, over_tokens=False)
    feed(arm, lambda n: 1330.0, [512] * 200)
    assert arm.expect(512) == pytest.approx(1330.0, rel=0.05)
    assert 0.05 < arm.noise < 0.15


def test_an_outlier_just_after_a_change_decides_nothing_either() -> None:
    arm = Arm(64, over_tokens=False)
    feed(arm, lambda n: 1000.0, [512] * 50)
    while arm.add(512, 1500.0) is None:
        pass
    arm.add(512, 15000.0)
    assert arm.expect(512) == pytest.approx(1500.0, rel=0.05)


@pytest.mark.parametrize("outlier", [1e-3, 1e9])
def test_one_outlier_decides_nothing(outlier: float) -> None:
    """The level of an arm is a robust one."""
    arm = Arm(32, over_tokens=False)
    for _ in range(10):
        arm.add(8, 100.0)
    before = arm.expect(8)
    assert arm.add(8, outlier) is None
    assert arm.expect(8) == before


def test_line_is_found_through_noise_and_outliers() -> None:
    def cost(n: int) -> float:
        return 200.0 + 2.0 * n

    arm = Arm(64, over_tokens=True)
    feed(arm, cost, sizes(513, 768, 300))
    for n in (513, 640, 768):
        assert arm.expect(n) == pytest.approx(cost(n), rel=0.06)


def test_traffic_of_one_size_does_not_push_out_the_slope() -> None:
    def cost(n: int) -> float:
        return 100.0 + 2.0 * n

    arm = Arm(64, over_tokens=True)
    feed(arm, cost, [*[1025, 2048] * 12, *[2048] * 500])
    assert len(arm.samples) == 64
    assert arm.expect(1025) == pytest.approx(cost(1025), rel=0.1)


def test_without_a_slope_nothing_is_promised() -> None:
    arm = Arm(64, over_tokens=True)
    for _ in range(20):
        arm.add(100, 50.0)
    assert arm.expect(50) == pytest.approx(50.0)
    assert arm.expect(200) == pytest.approx(100.0)


@hypothesis.given(
    st.floats(0.0, 3.0), st.floats(50.0, 5000.0), st.integers(1, 500), st.integers(8, 400)
)
def test_fitted_line_goes_through_exact_points(
    slope: float, at: float, low: int, width: int
) -> None:
    """As long as the line is a possible one: no step of half the size takes no time."""
    points = [(float(n), at + slope * n) for n in range(low, low + width + 1)]
    line = fit_line(points)
    if not line.is_sloped:
        return
    for n, us in (points[0], points[-1]):
        assert line(n) == pytest.approx(us, rel=0.02)


@hypothesis.given(st.floats(10.0, 1e5))
def test_largest_inverts_the_line(limit: float) -> None:
    line = fit_line([(float(n), 100.0 + 3.0 * n) for n in range(100, 200)])
    n = line.largest(limit)
    if 100 <= n <= 200:
        assert line(n) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize("over_tokens", [False, True])
@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_a_large_change_is_noticed_in_four_samples(over_tokens: bool, factor: float) -> None:
    arm = Arm(64, over_tokens=over_tokens)
    feed(arm, lambda n: 1000.0, sizes(600, 700, 100))
    chance = random.Random(7)
    needed = next(
        count
        for count in range(1, 20)
        if arm.add(chance.randint(600, 700), 1000.0 * factor * chance.gauss(1.0, 0.05)) is not None
    )
    assert needed <= 5
    assert arm.expect(650) == pytest.approx(1000.0 * factor, rel=0.15)


def test_a_small_change_is_followed_too() -> None:
    arm = Arm(192, over_tokens=False)
    feed(arm, lambda n: 1000.0, [512] * 300)
    feed(arm, lambda n: 1080.0, [512] * 150, seed=5)
    assert arm.expect(512) == pytest.approx(1080.0, rel=0.03)


def test_steady_times_are_seldom_taken_for_a_change() -> None:
    changes = 0
    for seed in range(10):
        arm = Arm(192, over_tokens=False)
        changes += len(feed(arm, lambda n: 1000.0, [512] * 1000, seed=seed))
    assert changes <= 10


def test_history_is_bounded() -> None:
    for over_tokens in (False, True):
        arm = Arm(16, over_tokens=over_tokens)
        feed(arm, lambda n: 100.0 + n, sizes(1, 100, 500))
        assert len(arm.samples) == 16


def test_changes_of_other_arms_lead_only_so_far() -> None:
    """One after the other they would lead anywhere; a sample of its own ends that."""
    arm = Arm(64, over_tokens=True)
    feed(arm, lambda n: 1000.0, sizes(600, 700, 50))
    for _ in range(10):
        arm.borrow(0.7)
    assert arm.expect(650) == pytest.approx(1000.0 / 1.6, rel=0.05)
    for _ in range(10):
        arm.borrow(1.4)
    assert arm.expect(650) == pytest.approx(2500.0, rel=0.05)
    arm.add(650, 2500.0)
    arm.borrow(0.7)
    assert arm.expect(650) == pytest.approx(1750.0, rel=0.05)
