"""Modules of libraries in typical use compute on the tape what they compute plainly."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from real_modules import (  # noqa: E402
    WAYS,
    Played,
    play_batch_norm,
    play_encoder,
    play_lora,
    play_voice_detector,
)

DEVICE = "cpu"
BACKEND = "tape"


@pytest.mark.slow_except("False-runner", "True-graphed")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_voice_detector_keeps_the_state_between_its_chunks(way, in_place):
    """A step that assigns state runs eager with a reason; one that writes in place replays."""
    played = play_voice_detector(way, DEVICE, BACKEND, in_place=in_place)
    assert played == (Played(12, {}) if in_place else Played(0, {"python_state": 12}))


@pytest.mark.slow_except("False-graphed", "True-runner")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nested", [True, False])
def test_an_encoder_takes_a_padding_mask(way, nested):
    """Nested tensors run eager; the path without them replays."""
    played = play_encoder(way, DEVICE, BACKEND, nested=nested)
    assert played == (Played(0, {"capture_failed": 6}) if nested else Played(6, {}))


@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_a_module_in_training_move_as_in_plain_calls(way):
    """Rows depend on each other, so only full buckets replay."""
    played = play_batch_norm(way, DEVICE, BACKEND)
    assert played.replayed == 10
    assert set(played.eager) == {"rows_depend", "training_mode"}


@pytest.mark.slow  # imports the library and needs thousands of replays until a change shows
@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_switched_and_scaled_by_their_library(way):
    """Each change shows within the stated number of replays, or immediately after invalidate."""
    played = play_lora(way, DEVICE, BACKEND, pytest.importorskip("peft"))
    assert set(played.eager) == {"value_changed"}
    assert played.replayed >= 12
