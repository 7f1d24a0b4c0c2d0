"""Drafts through CUDA graphs: the tokens of ``generate``, in changing batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from decoder_models import gemma3, llama, marian  # noqa: E402
from drafting import DRAFTS, Known, served_with_drafts  # noqa: E402

from dispatchkit_transformers import (  # noqa: E402
    DECODE_ATTENTION,
    DraftModel,
    GraphDecoder,
    PromptLookup,
    SpeculativeDecoder,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DEVICE, MAX_LENGTH = "cuda:0", 128
ASKED = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Each prompt gets this many new tokens: windows of 24 are exceeded in both.
PROMPTS, COUNTS = (3, 40, 7, 25, 2, 16), (40, 9, 30, 50, 12, 24)


def prompt_of(length):
    maker = torch.Generator().manual_seed(length)
    return torch.randint(3, 997, (1, length), generator=maker).to(DEVICE)


def decoder_of(model, **settings):
    given = {"max_batch_size": 4, "max_length": MAX_LENGTH, "lengths": [32, MAX_LENGTH]}
    return GraphDecoder(model, **{**given, "sizes": [2, 4], "num_draft_tokens": DRAFTS, **settings})


def said_by(model, ids):
    return model.generate(ids, max_new_tokens=60, **ASKED)[0, -60:].tolist()


@pytest.mark.parametrize(
    ("make", "attention"), [(llama, "sdpa"), (llama, DECODE_ATTENTION), (gemma3, "sdpa")]
)
def test_tokens_are_those_of_generate(make, attention):
    """In float32 without TF32, with rows that have fewer drafts than others, or none."""
    torch.manual_seed(0)
    model = make().to(DEVICE).eval()
    model.set_attn_implementation(attention)
    prompts = [prompt_of(length) for length in PROMPTS]
    known = [said_by(model, one) for one in prompts]
    decoder = decoder_of(model, prompt_sizes=(16, 64))
    for _ in range(2):  # captured on demand first, then all available
        drafter = Known(0.7, fewest=0)
        loop = SpeculativeDecoder(decoder, drafter)

        def admit(number, drafter=drafter, loop=loop):
            drafter.waiting.append(known[number])
            loop.admit(prompts[number])

        want = [one[:count] for one, count in zip(known, COUNTS, strict=True)]
        assert served_with_drafts(loop, admit, COUNTS) == want
    stats = decoder.stats()
    assert 0.2 < stats.accepted / stats.drafted < 0.8


def test_an_encoder_decoder_verifies_drafts():
    torch.manual_seed(0)
    model = marian().to(DEVICE).eval()
    sources = [prompt_of(length) for length in PROMPTS]
    start = torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    known = [said_by(model, one) for one in sources]
    drafter = Known(0.7)
    loop = SpeculativeDecoder(decoder_of(model, max_source_length=48), drafter)

    def admit(number):
        with torch.no_grad():
            encoded = model.get_encoder()(sources[number])
        drafter.waiting.append(known[number])
        loop.admit(start, encoder_outputs=encoded)

    want = [one[:count] for one, count in zip(known, COUNTS, strict=True)]
    assert served_with_drafts(loop, admit, COUNTS) == want


@pytest.mark.parametrize("how", ["lookup", "model"])
def test_generate_with_drafts_gives_the_tokens_of_generate(how):
    torch.manual_seed(0)
    model = llama().to(DEVICE).eval()
    ids = torch.cat([torch.nn.functional.pad(prompt_of(one), (40 - one, 0)) for one in PROMPTS[:4]])
    prompts = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    decoder = decoder_of(model)
    made = PromptLookup(decoder) if how == "lookup" else DraftModel(decoder, decoder_of(model))
    loop = SpeculativeDecoder(decoder, made)
    want = model.generate(**prompts, max_new_tokens=80, **ASKED)
    for _ in range(2):
        assert torch.equal(loop.generate(**prompts, max_new_tokens=80, **ASKED), want)
    stats = decoder.stats()
    assert stats.drafted > 0
    # Random weights may repeat nothing, so that look-ups may all be wrong.
    assert how == "lookup" or stats.accepted > 0
    assert not stats.graphs["drafts"].eager_by_reason
