"""Drafts that are right with a chance, and a server's loop with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dispatchkit_transformers import SpeculativeDecoder

#: Drafts for each row.
DRAFTS = 3


class Known:
    """Drafts from what rows are known to say, some of them wrong.

    Args:
        chance: Of a draft to be right.
        fewest: Of the drafts that a row has.
    """

    num_draft_tokens = DRAFTS

    def __init__(self, chance: float, fewest: int = DRAFTS) -> None:
        self.chance, self.fewest = chance, fewest
        self.maker = torch.Generator().manual_seed(0)
        #: What the rows that come are to say.
        self.waiting: list[list[int]] = []
        self.rows: list[tuple[int, list[int]]] = []

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Take what the next rows are to say."""
        for length in lengths:
            self.rows.append((length, self.waiting.pop(0)))

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return what rows are to say next, or something else."""
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
        """Keep the rows that remain."""
        self.rows = [self.rows[row] for row in order]


def served_with_drafts(
    loop: SpeculativeDecoder, admit: Callable[[int], object], counts: Sequence[int]
) -> list[list[int]]:
    """Return the tokens of requests that join and finish at different times, which all replay.

    Args:
        loop: Serves them.
        admit: Gives the loop a request, by its number.
        counts: How many tokens each request is served.
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
