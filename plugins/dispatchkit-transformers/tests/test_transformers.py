"""Decoding through graphs gives the tokens of the library's own ``generate``."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from dispatchkit.errors import (  # noqa: E402
    ConfigError,
    DescriptorError,
    InputError,
    UnknownNameError,
)

from dispatchkit_transformers import (  # noqa: E402
    DECODE_ATTENTION,
    GraphDecoder,
    static_models,
)
from dispatchkit_transformers import decode_attention as attention_module  # noqa: E402
from dispatchkit_transformers.decode_attention import decode_attention  # noqa: E402
from dispatchkit_transformers.decode_step import (  # noqa: E402
    compile_for_any_size,
    decode_step,
)
from dispatchkit_transformers.slot_cache import SlotCache  # noqa: E402

# Loading the library takes longer than all other quick tests of a worker together.
pytestmark = pytest.mark.slow

PAD = 0
LENGTHS = (16, 32, 64)


def llama(**settings):
    config = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        **settings,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.3,
        )
    )


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request):
    torch.manual_seed(0)
    return request.param().eval()


@pytest.fixture
def one_model():
    """Return the Llama-like model, where the kind of model does not matter."""
    torch.manual_seed(0)
    return llama().eval()


@pytest.fixture
def prompts():
    """Return five prompts of 7, 7, 4, 7 and 2 tokens, padded on the left."""
    ids = torch.randint(3, 97, (5, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, :3] = 0
    mask[4, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def decoder_of(model, **settings):
    settings = {"max_batch_size": 8, "max_length": 64, "lengths": LENGTHS, **settings}
    return GraphDecoder(model, **settings)


def both(model, decoder, prompts, **asked):
    """Return the results of library and decoder for the same random numbers."""
    results = []
    for run in (model.generate, decoder.generate):
        torch.manual_seed(5)
        results.append(run(**prompts, pad_token_id=PAD, **asked))
    return results


def common_tokens(model, prompts):
    """Return tokens that some rows will produce, so that these end early."""
    said = model.generate(**prompts, max_new_tokens=24, do_sample=False, pad_token_id=PAD)
    return sorted({int(said[row, 7 + 3 * row + 1]) for row in range(4)})


# -- equal tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager", DECODE_ATTENTION])
def test_greedy_tokens_are_those_of_generate_at_every_length(model, prompts, attention):
    model.set_attn_implementation(attention)
    decoder = decoder_of(model)
    want, got = both(model, decoder, prompts, max_new_tokens=50, do_sample=False)
    assert torch.equal(want, got)
    stats = decoder.stats().graphs["tokens"]
    assert {int(key.partition("axes=")[2]) for key in stats.hits} == set(LENGTHS)
    assert stats.steps == decoder.stats().steps == 49
    assert not stats.eager_by_reason


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("value_size", [16, 8])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["own", "shared"])
def test_attention_of_few_tokens_is_the_librarys_with_every_mask(heads, value_size, tokens):
    maker = torch.Generator().manual_seed(2)
    size, rows, positions = 16, 3, 9
    query = torch.randn(rows, tokens, heads[0], size, generator=maker).transpose(1, 2)
    memory = torch.randn(2, 5, heads[1], positions + 3, size, generator=maker)
    key, value = memory[:, :rows, :, :positions]
    value = value[..., :value_size]
    last = torch.tensor([1, 5, 4]).view(rows, 1, 1, 1) + torch.arange(tokens).view(-1, 1)
    looks = torch.arange(positions) <= last
    added = torch.zeros(looks.shape).masked_fill(~looks, torch.finfo(torch.float32).min)
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    for mask in (None, looks, added, looks[:1], added[:1]):
        for scaling in (None, 0.3):
            want, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
            got, _ = decode_attention(module, query, key, value, mask, scaling=scaling)
            torch.testing.assert_close(got, want)


class Operations(TorchDispatchMode):
    """Records the operations that would be kernels on a device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func.__name__.startswith("_unsafe_view"):
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_of_one_token_is_few_operations_and_copies_no_keys(dtype):
    memory = torch.ones(2, 5, 2, 12, 16, dtype=dtype)
    key, value = memory[:, :3, :, :9]
    looks = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    for mask, between in (
        (torch.zeros(looks.shape, dtype=dtype), ["add_"]),
        (looks, ["bitwise_not", "masked_fill_"]),
        (None, []),
    ):
        with Operations() as done:
            decode_attention(torch.nn.Module(), memory[0, :3, :, :1], key, value, mask)
        assert done.names == ["mul", "bmm", *between, "_softmax", "bmm"]


