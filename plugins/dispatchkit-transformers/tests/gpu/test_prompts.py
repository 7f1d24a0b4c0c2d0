"""Prompts through CUDA graphs: the library's tokens, while other sequences continue."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from decoder_models import gemma3, gpt2, llama, qwen35  # noqa: E402

from dispatchkit_transformers import DECODE_ATTENTION, GraphDecoder  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]

DEVICE = "cuda:0"
PAD = 0
ASKED = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


@pytest.mark.parametrize("attention", ["sdpa", "eager", DECODE_ATTENTION])
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_tokens_after_prompts_through_graphs_are_those_of_generate(make, attention):
    """Prompts are padded, in one or several chunks, in reused slots, in float32 without TF32."""
    torch.manual_seed(0)
    model = make().to(DEVICE).eval()
    model.set_attn_implementation(attention)
    decoder = GraphDecoder(model, max_batch_size=8, max_length=256, prompt_sizes=(16, 64, 256))
    asked = {"max_new_tokens": 40, **ASKED}
    for number, (rows, width) in enumerate(((5, 9), (1, 140), (2, 70), (5, 9), (1, 1))):
        maker = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 997, (rows, width), generator=maker).to(DEVICE)
        mask = torch.ones_like(ids)
        if rows == 5:
            mask[2, :3] = mask[4, :8] = 0
        prompts = {"input_ids": ids * mask, "attention_mask": mask}
        for block in decoder.cache.memory:
            block.fill_(float("nan"))
        assert torch.equal(model.generate(**prompts, **asked), decoder.generate(**prompts, **asked))
    stats = decoder.stats()
    assert stats.prompts == {"graphs": 14}
    assert not stats.graphs["prompts"].eager_by_reason
    assert {key.partition("axes=")[2].split(",")[0] for key in stats.graphs["prompts"].hits} == {
        "16", "64", "256",
    }  # fmt: skip


@pytest.mark.parametrize("make", [llama, gemma3, qwen35], ids=lambda make: make.__name__)
def test_prompts_that_join_others_get_what_they_would_get_alone(make):
    """Prompts run in chunks shorter and longer than the windows of 24, and in several chunks."""
    torch.manual_seed(0)
    model = make().to(DEVICE).eval()
    decoder = GraphDecoder(model, max_batch_size=6, max_length=128, prompt_sizes=(16, 64))
    prompts = [
        torch.randint(3, 997, (1, 5 + 9 * number), generator=torch.Generator().manual_seed(number))
        for number in range(6)
    ]
    said = []
    for one in prompts:
        decoder.admit(one.to(DEVICE))
        said.append([int(decoder.tokens[-1])])
        for row, token in enumerate(decoder.step().tolist()):
            said[row].append(token)
    for one, tokens in zip(prompts, said, strict=True):
        want = model.generate(one.to(DEVICE), max_new_tokens=len(tokens), **ASKED)
        assert want[0, one.shape[1] :].tolist() == tokens
    assert decoder.stats().prompts == {"graphs": 6}
    assert not decoder.stats().graphs["prompts"].eager_by_reason


@pytest.mark.parametrize("make", [gemma3, qwen35], ids=lambda make: make.__name__)
def test_prompts_of_several_lengths_in_chunks_leave_other_slots_alone(make):
    """Three prompts run together in chunks of 16, in slots that contain NaN."""
    torch.manual_seed(0)
    model = make().to(DEVICE).eval()
    decoder = GraphDecoder(model, max_batch_size=4, max_length=256, prompt_sizes=(16, 192))
    for block in decoder.cache.memory:
        block.fill_(float("nan"))
    prompts = [
        torch.randint(3, 997, (1, width), generator=torch.Generator().manual_seed(width))
        for width in (60, 50, 7, 33)
    ]
    decoder.admit(prompts[0].to(DEVICE))
    ids = torch.cat([torch.nn.functional.pad(one, (50 - one.shape[1], 0)) for one in prompts[1:]])
    decoder.admit(ids.to(DEVICE), (ids != PAD).long().to(DEVICE))
    said = [decoder.tokens.tolist(), *(decoder.step().tolist() for _ in range(20))]
    for row, prompt in enumerate(prompts):
        want = model.generate(prompt.to(DEVICE), max_new_tokens=21, **ASKED)
        assert want[0, prompt.shape[1] :].tolist() == [tokens[row] for tokens in said]
    stats = decoder.stats()
    assert stats.prompts == {"graphs": 4}
    assert stats.graphs["prompts"].hits["FULL tokens=4 reqs=4 axes=16,128"] == 4
    assert not stats.graphs["prompts"].eager_by_reason


def test_logits_in_16_bits_are_as_near_to_float32_as_those_of_eager_prompts():
    torch.manual_seed(0)
    model = llama(hidden_size=256, num_attention_heads=8, initializer_range=0.1)
    model = model.to(DEVICE, torch.bfloat16).eval()
    exact = copy.deepcopy(model).float()
    ids = torch.randint(3, 997, (2, 100), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    logits = []
    for one, sizes in ((exact, ()), (model, ()), (model, (16, 64, 256))):
        decoder = GraphDecoder(one, max_batch_size=2, max_length=256, prompt_sizes=sizes)
        logits.append(decoder.admit(ids * mask, mask))
    want, eager, got = logits
    allowed = (eager - want).abs().max()
    assert (got - want).abs().max() <= 2 * allowed + 1e-3
    assert allowed < want.std()  # otherwise the comparison would show nothing
