"""A small decoder with a key/value cache.

A decode step (FULL) is captured as one graph. A mixed step (PIECEWISE) is captured in segments, and
attention runs eager between them.

All shapes depend only on the number of tokens, not on the values of positions or slots, so
attention can also be captured. To keep shapes fixed, each token attends to its request's complete
cache, and later positions are masked. A serving engine would use a dedicated attention kernel.
Plain operations keep this model readable and run on every device.

Shape legend: T tokens of the step, E embedding width, H heads, D head width, L cache rows of
one request, S request slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from dispatchkit.execute import eager_region
from dispatchkit.keys.checks import check_count


@attrs.frozen(kw_only=True)
class DecoderShape:
    """Sizes of the decoder and its cache.

    Attributes:
        num_layers: Number of transformer blocks.
        num_heads: Number of query heads, which share one key/value head (multi-query attention).
        head_dim: Width of a head; must be even for the rotary embedding.
        cache_len: Number of cache rows (tokens) of one request.
        num_slots: Maximum number of concurrent requests; an additional slot is for padding rows.
        vocab: Number of token ids.
    """

    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 16
    cache_len: int = 512
    num_slots: int = 128
    vocab: int = 256

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            object.__setattr__(self, name, check_count(value, name))

    @property
    def width(self) -> int:
        """Embedding width E."""
        return self.num_heads * self.head_dim

    @property
    def sink_slot(self) -> int:
        """The slot for padding rows, which is never assigned to a request."""
        return self.num_slots


class KVCache:
    """The keys and values of all requests, as two flat tensors per layer.

    Row ``slot * cache_len + position`` belongs to that position of the request in that slot.

    Attributes:
        keys: One tensor of shape ((S + 1) * L, D) per layer.
        values: Tensors of the same shapes as ``keys``.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __init__(self, shape: DecoderShape, device: torch.device | str = "cpu") -> None:
        rows = (shape.num_slots + 1) * shape.cache_len

        def empty() -> list[Tensor]:
            return [
                torch.zeros(rows, shape.head_dim, device=device) for _ in range(shape.num_layers)
            ]

        self.shape = shape
        self.keys, self.values = empty(), empty()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache, which are the state that a step changes."""
        return (*self.keys, *self.values)

    @property
    def num_bytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def real_rows(self) -> tuple[Tensor, ...]:
        """Return the rows of all slots except the padding slot."""
        rows = self.shape.num_slots * self.shape.cache_len
        return tuple(tensor[:rows] for tensor in self.tensors)


class RMSNorm(nn.Module):
    """Root-mean-square normalization in plain operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the rows (T, E), scaled to a mean square of one and multiplied by the weight."""
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)  # (T, 1)
        return hidden * scale * self.weight


class Block(nn.Module):
    """A transformer block, split into the parts before and after attention."""

    num_heads: int
    head_dim: int
    norm_attention: RMSNorm
    norm_mlp: RMSNorm

    def __init__(self, shape: DecoderShape, generator: torch.Generator) -> None:
        super().__init__()
        width, head_dim = shape.width, shape.head_dim
        self.num_heads, self.head_dim = shape.num_heads, head_dim
        self.norm_attention, self.norm_mlp = RMSNorm(width), RMSNorm(width)
        self.query: nn.Parameter = _weight(generator, width, width)
        self.key_value: nn.Parameter = _weight(generator, 2 * head_dim, width)
        self.out: nn.Parameter = _weight(generator, width, width)
        self.gate_up: nn.Parameter = _weight(generator, 4 * width, width)
        self.down: nn.Parameter = _weight(generator, width, 2 * width)

    def before_attention(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query (T, H, D), key (T, D) and value (T, D) of each token."""
        normed = self.norm_attention(hidden)
        query = nn.functional.linear(normed, self.query).view(-1, self.num_heads, self.head_dim)
        key, value = nn.functional.linear(normed, self.key_value).chunk(2, dim=-1)
        cos, sin = angles
        return (
            _rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)),
            _rotate(key, cos, sin),
            value.contiguous(),
        )

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the hidden state (T, E) after the output projection and the MLP."""
        hidden = hidden + nn.functional.linear(attended, self.out)
        gate, up = nn.functional.linear(self.norm_mlp(hidden), self.gate_up).chunk(2, dim=-1)
        return hidden + nn.functional.linear(nn.functional.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """A decoder-only language model with random weights.

    Args:
        shape: Sizes of the decoder and its cache.
        device: Device of the weights.
        seed: Seed of the weights; the same seed gives the same weights on every device.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, shape: DecoderShape, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.embedding: nn.Parameter = _weight(generator, shape.vocab, shape.width, scale=1.0)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(shape, generator) for _ in range(shape.num_layers)
        )
        self.norm: RMSNorm = RMSNorm(shape.width)
        self.head: nn.Parameter = _weight(generator, shape.vocab, shape.width)
        cos, sin = _rotary_tables(shape)
        self.cos, self.sin = nn.Buffer(cos), nn.Buffer(sin)
        self.last_position: torch.Tensor = nn.Buffer(torch.arange(shape.cache_len))
        self.to(device)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: KVCache) -> Tensor:
        """Run one step, and write its keys and values to the cache.

        Args:
            tokens: Token ids (T,), int64.
            positions: Position of each token in its request (T,), int64.
            slots: Slot of each token's request (T,), int64.
            cache: The cache, which is changed in place.

        Returns:
            Logits (T, V), float32.
        """
        hidden, angles = self.embed(tokens, positions)
        for layer in range(self.shape.num_layers):
            block = self.block(layer)
            query, key, value = block.before_attention(hidden, angles)
            attended = torch.empty_like(hidden)
            self.attend_into(attended, layer, query, key, value, positions, slots, cache)
            hidden = block.after_attention(hidden, attended)
        return self.logits(hidden)

    def block(self, layer: int) -> Block:
        """Return the transformer block of a layer."""
        return cast("Block", self.blocks[layer])

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the hidden state (T, E) and the rotary cosines and sines (T, D / 2)."""
        hidden = nn.functional.embedding(tokens, self.embedding)
        return hidden, (self.cos[positions], self.sin[positions])

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
    ) -> Tensor:
        """Write this step's keys and values to the cache, and return the attention output.

        Each token attends to its request's cache, up to its own position. Several padding rows may
        write the same row of the padding slot, which no request reads.

        Shapes: query (T, H, D), key and value (T, D) -> (T, E).
        """
        length = self.shape.cache_len
        rows = slots * length + positions
        cache.keys[layer].index_copy_(0, rows, key)
        cache.values[layer].index_copy_(0, rows, value)
        all_keys = cache.keys[layer].view(-1, length, self.shape.head_dim)
        all_values = cache.values[layer].view(-1, length, self.shape.head_dim)
        scores = torch.bmm(query, all_keys.index_select(0, slots).transpose(1, 2))  # (T, H, L)
        ahead = self.last_position > positions.unsqueeze(1)  # (T, L)
        scores = scores * self.shape.head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(ahead.unsqueeze(1), float("-inf")), dim=-1)
        attended = torch.bmm(weights, all_values.index_select(0, slots))  # (T, H, D)
        return attended.reshape(-1, self.shape.width)

    @eager_region
    def attend_into(self, out: Tensor, *args: Any) -> None:
        """Attend, and write the result (T, E) to ``out``.

        This eager call returns nothing. If it returned a tensor, each replay would first save the
        cache, and restore it if the tensor had a different shape or dtype than in the capture.
        """
        out.copy_(self.attend(*args))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (T, V) of a hidden state (T, E)."""
        return nn.functional.linear(self.norm(hidden), self.head)

    def step(self, cache: KVCache) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function that runs the model on one cache, as the step of a ``GraphRunner``.

        Args:
            cache: The cache that the step writes. Declare its tensors as state of the runner.
        """

        def step(tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
            logits: Tensor = self(tokens, positions, slots, cache)
            return logits

        return step


def _weight(
    generator: torch.Generator, rows: int, columns: int, *, scale: float | None = None
) -> nn.Parameter:
    """Return random weights that, by default, preserve the variance of their inputs."""
    values = torch.randn(rows, columns, generator=generator)
    return nn.Parameter(values * (columns**-0.5 if scale is None else scale), requires_grad=False)


def _rotary_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (L, D / 2) of the rotary embedding.

    Source: Su et al., "RoFormer", 2021, section 3.2.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(shape.cache_len).float(), frequencies)
    return angles.cos(), angles.sin()


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature pairs, one from each half of a head, by the angles of the token's position."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
