"""Tiny random models of the supported classes, grouped by their kinds of cache.

A configuration combines the sizes that the library's configurations share (``SIZES``) with the
settings that a class needs beyond them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

#: Values for all configuration fields of these names.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "hidden_dim", "conv_dim"), 32
    ),
    **dict.fromkeys(("word_embed_proj_dim", "ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 64
    ),
    "intermediate_size_mlp": 64,
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2
    ),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    "swa_num_attention_heads": 4,
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "swa_head_dim", "global_head_dim"), 8),
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    "max_target_positions": 128,
    "max_source_positions": 12,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_expand", "expand", "n_mamba_heads"), 2),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("initializer_range", "init_std", "init_method_std"), 0.3),
    "first_k_dense_replace": 1,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def _of(names: str, **settings: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), settings)


#: Classes whose layers all cache every position.
FULL: dict[str, dict[str, Any]] = {
    **_of("""
        Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
        BioGptForCausalLM BitNetForCausalLM BloomForCausalLM CTRLLMHeadModel CodeGenForCausalLM
        CohereForCausalLM DiffLlamaForCausalLM Dots1ForCausalLM Emu3ForCausalLM
        Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM FalconForCausalLM FlexOlmoForCausalLM
        GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM
        GPTNeoXJapaneseForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
        GlmForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM
        HYV3ForCausalLM HeliumForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM
        HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM LagunaForCausalLM
        LlamaForCausalLM MellumForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
        MllamaForCausalLM MptForCausalLM NanoChatForCausalLM NemotronForCausalLM OPTForCausalLM
        Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM PersimmonForCausalLM PhiForCausalLM
        Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
        SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM
        XGLMForCausalLM
        """),
    **_of("""
        BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM
        BlenderbotSmallForCausalLM MBartForCausalLM MarianForCausalLM PLBartForCausalLM
        PegasusForCausalLM
        """),
    **_of(
        """
        AXK1ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
        Glm4MoeLiteForCausalLM MiniCPM3ForCausalLM YoutuForCausalLM
        """,
        num_key_value_heads=4,
    ),
}

#: Classes with layers that cache a window or a chunk of positions.
WINDOWS: dict[str, dict[str, Any]] = {
    **_of(
        """
        AfmoeForCausalLM BeamForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CwmForCausalLM
        DogeForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FlintForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM Gemma4ForCausalLM Gemma4UnifiedForCausalLM GptOssForCausalLM
        GraniteMoeSWAForCausalLM GraniteSWAForCausalLM Kolibri1ForCausalLM Llama4ForCausalLM
        MiMoV2FlashForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM
        MixtralForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM Olmo3ForCausalLM
        Phi3ForCausalLM PhimoeForCausalLM Starcoder2ForCausalLM VaultGemmaForCausalLM
        """
    ),
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
}

#: Classes with layers that keep states of fixed size.
RECURRENT: dict[str, dict[str, Any]] = {
    **_of("""
        FalconMambaForCausalLM LaraMiniForCausalLM Lfm3ForCausalLM MambaForCausalLM
        NemotronHForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM
        Qwen3_5MoeForCausalLM
        """),
    "BailingHybridForCausalLM": {"num_key_value_heads": 4},
    "BambaForCausalLM": {"attn_layer_indices": [1], "layer_types": None},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"num_key_value_heads": 4},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    # Their layer types follow from other settings.
    "FalconH1ForCausalLM": {"layer_types": None, "mamba_d_ssm": 64},
    "ZambaForCausalLM": {
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
    },
    "Zamba2ForCausalLM": {
        "layer_types": None,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
    },
}

_T5GEMMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8,
    "max_position_embeddings": 128, "initializer_range": 0.3,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

#: Classes whose decoder also attends to an encoder's states.
ENCODER_DECODER: dict[str, dict[str, Any]] = {
    **_of("""
        BartForConditionalGeneration BigBirdPegasusForConditionalGeneration
        BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration
        MBartForConditionalGeneration MarianMTModel PLBartForConditionalGeneration
        PegasusForConditionalGeneration
        """),
    # The model's own generate() drops this token at the end, even when it generated it.
    "WhisperForConditionalGeneration": {"eos_token_id": 50},
    "T5GemmaForConditionalGeneration": {"encoder": _T5GEMMA, "decoder": _T5GEMMA},
    # Relative positions, for which only this attention implementation receives the position of each
    # row.
    **_of(
        "MT5ForConditionalGeneration T5ForConditionalGeneration",
        attn_implementation="dispatchkit_decode",
        initializer_factor=4.0,
    ),
}

#: Classes whose own code waits for the device: every step runs eager and is counted.
EAGER: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "JetMoeForCausalLM": {},
}

#: Settings of unsupported classes, and a part of the error message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "M2M100ForConditionalGeneration": ({}, "with rows at different positions"),
    "MiniMaxForCausalLM": ({}, "MiniMax uses cache of its own"),
    "MoonshineForConditionalGeneration": (
        {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2},
        "has no attribute 'attention_mask'",
    ),
    "MvpForCausalLM": ({}, "with rows at different positions"),
    "MvpForConditionalGeneration": ({}, "with rows at different positions"),
    "PegasusXForConditionalGeneration": ({}, "with rows at different positions"),
    "RecurrentGemmaForCausalLM": (
        {"layer_types": None, "num_hidden_layers": 3},
        "must return a cache with layers",
    ),
    "RwkvForCausalLM": (
        {},
        r"whose forward\(\) accepts cache, past_key_values or cache_params",
    ),
    "xLSTMForCausalLM": (
        {"hidden_size": 64, "qk_dim_factor": 1.0, "chunk_size": 64},
        "must return a cache with layers",
    ),
}


def tiny(name: str, *, seed: int = 0, **settings: Any) -> Any:
    """Return a small random model of a class, or None if the release lacks the class."""
    cls = getattr(transformers, name, None)
    if cls is None:
        return None
    kind = cls.config_class
    names = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    for one in kind.__mro__:
        names |= set(getattr(one, "__annotations__", {}))
    given = {key: value for key, value in SIZES.items() if key in names}
    types = getattr(kind(), "layer_types", None)
    if types:
        # One layer of each type, at least two layers.
        types = list(dict.fromkeys(types))
        types = types * 2 if len(types) == 1 else types
        if "layer_types" in names:
            given["layer_types"] = types
        given |= {key: len(types) for key in ("num_hidden_layers", "n_layer") if key in given}
    given |= settings
    if given.get("layer_types", ()) is None:
        del given["layer_types"]
    torch.manual_seed(seed)
    config = kind(**given)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    return cls(config).eval()
