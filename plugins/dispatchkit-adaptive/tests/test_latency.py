"""Latencies by key and mode."""

from __future__ import annotations

from typing import Any

import pytest

from dispatchkit.errors import ConfigError

from dispatchkit_adaptive import LatencyPolicy


def taught(**latencies: float) -> LatencyPolicy:
    policy = LatencyPolicy(16)
    for mode, us in latencies.items():
        for _ in range(5):
            policy.record("key", mode, us)
    return policy


def test_the_faster_of_eager_and_graph_is_used() -> None:
    assert not taught(EAGER=10.0, FULL=20.0).should_use_graph("key", True)
    assert taught(EAGER=20.0, FULL=10.0).should_use_graph("key", True)
    assert taught(EAGER=10.0, FULL=20.0).should_use_graph("another key", True)


def test_without_a_graph_or_a_time_of_both_nothing_is_changed() -> None:
    assert not taught(EAGER=20.0, FULL=10.0).should_use_graph("key", False)
    assert taught(EAGER=1.0).should_use_graph("key", True)


def test_the_fastest_mode_is_selected_and_unknown_ones_first() -> None:
    policy = taught(FULL=20.0, PIECEWISE=10.0)
    assert policy.select_mode("key", ["FULL", "PIECEWISE"]) == "PIECEWISE"
    assert policy.select_mode("key", ["FULL", "OTHER"]) == "OTHER"


def test_one_outlier_does_not_decide() -> None:
    """An outlier of any size does not change the choice."""
    policy = taught(EAGER=20.0, FULL=10.0)
    policy.record("key", "FULL", 10_000.0)
    assert policy.should_use_graph("key", True)


def test_the_slower_way_is_tried_again_now_and_then() -> None:
    """A slow mode may have become fast."""
    policy = taught(EAGER=10.0, FULL=20.0)
    tries = [policy.should_use_graph("key", True) for _ in range(640)]
    assert tries.count(True) == 10


def test_keys_and_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatchkit_adaptive.latency.MAX_KEYS", 4)
    policy = LatencyPolicy(8)
    for key in range(9):
        for _ in range(20):
            policy.record(key, "FULL", 5.0)
    assert policy.latency(0, "FULL") is None
    assert policy.latency(8, "FULL") == pytest.approx(5.0)


@pytest.mark.parametrize("latency", [0, -1.0, float("nan"), True])
def test_impossible_latencies_are_refused(latency: Any) -> None:
    with pytest.raises(ConfigError, match="latency"):
        LatencyPolicy().record("key", "FULL", latency)
    with pytest.raises(ConfigError, match="available_modes"):
        LatencyPolicy().select_mode("key", [])
