"""Modules of libraries in typical use compute on a device what they compute plainly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "execute"))
from real_modules import (  # noqa: E402
    WAYS,
    Played,
    play_batch_norm,
    play_encoder,
    play_lora,
    play_voice_detector,
)

from dispatchkit import graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.graphed import buckets  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
BACKEND = "cuda"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_voice_detector_keeps_the_state_between_its_chunks(way, in_place):
    """A step that assigns state runs eager with a reason; one that writes in place replays."""
    played = play_voice_detector(way, DEVICE, BACKEND, in_place=in_place)
    assert played == (Played(12, {}) if in_place else Played(0, {"python_state": 12}))


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


@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_switched_and_scaled_by_their_library(way):
    """Each change shows within the stated number of replays, or immediately after invalidate."""
    played = play_lora(way, DEVICE, BACKEND, pytest.importorskip("peft"))
    assert set(played.eager) == {"value_changed"}
    assert played.replayed >= 12


class _Recurrent(torch.nn.Module):
    """A script module has one ``forward``, unlike an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 16, 2, batch_first=True)

    def forward(self, x, state: tuple[torch.Tensor, torch.Tensor]):
        return self.lstm(x, state)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_recurrent_state_of_a_call_is_contiguous_in_graphs_too():
    """Its batch is dimension 1, and cuDNN accepts no part of a larger buffer."""
    torch.manual_seed(0)
    rnn = _Recurrent().eval().to(DEVICE)
    for module in (rnn.lstm, torch.jit.script(rnn)):
        fast = graphed(module, backend=BACKEND)
        with torch.no_grad():
            for rows in (4, 5, 3, 4, 5, 3):
                x = torch.randn(rows, 6, 8, device=DEVICE)
                state = (
                    torch.randn(2, rows, 16, device=DEVICE),
                    torch.randn(2, rows, 16, device=DEVICE),
                )
                y, (h, c) = fast(x, state)
                want, (want_h, want_c) = module(x, state)
                torch.testing.assert_close((y, h, c), (want, want_h, want_c), rtol=1e-3, atol=1e-3)
        assert fast.graphed.stats().steps_by_mode["FULL"] == 6


def test_a_mask_that_is_added_to_scores_is_padded_and_buckets_are_planned(monkeypatch):
    """Layers of torch with several batches and lengths; the plan costs two lengths' graphs."""
    monkeypatch.setattr(buckets, "_PLAN_AFTER", (12,))
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE).eval()
    fast = graphed(
        lambda x, mask: encoder(x, src_key_padding_mask=mask), backend=BACKEND, sizes=[1, 2, 4]
    )
    with torch.no_grad():
        for length in (12, 70, 20, 72, 66, 19, 70, 72, 17, 68, 70, 24, 72, 20, 70, 66, 18, 72):
            rows = 1 + length % 4
            x = torch.randn(rows, length, 16, device=DEVICE)
            mask = torch.zeros(rows, length, device=DEVICE)
            mask[0, length // 2 :] = -torch.inf
            want = encoder(x, src_key_padding_mask=mask)
            torch.testing.assert_close(fast(x, mask), want, rtol=1e-3, atol=1e-3)
    assert fast.graphed.stats().steps_by_mode["NONE"] == 0
    assert fast.graphed.runners[-1].config.axes[0].buckets == (24, 72, 128, 256, 512)


def test_a_constant_of_the_host_is_told_with_its_line():
    """timm's dinov3 and edgenext create one in each call and copy it to the device."""

    class Positions(torch.nn.Module):
        def forward(self, x):
            return x + torch.arange(8.0).to(x.device)

    fast = graphed(Positions().eval(), backend=BACKEND)
    with torch.no_grad(), pytest.warns(EagerStepWarning):
        fast(torch.zeros(2, 8, device=DEVICE))
    told = str(fast.graphed.runners[0])
    assert "a copy between host and device" in told
    assert f"{__file__}:" in told
    assert "Create constants on the device with device=" in told
