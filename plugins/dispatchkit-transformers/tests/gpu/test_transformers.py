"""Decoding through CUDA graphs: the library's tokens, one cache, constant memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from decoder_models import gpt2, llama  # noqa: E402

from dispatchkit import graphed  # noqa: E402

from dispatchkit_transformers import DECODE_ATTENTION, GraphDecoder  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # torch's own warnings when it loads inductor
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]

DEVICE = "cuda:0"
PAD = 0


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request):
    """Uses float32 without TF32, so that static and growing cache round almost equally."""
    torch.manual_seed(0)
    return request.param().to(DEVICE).eval()


@pytest.fixture
def prompts():
    ids = torch.randint(3, 997, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, :3] = 0
    mask[4, :6] = 0
    return {"input_ids": (ids * mask).to(DEVICE), "attention_mask": mask.to(DEVICE)}


@pytest.mark.parametrize("attention", ["sdpa", DECODE_ATTENTION])
def test_greedy_tokens_are_those_of_generate(model, prompts, attention):
    model.set_attn_implementation(attention)
    decoder = GraphDecoder(model, max_batch_size=8, max_length=256, lengths=[32, 64, 256])
    asked = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": PAD}
    want = model.generate(**prompts, **asked)
    for _ in range(2):  # captured on demand first, then all available
        assert torch.equal(want, decoder.generate(**prompts, **asked))
    stats = decoder.stats().graphs["tokens"]
    assert {int(key.partition("axes=")[2]) for key in stats.hits} == {32, 64, 256}
    assert not stats.eager_by_reason


def test_finished_rows_are_compacted_and_change_nothing(model, prompts):
    asked = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": PAD}
    said = model.generate(**prompts, **asked)
    asked["eos_token_id"] = sorted({int(said[row, 9 + 3 * row + 1]) for row in range(4)})
    decoder = GraphDecoder(model, max_batch_size=5, max_length=128, sizes=[1, 2, 3, 4, 5])
    assert torch.equal(model.generate(**prompts, **asked), decoder.generate(**prompts, **asked))
    assert decoder.stats().moved > 0


def test_a_thousand_steps_of_requests_that_come_and_go_keep_memory_flat(model):
    decoder = GraphDecoder(model, max_batch_size=16, max_length=64, lengths=[64], lazy=False)
    decoder.capture()
    maker = torch.Generator().manual_seed(2)
    used = []
    for number in range(1000):
        while decoder.num_rows < 1 + (number * 7) % 16:
            prompt = torch.randint(3, 997, (1, 4), generator=maker)
            decoder.admit(prompt.to(DEVICE))
        decoder.step()
        full = [row for row, length in enumerate(decoder.row_lengths) if length >= 63]
        excess = range(1 + (number * 5) % 16, decoder.num_rows)
        decoder.drop({*full, *excess})
        if number in (200, 999):
            torch.cuda.synchronize()
            gc.collect()
            used.append(torch.cuda.memory_allocated())
    assert used[1] <= used[0] + (1 << 20)


@pytest.mark.parametrize("part", ["step", "model"])
@pytest.mark.filterwarnings("error::dispatchkit.execute.UncompiledCodeWarning")
def test_graphs_of_compiled_code(model, prompts, part):
    torch._dynamo.reset()
    given = {"compile": True} if part == "step" else {"forward": torch.compile(model)}
    decoder = GraphDecoder(
        model, max_batch_size=8, max_length=64, lengths=[64], sizes=[8], **given
    )  # fmt: skip
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    got = decoder.generate(**prompts, **asked)
    want = model.generate(**prompts, **asked)
    # Fused kernels round differently; the first tokens are far from ties.
    assert torch.equal(want[:, :12], got[:, :12])
    (stats,) = decoder.stats().graphs.values()
    assert stats.captures == 1
    assert not stats.eager_by_reason
    # They need none of Dynamo's state.
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(got, decoder.generate(**prompts, **asked))


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_graphed_module_gives_what_the_module_gives(lanes):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    ).to(DEVICE)
    fast = graphed(net.eval(), lanes=lanes)
    for rows in (1, 3, 8, 20, 5, 33, 3):
        x = torch.randn(rows, 64, device=DEVICE)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    modes = fast.graphed.stats().steps_by_mode
    assert modes["NONE"] == 0
    assert fast.to("cpu") is fast
    assert fast(torch.randn(2, 64)).device.type == "cpu"


def test_the_benchmark_runs_with_small_models():
    script = Path(__file__).resolve().parents[4] / "bench" / "decoding.py"
    small = "--models llama-tiny --batches 1 4 --steps 3 --rounds 1 --trace-steps 20 --length 64"
    # A script imports modules from its folder, even if the environment forbids it.
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(script), *small.split(), "--most", "8"],
        capture_output=True, text=True, timeout=900, check=False, env=surroundings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["case"] for row in rows} >= {
        "eager", "raw graphs", "default", "reduce-overhead", "graphs", "graphs, compiled",
        "graphs, decode attention",
        "graphs, compiled, decode attention", "graphs, compiled, decode attention, planned",
        "library static",
    }  # fmt: skip