def test_scores_that_only_their_scale_brings_into_the_range_of_a_type():
    """A product of 230,400 overflows float16, unlike those of a quarter of the rows."""
    query = torch.full((1, 2, 1, 64), 60.0)
    key = torch.full((1, 2, 8, 64), 60.0)
    key[:, :, ::4] = -60
    value = torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(3))
    for mask in (None, torch.ones(1, 1, 1, 8, dtype=torch.bool)):
        halves = [one.half() for one in (query, key, value)]
        got, _ = decode_attention(torch.nn.Module(), *halves, mask)
        want, _ = sdpa_attention_forward(torch.nn.Module(), query, key, value, mask)
        torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_models_with_scores_that_it_does_not_know_are_refused(name):
    """The library's ``sdpa`` ignores unknown options, and refuses only its own name."""
    one = torch.ones(1, 2, 1, 4)
    for query in (one, torch.ones(1, 2, 3, 4)):
        with pytest.raises(ConfigError, match=rf"supports .* \({name}\)"):
            decode_attention(torch.nn.Module(), query, one, one, None, **{name: torch.ones(2)})


def test_attention_of_prompts_is_the_librarys(monkeypatch):
    asked = []

    def librarys(module, query, key, value, mask, **kwargs):
        asked.append((query.shape[2], kwargs["dropout"], kwargs.get("position_bias")))
        return query, None

    monkeypatch.setattr(attention_module, "sdpa_attention_forward", librarys)
    one, many = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 3, 4)
    module = torch.nn.Module()
    decode_attention(module, many, many, many, None)
    decode_attention(module, one, many, many, None, dropout=0.1)
    decode_attention(module, one, many, many, None, position_bias=30.0)
    decode_attention(module, one, many, many, None, softcap=None, position_bias=None)
    assert asked == [(3, 0.0, None), (1, 0.1, None), (1, 0.0, 30.0)]


@pytest.fixture
def cudnn(monkeypatch):
    """Simulate cuDNN's attention on the CPU; return the shapes of its queries and keys."""
    calls = []

    def attend(query, key, value, mask, wants_logsumexp, *, scale):
        assert not wants_logsumexp
        assert mask is None or mask.dtype == query.dtype
        calls.append((tuple(query.shape), tuple(key.shape)))
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=True
        )
        return found, None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attend)
    monkeypatch.setattr(attention_module, "_for_cudnn", lambda *given: True)
    return calls


def test_tokens_by_cudnn_are_those_of_generate_at_every_length(model, prompts, cudnn):
    model.set_attn_implementation(DECODE_ATTENTION)
    decoder = decoder_of(model)
    want, got = both(model, decoder, prompts, max_new_tokens=50, do_sample=False)
    assert torch.equal(want, got)
    config = model.config
    shared = getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert {key[1] for _, key in cudnn} == {shared}
    assert {key[2] for _, key in cudnn} >= set(LENGTHS)
    assert not decoder.stats().graphs["tokens"].eager_by_reason


def test_compiled_steps_have_the_attention_too(model, prompts):
    model.set_attn_implementation(DECODE_ATTENTION)
    torch._dynamo.reset()
    decoder = decoder_of(
        model, lengths=[64], compile=partial(torch.compile, backend="aot_eager", fullgraph=True)
    )
    want, got = both(model, decoder, prompts, max_new_tokens=20, do_sample=False)
    assert torch.equal(want, got)
    assert not decoder.stats().graphs["tokens"].eager_by_reason


