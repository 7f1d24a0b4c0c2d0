"""Steps that verify drafts give the tokens of greedy ``generate``, for any drafts."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
from decoder_classes import ENCODER_DECODER, FULL, RECURRENT, WINDOWS, tiny  # noqa: E402
from drafting import DRAFTS, Known, served_with_drafts  # noqa: E402

from dispatchkit.errors import ConfigError, DescriptorError, InputError  # noqa: E402

from dispatchkit_transformers import (  # noqa: E402
    DECODE_ATTENTION,
    DraftModel,
    GraphDecoder,
    PromptLookup,
    SpeculativeDecoder,
    slot_cache,
)
from dispatchkit_transformers.decode_step import compile_for_any_size  # noqa: E402
from dispatchkit_transformers.layers.layer_tensors import layer_tensors  # noqa: E402

# Loading the library takes longer than all other quick tests of a worker together.
pytestmark = pytest.mark.slow

MAX_LENGTH = 40
# Each prompt gets this many new tokens: windows of 8 are exceeded in both.
PROMPTS, COUNTS = (3, 11, 4, 6, 2), (14, 9, 25, 19, 4)
ASKED = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def made(name, **settings):
    model = tiny(name, **{**FULL, **WINDOWS, **RECURRENT, **ENCODER_DECODER}[name], **settings)
    has_one_cache = hasattr(transformers.cache_utils, "LinearAttentionLayer")
    if model is None or (name in {**RECURRENT, **ENCODER_DECODER} and not has_one_cache):
        pytest.skip(f"transformers {transformers.__version__} has no {name}, or another cache")
    return model


def llama(**settings):
    return made("LlamaForCausalLM", **settings)


def decoder_of(model, **settings):
    given = {"max_batch_size": 3, "max_length": MAX_LENGTH, "lengths": [16, MAX_LENGTH]}
    return GraphDecoder(model, **{**given, "sizes": [1, 3], "num_draft_tokens": DRAFTS, **settings})


def prompt_of(length):
    maker = torch.Generator().manual_seed(length)
    return torch.randint(3, 97, (1, length), generator=maker)


def said_by(model, inputs, count):
    """Return the new tokens of one request, from the library's own method."""
    return model.generate(**inputs, max_new_tokens=count, **ASKED)[0, -count:].tolist()


def serve_with(model, drafter, **settings):
    """Check the tokens of requests with drafts, in memory filled with NaN."""
    decoder = decoder_of(model, **settings)
    for block in decoder.cache.memory:
        block.fill_(float("nan"))
    prompts = [prompt_of(length) for length in PROMPTS]
    known = [said_by(model, {"input_ids": one}, MAX_LENGTH - 12) for one in prompts]
    loop = SpeculativeDecoder(decoder, drafter)

    def admit(number):
        drafter.waiting.append(known[number])
        loop.admit(prompts[number])

    want = [one[:count] for one, count in zip(known, COUNTS, strict=True)]
    assert served_with_drafts(loop, admit, COUNTS) == want
    return decoder.stats()


@pytest.mark.parametrize("chance", [0, 0.6, 1])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM"])
def test_tokens_are_those_of_generate(name, chance):
    stats = serve_with(made(name), Known(chance))
    if chance == 0:
        assert stats.accepted == 0
    elif chance < 1:
        assert 0.2 < stats.accepted / stats.drafted < 0.6
    else:
        assert stats.accepted == stats.drafted


# Full attention with every kind of positions, windows in some or all layers, chunked attention, and
# experts. Models whose results differ for prompts in chunks are refused (below).
@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel", "BioGptForCausalLM", "OPTForCausalLM", "DeepseekV3ForCausalLM",
        "GptOssForCausalLM", "Cohere2ForCausalLM", "Qwen3MoeForCausalLM", "DogeForCausalLM",
    ],
)  # fmt: skip
def test_tokens_of_other_classes_are_those_of_generate(name):
    """Includes rows with fewer drafts than the graph has places, or none."""
    serve_with(made(name), Known(0.7, fewest=0))


def test_tokens_by_attention_made_for_decoding_are_those_of_generate():
    serve_with(llama(attn_implementation=DECODE_ATTENTION), Known(0.7))


def test_steps_with_drafts_may_be_compiled_whole():
    torch._dynamo.reset()
    compiler = partial(compile_for_any_size, backend="aot_eager")
    serve_with(llama(), Known(0.7), lengths=[MAX_LENGTH], compile=compiler)


