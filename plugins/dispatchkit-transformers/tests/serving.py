"""A server's loop: more requests than slots, which join and finish at different times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dispatchkit_transformers import GraphDecoder


def served(
    decoder: GraphDecoder, admit: Callable[[int], object], counts: Sequence[int]
) -> list[list[int]]:
    """Return the tokens of each request, which all replay.

    Args:
        decoder: Serves them.
        admit: Gives the decoder a request, by its number.
        counts: How many tokens each request is served.
    """
    waiting: list[int] = list(range(len(counts)))
    rows: list[int] = []
    said: list[list[int]] = [[] for _ in counts]
    while waiting or rows:
        while waiting and decoder.num_rows < decoder.max_batch_size:
            number = waiting.pop(0)
            admit(number)
            rows.append(number)
            said[number].append(int(decoder.tokens[-1]))
        for number, token in zip(rows, decoder.step().tolist(), strict=True):
            said[number].append(token)
        done = [row for row, number in enumerate(rows) if len(said[number]) >= counts[number]]
        rows = [rows[row] for row in decoder.drop(done)]
    assert decoder.stats().moved > 0
    assert not decoder.stats().graphs["tokens"].eager_by_reason
    return said