@pytest.mark.parametrize("rows", [1, 3])
def test_cudnn_is_given_masks_of_true_and_false_as_numbers(rows, cudnn):
    torch.manual_seed(2)
    query, memory = torch.randn(3, 4, 1, 16), torch.randn(2, 5, 2, 13, 16)
    key, value = memory[:, :3, :, :9]
    looks = torch.rand(rows, 1, 1, 9) < 0.5
    looks[..., 0] = True
    mask = torch.zeros(looks.shape).masked_fill_(~looks, torch.finfo(torch.float32).min)
    wanted = partial(
        torch.nn.functional.scaled_dot_product_attention,
        query, *(one.repeat_interleave(2, 1) for one in (key, value)), looks,
    )  # fmt: skip
    module = torch.nn.Module()
    for given in (looks, mask, torch.cat([looks, ~looks], -1)):
        got, weights = decode_attention(module, query, key, value, given)
        assert weights is None
        torch.testing.assert_close(got, wanted().transpose(1, 2))
    got, _ = decode_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(got, wanted(scale=0.3).transpose(1, 2))
    assert len(cudnn) == 4


def test_only_what_cudnn_computes_is_given_to_it(monkeypatch):
    """Uses tensors that report a CUDA device with cuDNN's attention."""

    class OnCuda:
        def __init__(self, one, requires_grad=False):
            self.is_cuda, self.dtype, self.device = True, one.dtype, "cuda:0"
            self.shape, self.stride, self.requires_grad = one.shape, one.stride, requires_grad

    asked = []
    monkeypatch.setattr(attention_module, "_has_cudnn", lambda *given: not asked.append(given))

    def is_for_cudnn(size=64, value_size=None, dtype=torch.float16, mask=None, **more):
        states = torch.zeros(2, 3, 2, 9, size, dtype=dtype)
        query, key = torch.zeros(3, 4, 1, size, dtype=dtype), states[0]
        value = states[1, ..., :value_size]
        query, key, value = (more.get(name, one) for name, one in
                             (("query", query), ("key", key), ("value", value)))  # fmt: skip
        grad = more.get("requires_grad", False)
        return attention_module._for_cudnn(OnCuda(query, grad), OnCuda(key), OnCuda(value), mask)

    looks = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    assert is_for_cudnn()
    assert is_for_cudnn(size=128, dtype=torch.bfloat16, mask=looks.to(torch.bfloat16))
    assert is_for_cudnn(mask=looks)
    assert asked == [("cuda:0", dtype) for dtype in (torch.float16, torch.bfloat16, torch.float16)]
    with torch.no_grad():
        assert is_for_cudnn(requires_grad=True)
    assert not is_for_cudnn(requires_grad=True)
    assert not is_for_cudnn(size=20)
    assert not is_for_cudnn(size=256)
    assert not is_for_cudnn(value_size=32)
    assert not is_for_cudnn(mask=looks.float())
    assert not is_for_cudnn(query=torch.zeros(3, 4, 1, 64))
    turned = torch.zeros(3, 2, 64, 9, dtype=torch.float16).transpose(2, 3)
    assert not is_for_cudnn(key=turned)
    assert not is_for_cudnn(value=turned)
    assert len(asked) == 4
    on_cpu = [torch.zeros(3, 2, 1, 64, dtype=torch.float16)] * 3
    assert not attention_module._for_cudnn(*on_cpu, None)


