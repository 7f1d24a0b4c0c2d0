"""An audio model with clips of different lengths, using an axis in addition to the batch.

    python examples/audio_lengths.py

A spectrogram of any length is encoded and pooled over its frames. The number of frames is an axis:
clips are padded to a bucket of this axis, in addition to the usual padding of the batch. The true
length of each clip is an input, so that padding does not affect the result. Without a GPU, the
example runs on the tape.
"""

from __future__ import annotations

import random

import torch
from torch import nn

from dispatchkit import Axis, GraphRunner, StaticInput

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDS = 16


class Encoder(nn.Module):
    """Two convolutions over time, then the mean over real frames."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, 32, kernel_size=5, padding=2)
        self.second = nn.Conv1d(32, 32, kernel_size=3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, clips: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return scores (B, 10) of clips (B, bands, frames) with lengths (B,)."""
        frames = torch.arange(clips.shape[2], device=clips.device)
        real = (frames < lengths.unsqueeze(1)).unsqueeze(1)  # (B, 1, frames)
        hidden = torch.relu(self.first(clips * real)) * real
        hidden = torch.relu(self.second(hidden)) * real
        # Padding rows have length 0.
        pooled = hidden.sum(-1) / lengths.clamp(min=1).unsqueeze(1)
        return self.head(pooled)


def main() -> None:
    """Encode clips of many lengths, and compare the scores with those of the plain model."""
    torch.manual_seed(0)
    model = Encoder().to(DEVICE).eval()
    runner = GraphRunner(
        model,
        {
            "clips": StaticInput((None, BANDS, "frames"), "float32"),
            "lengths": StaticInput((None,), "int64"),
        },
        axes=[Axis("frames", (50, 100, 200))],
        sizes=[1, 2, 4, 8],
        mode="FULL",
    )
    runner.capture()
    choose = random.Random(0)
    worst = 0.0
    for _ in range(30):
        lengths = torch.tensor([choose.randint(20, 200) for _ in range(choose.randint(1, 8))])
        longest = int(lengths.max())
        clips = torch.randn(len(lengths), BANDS, longest, device=DEVICE)
        lengths = lengths.to(DEVICE)
        scores = runner(clips=clips, lengths=lengths, frames=longest)
        with torch.no_grad():
            worst = max(worst, float((scores - model(clips, lengths)).abs().max()))
    print(runner)
    print(f"largest difference from the plain model: {worst:.1e}")


if __name__ == "__main__":
    main()
