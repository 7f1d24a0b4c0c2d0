"""cuDNN attention equals float32, in graphs and in compiled code."""

from __future__ import annotations

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from decoder_models import gpt2, llama  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from dispatchkit_transformers import (  # noqa: E402
    DECODE_ATTENTION,
    GraphDecoder,
    static_models,
)
from dispatchkit_transformers import decode_attention as attention_module  # noqa: E402
from dispatchkit_transformers.decode_attention import decode_attention  # noqa: E402
from dispatchkit_transformers.decode_step import decode_step  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]

DEVICE = "cuda:0"
LENGTH, SLOTS = 96, 9


@pytest.fixture
def cudnn(monkeypatch):
    """Return, for each requested attention, whether cuDNN computed it."""
    said = []
    ask = attention_module._for_cudnn

    def asked(*given):
        said.append(ask(*given))
        return said[-1]

    monkeypatch.setattr(attention_module, "_for_cudnn", asked)
    return said


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)], ids=["own", "shared", "one"])
def test_what_tokens_attend_to_is_as_near_to_float32_as_by_products_of_matrices(
    heads, size, dtype, cudnn
):
    torch.manual_seed(size)
    memory = torch.randn(2, SLOTS, heads[1], LENGTH + 1, size, device=DEVICE, dtype=dtype)
    module = torch.nn.Module()
    shapes = ((1, 64, 1), (5, LENGTH, 1), (SLOTS, 33, 1), (3, 7, 1), (5, LENGTH, 4), (1, 64, 8))
    for rows, length, tokens in shapes:
        query = torch.randn(rows, heads[0], tokens, size, device=DEVICE, dtype=dtype)
        used = torch.randint(1, length + 1, (rows,), device=DEVICE)
        used[0] = length
        # Each token attends to one more position than the preceding token.
        ends = used[:, None] + torch.arange(1 - tokens, 1, device=DEVICE)
        looks = torch.arange(length, device=DEVICE) < ends.clamp(min=1).unsqueeze(-1)
        looks = looks.unsqueeze(1)
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(looks.shape, device=DEVICE, dtype=dtype).masked_fill_(~looks, lowest)
        # Large values after the used positions have no weight.
        behind = torch.arange(LENGTH + 1, device=DEVICE) >= used[:, None]
        memory[:, :rows].masked_fill_(behind.view(1, rows, 1, -1, 1), 100.0)
        key, value = memory[:, :rows, :, :length]
        exact = (one.float() for one in (query, key, value, mask))
        want, _ = decode_attention(module, *exact, scaling=0.11)
        with sdpa_kernel(SDPBackend.MATH):  # no cuDNN
            plain, _ = decode_attention(module, query, key, value, mask, scaling=0.11)
        assert cudnn == [False, False]
        allowed = (plain.float() - want).abs().max()
        for given in (mask, looks):
            got, _ = decode_attention(module, query, key, value, given, scaling=0.11)
            assert got.shape == want.shape
            assert (got.float() - want).abs().max() <= 2 * allowed + 1e-3
        assert cudnn == [False, False, *[size <= 128] * 2]
        cudnn.clear()
        memory.normal_()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize(
    "make",
    [
        partial(llama, hidden_size=256, num_attention_heads=8, initializer_range=0.1),
        partial(gpt2, initializer_range=0.1),
    ],
    ids=["llama", "gpt2"],
)
def test_logits_of_replays_are_as_near_to_float32_as_those_of_sdpa(make, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact = make().to(DEVICE).eval()
    model = copy.deepcopy(exact).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    exact.load_state_dict(model.state_dict())  # the same weights as rounded
    model.set_attn_implementation(DECODE_ATTENTION)
    decoder = GraphDecoder(
        model, max_batch_size=8, max_length=LENGTH, lengths=[32, LENGTH], sizes=[2, 8],
        compile=compiled,
    )  # fmt: skip
    runner = decoder.runner(logits=True)
    others = []  # the library's attention in both types, with separate caches
    for one in (exact, plain):
        found = static_models.probe(one, LENGTH)
        memory = found.cache(8, LENGTH)
        others.append((memory, decode_step(found, memory, [LENGTH], one, wants_logits=True)))
    worst, allowed, spread = 0.0, 0.0, 0.0
    for number in range(12):
        rows, length = (1, 2, 5, 8)[number % 4], (32, LENGTH)[number % 2]
        tokens = torch.randint(3, 997, (rows,), device=DEVICE)
        positions = torch.randint(0, length, (rows,), device=DEVICE)
        for index, block in enumerate(decoder.cache.memory):
            block.normal_()
            for memory, _ in others:
                memory.memory[index].copy_(block)
        # Rows after the batch must change nothing, whatever is in their slots.
        for block in decoder.cache.memory:
            block[:, rows:] = float("nan")
        got = runner(tokens=tokens, positions=positions, length=length)[0].clone()
        with torch.no_grad():
            want, near = (step(tokens, positions, LENGTH)[0] for _, step in others)
        worst = max(worst, float((got - want).abs().max()))
        allowed = max(allowed, float((near - want).abs().max()))
        spread = max(spread, float(want.std()))
    assert worst <= 2 * allowed + 1e-3
    assert allowed < spread  # otherwise the comparison would show nothing
    assert runner.stats().steps == 12
    assert not runner.stats().eager_by_reason
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        runner(tokens=tokens, positions=positions, length=length)
        torch.cuda.synchronize()
    assert sum("cudnn" in one.name and "sdpa" in one.name for one in seen.events()) == 3


def test_types_of_32_bits_are_not_for_cudnn(cudnn):
    model = llama(hidden_size=256, num_attention_heads=8).to(DEVICE).eval()
    model.set_attn_implementation(DECODE_ATTENTION)
    decoder = GraphDecoder(model, max_batch_size=2, max_length=LENGTH)
    tokens = torch.randint(3, 997, (2,), device=DEVICE)
    decoder.runner()(tokens=tokens, positions=torch.zeros_like(tokens), length=LENGTH)
    assert cudnn
    assert not any(cudnn)