def test_releases_of_cudnn_that_are_wrong_are_not_asked(monkeypatch):
    monkeypatch.setattr(
        torch.backends.cuda, "can_use_cudnn_attention", lambda params: params.enable_gqa
    )
    asked = attention_module._can_have_cudnn.__wrapped__
    for version, expected in ((None, False), (91002, False), (91500, False), (91501, True)):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert asked(torch.device("cpu"), torch.float16) is expected
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not asked(torch.device("cpu"), torch.float16)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_asks_for_cudnn_while_it_is_traced(dynamic, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounter()

    @partial(torch.compile, backend=counter, fullgraph=True, dynamic=dynamic)
    def run(query, key):
        return query + 1 if attention_module._has_cudnn(key.device, key.dtype) else query - 1

    for rows in (3, 4, 5):
        query, key = torch.zeros(rows, 4, 1, 16), torch.zeros(rows, 2, 9, 16)
        for one in (query, key):
            torch._dynamo.maybe_mark_dynamic(one, 0)
        assert torch.equal(run(query, key), query - 1)
    assert counter.frame_count == 1
    monkeypatch.setattr(attention_module, "_can_have_cudnn", lambda *given: True)
    torch._dynamo.reset()
    assert torch.equal(run(query, key), query + 1)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    torch._dynamo.reset()
    assert torch.equal(run(query, key), query - 1)


@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": True, "top_k": 20, "temperature": 0.7},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "num_return_sequences": 1, "top_p": 0.8},
    ],
    ids=["top_k", "repetition_penalty", "top_p"],
)
def test_processors_and_sampling_are_the_librarys(model, prompts, asked):
    decoder = decoder_of(model)
    want, got = both(model, decoder, prompts, max_new_tokens=20, **asked)
    assert torch.equal(want, got)
    graphs = decoder.stats().graphs
    assert graphs["logits"].steps == decoder.stats().steps > graphs["tokens"].steps == 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_finished_rows_are_compacted_and_change_nothing(model, prompts, do_sample):
    decoder = decoder_of(model, sizes=[1, 2, 3, 4, 5, 8])
    ends = common_tokens(model, prompts)
    asked = {"max_new_tokens": 40, "do_sample": do_sample, "eos_token_id": ends}
    want, got = both(model, decoder, prompts, **asked)
    assert torch.equal(want, got)
    stats = decoder.stats()
    assert stats.moved > 0
    # Keys and values of the used positions in both layers, without spare positions of the slots.
    row = decoder.cache.num_bytes // decoder.max_batch_size
    assert 0 < stats.moved_bytes < stats.moved * row
    sizes_used = {key for one in stats.graphs.values() for key in one.hits}
    assert len(sizes_used) > 1, "finished rows should lead to smaller graphs"


def test_scores_and_logits_are_those_of_generate(one_model, prompts):
    decoder = decoder_of(one_model)
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want, got = both(one_model, decoder, prompts, max_new_tokens=9, do_sample=False, **wants)
    assert torch.equal(want.sequences, got.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(want, name), getattr(got, name), rtol=1e-4, atol=1e-4)


def test_the_decoder_is_a_custom_generate_of_the_library(one_model, prompts):
    decoder = decoder_of(one_model)
    want = one_model.generate(**prompts, max_new_tokens=6, do_sample=False, pad_token_id=PAD)
    got = one_model.generate(
        **prompts, max_new_tokens=6, do_sample=False, pad_token_id=PAD, custom_generate=decoder
    )
    assert torch.equal(want, got)
    assert decoder.stats().steps == 5


def test_a_compiled_forward_takes_the_models_place(one_model, prompts):
    decoder = decoder_of(
        one_model, forward=torch.compile(one_model, backend="aot_eager"), sizes=[8]
    )
    want, got = both(one_model, decoder, prompts, max_new_tokens=5, do_sample=False)
    assert torch.equal(want, got)


def test_a_step_is_compiled_once_for_all_sizes_and_once_for_a_single_row(one_model):
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        # Sizes of tokens and positions are symbolic, but none of the memory.
        graphs.append(sum(isinstance(one, torch.SymInt) for one in inputs))
        return graph.forward

    found = static_models.probe(one_model, 32)
    memory = found.cache(9, 32)
    step = decode_step(
        found, memory, [32], one_model, wants_logits=False,
        compile=partial(compile_for_any_size, backend=counted),
    )  # fmt: skip
    with torch.no_grad():
        for rows in (5, 3, 8, 2, 1, 9, 1):
            tokens = torch.full((rows,), 7)
            assert step(tokens, torch.zeros_like(tokens), 32)[0].shape == (rows,)
    assert graphs == [2, 0]


def test_a_step_may_be_compiled_whole(one_model, prompts):
    steps = []

    def compiler(step):
        steps.append(step)
        return torch.compile(step, backend="aot_eager")

    decoder = decoder_of(one_model, compile=compiler, sizes=[8])
    want, got = both(one_model, decoder, prompts, max_new_tokens=20, do_sample=False)
    assert torch.equal(want, got)
    assert len(steps) == len(LENGTHS)
    with pytest.raises(ConfigError, match="compile"):
        decoder_of(one_model, compile="inductor")


# -- serving loop ---------------------------------------------------------------------------


