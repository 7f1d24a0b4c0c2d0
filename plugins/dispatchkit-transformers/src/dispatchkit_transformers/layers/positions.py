"""Position embeddings that models compute from one number, for rows at different positions.

Such a model asks its cache for the number of past tokens, and embeds the positions for all rows. If
it gets one number per row, it embeds all of them, but some classes use the wrong dimension; a hook
corrects the embeddings' outputs while a step runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def position_embeddings(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the embeddings of a model that are called with positions."""
    return tuple(
        one
        for one in model.modules()
        if isinstance(one, torch.nn.Embedding)
        and "position_ids" in inspect.signature(one.forward).parameters
    )


@contextmanager
def one_for_each_row(embeddings: Sequence[torch.nn.Module], shape: torch.Size) -> Iterator[None]:
    """Make embeddings return the positions (B, T) of each row's tokens (B, T, size)."""

    def put_right(module: torch.nn.Module, args: Any, given: torch.Tensor) -> torch.Tensor:
        return given.reshape(*shape, -1)

    with ExitStack() as hooks:
        for one in embeddings:
            hooks.callback(one.register_forward_hook(put_right).remove)
        yield
