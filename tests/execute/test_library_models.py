"""Models as libraries write them: what they ask torch for, and what they return."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import Axis, GraphRunner, StaticInput  # noqa: E402

pytestmark = pytest.mark.slow  # importing transformers takes seconds


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def test_an_encoder_that_asks_whether_it_is_captured_has_graphs(bert):
    """The library skips a read of its mask by the host in a capture."""

    def step(input_ids, attention_mask):
        return bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = StaticInput((None, "length"), "int64")
    runner = GraphRunner(
        step,
        {"input_ids": ids, "attention_mask": ids},
        axes=[Axis("length", (16, 32))],
        sizes=[1, 2, 4],
        mode="FULL",
        backend="tape",
    )
    assert runner.capture().num_graphs == 6
    input_ids = torch.randint(1, 100, (3, 11))
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    with torch.no_grad():
        want = step(input_ids, mask)
    got = runner(input_ids=input_ids, attention_mask=mask, length=11)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert runner.stats().steps_by_mode["FULL"] == 1
