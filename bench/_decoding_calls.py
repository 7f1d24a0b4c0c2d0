"""Complete calls of ``generate``, with transformers and with GraphDecoder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _decoding_cases import DEVICE, decoder_of

LIBRARY_STATIC = "library static"
CALLS = ("library dynamic", "generate", LIBRARY_STATIC)

Call = Callable[[torch.Tensor], Any]


def calls_of(model: Any, args: argparse.Namespace, names: list[str]) -> dict[str, Call]:
    """Return the named calls; each takes prompts of shape (rows, T)."""
    found: dict[str, Call] = {}
    if "library dynamic" in names:
        found["library dynamic"] = lambda ids: model.generate(ids, **generate_options(args))
    if "generate" in names:
        decoder = decoder_of(model, args)
        found["generate"] = lambda ids: decoder.generate(ids, **generate_options(args))
    if LIBRARY_STATIC in names:
        found[LIBRARY_STATIC] = lambda ids: model.generate(
            ids, cache_implementation="static", **generate_options(args)
        )
    return found


def num_tokens(args: argparse.Namespace) -> int:
    """Return the number of tokens that a call generates per row."""
    return min(args.steps, args.length // 2, 50) + 1


def generate_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for ``generate``."""
    return {
        "max_new_tokens": num_tokens(args),
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def prompts(rows: int) -> torch.Tensor:
    """Return short prompts. Shape (rows, 8)."""
    maker = torch.Generator().manual_seed(3)
    return torch.randint(3, 90, (rows, 8), generator=maker).to(DEVICE)
