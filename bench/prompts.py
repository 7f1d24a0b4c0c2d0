"""Measure the time to the first token of prompts, eager and in chunks through graphs.

    python bench/prompts.py [--models NAME ...] [--tokens N ...] [--rows N ...] [--sizes N ...]
        [--rounds N]

A sample admits prompts of random tokens to a GraphDecoder with one live sequence, waits for the
device, and drops the prompts. ``eager`` is a decoder without ``prompt_sizes``, ``graphs`` one with
``--sizes``, whose graphs are captured before the samples. Prompts that together have more tokens
than the largest size run eager in both. Lines that begin with ``#`` contain the modes in which the
prompts ran, the error of the logits, and the time of the first calls, which includes captures. The
last of these lines contains the memory of all graphs.

Weights are random, and cases take turns. ``gemma3`` has sliding windows of 256 tokens, ``qwen3.5``
has linear attention in three of four layers. Without a CUDA device, a tiny model runs on the tape
backend, which tests the script only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from _common import at_least_one, emit_all, interleaved
from _decoding_cases import DEVICE, IS_GPU, MODELS, free_memory, make_model, synchronize

from dispatchkit_transformers import GraphDecoder

BENCH = "prompts"


def admits(decoder: GraphDecoder, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that admits prompts, synchronizes, and drops them."""
    rows = range(1, 1 + len(ids))

    def run() -> torch.Tensor:
        logits = decoder.admit(ids)
        synchronize()
        decoder.drop(rows)
        return logits

    return run


def measure(name: str, args: argparse.Namespace) -> None:
    """Measure one model."""
    model = make_model(name)
    length = max(*args.tokens, *args.sizes) + 8
    common: dict[str, Any] = {"max_batch_size": max(args.rows) + 1, "max_length": length}
    decoders = {
        "eager": GraphDecoder(model, **common),
        "graphs": GraphDecoder(model, prompt_sizes=args.sizes, **common),
    }
    maker = torch.Generator().manual_seed(1)
    for decoder in decoders.values():
        decoder.admit(torch.full((1, 4), 7, device=DEVICE))
    for tokens in args.tokens:
        for rows in args.rows:
            ids = torch.randint(3, 90, (rows, tokens), generator=maker).to(DEVICE)
            runs = {case: admits(decoder, ids) for case, decoder in decoders.items()}
            start = perf_counter()
            want, got = runs["eager"](), runs["graphs"]()
            first = perf_counter() - start
            error = float((got - want).norm() / want.norm())
            before = decoders["graphs"].stats()
            times = interleaved(runs, rounds=args.rounds, warmup=2)
            after = decoders["graphs"].stats()
            ran = sorted(
                how for how, number in after.prompts.items() if number > before.prompts.get(how, 0)
            )
            what = f"{name}, {rows} of {tokens}"
            emit_all(
                BENCH,
                {f"{what}: {case}": found for case, found in times.items()},
                per=1,
                ratio_to=f"{what}: eager",
            )
            print(
                f"# {what}: ran {ran}, logits differ by {error:.1e}, first calls {first:.2f} s",
                flush=True,
            )
    runner = decoders["graphs"].prompt_runner()
    stats = runner.stats()
    print(
        f"# {name}: {stats.captures} graphs, {runner.num_bytes} bytes, replays {stats.hits}",
        flush=True,
    )


def main() -> None:
    """Measure all requested models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["llama-1b"] if IS_GPU else ["llama-tiny"]
    parser.add_argument("--models", nargs="+", default=names, choices=sorted(MODELS))
    tokens = [16, 100, 300, 512, 1000] if IS_GPU else [5, 15]
    parser.add_argument("--tokens", nargs="+", type=at_least_one, default=tokens)
    parser.add_argument("--rows", nargs="+", type=at_least_one, default=[1, 4] if IS_GPU else [1])
    sizes = [16, 64, 256, 512, 1024] if IS_GPU else [4, 16]
    parser.add_argument("--sizes", nargs="+", type=at_least_one, default=sizes)
    parser.add_argument("--rounds", type=at_least_one, default=10 if IS_GPU else 2)
    args = parser.parse_args()
    for name in args.models:
        measure(name, args)
        free_memory()


if __name__ == "__main__":
    main()
