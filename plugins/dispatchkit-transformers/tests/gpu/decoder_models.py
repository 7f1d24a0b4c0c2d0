"""Small models of transformers with random weights, for tests on a device."""

from __future__ import annotations

from typing import Any

import transformers


def llama(**settings: Any) -> Any:
    """Return a Llama-like model whose heads share keys."""
    config = {
        "vocab_size": 997,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        **settings,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def gpt2(**settings: Any) -> Any:
    """Return a GPT-2-like model."""
    config = {
        "vocab_size": 997,
        "n_positions": 512,
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        **settings,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
