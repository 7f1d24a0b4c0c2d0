"""Views of one layer's memory for a step, by kind of layer."""

from __future__ import annotations

from dispatchkit_transformers.layers.attention import AttentionLayer
from dispatchkit_transformers.layers.chunk import ChunkStates, chunk_layer
from dispatchkit_transformers.layers.cross import CrossLayer
from dispatchkit_transformers.layers.recurrent import HybridLayer, RecurrentLayer
from dispatchkit_transformers.layers.step_rows import StepRows

__all__ = [
    "AttentionLayer",
    "ChunkStates",
    "CrossLayer",
    "HybridLayer",
    "RecurrentLayer",
    "StepRows",
    "chunk_layer",
]
