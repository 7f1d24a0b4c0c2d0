"""Small models of transformers with random weights, for tests on a device."""

from __future__ import annotations

from typing import Any

import transformers

_COMMON = {"vocab_size": 997, "initializer_range": 0.2}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def llama(**settings: Any) -> Any:
    """Return a Llama-like model with grouped key heads."""
    config = {**_LLAMA_LIKE, **settings}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def gpt2(**settings: Any) -> Any:
    """Return a GPT-2-like model."""
    config = {
        **_COMMON,
        "n_positions": 512,
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **settings,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def gemma3(**settings: Any) -> Any:
    """Return a model with sliding windows in all layers but the last."""
    config = {
        **_LLAMA_LIKE,
        "head_dim": 32,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **settings,
    }
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config))


def qwen35(**settings: Any) -> Any:
    """Return a hybrid model of linear and full attention."""
    config = {
        **_LLAMA_LIKE,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        **settings,
    }
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config))


def mamba(**settings: Any) -> Any:
    """Return a state-space model."""
    config = {
        **_COMMON,
        "hidden_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **settings,
    }
    return transformers.MambaForCausalLM(transformers.MambaConfig(**config))


def marian(**settings: Any) -> Any:
    """Return an encoder-decoder."""
    config = {
        "vocab_size": 997,
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
        "init_std": 0.2,
        **settings,
    }
    return transformers.MarianMTModel(transformers.MarianConfig(**config))