@pytest.mark.parametrize("settings", [{"attention_chunk_size": 5}, {"attention_chunk_size": 37}])
def test_chunks_of_attention_begin_among_the_drafts(settings):
    serve_with(made("Llama4ForCausalLM", **settings), Known(0.8))


@pytest.mark.parametrize("window", [2, 5, 37, 39])
@pytest.mark.parametrize("sizes", [(), (4, 16)], ids=["eager", "prompts"])
def test_windows_of_every_length(window, sizes):
    """Shorter than the drafts, and long enough for the spare positions to reach the cache's end."""
    model = made("MistralForCausalLM", sliding_window=window)
    serve_with(model, Known(0.7), lengths=[MAX_LENGTH], prompt_sizes=sizes)


def test_a_window_with_a_spare_position_less_would_differ(monkeypatch):
    """A rejected draft overwrites a position that the next token attends to."""
    monkeypatch.setattr(
        slot_cache,
        "layer_tensors",
        lambda layer, length, spare: layer_tensors(layer, length, max(0, spare - 1)),
    )
    with pytest.raises(AssertionError):
        serve_with(made("Gemma3ForCausalLM"), Known(0.7))


@pytest.mark.parametrize("name", ["MarianMTModel", "BartForConditionalGeneration"])
def test_tokens_of_encoder_decoders_are_those_of_generate(name):
    model = made(name)
    sources = [{"input_ids": prompt_of(length)} for length in PROMPTS]
    start = torch.tensor([[1]])
    known = [said_by(model, one, MAX_LENGTH - 12) for one in sources]
    drafter = Known(0.7)
    loop = SpeculativeDecoder(decoder_of(model, max_source_length=12), drafter)

    def admit(number):
        with torch.no_grad():
            given = model.get_encoder()(**sources[number])
        drafter.waiting.append(known[number])
        loop.admit(start, encoder_outputs=given)

    want = [one[:count] for one, count in zip(known, COUNTS, strict=True)]
    assert served_with_drafts(loop, admit, COUNTS) == want


# -- drafters -------------------------------------------------------------------------------


