"""Embeddings of positions that models make of one number, for rows at positions of their own.

Such a model asks its cache how many tokens there were, and embeds that for all rows. Told one
number for each row it embeds them all, in the wrong dimension as some classes write it; what an
embedding gives is put right by a hook, for as long as a step runs.
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
    """Have embeddings give the positions (B, T) of each row's tokens (B, T, size)."""

    def put_right(module: torch.nn.Module, args: Any, given: torch.Tensor) -> torch.Tensor:
        return given.reshape(*shape, -1)

    with ExitStack() as hooks:
        for one in embeddings:
            hooks.callback(one.register_forward_hook(put_right).remove)
        yield
