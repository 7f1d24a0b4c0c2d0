"""Every kind of layer through CUDA graphs: the tokens of ``generate``, in changing batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from decoder_models import gemma3, mamba, marian, qwen35  # noqa: E402
from serving import served  # noqa: E402

from dispatchkit_transformers import GraphDecoder  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DEVICE = "cuda:0"
ASKED = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Each prompt gets this many new tokens: windows of 24 are exceeded in both.
PROMPTS, COUNTS = (3, 40, 7, 25, 2, 16), (40, 9, 30, 50, 12, 24)


def prompt_of(length):
    maker = torch.Generator().manual_seed(length)
    return torch.randint(3, 997, (1, length), generator=maker).to(DEVICE)


@pytest.fixture(params=[gemma3, qwen35, mamba], ids=lambda make: make.__name__)
def model(request):
    """Uses float32 without TF32, so that static and growing cache round almost equally."""
    torch.manual_seed(0)
    return request.param().to(DEVICE).eval()


def test_tokens_are_those_of_generate(model):
    prompts = [prompt_of(length) for length in PROMPTS]
    want = [
        model.generate(one, max_new_tokens=count, **ASKED)[0, one.shape[1] :].tolist()
        for one, count in zip(prompts, COUNTS, strict=True)
    ]
    decoder = GraphDecoder(model, max_batch_size=4, max_length=96, lengths=[32, 96], sizes=[2, 4])
    for _ in range(2):  # captured on demand first, then all available
        assert served(decoder, lambda number: decoder.admit(prompts[number]), COUNTS) == want


def test_a_capture_amid_live_sequences_leaves_their_states_as_they_were(model):
    """Graphs of each size and length are captured between steps of others."""
    prompts = [prompt_of(length) for length in PROMPTS[:3]]
    want = [
        model.generate(one, max_new_tokens=30, **ASKED)[0, one.shape[1] :].tolist()
        for one in prompts
    ]
    decoder = GraphDecoder(model, max_batch_size=3, max_length=96, lengths=[96], sizes=[1, 2, 3])
    said = [[] for _ in prompts]
    for one in prompts:
        decoder.admit(one)
        for row, token in enumerate(decoder.tokens.tolist()):
            if not said[row]:
                said[row].append(token)
        for row, token in enumerate(decoder.step().tolist()):
            said[row].append(token)
    for row, tokens in enumerate(said):
        assert tokens == want[row][: len(tokens)]
    decoder.capture(logits=True)
    for _ in range(20):
        for row, token in enumerate(decoder.step().tolist()):
            said[row].append(token)
    for row, tokens in enumerate(said):
        assert tokens == want[row][: len(tokens)]


def test_an_encoder_decoder_keeps_what_each_source_gave():
    torch.manual_seed(0)
    model = marian().to(DEVICE).eval()
    sources = [prompt_of(length) for length in PROMPTS]
    start = torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    want = [
        model.generate(one, max_new_tokens=count, **ASKED)[0, 1:].tolist()
        for one, count in zip(sources, COUNTS, strict=True)
    ]
    decoder = GraphDecoder(
        model, max_batch_size=4, max_length=96, max_source_length=48, lengths=[96], sizes=[2, 4]
    )

    def admit(number):
        with torch.no_grad():
            encoded = model.get_encoder()(sources[number])
        decoder.admit(start, encoder_outputs=encoded)

    assert served(decoder, admit, COUNTS) == want
