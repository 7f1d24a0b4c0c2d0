"""Models as written in libraries: their queries to torch and their results."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import Axis, GraphRunner, StaticInput, graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # importing transformers takes seconds
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]


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
    """During a capture, the library skips a host read of its mask."""

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


def test_an_encoder_has_graphs_for_batches_and_lengths_by_one_line(bert):
    """Nothing is declared: the mask hides the padding of a length."""
    run = graphed(bert, backend="tape")
    with torch.no_grad():
        for rows, length in ((3, 11), (2, 17), (4, 32), (1, 5), (3, 40)):
            ids = torch.randint(1, 100, (rows, length))
            mask = torch.ones(rows, length, dtype=torch.int64)
            mask[0, length // 2 :] = 0
            got, want = (one(input_ids=ids, attention_mask=mask) for one in (run, bert))
            assert type(got) is type(want)
            torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    assert run.graphed.stats().steps_by_mode["FULL"] >= 4
    assert run.graphed.stats().plain == {}


def test_outputs_of_a_library_are_as_it_returns_them():
    """An output object with hidden states, and a new cache in each call."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2Model(config).eval()
    run = graphed(model, backend="tape")
    ids = [torch.randint(0, 50, (rows, 6)) for rows in (3, 4, 2)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)  # the first call installs hooks
        for one in ids:
            got = run(one, use_cache=True, output_hidden_states=True)
            want = model(one, use_cache=True, output_hidden_states=True)
            assert type(got) is type(want)
            torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.hidden_states, want.hidden_states, rtol=1e-4, atol=1e-5)
            assert type(got.past_key_values) is type(want.past_key_values)
            assert got.past_key_values.get_seq_length() == 6
            # The cache continues as the model's own, in a call that is not a replay.
            token = torch.ones(len(one), 1, dtype=torch.int64)
            more = [model(token, past_key_values=out.past_key_values)[0] for out in (got, want)]
            torch.testing.assert_close(*more, rtol=1e-4, atol=1e-5)
    assert run.graphed.stats().steps_by_mode["FULL"] == 2


def test_a_cache_that_is_handed_in_is_written_as_in_the_plain_call():
    """Each call replaces its tensors, so no graph stays valid and every step runs eager."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2Model(config).eval()
    run = graphed(model, backend="tape")
    ours, theirs = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for token in range(4):
            ids = torch.full((2, 1), token)
            got = run(ids, past_key_values=ours)[0]
            want = model(ids, past_key_values=theirs)[0]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert ours.get_seq_length() == theirs.get_seq_length() == token + 1
