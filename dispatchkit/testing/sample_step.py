"""The step that RunnerTests run where none is given; imports torch."""

from __future__ import annotations

from typing import Any

import torch

from dispatchkit.execute import eager_piece, graph_piece


class SampleStep:
    """A small model with what goes wrong in practice: a table, a look across rows, a split.

    Args:
        device: Where its weights are.
    """

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table: torch.Tensor = torch.randn(16, 4, generator=generator).to(device)
        self.weight: torch.Tensor = torch.randn(4, 4, generator=generator).to(device)

    def pieces(self) -> list[Any]:
        """Return it as pieces, for PIECEWISE; in FULL they are one graph."""
        return [graph_piece(self.embed), eager_piece(self.mix), graph_piece(self.finish)]

    def embed(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Look rows up and project them."""
        return (self.table[tokens] + values) @ self.weight

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        """Each row sees those before it, never those after: what padding must not change."""
        return hidden.cumsum(0)

    def finish(self, mixed: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a result with structure."""
        return {"mixed": mixed.tanh(), "size": values.abs() * 2}
