"""Drafts that are correct with a given probability, and a serving loop that uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dispatchkit_transformers import SpeculativeDecoder

#: Number of drafts per row.
DRAFTS = 3


class Known:
    """Draft source that replaces some tokens of the true continuations by wrong tokens.

    Args:
        chance: Probability that a draft token is correct.
        fewest: Minimum number of drafts per row.
    """

    num_draft_tokens = DRAFTS

    def __init__(self, chance: float, fewest: int = DRAFTS) -> None:
        self.chance, self.fewest = chance, fewest
        self.maker = torch.Generator().manual_seed(0)
        #: Continuations of the rows that join next.
        self.waiting: list[list[int]] = []
        self.rows: list[tuple[int, list[int]]] = []

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Assign the waiting continuations to the new rows."""
        for length in lengths:
            self.rows.append((length, self.waiting.pop(0)))

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return drafts for the rows, some of them wrong."""
        assert positions.tolist() == list(lengths)
        made = []
        for (start, known), token, at in zip(self.rows, tokens.tolist(), lengths, strict=True):
            assert known[at - start] == token
            right = (known[at - start + 1 :] + [1] * DRAFTS)[:DRAFTS]
            chances = torch.rand(DRAFTS, generator=self.maker).tolist()
            count = int(torch.randint(self.fewest, DRAFTS + 1, (), generator=self.maker))
            made.append(
                [
                    (one if chance < self.chance else (one + 7) % 97) if number < count else -1
                    for number, (one, chance) in enumerate(zip(right, chances, strict=True))
                ]
            )
        return torch.tensor(made, device=tokens.device)

    def drop(self, order: Sequence[int]) -> None:
        """Keep only the given rows."""
        self.rows = [self.rows[row] for row in order]


def served_with_drafts(
    loop: SpeculativeDecoder, admit: Callable[[int], object], counts: Sequence[int]
) -> list[list[int]]:
    """Serve requests that join and finish at different times; return their tokens.

    All steps must replay.

    Args:
        loop: Speculative decoder that serves the requests.
        admit: Function that admits a request to the loop, by its number.
        counts: Number of tokens to serve for each request.
    """
    waiting: list[int] = list(range(len(counts)))
    rows: list[int] = []
    said: list[list[int]] = [[] for _ in counts]
    while waiting or rows:
        while waiting and loop.num_rows < loop.decoder.max_batch_size:
            number = waiting.pop(0)
            admit(number)
            rows.append(number)
            said[number].append(int(loop.decoder.tokens[-1]))
        for number, tokens in zip(rows, loop.step(), strict=True):
            assert 1 <= len(tokens) <= DRAFTS + 1
            said[number] += tokens
        done = [row for row, number in enumerate(rows) if len(said[number]) >= counts[number]]
        rows = [rows[row] for row in loop.drop(done)]
    stats = loop.decoder.stats()
    assert stats.moved > 0
    assert stats.graphs["tokens"].steps == 0
    assert not stats.graphs["drafts"].eager_by_reason
    return [tokens[:count] for tokens, count in zip(said, counts, strict=True)]
