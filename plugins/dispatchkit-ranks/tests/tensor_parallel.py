"""A small decoder split over ranks, and the whole decoder to compare it with.

Shapes: T rows (tokens) of a batch, W width, H heads of this rank, D width of a head, S sequences, P
positions. Each row belongs to a position of a sequence. A batch may mix prompts and decode steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, HIDDEN, LAYERS = 61, 32, 8, 4, 64, 2
NUM_SEQS, NUM_POSITIONS = 6, 24


def over_ranks(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of the parts of all ranks."""
    whole = part.clone()
    dist.all_reduce(whole)
    return whole


class Decoder:
    """One rank's part of the decoder; the whole decoder if ``size`` is 1.

    Args:
        rank: Rank that selects the part.
        size: Number of parts.
        device: Device of weights and cache.
    """

    def __init__(self, rank, size, device):
        generator = torch.Generator().manual_seed(7)

        def weight(*shape, cut=None):
            whole = torch.randn(*shape, generator=generator) / shape[0] ** 0.5
            part = whole if cut is None else whole.chunk(size, cut)[rank]
            return part.contiguous().to(device)

        self.size = size
        self.heads = HEADS // size
        self.embedding = weight(VOCABULARY, WIDTH) * 2
        self.head = weight(WIDTH, VOCABULARY)
        inner = HEADS * HEAD_WIDTH
        self.layers = [
            {
                "query": weight(WIDTH, inner, cut=1),
                "key": weight(WIDTH, inner, cut=1),
                "value": weight(WIDTH, inner, cut=1),
                "output": weight(inner, WIDTH, cut=0),
                "up": weight(WIDTH, HIDDEN, cut=1),
                "down": weight(HIDDEN, WIDTH, cut=0),
            }
            for _ in range(LAYERS)
        ]
        # Filler rows use an extra sequence.
        shape = (2, LAYERS, NUM_SEQS + 1, NUM_POSITIONS, self.heads, HEAD_WIDTH)
        self.cache = torch.zeros(shape, device=device)
        self.positions = torch.arange(NUM_POSITIONS, device=device)

    def over_ranks(self, hidden_tw):
        """Sum the parts of all ranks by the collective inside the step."""
        return hidden_tw if self.size == 1 else over_ranks(hidden_tw)

    def __call__(self, tokens, seqs, positions):
        """Return logits of shape (T, vocabulary)."""
        hidden_tw = self.embedding[tokens]
        seen_tp = self.positions[None] <= positions[:, None]
        for index, layer in enumerate(self.layers):
            normed_tw = torch.nn.functional.layer_norm(hidden_tw, (WIDTH,))
            shape = (-1, self.heads, HEAD_WIDTH)
            query_thd, key_thd, value_thd = (
                (normed_tw @ layer[name]).view(shape) for name in ("query", "key", "value")
            )
            keys, values = self.cache[0, index], self.cache[1, index]
            keys.index_put_((seqs, positions), key_thd)
            values.index_put_((seqs, positions), value_thd)
            scores_thp = torch.einsum("thd,tphd->thp", query_thd, keys[seqs]) / HEAD_WIDTH**0.5
            scores_thp = scores_thp.masked_fill(~seen_tp[:, None], float("-inf"))
            mixed_thd = torch.einsum("thp,tphd->thd", scores_thp.softmax(-1), values[seqs])
            attended_tw = mixed_thd.reshape(tokens.shape[0], -1) @ layer["output"]
            hidden_tw = hidden_tw + self.over_ranks(attended_tw)
            normed_tw = torch.nn.functional.layer_norm(hidden_tw, (WIDTH,))
            fed_tw = torch.relu(normed_tw @ layer["up"]) @ layer["down"]
            hidden_tw = hidden_tw + self.over_ranks(fed_tw)
        return hidden_tw @ self.head


def traffic(rng, num_steps, max_num_tokens):
    """Yield (tokens, seqs, positions, decode) per step, a mix of decode steps and prompts."""
    lengths = [0] * NUM_SEQS
    for _ in range(num_steps):
        decode = rng.random() < 0.6
        tokens, seqs, positions = [], [], []
        for seq in rng.sample(range(NUM_SEQS), rng.randint(1, NUM_SEQS)):
            count = 1 if decode else rng.randint(1, 4)
            if lengths[seq] + count > NUM_POSITIONS:
                lengths[seq] = 0
            if len(tokens) + count > max_num_tokens:
                break
            for _ in range(count):
                tokens.append(rng.randrange(VOCABULARY))
                seqs.append(seq)
                positions.append(lengths[seq])
                lengths[seq] += 1
        yield tokens, seqs, positions, decode or len(tokens) == len(set(seqs))
