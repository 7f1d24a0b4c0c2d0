"""Voice activity detection for hundreds of concurrent callers, each with its own state.

    python examples/streaming_vad.py [--callers N] [--slots N] [--seconds S]

The model has the architecture of Silero VAD for 16 kHz. It processes the audio in hops of 512
samples. Each hop, together with the last 64 samples of the previous hop, is transformed into
a spectrum. Four convolutions and an LSTM cell then compute the probability of speech. If silero-vad
is installed (pip install --no-deps silero-vad), the model uses its weights, otherwise random
weights.

Callers join, are late for some hops, hang up, and leave their slots to others. At the end, each
caller's probabilities are compared with those from running the caller's audio alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from dispatchkit import GraphRunner, SlotState, StaticInput

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
HOP, CONTEXT, WIDTH = 512, 64, 128  # 32 ms at 16 kHz
HOPS_PER_SECOND = 16_000 / HOP
BANKS = {
    "context": StaticInput((None, CONTEXT), "float32"),
    "hidden": StaticInput((None, WIDTH), "float32"),
    "cell": StaticInput((None, WIDTH), "float32"),
}


class VoiceDetector(torch.nn.Module):
    """Speech detector for one hop of several callers: audio (B, 512) to probabilities (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = torch.nn.Parameter(torch.randn(258, 1, 256) / 16)
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv1d(before, after, 3, stride=stride, padding=1)
            for before, after, stride in sizes
        )
        self.cell = torch.nn.LSTMCell(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, audio: torch.Tensor, slots: Any) -> torch.Tensor:
        """Return the probabilities of a hop; ``slots`` contains the state of the callers."""
        audio = torch.cat((slots["context"], audio), 1)
        slots["context"] = audio[:, -CONTEXT:]
        padded = functional.pad(audio, (0, CONTEXT), "reflect").unsqueeze(1)
        real, imaginary = functional.conv1d(padded, self.basis, stride=128).chunk(2, 1)
        features = (real.square() + imaginary.square()).sqrt()
        for convolution in self.convolutions:
            features = convolution(features).relu()
        hidden, cell = self.cell(features.squeeze(2), (slots["hidden"], slots["cell"]))
        slots["hidden"], slots["cell"] = hidden, cell
        return self.head(hidden.relu()).sigmoid().squeeze(1)


def load_detector() -> tuple[VoiceDetector, str]:
    """Return the model and the origin of its weights."""
    torch.manual_seed(0)
    model = VoiceDetector()
    found = importlib.util.find_spec("silero_vad")
    if found is None or not found.submodule_search_locations:
        return model.to(DEVICE).eval(), "random weights"
    path = Path(found.submodule_search_locations[0]) / "data" / "silero_vad.jit"
    theirs = torch.jit.load(str(path), map_location="cpu").state_dict()
    renamed = {
        "stft.forward_basis_buffer": "basis",
        "decoder.rnn": "cell",
        "decoder.decoder.2": "head",
        **{f"encoder.{number}.reparam_conv": f"convolutions.{number}" for number in range(4)},
    }
    own = {}
    for name, weight in theirs.items():
        for there, here in renamed.items():
            if name.startswith(f"_model.{there}"):
                own[name.replace(f"_model.{there}", here)] = weight
    own["head.weight"] = own["head.weight"].squeeze(2)
    model.load_state_dict(own)
    return model.to(DEVICE).eval(), "weights of silero-vad"


def sounds_of(num_callers: int, num_hops: int) -> torch.Tensor:
    """Return audio of shape (callers, hops, 512): intermittent tones in noise."""
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(num_hops * HOP) / 16_000
    pitch = 90 + 200 * torch.rand(num_callers, 1, generator=generator)
    rhythm = torch.sin(2 * torch.pi * (0.3 + pitch / 300) * time).clamp(min=0)
    voice = sum(torch.sin(2 * torch.pi * number * pitch * time) / number for number in range(1, 6))
    noise = torch.randn(num_callers, num_hops * HOP, generator=generator)
    sound = 0.2 * rhythm * voice + 0.01 * noise
    return sound.view(num_callers, num_hops, HOP).to(DEVICE)


def make_runner(model: VoiceDetector, slots: SlotState) -> GraphRunner:
    """Return a runner for batches of up to ``slots.num_slots`` callers."""
    return GraphRunner(
        model,
        {"audio": StaticInput((None, HOP), "float32"), "slots": slots},
        max_num_tokens=slots.num_slots,
        mode="FULL",
        backend="cuda" if DEVICE.type == "cuda" else "tape",
        lazy=True,
    )


def alone(model: VoiceDetector, audio: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of a caller that is served alone. Shape (hops,)."""
    slots = SlotState(BANKS, 1, device=DEVICE)
    slot = torch.tensor([slots.join("caller")], device=DEVICE)
    with torch.no_grad():
        return torch.cat([model(hop.unsqueeze(0), slots.rows(slot)) for hop in audio])


def main() -> None:
    """Serve callers until all have hung up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--callers", type=int, default=300)
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # TF32 results depend on the batch size
    num_hops = max(1, int(args.seconds * HOPS_PER_SECOND))
    model, weights = load_detector()
    audio = sounds_of(args.callers, num_hops)

    slots = SlotState(BANKS, args.slots, device=DEVICE)
    runner = make_runner(model, slots)
    chance = random.Random(0)
    results = torch.zeros(args.callers, num_hops, device=DEVICE)
    at = dict.fromkeys(range(args.callers), 0)  # next hop of each caller
    waiting, most = list(range(args.callers)), 0
    while waiting or len(slots):
        while waiting and len(slots) < args.slots:
            slots.join(waiting.pop(0))
        most = max(most, len(slots))
        ready = [caller for caller in slots if chance.random() < 0.9]
        if not ready:
            continue
        rows = torch.tensor(ready, device=DEVICE)
        hops = torch.tensor([at[caller] for caller in ready], device=DEVICE)
        results[rows, hops] = runner(audio=audio[rows, hops], slots=slots.slots_of(ready))
        for caller in ready:
            at[caller] += 1
        slots.leave(*(caller for caller in ready if at[caller] == num_hops))

    expected = torch.stack([alone(model, own) for own in audio])
    stats = runner.stats()
    print(f"{args.callers} callers with {weights}, up to {most} at a time, {num_hops} hops each")
    print(f"{stats.steps} steps, of which {stats.steps_by_mode['NONE']} ran eager")
    print(
        f"largest difference from running each caller alone: {(results - expected).abs().max():.1e}"
    )


if __name__ == "__main__":
    main()
