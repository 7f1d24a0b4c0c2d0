"""Models of every kind of layer give the tokens of ``generate``, in changing batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
from decoder_classes import (  # noqa: E402
    EAGER,
    ENCODER_DECODER,
    FULL,
    RECURRENT,
    REFUSED,
    WINDOWS,
    tiny,
)
from serving import served  # noqa: E402

from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

from dispatchkit_transformers import GraphDecoder, prompts, static_models  # noqa: E402

pytestmark = pytest.mark.slow

# Each prompt gets this many new tokens: windows of 8 are exceeded in both.
PROMPTS, COUNTS = (3, 11, 4, 6, 2), (4, 9, 14, 19, 4)
MAX_LENGTH = 32


HAS_ONE_CACHE = hasattr(transformers.cache_utils, "LinearAttentionLayer")


def made(name, settings):
    if not HAS_ONE_CACHE and (name in RECURRENT or name in ENCODER_DECODER):
        pytest.skip(f"transformers {transformers.__version__} has other caches for {name}")
    model = tiny(name, **settings)
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return model


def decoder_of(model, **settings):
    given = {"max_batch_size": 3, "max_length": MAX_LENGTH, "lengths": [MAX_LENGTH], "sizes": [3]}
    return GraphDecoder(model, **{**given, **settings})


def prompt_of(length):
    maker = torch.Generator().manual_seed(length)
    return torch.randint(3, 97, (1, length), generator=maker)


def alone(model, inputs, number):
    """Return the tokens of the library's own method for one request."""
    asked = {"max_new_tokens": COUNTS[number], "do_sample": False, "pad_token_id": 0}
    ids = model.generate(**inputs, **asked, eos_token_id=None)
    return ids[0, -COUNTS[number] :].tolist()


@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(*one, id=one[0]) for kind in (FULL, WINDOWS, RECURRENT) for one in kind.items()],
)
def test_tokens_are_those_of_generate(name, settings):
    model = made(name, settings)
    prompts = [prompt_of(length) for length in PROMPTS]
    want = [alone(model, {"input_ids": one}, number) for number, one in enumerate(prompts)]
    decoder = decoder_of(model)
    assert served(decoder, lambda number: decoder.admit(prompts[number]), COUNTS) == want


@pytest.mark.parametrize("name", sorted(EAGER))
def test_a_class_that_waits_for_the_device_runs_eager_and_says_why(name):
    model = made(name, EAGER[name])
    want = alone(model, {"input_ids": prompt_of(PROMPTS[0])}, 0)
    decoder = decoder_of(model)
    decoder.admit(prompt_of(PROMPTS[0]))
    said = decoder.tokens.tolist()
    with pytest.warns(EagerStepWarning, match=r"uses Tensor\.(item|tolist)"):
        said += decoder.step().tolist()
    while len(said) < COUNTS[0]:
        said += decoder.step().tolist()
    assert said == want
    assert decoder.stats().graphs["tokens"].eager_by_reason == {"capture_failed": COUNTS[0] - 1}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_class_that_is_not_served_is_refused_by_name(name):
    settings, reason = REFUSED[name]
    model = tiny(name, **settings)
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    given = {"max_source_length": 12} if model.config.is_encoder_decoder else {}
    with pytest.raises(ConfigError, match=reason) as caught:
        decoder_of(model, **given)
    assert name in str(caught.value)


def source_of(model, length):
    """Return inputs of an encoder: tokens, or audio, which has a single length."""
    if model.main_input_name == "input_ids":
        return {"input_ids": prompt_of(length)}
    maker = torch.Generator().manual_seed(length)
    return {"input_features": torch.randn(1, 8, 24, generator=maker)}


def batch_of(sources):
    """Return several inputs of an encoder as a batch padded on the right."""
    if "input_ids" not in sources[0]:
        return {"input_features": torch.cat([one["input_features"] for one in sources])}
    given = [one["input_ids"] for one in sources]
    most = max(one.shape[1] for one in given)
    ids = torch.cat([torch.nn.functional.pad(one, (0, most - one.shape[1])) for one in given])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize(
    ("name", "settings"), [pytest.param(*one, id=one[0]) for one in ENCODER_DECODER.items()]
)
def test_tokens_of_encoder_decoders_are_those_of_generate(name, settings):
    """Each request has its own source length, and batches pad their sources."""
    model = made(name, settings)
    sources = [source_of(model, length) for length in PROMPTS]
    start = torch.tensor([[model.config.decoder_start_token_id]])
    want = [alone(model, source, number) for number, source in enumerate(sources)]
    decoder = decoder_of(model, max_source_length=12)

    def admit(number):
        with torch.no_grad():
            given = model.get_encoder()(**sources[number])
        decoder.admit(start, encoder_outputs=given)

    assert served(decoder, admit, COUNTS) == want
    asked = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    batch = batch_of(sources[:3])
    assert torch.equal(decoder.generate(**batch, **asked), model.generate(**batch, **asked))


def test_a_length_at_which_logits_depend_on_what_a_cache_holds_is_refused():
    """All rows of Llama 4 would use one row's attention temperature."""
    model = made("Llama4ForCausalLM", {"no_rope_layers": [1, 0], "floor_scale": 12})
    decoder_of(model, max_length=11, lengths=[11])
    with pytest.raises(ConfigError, match="max_length must be smaller"):
        decoder_of(model, max_length=12, lengths=[12])


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Qwen3_5ForCausalLM", "MambaForCausalLM"])
def test_a_capture_amid_live_sequences_leaves_their_states_as_they_were(name):
    """Its warmup runs dummy rows in the slots of live sequences."""
    model = made(name, {})
    prompts = [prompt_of(length) for length in PROMPTS[1:3]]
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = [model.generate(one, **asked)[0, one.shape[1] :].tolist() for one in prompts]
    decoder = decoder_of(model, max_batch_size=2, sizes=[1, 2])
    said = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):  # each of them is followed by a capture
        decoder.admit(prompt)
        said[number].append(int(decoder.tokens[-1]))
        for row, token in enumerate(decoder.step().tolist()):
            said[row].append(token)
    decoder.capture(logits=True)
    for _ in range(5):
        for row, token in enumerate(decoder.step().tolist()):
            said[row].append(token)
    assert [len(one) for one in said] == [8, 7]
    assert said == [want[0], want[1][:7]]


@pytest.mark.parametrize(
    ("module", "settings"), [(static_models, {}), (prompts, {"prompt_sizes": (4,)})]
)
def test_a_device_without_memory_for_a_trial_is_no_fault_of_the_model(
    monkeypatch, module, settings
):
    def without_memory(*given, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "_matches_prompts", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        decoder_of(made("LlamaForCausalLM", {}), **settings)
