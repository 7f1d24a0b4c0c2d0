"""A step's view of one layer's memory, by the kind of layer."""

from __future__ import annotations

from dispatchkit_transformers.layers.attention import AttentionLayer
from dispatchkit_transformers.layers.chunk import ChunkStates, chunk_layer
from dispatchkit_transformers.layers.cross import CrossLayer
from dispatchkit_transformers.layers.place import Place
from dispatchkit_transformers.layers.recurrent import HybridLayer, RecurrentLayer

__all__ = [
    "AttentionLayer",
    "ChunkStates",
    "CrossLayer",
    "HybridLayer",
    "Place",
    "RecurrentLayer",
    "chunk_layer",
]
