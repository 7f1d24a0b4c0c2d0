"""The demo's decoder and its cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache  # noqa: E402
from dispatchkit.errors import ConfigError  # noqa: E402

SHAPE = DecoderShape(num_layers=2, num_heads=2, head_dim=8, cache_len=12, num_slots=3, vocab=40)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(SHAPE)


def test_decoding_token_by_token_equals_one_prompt(decoder: Decoder) -> None:
    """A prompt in one step or in several gives equal logits."""
    tokens = ints(3, 1, 4, 1, 5)
    positions = torch.arange(5)
    at_once = decoder(tokens, positions, ints(2, 2, 2, 2, 2), KVCache(SHAPE))
    cache = KVCache(SHAPE)
    one_by_one = [
        decoder(tokens[index : index + 1], positions[index : index + 1], ints(2), cache)
        for index in range(5)
    ]
    assert torch.allclose(torch.cat(one_by_one), at_once, atol=1e-5)


def test_requests_do_not_see_each_other_nor_what_a_slot_held_before(decoder: Decoder) -> None:
    """Slots are reused without being cleared."""
    alone = decoder(ints(8, 2), ints(0, 1), ints(0, 0), KVCache(SHAPE))
    cache = KVCache(SHAPE)
    decoder(ints(9, 9, 9), ints(0, 1, 2), ints(0, 0, 0), cache)  # an earlier request
    beside = decoder(ints(8, 2, 7), ints(0, 1, 0), ints(0, 0, 1), cache)
    assert torch.allclose(beside[:2], alone, atol=1e-5)


def test_padding_rows_write_to_the_sink_alone(decoder: Decoder) -> None:
    """Padding must not change the cache of any request."""
    cache = KVCache(SHAPE)
    decoder(ints(0, 0), ints(0, 0), ints(SHAPE.sink_slot, SHAPE.sink_slot), cache)
    assert all(not rows.any() for rows in cache.real_rows())
    assert any(bool(tensor.any()) for tensor in cache.tensors)


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    """Eager and dispatched runs share weights, and runs are comparable."""
    torch.manual_seed(1)
    one = Decoder(SHAPE, seed=3)
    torch.rand(10)
    other = Decoder(SHAPE, seed=3)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert not torch.equal(one.head, Decoder(SHAPE, seed=4).head)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_impossible_sizes_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="cache_len"):
        DecoderShape(cache_len=value)
