"""The default step of RunnerTests."""

from __future__ import annotations

from typing import Any

import torch

from dispatchkit.execute import eager_piece, graph_piece


class SampleStep:
    """A small model in three pieces, with an embedding table and an operation across rows.

    Args:
        device: Device of the weights.
    """

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table: torch.Tensor = torch.randn(16, 4, generator=generator).to(device)
        self.weight: torch.Tensor = torch.randn(4, 4, generator=generator).to(device)

    def pieces(self) -> list[Any]:
        """Return the pieces of the step; in FULL mode, they form one graph."""
        return [graph_piece(self.embed), eager_piece(self.mix), graph_piece(self.finish)]

    def embed(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Look up embeddings, add ``values`` and project the sums."""
        return (self.table[tokens] + values) @ self.weight

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return cumulative sums over rows; padding comes last, so it does not affect real rows."""
        return hidden.cumsum(0)

    def finish(self, mixed: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``tanh`` of the cumulative sums, and twice the absolute value of ``values``."""
        return {"mixed": mixed.tanh(), "size": values.abs() * 2}
