"""Each option of ``generate`` works as there, or is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
from decoder_classes import tiny  # noqa: E402

from dispatchkit.errors import ConfigError  # noqa: E402

from dispatchkit_transformers import GraphDecoder  # noqa: E402

# Loading the library takes longer than all other quick tests of a worker together.
pytestmark = pytest.mark.slow

SAMPLED = {"do_sample": True, "top_k": 0}
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

#: A value per option, with related options, that gives the library's tokens.
SERVED = {
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "bos_token_id": {"bos_token_id": 4},
    "decoder_start_token_id": {"decoder_start_token_id": 5},
    "disable_compile": {"disable_compile": True},
    "do_sample": {"do_sample": True},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "eos_token_id": {"eos_token_id": list(range(3, 20))},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02, **SAMPLED},
    "eta_cutoff": {"eta_cutoff": 0.02, **SAMPLED},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 9,
    },
    "forced_bos_token_id": {"forced_bos_token_id": 8},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "guidance_scale": {"guidance_scale": 1.5},
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "max_time": {"max_time": 1000.0},
    "min_length": {"min_length": 9, "eos_token_id": list(range(3, 60))},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": list(range(3, 60))},
    "min_p": {"min_p": 0.2, **SAMPLED},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "output_logits": SCORES,
    "output_scores": SCORES,
    "pad_token_id": {"pad_token_id": 11, "eos_token_id": list(range(3, 20))},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "do_sample": True},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "sequence_bias": {"sequence_bias": [[[5], 4.0], [[6, 7], -3.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(3, 60))},
    "temperature": {"temperature": 2.0, **SAMPLED},
    "top_h": {"top_h": 0.5, **SAMPLED},
    "top_k": {"top_k": 3, "do_sample": True},
    "top_p": {"top_p": 0.5, **SAMPLED},
    "typical_p": {"typical_p": 0.5, **SAMPLED},
    "use_cache": {"use_cache": False},
    "watermarking_config": {
        "watermarking_config": transformers.WatermarkingConfig(bias=4.0, seeding_scheme="lefthash"),
    },
}  # fmt: skip

#: A refused value per option.
REFUSED = {
    "assistant_early_exit": 1,
    "cache_implementation": "quantized",
    "compile_config": transformers.CompileConfig(),
    "constraints": [object()],
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "num_beam_groups": 2,
    "num_beams": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 2,
    "prompt_lookup_num_tokens": 2,
    "return_legacy_cache": True,
    "speculation_type": "dflash",
    "stop_strings": ["end"],
    "token_healing": True,
    "use_mtp": True,
}

#: Options without effect in a call without beams, drafts or the library's own cache.
OF_OTHERS = {
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind",
    "cache_config", "continuous_batching_config", "diversity_penalty", "early_stopping",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind",
    "transformers_version",
}  # fmt: skip

#: Arguments of ``generate`` that are no options of its configuration.
REFUSED_ARGUMENTS = {
    "assistant_model": torch.nn.Identity(),
    "inputs_embeds": torch.zeros(1, 2, 32),
    "streamer": object(),
    "synced_gpus": True,
}

FIELDS = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
PROMPTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
ASKED = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def decoder():
    model = tiny("LlamaForCausalLM")
    return GraphDecoder(model, max_batch_size=4, max_length=32, lengths=[32], sizes=[4])


def test_every_option_of_this_release_is_known():
    """A new option of a release must be classified: served, refused, or without effect here."""
    assert {*SERVED, *REFUSED, *OF_OTHERS} >= FIELDS


@pytest.mark.parametrize("name", sorted(SERVED.keys() & FIELDS))
def test_an_option_gives_what_it_gives_in_generate(decoder, name):
    """Tokens, scores and logits are equal for the same random numbers."""
    results = []
    for run in (decoder.model.generate, decoder.generate):
        torch.manual_seed(5)
        results.append(run(**{**PROMPTS, **ASKED, **SERVED[name]}))
    want, got = results
    if not isinstance(want, torch.Tensor):
        for field in ("scores", "logits"):
            if getattr(want, field) is None:
                assert getattr(got, field) is None
            else:
                torch.testing.assert_close(getattr(want, field), got[field], rtol=1e-4, atol=1e-4)
        want, got = want.sequences, got.sequences
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & FIELDS))
def test_an_option_that_is_not_served_is_refused_by_name(decoder, name):
    """The option is an argument, in a configuration or in the model's own settings."""
    value = REFUSED[name]
    with pytest.raises(ConfigError, match=name):
        decoder.generate(**PROMPTS, **ASKED, **{name: value})
    config = transformers.GenerationConfig(**ASKED)
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=name):
        decoder.generate(**PROMPTS, generation_config=config)
    own = decoder.model.generation_config
    before = getattr(own, name)
    setattr(own, name, value)
    try:
        with pytest.raises(ConfigError, match=name):
            decoder.generate(**PROMPTS, **ASKED)
    finally:
        setattr(own, name, before)
    assert decoder.num_rows == 0


@pytest.mark.parametrize("name", sorted(REFUSED_ARGUMENTS))
def test_an_argument_that_is_not_served_is_refused_by_name(decoder, name):
    with pytest.raises(ConfigError, match=name):
        decoder.generate(**PROMPTS, **ASKED, **{name: REFUSED_ARGUMENTS[name]})


@pytest.mark.parametrize("name", ["paged", "offloaded", "offloaded_static"])
def test_a_cache_elsewhere_is_refused(decoder, name):
    """With ``paged``, the library silently decodes without its ``custom_generate``."""
    with pytest.raises(ConfigError, match="cache_implementation"):
        decoder.generate(**PROMPTS, **ASKED, cache_implementation=name)


def test_a_static_cache_is_what_there_is(decoder):
    want = decoder.model.generate(**PROMPTS, **ASKED)
    assert torch.equal(decoder.generate(**PROMPTS, **ASKED, cache_implementation="static"), want)
