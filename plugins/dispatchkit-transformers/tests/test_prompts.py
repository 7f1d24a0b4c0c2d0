"""Prompts through graphs give the tokens of the library's own ``generate``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
from decoder_classes import FULL, RECURRENT, WINDOWS, tiny  # noqa: E402

from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.options import RunnerOptions  # noqa: E402

from dispatchkit_transformers import DECODE_ATTENTION, GraphDecoder, prompts  # noqa: E402
from dispatchkit_transformers.layers.chunk import RingMask  # noqa: E402
from dispatchkit_transformers.prompts import plan_chunks  # noqa: E402

# Loading the library takes longer than all other quick tests of a worker together.
pytestmark = pytest.mark.slow

HAS_ONE_CACHE = hasattr(transformers.cache_utils, "LinearAttentionLayer")
needs_one_cache = pytest.mark.skipif(
    not HAS_ONE_CACHE, reason=f"transformers {transformers.__version__} has other caches for it"
)

PAD = 0
LENGTHS = (16, 64)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
    )
    return transformers.GPT2LMHeadModel(config)


def gemma3():
    return tiny("Gemma3ForCausalLM")


def qwen35():
    return tiny("Qwen3_5ForCausalLM")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return llama().eval()


def decoder_of(model, **settings):
    settings = {"max_batch_size": 8, "max_length": 64, "lengths": LENGTHS, **settings}
    return GraphDecoder(model, **settings)


def tokens_of(*shape, seed=1):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def said_by(model, ids, count):
    return model.generate(
        ids, max_new_tokens=count, do_sample=False, pad_token_id=PAD, eos_token_id=None
    )


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (llama, "sdpa"),
        (llama, "eager"),
        (llama, DECODE_ATTENTION),
        (gpt2, "sdpa"),
        (gemma3, "eager"),
        pytest.param(qwen35, "sdpa", marks=needs_one_cache),
    ],
)
def test_padded_prompts_of_a_batch_run_together(make, attention):
    """Includes padded chunks and rows, in slots that contain NaN."""
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation(attention)
    ids = tokens_of(5, 9)
    mask = torch.ones_like(ids)
    mask[2, :3] = mask[4, :8] = 0
    asked = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    given = {"input_ids": ids * mask, "attention_mask": mask}
    decoder = decoder_of(model, prompt_sizes=(4, 16, 64))
    for block in decoder.cache.memory:
        block.fill_(float("nan"))
    assert torch.equal(model.generate(**given, **asked), decoder.generate(**given, **asked))
    stats = decoder.stats()
    assert stats.prompts == {"graphs": 5}
    # Three chunks of 4 tokens for 8 rows; 16 each would exceed 64 in total.
    assert stats.graphs["prompts"].hits == {"FULL tokens=8 reqs=8 axes=4,16": 3}
    assert not stats.graphs["prompts"].eager_by_reason


def test_sampled_tokens_and_logits_are_those_of_generate(model):
    ids, asked = tokens_of(3, 20), {"max_new_tokens": 8, "pad_token_id": PAD}
    wants = {"return_dict_in_generate": True, "output_logits": True, "do_sample": True}
    results = []
    for run in (model.generate, decoder_of(model, prompt_sizes=(8, 16, 64)).generate):
        torch.manual_seed(5)
        results.append(run(ids, **asked, **wants))
    want, got = results
    assert torch.equal(want.sequences, got.sequences)
    torch.testing.assert_close(want.logits, got.logits, rtol=1e-4, atol=1e-4)


def test_prompts_that_join_others_get_what_they_would_get_alone(model):
    """Short, long, grouped, and too long for graphs, while other sequences continue."""
    decoder = decoder_of(model, max_batch_size=10, prompt_sizes=(4, 16), sizes=[4, 10])
    shapes = [(1, 3), (2, 5), (1, 16), (1, 17), (3, 4), (1, 30), (1, 1)]
    waiting = [tokens_of(*shape, seed=number) for number, shape in enumerate(shapes)]
    wanted = {
        (number, row): tokens
        for number, one in enumerate(waiting)
        for row, tokens in enumerate(said_by(model, one, 6)[:, one.shape[1] :].tolist())
    }
    said = {name: [] for name in wanted}
    rows = []
    for number in range(len(waiting) + 6):
        if number < len(waiting):
            group = waiting[number]
            decoder.admit(group)
            names = [(number, row) for row in range(len(group))]
            rows += names
            for name, token in zip(names, decoder.tokens[-len(group) :].tolist(), strict=True):
                said[name].append(token)
        for name, token in zip(rows, decoder.step().tolist(), strict=True):
            said[name].append(token)
        done = [row for row, name in enumerate(rows) if len(said[name]) == 6]
        rows = [rows[row] for row in decoder.drop(done)]
        if not rows:
            break
    assert said == wanted
    stats = decoder.stats()
    assert stats.prompts == {"graphs": 8, "above_largest_size": 2}
    assert stats.moved > 0


def test_prompts_run_eager_unless_sizes_are_given(model):
    decoder = decoder_of(model)
    decoder.admit(tokens_of(2, 3))
    stats = decoder.stats()
    assert stats.prompts == {"no_prompt_sizes": 2}
    assert "prompts" not in stats.graphs


# These start again with every chunk, for any earlier state.
ONE_CHUNK = {
    "FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM", "ZambaForCausalLM",
}  # fmt: skip

# Single tokens of these differ from their prompts in the library too.
ROUNDING = {"NemotronHForCausalLM": 1e-3, "Zamba2ForCausalLM": 2e-2}

# The library counts padding on the left as positions.
PADDING_COUNTS = {"BartForCausalLM"}

# Widths of prompts: the first and the last fit only the longer chunk.
WIDTHS = (20, 9, 2, 6, 20)

# Nearly all classes implement full attention equally; these differ in their positions.
POSITIONS = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "OPTForCausalLM", "CTRLLMHeadModel",
    "GPTBigCodeForCausalLM", "DeepseekV3ForCausalLM", "BartForCausalLM", "MptForCausalLM",
    "XGLMForCausalLM",
)  # fmt: skip
CHUNKED = {**{name: FULL[name] for name in POSITIONS}, **WINDOWS, **RECURRENT}


@pytest.mark.parametrize(
    ("name", "settings"), [pytest.param(*one, id=one[0]) for one in CHUNKED.items()]
)
def test_chunks_give_the_logits_of_whole_sequences(name, settings):
    """One chunk longer than the windows, then shorter chunks for prompts of several lengths.

    These run while another sequence continues, in slots that contain NaN. Some prompts have no
    token in the first chunk, and the last chunk exceeds windows. One sequence ends, the last takes
    its place, and another joins in the free slot. Logits show errors that tokens of small models do
    not, such as a window one position too long.
    """
    model = tiny(name, **settings)
    if model is None or (name in RECURRENT and not HAS_ONE_CACHE):
        pytest.skip(f"transformers {transformers.__version__} has no {name}, or another cache")
    decoder = decoder_of(
        model, max_batch_size=4, max_length=32, lengths=[32], sizes=[4], prompt_sizes=(4, 32)
    )
    for block in decoder.cache.memory:
        block.fill_(float("nan"))
    sequences = [tokens_of(width, seed=number).tolist() for number, width in enumerate(WIDTHS)]
    found = [[] for _ in sequences]
    live = []

    def take(logits, numbers):
        for number, one in zip(numbers, logits.clone(), strict=True):
            found[number].append(one)
            sequences[number].append(int(one.argmax()))

    def admit(*numbers):
        longest = max(len(sequences[number]) for number in numbers)
        rows = [[PAD] * (longest - len(sequences[one])) + sequences[one] for one in numbers]
        ids = torch.tensor(rows)
        take(decoder.admit(ids, (ids != PAD).long()), numbers)
        live.extend(numbers)

    def step():
        take(decoder.logits(), live)
        decoder.tokens = torch.tensor([sequences[number][-1] for number in live])

    admit(0)
    step()
    admit(1, 2, 3)
    for _ in range(2):
        step()
    live = [live[row] for row in decoder.drop([1])]
    admit(4)
    for _ in range(2):
        step()
    stats = decoder.stats()
    assert stats.moved == 1
    if name == "MoshiForCausalLM":  # its own prompts attend beyond its window
        assert stats.prompts == {"windows_not_masked": 5}
        return
    if name in ONE_CHUNK:
        assert stats.prompts == {"graphs": 2, "states_not_continued": 3}
    elif name in RECURRENT or "position_ids" in inspect.signature(model.forward).parameters:
        assert stats.prompts == {"graphs": 5}
        assert stats.graphs["prompts"].hits["FULL tokens=4 reqs=4 axes=4,32"] == 3
    else:  # a model that does not accept positions of tokens
        assert stats.prompts == {"chunks_differ": 5}
    if "graphs" in stats.prompts:
        assert stats.graphs["prompts"].hits["FULL tokens=1 reqs=1 axes=32,32"] == 2
        assert not stats.graphs["prompts"].eager_by_reason
    assert not stats.graphs["logits"].eager_by_reason
    without_padding = (0, 1, 4)
    for number in without_padding if name in PADDING_COUNTS else range(len(sequences)):
        sequence, logits = sequences[number], found[number]
        with torch.no_grad():
            want = model(torch.tensor([sequence[:-1]])).logits[0, -len(logits) :].float()
        assert (torch.stack(logits) - want).norm() <= ROUNDING.get(name, 1e-4) * want.norm()


@pytest.mark.parametrize(
    "name", ["Gemma3ForCausalLM", pytest.param("Qwen3_5ForCausalLM", marks=needs_one_cache)]
)
def test_check_mode_runs_both_ways_from_the_same_windows_and_states(name):
    """A chunk reads both before it writes them, so a second run would find other values."""
    model = tiny(name)
    decoder = decoder_of(
        model, max_batch_size=4, prompt_sizes=(4, 64), options=RunnerOptions(check=1)
    )
    ids = tokens_of(3, 15)
    got = decoder.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(got, said_by(model, ids, 4))
    stats = decoder.stats().graphs["prompts"]
    assert list(stats.hits.values()) == [4]
    assert not stats.eager_by_reason


@needs_one_cache
def test_states_that_no_chunk_continues_are_found_where_logits_do_not_show_it(monkeypatch):
    """In 16-bit dtypes, rounding differences are too large to tell."""
    monkeypatch.setattr(prompts, "is_close", lambda *given: True)
    model = tiny("MambaForCausalLM").to(torch.bfloat16)
    decoder = decoder_of(model, max_batch_size=4, prompt_sizes=(4, 16))
    decoder.admit(tokens_of(1, 9))
    decoder.admit(tokens_of(3, 5))
    assert decoder.stats().prompts == {"graphs": 1, "states_not_continued": 3}


@needs_one_cache
def test_prompts_of_an_encoder_decoder_run_eager():
    model = tiny("MarianMTModel")
    decoder = decoder_of(model, max_source_length=8, prompt_sizes=(4, 16))
    with torch.no_grad():
        encoded = model.get_encoder()(tokens_of(1, 5))
    decoder.admit(torch.ones(1, 1, dtype=torch.int64), encoder_outputs=encoded)
    assert decoder.stats().prompts == {"encoder_decoder": 1}
    with pytest.raises(ConfigError, match="encoder_decoder"):
        decoder.prompt_runner()


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "Gemma3ForCausalLM",
        pytest.param("Qwen3_5ForCausalLM", marks=needs_one_cache),
        pytest.param("Mamba2ForCausalLM", marks=needs_one_cache),
    ],
)
def test_other_slots_stay_as_they_are(name):
    """A chunk of four rows with three prompts, after a live row and before free slots."""
    model = tiny(name, **{**FULL, **WINDOWS, **RECURRENT}[name])
    decoder = decoder_of(model, max_batch_size=6, prompt_sizes=(16, 64))
    decoder.admit(tokens_of(1, 5))
    others = [0, 4, 5]

    def content():
        # The kept positions are followed by one that is never read.
        kept = [one[:, others, :, :-1] for one in decoder.cache.slots.step_state.scratch]
        return [*kept, *(one[:, others] for one in decoder.cache.states)]

    for block in decoder.cache.memory:
        block[:, 4:].normal_(generator=torch.Generator().manual_seed(1))
    before = [one.clone() for one in content()]
    decoder.admit(tokens_of(3, 6))
    hits = decoder.stats().graphs["prompts"].hits
    assert [count for key, count in hits.items() if key.startswith("FULL tokens=4")] == [1]
    for found, then in zip(content(), before, strict=True):
        assert torch.equal(found, then)


def test_capture_ahead_leaves_nothing_to_capture_later(model):
    decoder = decoder_of(model, max_batch_size=3, sizes=[3], prompt_sizes=(4, 16), lazy=False)
    # For prompts: 1 row of 4 and of 16 tokens, 2 and 3 rows of 4.
    assert decoder.capture() == len(LENGTHS) * (1 + 4)
    for rows, width in ((1, 16), (2, 3), (3, 5), (1, 7)):
        decoder.generate(tokens_of(rows, width), max_new_tokens=3, do_sample=False)
    stats = decoder.stats()
    assert stats.graphs["prompts"].captures == len(LENGTHS) * 4
    assert not stats.graphs["prompts"].eager_by_reason
    assert stats.prompts == {"graphs": 7}


def test_chunks_take_the_least_time_and_are_few():
    """A device takes as long for a few tokens as for a few more."""
    sizes = (16, 64, 256, 512, 2048)
    plan = plan_chunks(sizes, 1, 2048)
    chosen = {width: plan[width] for width in (1, 16, 17, 300, 513, 1000, 1100, 1600)}
    assert chosen == {
        1: (16,),
        16: (16,),
        17: (64,),
        300: (512,),
        513: (16, 512),
        1000: (512, 512),
        1100: (256, 512, 512),
        1600: (2048,),
    }
    for width in range(1, 2049):
        first, *others = plan[width]
        assert 0 < width - sum(others) <= first, f"{width}: padding in more than the first"
    assert plan_chunks((16,), 64, 40)[40] == (16, 16, 16)
    assert plan_chunks(sizes, 1, 2048, whole=True)[513] == (2048,)
    assert plan_chunks((16, 64), 1, 256, whole=True)[65] == ()


@pytest.mark.parametrize(("chunk", "since"), [(None, [4, 5, 6]), (4, [4, 4, 4])])
def test_tokens_of_a_chunk_look_at_their_window_and_padding_somewhere(chunk, since):
    """Attention of a token without visible positions is NaN in some kernels."""
    positions = torch.tensor([[32, 0, 1], [5, 6, 7], [32, 32, 32]])
    look = RingMask(capacity=4, window=2 if chunk is None else 4, chunk=chunk, sink=32)
    mask = look.mask(positions, torch.arange(32)).squeeze(1)
    assert mask.any(-1).all()
    held = [4, 1, 2, 3, 5, 6, 7]  # by the ring when the second row begins, then by the chunk
    for token, (own, first) in enumerate(zip((5, 6, 7), since, strict=True)):
        seen = sorted(
            one for one, is_seen in zip(held, mask[1, token].tolist(), strict=True) if is_seen
        )
        assert seen == list(range(first, own + 1))


@pytest.mark.parametrize("sizes", [(0,), (128,), ("long",), 64, True])
def test_sizes_that_no_prompt_has_are_refused(sizes):
    with pytest.raises(ConfigError, match="prompt_sizes"):
        decoder_of(llama().eval(), prompt_sizes=sizes)