def test_sequences_that_come_and_go_get_what_they_would_get_alone(model):
    """Requests join while others run, end at different times, and move."""
    decoder = decoder_of(model, max_batch_size=4, sizes=[1, 2, 4])
    maker = torch.Generator().manual_seed(3)
    waiting = [
        (number, torch.randint(3, 97, (1, 3 + number), generator=maker), 4 + 3 * (number % 4))
        for number in range(9)
    ]
    want = {
        number: model.generate(
            prompt, max_new_tokens=count, do_sample=False, pad_token_id=PAD, eos_token_id=None
        )[0, prompt.shape[1] :].tolist()
        for number, prompt, count in waiting
    }
    wanted = {number: count for number, _, count in waiting}
    said = {number: [] for number, _, _ in waiting}
    rows = []
    while waiting or rows:
        while waiting and decoder.num_rows < decoder.max_batch_size:
            number, prompt, _ = waiting.pop(0)
            decoder.admit(prompt)
            rows.append(number)
            said[number].append(int(decoder.tokens[-1]))
        for number, token in zip(rows, decoder.step().tolist(), strict=True):
            said[number].append(token)
        done = [row for row, number in enumerate(rows) if len(said[number]) == wanted[number]]
        rows = [rows[row] for row in decoder.drop(done)]
    assert said == want
    stats = decoder.stats()
    assert stats.admitted == stats.dropped == 9
    assert stats.moved > 0


def test_what_a_sequence_left_behind_reaches_none_that_comes_after_it(model, prompts):
    """The keys are NaN, as after a sequence whose scores overflowed."""
    decoder = decoder_of(model, max_batch_size=8, sizes=[1, 2, 4, 8])
    asked = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    for block in decoder.cache.memory:
        block.fill_(float("nan"))
    want, got = both(model, decoder, prompts, **asked)
    assert torch.equal(want, got)
    # Includes slots that others are moved into.
    single = torch.full((1, 5), 7)
    for _ in range(4):
        decoder.admit(single)
    for block in decoder.cache.memory:
        block[:, 0] = float("nan")
    assert decoder.drop([0]) == [3, 1, 2]
    ahead = model.generate(single, pad_token_id=PAD, **asked)[0, single.shape[1] :].tolist()
    for token in ahead[1:]:
        assert decoder.step().tolist() == [token] * 3


def test_rows_without_a_sequence_leave_live_slots_as_they_are(one_model):
    """A graph of four rows with one live row writes nothing to other slots."""
    decoder = decoder_of(one_model, max_batch_size=4, sizes=[4])
    decoder.admit(torch.tensor([[5, 6, 7]]))
    before = [block.clone() for block in decoder.cache.memory]
    decoder.step()
    decoder.step()
    for block, then in zip(decoder.cache.memory, before, strict=True):
        changed = (block != then).flatten(3).any(-1)  # (layers x 2, slots, heads)
        assert changed[:, 0].all()
        readable = (block != then)[:, 1:, :, : decoder.max_length]
        assert not readable.any()


def test_capture_ahead_leaves_nothing_to_capture_later(one_model, prompts):
    decoder = decoder_of(one_model, sizes=[1, 2, 4, 8], lazy=False)
    assert decoder.capture() == 4 * len(LENGTHS)
    want, got = both(one_model, decoder, prompts, max_new_tokens=30, do_sample=False)
    assert torch.equal(want, got)
    assert sum(one.captures for one in decoder.stats().graphs.values()) == 4 * len(LENGTHS)


