"""Measure speculative decoding in a server's loop, compared with plain steps.

    python bench/speculation.py [--models NAME ...] [--batches N ...] [--rates RATE ...]
        [--drafts N] [--steps N] [--rounds N] [--attention NAME]

A sample is ``--steps`` steps of all rows. The host reads the tokens of each step, as in a server.
The cases are:

- ``none``: ``step`` of GraphDecoder.
- ``right RATE``: ``step`` of SpeculativeDecoder with drafts that are correct with this probability.
  They are derived from the known continuation of the rows and cost almost nothing.
- ``prompt lookup``: the drafts of PromptLookup. Models with random weights repeat themselves, so
  the drafts are correct more often than in most services.

``accepted`` is the share of accepted drafts, ``per_step`` the number of tokens per row and step.
With 16-bit weights, a correct draft may be rejected if two tokens are almost equally likely and
kernels round differently. Prompts and captures are not measured. Weights are random, and cases take
turns. Without a CUDA device, a tiny model runs on the tape backend, which tests the script only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from _common import at_least_one, emit
from _decoding_cases import DEVICE, IS_GPU, MODELS, free_memory, make_model, synchronize

from dispatchkit_transformers import (
    DECODE_ATTENTION,
    Drafter,
    GraphDecoder,
    PromptLookup,
    SpeculativeDecoder,
)

BENCH, PROMPT = "speculation", 16
PLAIN, LOOKUP = "none", "prompt lookup"


class KnownDrafts:
    """Drafter whose drafts are correct with a given probability.

    Args:
        known: Tokens of each row, from its first new token. Shape (rows, T).
        chance: Probability that a draft is correct.
        num_draft_tokens: Number of drafts per row.
    """

    def __init__(self, known: torch.Tensor, chance: float, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        maker = torch.Generator().manual_seed(1)
        is_right = torch.rand(known.shape, generator=maker).to(DEVICE) < chance
        self._drafts = torch.where(is_right, known, (known + 1) % 90)
        self._ahead = torch.arange(1, 1 + num_draft_tokens, device=DEVICE) - PROMPT

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Do nothing, because the tokens of all rows are known."""

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return the drafts after each row's position."""
        return self._drafts.gather(1, positions.unsqueeze(1) + self._ahead)

    def drop(self, order: Sequence[int]) -> None:
        """Do nothing, because all rows are dropped together."""


class Session:
    """The measurement of one model with one batch size.

    Args:
        decoder: Decoder to measure.
        rows: Number of sequences.
        args: Command-line arguments.
    """

    def __init__(self, decoder: GraphDecoder, rows: int, args: argparse.Namespace) -> None:
        self.decoder, self.steps = decoder, args.steps
        maker = torch.Generator().manual_seed(2)
        self.ids = torch.randint(3, 90, (rows, PROMPT), generator=maker).to(DEVICE)
        # Generate the known tokens with steps that verify drafts, because the kernels of plain
        # steps may round differently.
        none = torch.full((rows, args.drafts), -1, device=DEVICE)
        _, said = self.run(lambda: decoder.verify(none), steps=most_tokens(args))
        known = torch.tensor(said, device=DEVICE)
        self.cases: dict[str, Callable[[], tuple[float, list[list[int]]]]] = {
            PLAIN: lambda: self.run(self.plain_step)
        }
        drafters: dict[str, Drafter] = {
            f"right {rate:g}": KnownDrafts(known, rate, args.drafts) for rate in args.rates
        }
        for case, drafter in {**drafters, LOOKUP: PromptLookup(decoder, args.drafts)}.items():
            loop = SpeculativeDecoder(decoder, drafter)
            self.cases[case] = lambda loop=loop: self.run(loop.step, loop=loop)

    def plain_step(self) -> list[list[int]]:
        """Run a plain step."""
        return [[token] for token in self.decoder.step().tolist()]

    def run(
        self, step: Callable[[], list[list[int]]], steps: int | None = None, loop: Any = None
    ) -> tuple[float, list[list[int]]]:
        """Run a sample; return the duration without the prompts, and the tokens of each row."""
        loop = loop or self.decoder
        loop.admit(self.ids)
        said = [[token] for token in self.decoder.tokens.tolist()]
        synchronize()
        start = perf_counter()
        for _ in range(steps or self.steps):
            for one, more in zip(said, step(), strict=True):
                one += more
        seconds = perf_counter() - start
        loop.reset()
        return seconds, said


def most_tokens(args: argparse.Namespace) -> int:
    """Return the maximum number of tokens per row after the prompt, including drafts."""
    return (args.steps + 1) * (args.drafts + 1)


def measure(name: str, args: argparse.Namespace) -> None:
    """Measure one model."""
    model = make_model(name)
    model.set_attn_implementation(args.attention)
    length = PROMPT + most_tokens(args) + args.drafts + 1
    decoder = GraphDecoder(
        model,
        max_batch_size=max(args.batches),
        max_length=length,
        lengths=[length],
        sizes=args.batches,
        num_draft_tokens=args.drafts,
    )
    for rows in args.batches:
        cases = Session(decoder, rows, args).cases
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        fields: dict[str, dict[str, Any]] = {}
        for number in range(args.rounds + 1):
            for case, run in cases.items():
                before = decoder.stats()
                found, said = run()
                after = decoder.stats()
                if not number:
                    continue  # the first round captures
                tokens = sum(len(one) - 1 for one in said)
                seconds[case].append(found / tokens)
                drafted = after.drafted - before.drafted
                right = (after.accepted - before.accepted) / drafted if drafted else None
                fields[case] = {
                    "ms_per_step": round(1e3 * found / args.steps, 3),
                    "accepted": right and round(right, 3),
                    "per_step": round(tokens / (rows * args.steps), 2),
                }
        for case, samples in seconds.items():
            pairs = zip(seconds[PLAIN], samples, strict=True)
            emit(
                BENCH,
                f"{name}, batch {rows}: {case}",
                1 / statistics.median(samples),
                "tokens/s",
                len(samples),
                ratio_to=f"{name}, batch {rows}: {PLAIN}",
                ratio=statistics.median(plain / mine for plain, mine in pairs),
                drafts=args.drafts,
                attention=args.attention,
                **fields[case],
            )
    eager = {gives: one.eager_by_reason for gives, one in decoder.stats().graphs.items()}
    print(f"# {name}: eager steps by reason {eager}", flush=True)


def main() -> None:
    """Measure all requested models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["llama-small", "llama-1b"] if IS_GPU else ["llama-tiny"]
    parser.add_argument("--models", nargs="+", default=names, choices=sorted(MODELS))
    batches = [1, 8, 64] if IS_GPU else [1, 2]
    parser.add_argument("--batches", nargs="+", type=at_least_one, default=batches)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.6, 0.9])
    parser.add_argument("--drafts", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=48 if IS_GPU else 6)
    parser.add_argument("--rounds", type=at_least_one, default=3 if IS_GPU else 1)
    parser.add_argument("--attention", default=DECODE_ATTENTION)
    args = parser.parse_args()
    for name in args.models:
        measure(name, args)
        free_memory()


if __name__ == "__main__":
    main()
