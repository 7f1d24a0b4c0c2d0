"""Decoding with transformers models and captured graphs."""

from __future__ import annotations

from dispatchkit_transformers.decoder import DECODE_ATTENTION, DecoderStats, GraphDecoder
from dispatchkit_transformers.speculation import (
    Drafter,
    DraftModel,
    PromptLookup,
    SpeculativeDecoder,
)

__version__ = "0.1.0"

__all__ = [
    "DECODE_ATTENTION",
    "DecoderStats",
    "DraftModel",
    "Drafter",
    "GraphDecoder",
    "PromptLookup",
    "SpeculativeDecoder",
]