def test_weights_changed_in_place_are_seen(one_model, prompts):
    decoder = decoder_of(one_model)
    before, _ = both(one_model, decoder, prompts, max_new_tokens=12, do_sample=False)
    other = copy.deepcopy(one_model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    one_model.load_state_dict(other.state_dict())
    want, got = both(one_model, decoder, prompts, max_new_tokens=12, do_sample=False)
    assert torch.equal(want, got)
    assert not torch.equal(before, got)


# -- refused calls --------------------------------------------------------------------------


def test_a_cache_too_short_is_said_before_anything_runs(one_model, prompts):
    decoder = decoder_of(one_model, max_length=20, lengths=[20])
    with pytest.raises(DescriptorError, match=r"at most max_length \(20\).*larger max_length"):
        decoder.generate(**prompts, max_new_tokens=15, do_sample=False, pad_token_id=PAD)
    assert decoder.stats().admitted == 0
    assert decoder.generate(**prompts, max_new_tokens=14, do_sample=False).shape == (5, 21)


def test_a_row_at_the_end_of_the_cache_is_an_error(one_model):
    decoder = decoder_of(one_model, max_length=16, lengths=[16])
    decoder.admit(torch.full((1, 15), 5))
    decoder.step()
    with pytest.raises(DescriptorError, match="sequence length must be at most max_length"):
        decoder.step()


def test_a_batch_above_the_limit_is_an_error(one_model, prompts):
    decoder = decoder_of(one_model, max_batch_size=4)
    with pytest.raises(DescriptorError, match=r"max_batch_size \(4\), got 5.*bytes per sequence"):
        decoder.generate(**prompts, max_new_tokens=5, pad_token_id=PAD)


def test_arguments_of_another_kind_are_errors(one_model):
    for sizes in ("16", 16):
        with pytest.raises(ConfigError, match=r"prompt_sizes must be .* such as \[16, 64, 256\]"):
            decoder_of(one_model, prompt_sizes=sizes)
        with pytest.raises(
            ConfigError,
            match=r"a list of cache lengths up to max_length, such as \[16\]",
        ):
            decoder_of(one_model, max_length=16, lengths=sizes)
    with pytest.raises(ConfigError, match="options must be a RunnerOptions, got 3"):
        decoder_of(one_model, options=3)
    with pytest.raises(ConfigError, match="forward must be a function or None, got 3"):
        decoder_of(one_model, forward=3)
    decoder = decoder_of(one_model)
    ids = torch.ones(1, 2, dtype=torch.long)
    for mask in ("x", torch.ones(1, 3), torch.ones(1, 2).numpy()):
        with pytest.raises(InputError, match=r"with the shape of input_ids, \(1, 2\), got"):
            decoder.admit(ids, mask)
        with pytest.raises(InputError, match=r"with the shape of inputs, \(1, 2\), got"):
            decoder.generate(ids, attention_mask=mask, max_new_tokens=1)
    for ids, problem in (
        ([[5, 6]], r"int32 tensor of tokens \(B, T\), got list. For a list of tokens, pass torch"),
        (torch.ones(1, 2), r"got torch.float32. If the values are tokens, pass NAME.long"),
        (torch.ones(1, 2).long().numpy(), r"got ndarray"),
        ({"input_ids": torch.ones(1, 2)}, r"got dict. Call inputs = tokenizer.* pass \*\*inputs"),
        (torch.tensor([5, 6]), r"got \(2,\). For a single prompt, pass NAME\[None\]"),
        (torch.ones(1, 0, dtype=torch.long), r"shape \(B, T\) with T at least 1, got \(1, 0\)\.$"),
    ):
        for name, call in (
            ("input_ids", decoder.admit),
            ("inputs", lambda ids: decoder.generate(ids, max_new_tokens=1)),
            ("inputs", lambda ids: decoder.generate(inputs=ids, max_new_tokens=1)),
            ("input_ids", lambda ids: decoder.generate(input_ids=ids, max_new_tokens=1)),
        ):
            expected = f"^{name} must .*{problem.replace('NAME', name)}"
            with pytest.raises(InputError, match=expected):
                call(ids)
    with pytest.raises(
        DescriptorError,
        match=r"rows must be a list of row indices, got 0. For a single row, pass \[0\]",
    ):
        decoder.drop(0)
    with pytest.raises(DescriptorError, match=r"The decoder has no rows\. Call admit\(\) first"):
        decoder.drop([0])
    assert decoder.num_rows == 0


@pytest.mark.parametrize("settings", [{}, {"prompt_sizes": (4,)}], ids=["eager", "graphs"])
@pytest.mark.parametrize("token", [97, -1])
def test_a_token_outside_the_vocabulary_is_an_error(one_model, token, settings):
    """It is refused before anything runs, with prompts through graphs or not."""
    decoder = decoder_of(one_model, **settings)
    with pytest.raises(InputError, match=rf"tokens from 0 to 96 .*, got {token}\."):
        decoder.admit(torch.tensor([[5, token, 6]]))
    assert decoder.num_rows == 0


def test_prompts_of_an_encoder_decoder_are_tokens_of_its_decoder():
    """The encoder has the larger of two vocabularies."""
    config = transformers.MarianConfig(
        vocab_size=97, decoder_vocab_size=40, share_encoder_decoder_embeddings=False, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0,
        decoder_start_token_id=1, eos_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    decoder = GraphDecoder(
        transformers.MarianMTModel(config).eval(),
        max_batch_size=2, max_length=16, max_source_length=8,
    )  # fmt: skip
    with torch.no_grad():
        encoded = decoder.model.get_encoder()(torch.tensor([[50, 60]]))
    decoder.admit(torch.tensor([[39]]), encoder_outputs=encoded)
    with pytest.raises(InputError, match=r"tokens from 0 to 39 .*, got 40"):
        decoder.admit(torch.tensor([[40]]), encoder_outputs=encoded)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"prompt_size": (4,)}, UnknownNameError, "GraphDecoder has no setting .*prompt_sizes"),
        ({"axes": []}, UnknownNameError, "GraphDecoder has no setting .axes."),
        ({"max_num_tokens": 4}, UnknownNameError, "no setting .max_num_tokens.; its settings are"),
        ({"max_graphs": 4}, ConfigError, "max_graphs is not a separate argument"),
        ({"policy": "vlm"}, UnknownNameError, "policy .*Did you mean 'vllm'"),
        ({"backend": "cudda"}, UnknownNameError, "backend .*Did you mean 'cuda'"),
        ({"mode": "HALF"}, ConfigError, "mode"),
        ({"sizes": [0]}, ConfigError, "sizes"),
    ],
)
def test_a_setting_that_there_is_not_is_refused_when_a_decoder_is_made(
    one_model, settings, error, message
):
    with pytest.raises(error, match=message):
        decoder_of(one_model, **settings)


