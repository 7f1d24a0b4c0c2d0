"""Predictions and their captures, without a device."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dispatchkit import BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.observe import StepTrace, read_trace

from dispatchkit_predictive import (
    CapturePlanner,
    KeyPredictor,
    Predictive,
    fewest_eager_steps,
    keys_of_trace,
    simulate_prediction,
)

TRACES = Path(__file__).resolve().parents[3] / "tests" / "data" / "traces"
KEYS = [GraphKey(RuntimeMode.FULL, BatchDescriptor(size)) for size in (1, 2, 4, 8, 16, 32, 64)]
ONE, TWO, FOUR, EIGHT, SIXTEEN, *_ = KEYS


def predictor_after(keys, **options):
    predictor = KeyPredictor(KEYS, **options)
    for key in keys:
        predictor.scores()
        predictor.record(key)
    return predictor


def test_what_always_follows_is_expected() -> None:
    predictor = predictor_after([ONE, SIXTEEN, FOUR] * 5)
    assert predictor.expected() == ONE
    assert predictor.hit_rate > 0.5


def test_longer_contexts_tell_apart_what_shorter_ones_cannot() -> None:
    pattern = [ONE, TWO, SIXTEEN, FOUR, TWO, EIGHT]
    assert predictor_after(pattern * 6 + [ONE, TWO], order=2).expected() == SIXTEEN
    assert (
        predictor_after(pattern * 6 + [ONE, TWO, SIXTEEN, FOUR, TWO], order=2).expected() == EIGHT
    )


def test_a_key_never_seen_is_expected_beside_those_that_were() -> None:
    assert predictor_after([ONE, TWO, FOUR]).expected() in (TWO, EIGHT)
    scores = predictor_after([ONE, TWO, FOUR]).scores()
    assert scores[EIGHT] > scores[KEYS[-1]] > 0


def test_steps_in_a_row_with_one_key_are_one_event() -> None:
    assert (
        predictor_after([ONE, TWO] * 3).scores()
        == predictor_after([ONE, ONE, TWO, TWO, TWO] * 3).scores()
    )


def test_old_habits_are_forgotten() -> None:
    steps = [ONE, SIXTEEN] * 50 + [ONE, FOUR] * 20 + [ONE]
    assert predictor_after(steps, order=1, decay=0.9).expected() == FOUR


def test_undeclared_keys_are_nothing() -> None:
    predictor = KeyPredictor(KEYS[:2])
    predictor.record(KEYS[-1])
    assert predictor.expected() is None
    assert not any(predictor.scores().values())
    predictor.record(ONE)
    assert predictor.expected() == TWO
    assert KeyPredictor([]).expected() is None


def test_what_was_asked_for_in_vain_goes_first() -> None:
    planner = CapturePlanner(KeyPredictor(KEYS), max_graphs=2)
    planner.record_use(EIGHT, has_graph=False)
    planner.record_use(ONE, has_graph=False)
    assert planner.next_capture(set()) == (ONE, None)
    planner.record_capture(ONE, ok=True)
    assert planner.next_capture({ONE}) == (EIGHT, None)
    planner.record_capture(EIGHT, ok=True)
    assert planner.num_ahead == 0


def test_the_key_of_the_last_step_is_spared() -> None:
    planner = CapturePlanner(KeyPredictor(KEYS), max_graphs=1)
    planner.record_use(ONE, has_graph=True)
    found = planner.next_capture({ONE, TWO})
    assert found is None or found[1] == TWO


def test_off_when_nothing_captured_ahead_is_used() -> None:
    planner = CapturePlanner(KeyPredictor(KEYS), max_graphs=3, least_used=0.5)
    planner.record_use(ONE, has_graph=True)
    planner.record_capture(SIXTEEN, ok=True)
    for _ in range(100):
        planner.record_capture(EIGHT, ok=True)
        planner.record_eviction(EIGHT)
    assert not planner.is_on
    assert planner.next_capture({ONE}) is None
    for step in range(101):
        planner.record_use(KEYS[step % 2], has_graph=True)
    assert planner.is_on


def test_a_graph_used_counts_once() -> None:
    planner = CapturePlanner(KeyPredictor(KEYS))
    planner.record_capture(ONE, ok=True)
    planner.record_use(ONE, has_graph=True)
    planner.record_use(TWO, has_graph=True)
    planner.record_use(ONE, has_graph=True)
    assert (planner.num_ahead, planner.num_used) == (1, 1)


def test_budget_holds_at_every_moment() -> None:
    rng = random.Random(3)
    planner, live = CapturePlanner(KeyPredictor(KEYS), max_graphs=3), set()
    for _ in range(500):
        key = rng.choice(KEYS)
        planner.record_use(key, has_graph=key in live)
        if (found := planner.next_capture(live)) is not None:
            wanted, victim = found
            live.discard(victim)
            planner.record_eviction(victim)
            live.add(wanted)
            planner.record_capture(wanted, ok=True)
        assert len(live) <= 3


@pytest.mark.parametrize(
    "name", ["step_mooncake_low", pytest.param("step_azure_code_high", marks=pytest.mark.slow)]
)
def test_real_traces_run_eager_a_third_as_often_for_want_of_a_graph(name: str) -> None:
    keys, declared = keys_of_trace(read_trace(TRACES / f"{name}.csv.gz"))
    found = simulate_prediction(keys, declared, max_graphs=64)
    assert found.predicted * 3 <= min(found.most_wanted, found.latest)
    assert 0 < found.hit_rate < 1


def test_who_knows_the_future_does_best() -> None:
    room = 4
    keys, declared = keys_of_trace(read_trace(TRACES / "step_mooncake_low.csv.gz"))
    keys = keys[:1500]
    found = simulate_prediction(keys, declared, max_graphs=room)
    without = fewest_eager_steps(keys, max_graphs=room, ahead=False)
    assert fewest_eager_steps(keys, max_graphs=room) == 1  # the first step
    assert len({*keys} - {None}) <= without <= min(found.most_wanted, found.latest)
    assert fewest_eager_steps(keys, max_graphs=room) <= found.predicted


def test_what_is_wanted_last_is_given_up() -> None:
    steps = [ONE, TWO, FOUR, ONE, TWO, ONE, TWO, FOUR]
    assert fewest_eager_steps(steps, max_graphs=2, ahead=False) == 3
    assert fewest_eager_steps(steps, max_graphs=2) == 1
    assert fewest_eager_steps([ONE, TWO, ONE, TWO], max_graphs=1) == 1
    assert fewest_eager_steps([ONE, TWO, ONE, TWO], max_graphs=1, ahead=False) == 2
    assert fewest_eager_steps([None, ONE, None], max_graphs=1, idle_every=2) == 0


@pytest.mark.slow
def test_all_real_traces_with_little_room_and_with_much() -> None:
    """The page's figures, within a tenth."""
    seen = [keys_of_trace(read_trace(path)) for path in sorted(TRACES.glob("step_*.csv.gz"))]
    assert len(seen) == 9
    for room, most_wanted, predicted in ((16, 1170, 534), (64, 348, 44)):
        found = [simulate_prediction(keys, declared, max_graphs=room) for keys, declared in seen]
        assert sum(one.most_wanted for one in found) == most_wanted
        assert sum(one.predicted for one in found) == pytest.approx(predicted, rel=0.1)


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(TraceError):
        keys_of_trace(StepTrace.from_steps([], source="empty"))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: KeyPredictor(KEYS, order=0), "order"),
        (lambda: KeyPredictor(KEYS, decay=0.0), "decay"),
        (lambda: KeyPredictor(KEYS, decay=float("nan")), "decay"),
        (lambda: CapturePlanner(KeyPredictor(KEYS), max_graphs=0), "max_graphs"),
        (lambda: CapturePlanner(KeyPredictor(KEYS), margin=0.5), "margin"),
        (lambda: CapturePlanner(KeyPredictor(KEYS), least_used=2.0), "least_used"),
        (lambda: simulate_prediction([], KEYS, max_graphs=1, idle_every=0), "idle_every"),
        (lambda: simulate_prediction([], [], max_graphs=1), "declared"),
        (lambda: KeyPredictor(KEYS, decay="x"), "decay"),
        (lambda: CapturePlanner(3), "predictor"),
        (lambda: CapturePlanner(KeyPredictor(KEYS), margin="x"), "margin"),
        (lambda: CapturePlanner(KeyPredictor(KEYS), least_used=True), "least_used"),
        (lambda: Predictive(order="x"), "order"),
        (lambda: Predictive(decay="x"), "decay"),
        (lambda: Predictive(margin=0), "margin"),
        (lambda: Predictive(least_used="x"), "least_used"),
        (lambda: Predictive().attach(3), "runner"),
        (lambda: keys_of_trace(3), "trace"),
        (lambda: KeyPredictor(3), "keys"),
        (lambda: KeyPredictor([3]), "keys[0]"),
        (lambda: simulate_prediction(3, KEYS, max_graphs=1), "keys"),
        (lambda: simulate_prediction([], 3, max_graphs=1), "declared"),
        (lambda: fewest_eager_steps(3, max_graphs=1), "keys"),
    ],
)
def test_bad_settings_are_refused_by_name(make, setting) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting == setting
