"""The step loop of a small serving engine that uses dispatchkit.

    python examples/engine_loop.py

Requests of different lengths arrive over time and decode together, one token per step. Each request
has a slot of the KV cache. The runner handles capture sizes, padding, the dictionary of graphs and
the fallback to eager, which engines usually implement themselves. Without a GPU, the example runs
on the tape backend.
"""

from __future__ import annotations

import random

import torch

from dispatchkit import (
    GraphRunner,
    StaticInput,
    StepState,
)
from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 16


def main() -> None:
    """Serve 40 requests, and print the runner's statistics."""
    shape = DecoderShape(num_slots=SLOTS, cache_len=16)
    model, cache = Decoder(shape).to(DEVICE), KVCache(shape, DEVICE)
    choose = random.Random(0)
    waiting = [choose.randint(3, 12) for _ in range(40)]  # number of tokens of each request

    # ---- the engine -------------------------------------------------------------------
    runner = GraphRunner(
        lambda tokens, positions, slots: model(tokens, positions, slots, cache).argmax(-1),
        {name: StaticInput((None,), "int64") for name in ("tokens", "positions", "slots")},
        max_num_tokens=SLOTS,
        mode="FULL",
        # Rows without a request write to slot 0, which is never read.
        state=StepState(scratch=cache.tensors),
    )
    runner.capture()
    free, live, tokens = list(range(1, SLOTS + 1)), [], torch.empty(0, dtype=torch.int64)
    while waiting or live:
        while waiting and free and choose.random() < 0.5:  # a request arrives
            live.append([free.pop(), 0, waiting.pop()])  # slot, position, remaining tokens
            tokens = torch.cat((tokens.to(DEVICE), torch.ones(1, dtype=torch.int64, device=DEVICE)))
        if live:
            slots, positions, _ = torch.tensor(live, device=DEVICE).T.contiguous()
            tokens = runner(tokens=tokens, positions=positions, slots=slots)
        live = [[slot, at + 1, left - 1] for slot, at, left in live]
        free += [slot for slot, _, left in live if not left]
        tokens = tokens[[row for row, one in enumerate(live) if one[2]]]
        live = [one for one in live if one[2]]
    # -----------------------------------------------------------------------------------
    print(runner)


if __name__ == "__main__":
    main()