def looked_up(tokens, max_ngram, number=DRAFTS):
    """Return the expected proposals of ``PromptLookup`` for one row, computed on the host."""
    best, place = 0, None
    for end in range(len(tokens) - 1):
        equal = 0
        while equal < min(max_ngram, end + 1) and tokens[end - equal] == tokens[-1 - equal]:
            equal += 1
        if equal and equal >= best:
            best, place = equal, end
    if place is None:
        return [-1] * number
    following = tokens[place + 1 :]
    return [following[one % len(following)] for one in range(number)]


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_what_followed_the_last_tokens_is_proposed(max_ngram):
    """Rows with few different tokens join and leave; one of them has a single token."""
    model = llama()
    lookup = PromptLookup(decoder_of(model, max_batch_size=8, sizes=[8]), max_ngram=max_ngram)
    maker = torch.Generator().manual_seed(0)
    rows = []
    for number in range(30):
        if len(rows) < 6:
            made = torch.randint(3, 7, (2, 1 + number % 8), generator=maker)
            lookup.admit(made, [made.shape[1], 1])
            rows += [made[0].tolist(), made[1, -1:].tolist()]
        tokens = torch.randint(3, 7, (len(rows),), generator=maker)
        positions = torch.tensor([len(one) for one in rows])
        drafts = lookup.propose(tokens, positions, positions.tolist()).tolist()
        for row, (one, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            one.append(token)
            assert drafts[row] == looked_up(one, max_ngram)
            one += [draft for draft in drafts[row][: number % 4] if draft >= 0]
        gone = [
            row for row, one in enumerate(rows) if len(one) > MAX_LENGTH - 8 or row == number % 7
        ]
        order = [row for row in range(len(rows)) if row not in gone]
        order = order[-1:] + order[:-1]
        lookup.drop(order)
        rows = [rows[row] for row in order]


def served_by(model, make_drafter, **settings):
    """Serve requests with a drafter's own drafts; return the decoder's counts."""
    decoder = decoder_of(model, **settings)
    prompts = [prompt_of(length) for length in PROMPTS]
    loop = SpeculativeDecoder(decoder, make_drafter(decoder))
    want = [
        said_by(model, {"input_ids": one}, count)
        for one, count in zip(prompts, COUNTS, strict=True)
    ]
    assert served_with_drafts(loop, lambda number: loop.admit(prompts[number]), COUNTS) == want
    return decoder.stats()


def test_drafts_by_prompt_lookup_are_right_where_a_row_repeats_itself():
    stats = served_by(llama(), PromptLookup)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_draft_model_of_the_same_weights_is_always_right(name):
    """Its cache must contain every token: accepted drafts and the token after them."""
    model = made(name)
    stats = served_by(model, lambda decoder: DraftModel(decoder, decoder_of(model)))
    assert stats.accepted == stats.drafted > 0


def test_a_draft_model_has_all_its_drafts_after_those_that_were_accepted():
    model = llama()
    want = said_by(model, {"input_ids": prompt_of(5)}, 9)
    decoder = decoder_of(model)
    loop = SpeculativeDecoder(decoder, DraftModel(decoder, decoder_of(model)))
    loop.admit(prompt_of(5))
    assert [loop.step(), loop.step()] == [[want[1:5]], [want[5:]]]


def test_a_draft_model_of_other_weights_changes_no_token():
    model, small = llama(), made("MistralForCausalLM", seed=1, num_hidden_layers=1)
    stats = served_by(model, lambda decoder: DraftModel(decoder, decoder_of(small)))
    assert stats.accepted < stats.drafted


def test_prompts_that_a_drafter_refuses_leave_no_rows():
    decoder = decoder_of(llama())
    drafter = Known(1)
    loop = SpeculativeDecoder(decoder, drafter)
    known = said_by(decoder.model, {"input_ids": prompt_of(4)}, 12)
    drafter.waiting = [known]
    loop.admit(prompt_of(4))
    with pytest.raises(IndexError):
        loop.admit(prompt_of(6))  # which Known has no continuation for
    assert decoder.row_lengths == (4,)
    assert loop.step() == [known[1:5]]


# -- generate -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_generate_gives_the_tokens_of_generate(name):
    """Rows of different lengths; some end early, and all end at the end of the cache."""
    model = made(name)
    ids = torch.cat([torch.nn.functional.pad(prompt_of(one), (11 - one, 0)) for one in PROMPTS])
    prompts = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    asked = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": MAX_LENGTH - 10}
    said = model.generate(**prompts, **asked, eos_token_id=None)
    ends = sorted({int(said[row, 13 + 4 * row]) for row in range(3)})
    settings = {"max_batch_size": 5, "sizes": [1, 2, 3, 4, 5], "num_draft_tokens": DRAFTS}
    for make in (
        PromptLookup,
        lambda decoder: DraftModel(decoder, decoder_of(model, **settings)),
    ):
        decoder = decoder_of(model, **settings)
        loop = SpeculativeDecoder(decoder, make(decoder))
        for stop in (None, ends):
            want = model.generate(**prompts, **asked, eos_token_id=stop)
            assert torch.equal(loop.generate(**prompts, **asked, eos_token_id=stop), want)
        assert decoder.stats().accepted > 0
        assert decoder.num_rows == 0


def test_generate_of_an_encoder_decoder_gives_the_tokens_of_generate():
    model = made("MarianMTModel")
    ids = torch.cat([torch.nn.functional.pad(prompt_of(one), (0, 11 - one)) for one in PROMPTS])
    sources = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    settings = {"max_batch_size": 5, "sizes": [5], "max_source_length": 12}
    decoder = decoder_of(model, **settings)
    loop = SpeculativeDecoder(decoder, PromptLookup(decoder))
    want = model.generate(**sources, **ASKED, max_new_tokens=20)
    assert torch.equal(loop.generate(**sources, **ASKED, max_new_tokens=20), want)


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        ({"do_sample": True}, "sampling"),
        ({"do_sample": False, "repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor."),
        (
            {"do_sample": False, "return_dict_in_generate": True, "output_logits": True},
            "scores or logits.",
        ),
    ],
)
def test_sampling_and_processors_are_refused(asked, needs):
    decoder = decoder_of(llama())
    loop = SpeculativeDecoder(decoder, PromptLookup(decoder))
    with pytest.raises(ConfigError, match=f"only greedy decoding, but the call needs {needs}"):
        loop.generate(prompt_of(3), max_new_tokens=3, **asked)
    assert decoder.stats().admitted == 0


# -- traces of a rejected draft -------------------------------------------------------------


def test_a_rejected_draft_that_is_no_number_reaches_no_other_token():
    """Its keys and values lie after the row's end, where weights are 0, but 0 * NaN is NaN."""
    model, bad = llama(), 96
    model.get_input_embeddings().weight.data[bad] = float("nan")
    want = said_by(model, {"input_ids": prompt_of(5)}, 12)
    assert bad not in want
    decoder = decoder_of(model)
    decoder.admit(prompt_of(5))
    said = [int(decoder.tokens[0])]
    for _ in range(5):
        said += decoder.verify(torch.full((1, DRAFTS), bad))[0]
        said.append(int(decoder.step()[0]))
    assert said == want[: len(said)]


