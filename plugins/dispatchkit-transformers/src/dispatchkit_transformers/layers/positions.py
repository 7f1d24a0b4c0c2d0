"""Per-row position embeddings for models that do not accept positions.

These models ask their cache for the number of past tokens and embed the resulting positions. If the
cache returns one number per row, some model classes put the rows in the wrong dimension of the
embeddings. While a step runs, a hook reshapes the embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def position_embeddings(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the model's embeddings that take ``position_ids``."""
    return tuple(
        one
        for one in model.modules()
        if isinstance(one, torch.nn.Embedding)
        and "position_ids" in inspect.signature(one.forward).parameters
    )


@contextmanager
def embeddings_per_row(embeddings: Sequence[torch.nn.Module], shape: torch.Size) -> Iterator[None]:
    """Reshape the embeddings' outputs to (B, T, size) inside the context; ``shape`` is (B, T)."""

    def restore_shape(module: torch.nn.Module, args: Any, given: torch.Tensor) -> torch.Tensor:
        return given.reshape(*shape, -1)

    with ExitStack() as hooks:
        for one in embeddings:
            hooks.callback(one.register_forward_hook(restore_shape).remove)
        yield
