"""The estimated time of one arm: robust levels and slopes, and detected changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st

from dispatchkit_adaptive.estimates import Estimate


def make(memory: int = 64, *, over_tokens: bool = False, top: int = 700) -> Estimate:
    return Estimate(top, memory, over_tokens=over_tokens)


def feed(
    arm: Estimate, cost: Callable[[int], float], sizes: list[int], seed: int = 0
) -> list[float]:
    """Add noisy samples; return the factors of the detected changes."""
    chance = random.Random(seed)
    found = []
    for n in sizes:
        us = cost(n) * max(0.2, chance.gauss(1.0, 0.1)) * (10 if chance.random() < 0.01 else 1)
        jump = arm.add(n, us)
        if jump:
            found.append(math.exp(jump))
    return found


def sizes(low: int, high: int, count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(low, high) for _ in range(count)]


def test_level_is_found_through_noise_and_outliers() -> None:
    arm = make()
    feed(arm, lambda n: 1330.0, [512] * 200)
    assert arm.expect(512) == pytest.approx(1330.0, rel=0.05)
    assert 0.05 < arm.noise < 0.15


def test_an_outlier_just_after_a_change_decides_nothing_either() -> None:
    arm = make()
    feed(arm, lambda n: 1000.0, [512] * 50)
    while not arm.add(512, 1500.0):
        pass
    arm.add(512, 15000.0)
    assert arm.expect(512) == pytest.approx(1500.0, rel=0.05)


@pytest.mark.parametrize("outlier", [1e-3, 1e9])
def test_one_outlier_decides_nothing(outlier: float) -> None:
    """The level of an arm is robust against outliers."""
    arm = make(32)
    for _ in range(10):
        arm.add(8, 100.0)
    before = arm.expect(8)
    assert not arm.add(8, outlier)
    assert arm.expect(8) == before


def test_line_is_found_through_noise_and_outliers() -> None:
    def cost(n: int) -> float:
        return 200.0 + 2.0 * n

    arm = make(over_tokens=True, top=768)
    feed(arm, cost, sizes(513, 768, 300))
    for n in (513, 640, 768):
        assert arm.expect(n) == pytest.approx(cost(n), rel=0.06)


def test_traffic_of_one_size_does_not_push_out_the_slope() -> None:
    def cost(n: int) -> float:
        return 100.0 + 2.0 * n

    arm = make(over_tokens=True, top=2048)
    feed(arm, cost, [*[1025, 2048] * 12, *[2048] * 500])
    assert arm.expect(1025) == pytest.approx(cost(1025), rel=0.1)


def test_far_from_what_was_measured_little_is_known() -> None:
    """The time may be constant, proportional or anything in between, so the error is large."""
    arm = make(over_tokens=True, top=200)
    for _ in range(20):
        arm.add(200, 50.0)
    assert arm.expect(200) == pytest.approx(50.0)
    assert 25.0 < (arm.expect(100) or 0.0) < 50.0
    assert arm.error(200) < 0.03
    assert arm.error(100) > 0.25


@hypothesis.given(
    st.floats(0.0, 1.2), st.floats(50.0, 5000.0), st.integers(16, 500), st.floats(1.3, 2.0)
)
def test_a_power_law_is_found_at_both_ends(slope: float, us: float, low: int, width: float) -> None:
    top = int(low * width)
    arm = make(192, over_tokens=True, top=top)
    for n in [top] * 8 + [low] * 8 + [top, low] * 20:
        arm.add(n, us * (n / top) ** slope)
    for n in (low, (low + top) // 2, top):
        assert arm.expect(n) == pytest.approx(us * (n / top) ** slope, rel=0.02)
    if slope > 0.1:
        assert arm.largest(math.log(us)) == pytest.approx(top, rel=0.2)
        assert arm.log_us(arm.largest(math.log(us))) == pytest.approx(math.log(us))


@pytest.mark.parametrize("over_tokens", [False, True])
@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_a_large_change_is_noticed_in_four_samples(over_tokens: bool, factor: float) -> None:
    arm = make(over_tokens=over_tokens)
    feed(arm, lambda n: 1000.0, sizes(600, 700, 100))
    chance = random.Random(7)
    needed = next(
        count
        for count in range(1, 20)
        if arm.add(chance.randint(600, 700), 1000.0 * factor * chance.gauss(1.0, 0.05))
    )
    assert needed <= 5
    assert arm.expect(650) == pytest.approx(1000.0 * factor, rel=0.15)


def test_a_small_change_is_followed_too() -> None:
    arm = make(192)
    feed(arm, lambda n: 1000.0, [512] * 300)
    feed(arm, lambda n: 1080.0, [512] * 150, seed=5)
    assert arm.expect(512) == pytest.approx(1080.0, rel=0.03)


def test_two_outliers_in_a_row_are_no_change_and_four_are() -> None:
    """Among thousands of samples, three outliers in a row occur by chance."""
    arm = make()
    feed(arm, lambda n: 1000.0, [512] * 100)
    assert [arm.add(512, us) for us in (10_000.0, 10_000.0, 1150.0)] == [0.0] * 3
    feed(arm, lambda n: 1000.0, [512] * 100)
    jumps = [arm.add(512, 10_000.0) for _ in range(4)]
    assert [bool(jump) for jump in jumps[:3]] == [False] * 3
    assert jumps[3] == pytest.approx(math.log(10), abs=0.1)


def test_what_is_known_is_the_same_after_a_restart() -> None:
    arm, again = make(over_tokens=True), make(over_tokens=True)
    feed(arm, lambda n: 100.0 + n, sizes(400, 700, 50))
    again.restore(arm.numbers())
    assert (again.expect(500), again.error(500)) == (arm.expect(500), arm.error(500))
    assert again.samples == 50


def test_steady_times_are_seldom_taken_for_a_change() -> None:
    changes = 0
    for seed in range(10):
        arm = make(192)
        changes += len(feed(arm, lambda n: 1000.0, [512] * 1000, seed=seed))
    assert changes <= 10


def test_changes_of_other_arms_lead_only_so_far() -> None:
    """Changes of other arms move the estimate within limits, until the arm has a new sample."""
    arm = make(over_tokens=True)
    feed(arm, lambda n: 1000.0, sizes(600, 700, 50))
    before = arm.error(650)
    for factor, expected in ((0.7, 400.0), (1.4, 2500.0)):
        for _ in range(10):
            arm.borrow(math.log(factor))
        assert arm.expect(650) == pytest.approx(expected, rel=0.05)
    assert arm.error(650) > 5 * before  # estimates without samples have a larger error
    arm.add(650, 2500.0)
    arm.borrow(math.log(0.7))
    assert arm.expect(650) == pytest.approx(1750.0, rel=0.05)