def test_drafts_that_are_no_tokens_are_never_right():
    model = llama()
    want = said_by(model, {"input_ids": prompt_of(5)}, 6)
    decoder = decoder_of(model)
    decoder.admit(prompt_of(5))
    assert decoder.verify(torch.tensor([[97, 97, 97]])) == [[want[1]]]
    # No draft follows a place without one.
    assert decoder.verify(torch.tensor([[want[2], -1, want[4]]])) == [want[2:4]]
    assert decoder.verify(torch.tensor([[1 << 40]], dtype=torch.int64)) == [[want[4]]]
    stats = decoder.stats()
    assert (stats.drafted, stats.accepted, stats.steps) == (5, 1, 3)


def test_a_row_takes_drafts_up_to_the_end_of_the_cache():
    model = llama()
    want = said_by(model, {"input_ids": prompt_of(34)}, 7)
    decoder = decoder_of(model)
    decoder.admit(prompt_of(34))
    assert decoder.verify(torch.tensor([want[1:4]])) == [want[1:5]]
    assert decoder.verify(torch.tensor([[*want[5:7], 5]])) == [want[5:7]]
    assert decoder.row_lengths == (MAX_LENGTH,)
    assert decoder.stats().drafted == 4
    with pytest.raises(DescriptorError, match="at most max_length"):
        decoder.verify(torch.tensor([[5]]))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_rows_go_back_as_far_as_their_layers_keep_positions(name):
    """Full attention goes back to its first position, windows by spare positions plus one."""
    model = made(name)
    want = said_by(model, {"input_ids": prompt_of(11)}, 12)
    decoder = decoder_of(model)
    decoder.admit(prompt_of(11))
    for _ in range(5):
        decoder.step()
    for back in (4, 1):
        decoder.truncate([16 - back])
        decoder.tokens = torch.tensor([want[5 - back]])
        assert [int(decoder.step()[0]) for _ in range(back)] == want[6 - back : 6]
    if name == "Gemma3ForCausalLM":
        with pytest.raises(DescriptorError, match="length of row 0 must be from 12 to 16, got 11"):
            decoder.truncate([11])
    with pytest.raises(DescriptorError, match="to 16, got 17"):
        decoder.truncate([17])
    with pytest.raises(DescriptorError, match=r"a list of 1 length \(one for each row\)"):
        decoder.truncate([])
    assert decoder.step().tolist() == want[6:7]
    # Drafts are written too, over the window's earlier positions, even if wrong.
    decoder.verify(torch.full((1, DRAFTS), (want[7] + 7) % 97))
    assert decoder.row_lengths == (18,)
    if name == "Gemma3ForCausalLM":
        with pytest.raises(DescriptorError, match="must be from 17 to 18, got 16"):
            decoder.truncate([16])
    decoder.truncate([17])
    decoder.tokens = torch.tensor([want[6]])
    assert decoder.verify(torch.tensor([want[7:10]])) == [want[7:11]]


@pytest.mark.parametrize("sizes", [(), (16,)], ids=["eager", "prompts"])
def test_rows_with_windows_do_not_go_back_behind_their_prompt(sizes):
    """Windows keep only the positions that the next token attends to."""
    decoder = decoder_of(made("MistralForCausalLM", sliding_window=5), prompt_sizes=sizes)
    decoder.admit(prompt_of(11))
    decoder.step()
    with pytest.raises(DescriptorError, match="must be from 11 to 12, got 10"):
        decoder.truncate([10])


class Interrupt(BaseException):
    """An exception that may be raised anywhere, as by a signal."""


