"""A serving loop with more requests than slots; requests join and finish at different times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dispatchkit_transformers import GraphDecoder


def served(
    decoder: GraphDecoder, admit: Callable[[int], object], counts: Sequence[int]
) -> list[list[int]]:
    """Serve requests and return their tokens; all steps must replay.

    Args:
        decoder: Decoder that serves the requests.
        admit: Function that admits a request to the decoder, by its number.
        counts: Number of tokens to serve for each request.
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
