"""Prediction and what is captured for it, without a device."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dispatchkit import BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.observe import StepTrace, read_trace

from dispatchkit_predictive import Foresight, KeyPredictor, at_best, keys_of_trace, rehearse

TRACES = Path(__file__).resolve().parents[3] / "tests" / "data" / "traces"
KEYS = [GraphKey(RuntimeMode.FULL, BatchDescriptor(size)) for size in (1, 2, 4, 8, 16, 32, 64)]
ONE, TWO, FOUR, EIGHT, SIXTEEN, *_ = KEYS


def learnt(keys, **options):
    predictor = KeyPredictor(KEYS, **options)
    for key in keys:
        predictor.scores()
        predictor.see(key)
    return predictor


def test_what_always_follows_is_expected() -> None:
    predictor = learnt([ONE, SIXTEEN, FOUR] * 5)
    assert predictor.expected() == ONE
    assert predictor.hit_rate > 0.5


def test_longer_contexts_tell_apart_what_shorter_ones_cannot() -> None:
    pattern = [ONE, TWO, SIXTEEN, FOUR, TWO, EIGHT]
    assert learnt(pattern * 6 + [ONE, TWO], order=2).expected() == SIXTEEN
    assert learnt(pattern * 6 + [ONE, TWO, SIXTEEN, FOUR, TWO], order=2).expected() == EIGHT


def test_a_key_never_seen_is_expected_beside_those_that_were() -> None:
    assert learnt([ONE, TWO, FOUR]).expected() in (TWO, EIGHT)
    scores = learnt([ONE, TWO, FOUR]).scores()
    assert scores[EIGHT] > scores[KEYS[-1]] > 0


def test_steps_in_a_row_with_one_key_are_one_event() -> None:
    assert learnt([ONE, TWO] * 3).scores() == learnt([ONE, ONE, TWO, TWO, TWO] * 3).scores()


def test_old_habits_are_forgotten() -> None:
    steps = [ONE, SIXTEEN] * 50 + [ONE, FOUR] * 20 + [ONE]
    assert learnt(steps, order=1, decay=0.9).expected() == FOUR


def test_undeclared_keys_are_nothing() -> None:
    predictor = KeyPredictor(KEYS[:2])
    predictor.see(KEYS[-1])
    assert predictor.expected() is None
    assert not any(predictor.scores().values())
    predictor.see(ONE)
    assert predictor.expected() == TWO
    assert KeyPredictor([]).expected() is None


def test_what_was_asked_for_in_vain_goes_first() -> None:
    foresight = Foresight(KeyPredictor(KEYS), max_graphs=2)
    foresight.see(EIGHT, has_graph=False)
    foresight.see(ONE, has_graph=False)
    assert foresight.next_capture(set()) == (ONE, None)
    foresight.captured(ONE, ok=True)
    assert foresight.next_capture({ONE}) == (EIGHT, None)
    foresight.captured(EIGHT, ok=True)
    assert foresight.num_ahead == 0


def test_the_key_of_the_last_step_is_spared() -> None:
    foresight = Foresight(KeyPredictor(KEYS), max_graphs=1)
    foresight.see(ONE, has_graph=True)
    found = foresight.next_capture({ONE, TWO})
    assert found is None or found[1] == TWO


def test_off_when_nothing_captured_ahead_is_used() -> None:
    foresight = Foresight(KeyPredictor(KEYS), max_graphs=3, least_used=0.5)
    foresight.see(ONE, has_graph=True)
    foresight.captured(SIXTEEN, ok=True)
    for _ in range(100):
        foresight.captured(EIGHT, ok=True)
        foresight.evicted(EIGHT)
    assert not foresight.is_on
    assert foresight.next_capture({ONE}) is None
    for step in range(101):
        foresight.see(KEYS[step % 2], has_graph=True)
    assert foresight.is_on


def test_a_graph_used_counts_once() -> None:
    foresight = Foresight(KeyPredictor(KEYS))
    foresight.captured(ONE, ok=True)
    foresight.see(ONE, has_graph=True)
    foresight.see(TWO, has_graph=True)
    foresight.see(ONE, has_graph=True)
    assert (foresight.num_ahead, foresight.num_used) == (1, 1)


def test_budget_holds_at_every_moment() -> None:
    rng = random.Random(3)
    foresight, live = Foresight(KeyPredictor(KEYS), max_graphs=3), set()
    for _ in range(500):
        key = rng.choice(KEYS)
        foresight.see(key, has_graph=key in live)
        if (found := foresight.next_capture(live)) is not None:
            wanted, victim = found
            live.discard(victim)
            foresight.evicted(victim)
            live.add(wanted)
            foresight.captured(wanted, ok=True)
        assert len(live) <= 3


@pytest.mark.parametrize(
    "name", ["step_mooncake_low", pytest.param("step_azure_code_high", marks=pytest.mark.slow)]
)
def test_real_traces_run_eager_a_third_as_often_for_want_of_a_graph(name: str) -> None:
    keys, declared = keys_of_trace(read_trace(TRACES / f"{name}.csv.gz"))
    found = rehearse(keys, declared, max_graphs=64)
    assert found.predicted * 3 <= min(found.most_wanted, found.latest)
    assert 0 < found.hit_rate < 1


def test_who_knows_the_future_does_best() -> None:
    room = 4
    keys, declared = keys_of_trace(read_trace(TRACES / "step_mooncake_low.csv.gz"))
    keys = keys[:1500]
    found = rehearse(keys, declared, max_graphs=room)
    without = at_best(keys, max_graphs=room, ahead=False)
    assert at_best(keys, max_graphs=room) == 1  # the first step
    assert len({*keys} - {None}) <= without <= min(found.most_wanted, found.latest)
    assert at_best(keys, max_graphs=room) <= found.predicted


def test_what_is_wanted_last_is_given_up() -> None:
    steps = [ONE, TWO, FOUR, ONE, TWO, ONE, TWO, FOUR]
    assert at_best(steps, max_graphs=2, ahead=False) == 3
    assert at_best(steps, max_graphs=2) == 1
    assert at_best([ONE, TWO, ONE, TWO], max_graphs=1) == 1
    assert at_best([ONE, TWO, ONE, TWO], max_graphs=1, ahead=False) == 2
    assert at_best([None, ONE, None], max_graphs=1, idle_every=2) == 0


@pytest.mark.slow
def test_all_real_traces_with_little_room_and_with_much() -> None:
    """The figures of the page, within a tenth."""
    seen = [keys_of_trace(read_trace(path)) for path in sorted(TRACES.glob("step_*.csv.gz"))]
    assert len(seen) == 9
    for room, most_wanted, predicted in ((16, 1170, 534), (64, 348, 44)):
        found = [rehearse(keys, declared, max_graphs=room) for keys, declared in seen]
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
        (lambda: Foresight(KeyPredictor(KEYS), max_graphs=0), "max_graphs"),
        (lambda: Foresight(KeyPredictor(KEYS), margin=0.5), "margin"),
        (lambda: Foresight(KeyPredictor(KEYS), least_used=2.0), "least_used"),
        (lambda: rehearse([], KEYS, max_graphs=1, idle_every=0), "idle_every"),
        (lambda: rehearse([], [], max_graphs=1), "declared"),
    ],
)
def test_bad_settings_are_refused_by_name(make, setting) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting == setting