def interrupted(call, monkeypatch):
    """Run a call that waits for the device, and interrupt it there."""

    def raise_it(tensor):
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", raise_it)
        with pytest.raises(Interrupt):
            call()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_rows_of_an_interrupted_step_go_on_only_from_where_they_were(name, monkeypatch):
    """The device is ahead of the host: it has verified drafts that were not reported."""
    model = made(name)
    want = said_by(model, {"input_ids": prompt_of(11)}, 20)
    decoder = decoder_of(model)
    decoder.admit(prompt_of(11))
    said = want[:1]
    for _ in range(2):  # the second time, tokens are in memory that the step writes
        drafts = torch.tensor([want[len(said) : len(said) + DRAFTS]])
        interrupted(partial(decoder.verify, drafts), monkeypatch)
        for call in (decoder.step, decoder.logits, partial(decoder.verify, drafts)):
            with pytest.raises(InputError, match=r"may be incomplete.*truncate"):
                call()
        with pytest.raises(InputError, match="A step with 1 row was interrupted"):
            decoder.admit(prompt_of(4))
        decoder.truncate(decoder.row_lengths)
        decoder.tokens = torch.tensor(said[-1:])
        said += decoder.verify(drafts)[0]
    assert said == want[: len(said)]
    interrupted(lambda: decoder.verify(torch.tensor([[-1]])), monkeypatch)
    decoder.reset()
    decoder.admit(prompt_of(11))
    assert decoder.step().tolist() == want[1:2]


def test_a_half_done_step_of_recurrent_layers_cannot_be_taken_back():
    """Some layers have processed the token, and others have not."""
    model = made("Lfm2ForCausalLM")
    decoder = decoder_of(model, num_draft_tokens=0, mode="NONE")
    decoder.admit(prompt_of(5))

    def raise_it(*_):
        raise Interrupt

    hook = model.lm_head.register_forward_pre_hook(raise_it)
    with pytest.raises(Interrupt):
        decoder.step()
    hook.remove()
    for call in (decoder.step, lambda: decoder.truncate(decoder.row_lengths)):
        with pytest.raises(InputError, match=r"Call reset\(\) and admit the rows again\.$"):
            call()
    decoder.reset()
    decoder.admit(prompt_of(5))
    with pytest.raises(
        DescriptorError, match=r"row 0 must be 5, got 4\. .* cannot continue from an earlier"
    ):
        decoder.truncate([4])
    assert decoder.step().tolist() == said_by(model, {"input_ids": prompt_of(5)}, 2)[1:]


def test_rows_are_named_by_numbers():
    """True and False would be rows 1 and 0, and a mask would drop both."""
    decoder = decoder_of(llama())
    decoder.admit(torch.cat([prompt_of(4)] * 3))
    mask = torch.tensor([False, True, True])
    for wrong in (mask, mask.numpy(), mask.tolist(), [0.5], "0", [3]):
        with pytest.raises(
            DescriptorError,
            match=r"row must be at least 0 and less than 3 \(the number of live rows\)",
        ):
            decoder.drop(wrong)
    for mask_of_integers in ([0, 1, 1], [1, 1]):
        with pytest.raises(DescriptorError, match="Row 1 is given more than once"):
            decoder.drop(mask_of_integers)
    assert decoder.num_rows == 3
    for wrong in ([2.5, 2, 2], [True] * 3):
        with pytest.raises(DescriptorError, match="length of row 0 must be from 1 to 4"):
            decoder.truncate(wrong)
    with pytest.raises(InputError, match="tokens must be a tensor of shape"):
        decoder.tokens = [5, 6, 7]
    decoder.truncate(torch.tensor([2, 3, 4]))
    assert decoder.row_lengths == (2, 3, 4)
    assert decoder.drop(mask.nonzero().flatten()) == [0]


# -- refused calls --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3_5ForCausalLM", "recurrent layers cannot undo a rejected draft"),
        ("MambaForCausalLM", "recurrent layers cannot undo a rejected draft"),
        ("BloomForCausalLM", "steps with several tokens per row return different logits"),
        ("T5ForConditionalGeneration", "steps with several tokens per row return different logits"),
    ],
)
def test_models_that_cannot_verify_are_refused(name, message):
    source = {"max_source_length": 12} if name in ENCODER_DECODER else {}
    with pytest.raises(ConfigError, match=f"0 for {name}.*{message}"):
        decoder_of(made(name), **source)


def test_a_decoder_without_room_for_drafts_says_so():
    decoder = decoder_of(llama(), num_draft_tokens=0)
    for ask in (
        lambda: decoder.verify(torch.tensor([[1]])),
        lambda: decoder.capture(drafts=True),
        lambda: PromptLookup(decoder),
    ):
        with pytest.raises(ConfigError, match=r"num_draft_tokens=3"):
            ask()
    for number in (-1, True, 1.5, MAX_LENGTH):
        with pytest.raises(ConfigError, match="num_draft_tokens"):
            decoder_of(llama(), num_draft_tokens=number)