def test_a_decoder_prints_its_model_rows_and_graphs(one_model):
    decoder = decoder_of(one_model, sizes=[2, 8], lengths=[64])
    decoder.admit(torch.tensor([[5, 6, 7]]))
    decoder.step()
    assert repr(decoder) == (
        "<GraphDecoder LlamaForCausalLM on tape, 1 of 8 rows, 1 of 2 keys captured>"
    )


def test_a_step_without_rows_is_an_error(one_model):
    with pytest.raises(DescriptorError, match=r"Call admit\(\) first"):
        decoder_of(one_model).step()


def without_layers():
    """Return a model whose state is no cache of the library."""
    config = transformers.RwkvConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2)
    return transformers.RwkvForCausalLM(config).eval()


def sparse():
    """Return a model whose layers keep keys for choosing attended positions."""
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip(f"transformers {transformers.__version__} has no such layers")
    config = transformers.DeepseekV32Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4,
        n_group=1, topk_group=1, index_topk=4, index_n_heads=2, index_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config).eval()


def window_by_length():
    """Return a model that cuts the window at the end of its keys, wherever the token is."""
    config = transformers.GPTNeoConfig(
        vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, window_size=4,
        max_position_embeddings=64, attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            without_layers,
            r"whose forward\(\) accepts cache, past_key_values or cache_params",
        ),
        (sparse, "DynamicIndexedLayer"),
        (window_by_length, "steps on a static cache, with rows at different positions"),
        (lambda: torch.nn.Linear(2, 2), "can generate text.*AutoModelForCausalLM"),
        (lambda: llama().train(), r"in evaluation mode.*model\.eval"),
    ],
    ids=["without-layers", "sparse", "window-by-length", "other-module", "training"],
)
def test_a_model_that_cannot_be_cached_statically_is_refused(make, message):
    """Its state or its results differ from those of a static cache."""
    with pytest.raises(ConfigError, match=message):
        GraphDecoder(make(), max_batch_size=2, max_length=16)


def test_more_positions_than_the_model_has_are_refused(one_model):
    with pytest.raises(ConfigError, match="max_length must be at most 128"):
        GraphDecoder(one_model, max_batch_size=2, max_length=129)


