"""Packed sequences: tokens in the batch dimension, requests along an axis, one more offset."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dispatchkit import Axis, StaticInput  # noqa: E402
from dispatchkit.errors import ConfigError, InputError  # noqa: E402

REQUESTS = Axis("requests", (1, 2, 4))
WIDTH = 4
LENGTHS = [(3, 2, 2), (1,), (2, 5), (4, 4, 4, 4), (1, 1, 1), (7, 1)]


def offsets_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)


def tokens_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), WIDTH, generator=generator)


def sums(x, offsets):
    """Return the sum of each request."""
    request = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(x)), right=True)
    total = torch.zeros(len(offsets), WIDTH).index_add(0, request, x)
    return total[:-1]


def attend(x, offsets):
    """Causal attention within each request; return the last token of each."""
    position = torch.arange(len(x))
    request = torch.searchsorted(offsets[1:].contiguous(), position, right=True)
    may_see = (request[:, None] == request[None, :]) & (position[:, None] >= position[None, :])
    scores = (x @ x.T).masked_fill(~may_see, float("-inf"))
    hidden = scores.softmax(-1) @ x
    return {"hidden": hidden, "last": hidden[(offsets[1:].long() - 1).clamp(min=0)]}


def moved(x, offsets):
    """Return results of three sizes: per token, per request, and per request plus one."""
    return x + 1, offsets[1:] - offsets[:-1], offsets * 2


@pytest.mark.slow_except("requests + 1-sums", "requests + 1-attend", "requests + 1-moved")
@pytest.mark.parametrize("step", [sums, attend, moved])
@pytest.mark.parametrize("shape", ["requests + 1", "requests+1"])
def test_packed_sequences_replay_as_eager(make_runner, step, shape):
    """Padded requests have no tokens: their offsets repeat the last one."""
    inputs = {
        "x": StaticInput((None, WIDTH), "float32"),
        "offsets": StaticInput((shape,), "int32", fill="last"),
    }
    runner = make_runner(step, inputs, axes=[REQUESTS], sizes=[4, 8, 16])
    assert runner.capture().failed == {}
    for seed, lengths in enumerate(LENGTHS):
        x, offsets = tokens_of(lengths, seed), offsets_of(lengths)
        result = runner(x=x, offsets=offsets, requests=len(lengths))
        torch.testing.assert_close(result, step(x, offsets))
    assert runner.stats().steps_by_mode["FULL"] == len(LENGTHS)


def test_an_axis_may_count_the_offsets(make_runner):
    """Results that are one shorter than the axis value are cut too."""
    inputs = {
        "x": StaticInput((None, WIDTH), "float32"),
        "offsets": StaticInput(("cuts",), "int64", fill="last"),
    }
    runner = make_runner(sums, inputs, axes=[Axis("cuts", (2, 3, 5))], sizes=[4, 8, 16])
    assert runner.capture().failed == {}
    for lengths in LENGTHS:
        x, offsets = tokens_of(lengths), offsets_of(lengths, torch.int64)
        result = runner(x=x, offsets=offsets, cuts=len(offsets))
        torch.testing.assert_close(result, sums(x, offsets))
    assert runner.stats().steps_by_mode["FULL"] == len(LENGTHS)


def test_offsets_of_the_host_and_a_table_of_each_request(make_runner):
    """Other inputs per request have their own fill."""

    def step(x, offsets, blocks):
        return sums(x, offsets) + blocks.sum(1, keepdim=True)

    inputs = {
        "x": StaticInput((None, WIDTH), "float32"),
        "offsets": StaticInput(("requests + 1",), "int32", fill="last", host=True),
        "blocks": StaticInput(("requests", 2), "int64", fill=-7),
    }
    runner = make_runner(step, inputs, axes=[REQUESTS], sizes=[4, 8, 16])
    assert runner.capture().failed == {}
    for lengths in LENGTHS:
        x, offsets = tokens_of(lengths), offsets_of(lengths)
        blocks = torch.arange(2 * len(lengths)).view(-1, 2)
        result = runner(x=x, offsets=offsets.numpy(), blocks=blocks, requests=len(lengths))
        torch.testing.assert_close(result, step(x, offsets, blocks))
    assert runner.stats().steps_by_mode["FULL"] == len(LENGTHS)


def test_the_last_values_of_a_matrix_go_on_along_each_axis(make_runner):
    """A call without any value is filled with zeros."""
    inputs = {
        "x": StaticInput((None,), "float32"),
        "table": StaticInput(("requests", "requests - 1"), "int64", fill="last"),
    }
    runner = make_runner(
        lambda x, table: (x, table.sum()), inputs, axes=[Axis("requests", (4,))], sizes=[2]
    )
    assert runner.capture().failed == {}
    table = torch.tensor([[1, 2], [3, 4], [5, 6]])
    _, total = runner(x=torch.zeros(2), table=table, requests=3)
    assert total == (1 + 2 + 2) + (3 + 4 + 4) + 2 * (5 + 6 + 6)
    _, total = runner(x=torch.zeros(2), table=torch.zeros(0, 0, dtype=torch.int64), requests=0)
    assert total == 0


@pytest.mark.parametrize("shape", [(None,), (4,), (None, "requests"), ()])
def test_the_last_value_is_for_inputs_along_an_axis(shape):
    """Rows of any batch are filled with one value."""
    with pytest.raises(ConfigError, match="fill must be a number, unless"):
        StaticInput(shape, "int32", fill="last")


@pytest.mark.parametrize("size", ["requests * 2", "requests +", "+ 1", "2 requests", "", "a b"])
def test_a_size_is_an_axis_and_a_number(size):
    with pytest.raises(ConfigError, match="shape"):
        StaticInput((size,), "int32")


def test_offsets_of_another_number_of_requests_are_refused(make_runner):
    inputs = {
        "x": StaticInput((None, WIDTH), "float32"),
        "offsets": StaticInput(("requests + 1",), "int32", fill="last"),
    }
    runner = make_runner(sums, inputs, axes=[REQUESTS], sizes=[8])
    with pytest.raises(InputError, match=r"'offsets' must have shape \(4\), got \(3,\)"):
        runner(x=tokens_of((3, 4)), offsets=offsets_of((3, 4)), requests=3)
    with pytest.raises(ConfigError, match=r"the declared axes are: requests"):
        make_runner(
            sums, {**inputs, "offsets": StaticInput(("cuts + 1",), "int32")}, axes=[REQUESTS]
        )