def test_drafts_of_another_kind_are_errors():
    decoder = decoder_of(llama())
    for rows in (0, 1):
        with pytest.raises(DescriptorError, match=r"Call admit\(\) first"):
            decoder.verify(torch.zeros(rows, 1, dtype=torch.int64))
    decoder.admit(prompt_of(3))
    for drafts in ([[5]], torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int32)):
        with pytest.raises(InputError, match="drafts must be an int64 tensor of tokens"):
            decoder.verify(drafts)
    for shape in ((3,), (2, 3), (1, 0), (1, DRAFTS + 1)):
        with pytest.raises(
            InputError, match=r"have shape \(1, N\) with N from 1 to num_draft_tokens"
        ):
            decoder.verify(torch.ones(shape, dtype=torch.int64))
    assert decoder.row_lengths == (3,)


def test_a_drafter_that_does_not_fit_the_decoder_is_refused():
    model = llama()
    decoder = decoder_of(model)
    with pytest.raises(
        ConfigError, match=r"decoder's num_draft_tokens \(3\), got 4.*num_draft_tokens=4"
    ):
        SpeculativeDecoder(decoder, PromptLookup(decoder, 4))
    plain = decoder_of(model, num_draft_tokens=0)
    for wrong, message in (
        (
            lambda: SpeculativeDecoder(plain, PromptLookup(decoder)),
            r"num_draft_tokens must be at least 1 to verify drafts, got 0. Create",
        ),
        (lambda: SpeculativeDecoder(3, PromptLookup(decoder)), "decoder must be a GraphDecoder"),
        (
            lambda: SpeculativeDecoder(decoder, 3),
            r"a Drafter with an integer num_draft_tokens, got 3. Pass PromptLookup\(decoder\)",
        ),
        (lambda: PromptLookup(3), "decoder must be a GraphDecoder, got 3"),
        (lambda: DraftModel(decoder, model), r"small must be a GraphDecoder, got <Llama.* Create"),
        (lambda: DraftModel(3, decoder), "decoder must be a GraphDecoder, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()
    for settings, message in (
        ({"max_length": 39, "lengths": [39]}, r"small.max_length must be at least.*40"),
        ({"max_batch_size": 2}, "small.max_batch_size must be at least"),
        ({"num_draft_tokens": 0}, "small.num_draft_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            DraftModel(decoder, decoder_of(model, **{"sizes": None, **settings}))
    large = decoder_of(llama(vocab_size=700))
    with pytest.raises(
        ConfigError, match=r"small.vocabulary must be at least 189, got 188. .* has 700 tokens"
    ):
        DraftModel(large, decoder_of(llama(vocab_size=188)))
    with pytest.raises(ConfigError, match="a GraphDecoder other than the decoder that verifies"):
        DraftModel(decoder, decoder)
    with pytest.raises(ConfigError, match=r"a decoder of a model without an encoder.*PromptLookup"):
        DraftModel(decoder, decoder_of(made("MarianMTModel"), max_source_length=4))


@pytest.mark.parametrize("vocabulary", [64, 128])
def test_a_draft_model_may_have_a_vocabulary_of_another_padding(vocabulary):
    """The larger model may have tokens that the smaller one lacks, because a draft is a guess."""
    model = llama()
    decoder = decoder_of(model)
    small = decoder_of(llama(vocab_size=vocabulary), sizes=None)
    loop = SpeculativeDecoder(decoder, DraftModel(decoder, small))
    ids = torch.tensor([[3, 96, 65, 5], [96, 95, 1, 63]])
    found = loop.generate(ids, max_new_tokens=12, do_sample=False)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert found.tolist() == expected.tolist()
    assert int(expected.max()) >= 64  # a token that only the larger model has


def test_a_step_without_rows_is_an_error_in_every_loop():
    decoder = decoder_of(llama())
    loop = SpeculativeDecoder(decoder, PromptLookup(decoder))
    for step in (loop.step, decoder.step, decoder.logits):
        with pytest.raises(DescriptorError, match=r"Call admit\(\) first"):
            step()


def test_rows_that_a_loop_does_not_know_of_are_an_error():
    decoder = decoder_of(llama())
    loop = SpeculativeDecoder(decoder, PromptLookup(decoder))
    loop.admit(prompt_of(3))
    decoder.step()
    with pytest.raises(
        InputError, match=r"rows of the decoder were changed.* Call reset\(\) of the"
    ):
        loop.step()
    loop.reset()
    loop.admit(prompt_of(3))
    assert loop.step()
    with pytest.raises(ConfigError, match=r"decoder\.num_rows must be 0"):
        SpeculativeDecoder(decoder, PromptLookup(decoder))