def test_padding_on_the_right_is_refused(one_model):
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    with pytest.raises(InputError, match=r"but row 1 is not\. Tokenize with padding_side='left'"):
        decoder_of(one_model).admit(ids, (ids != 0).long())
    with pytest.raises(InputError, match=r"but row 1 is all zeros\. Omit empty prompts"):
        decoder_of(one_model).admit(ids, torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_a_model_that_was_moved_or_set_to_training_is_refused(one_model):
    decoder = decoder_of(one_model)
    one_model.train()
    with pytest.raises(ConfigError, match="in evaluation mode"):
        decoder.admit(torch.tensor([[5]]))
    one_model.eval().double()
    with pytest.raises(ConfigError, match="float64 on cpu"):
        decoder.admit(torch.tensor([[5]]))


@pytest.mark.parametrize("lengths", [[], [8], [0, 64], ["long"]])
def test_lengths_must_end_with_the_longest(one_model, lengths):
    with pytest.raises(ConfigError, match="lengths"):
        decoder_of(one_model, lengths=lengths)


# -- the cache alone ------------------------------------------------------------------------


def test_a_prompt_that_fails_takes_no_slot(one_model):
    def fail(*given):
        raise RuntimeError("out of order")

    decoder = decoder_of(one_model, max_batch_size=3)
    prompt = torch.tensor([[5, 6, 7]])
    first = decoder.admit(prompt)
    hook = one_model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of order"):
        decoder.admit(prompt.expand(2, 3))
    hook.remove()
    assert (decoder.num_rows, len(decoder.cache.slots)) == (1, 1)
    logits = decoder.admit(prompt.expand(2, 3))
    torch.testing.assert_close(logits, first.expand(2, -1))


def layer_of(states, window=None):
    """Return a layer of the library after a prompt with these keys and values."""
    made = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    made.update(states, states + 1)
    return made


@pytest.mark.parametrize("paddings", [[0, 0], [3, 0], [1, 9]])
@pytest.mark.parametrize("width", [4, 5, 6, 11, 17])
def test_a_ring_keeps_the_latest_positions_of_a_prompt_at_their_places(paddings, width):
    window = 5
    paddings = [min(one, width - 1) for one in paddings]
    at = torch.arange(width).float() - torch.tensor(paddings).view(-1, 1)
    prompt = layer_of(at.view(2, 1, width, 1), window)
    cache = SlotCache([prompt], num_slots=3, length=32)
    (block,) = cache.memory
    block.fill_(float("nan"))
    with cache.joining(1), cache.joining(2) as start:
        cache.fill(start, [prompt], paddings, width)
    keys, values = block[:, 1:, 0, :, 0]
    for row, padding in enumerate(paddings):
        length = width - padding
        want = torch.zeros(window + 1)
        # The library keeps the positions that the next token may attend to.
        for position in range(max(0, length - window + 1), length):
            want[position % window] = position
        held = torch.zeros(window + 1)
        held[[one % window for one in range(max(0, length - window + 1), length)]] = 1
        assert torch.equal(keys[row], want)
        assert torch.equal(values[row], (want + 1) * held)


def test_layers_of_other_shapes_have_memory_of_their_own():
    like = [layer_of(torch.zeros(1, 2, 1, 4)), layer_of(torch.zeros(1, 1, 1, 8))]
    cache = SlotCache(like, num_slots=3, length=5)
    assert [tuple(block.shape) for block in cache.memory] == [(2, 3, 2, 6, 4), (2, 3, 1, 6, 8)]
    assert cache.num_bytes == 4 * (2 * 3 * 2 * 6 * 4 + 2 * 3 * 6 * 8)


# -- the benchmark --------------------------------------------------------------------------


def test_the_benchmark_of_decoding_runs_with_tiny_models_on_a_cpu():
    script = Path(__file__).resolve().parents[3] / "bench" / "decoding.py"
    small = "--models llama-tiny --batches 2 --steps 2 --rounds 1 --trace-steps 4 --most 4"
    # A script imports modules from its folder, even if the environment forbids it.
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(script), *small.split()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**surroundings, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["traffic"], row["case"]) for row in rows} == {
        ("batch 2", "eager"),
        ("batch 2", "graphs"),
        ("batch 2", "graphs, decode attention"),
        ("trace of 4", "eager"),
        ("trace of 4", "graphs"),
        ("trace of 4", "graphs, decode attention"),
        ("trace of 4, again", "graphs"),
        ("trace of 4, again", "graphs, decode attention"),
        ("generate, batch 2", "library dynamic"),
        ("generate, batch 2", "generate"),
        ("all", "summary"),
    }
    *measured, summary = rows
    assert all(row["tokens_per_s"] > 0 for row in measured)
    assert summary["failed"] == []
    assert summary["batch 2"]["times eager"] > 0
