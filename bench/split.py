"""Measure split and packed batches, compared with eager and a single padded replay.

    python bench/split.py [decode] [encoder] [--rounds N] [--calls N] [--seconds S] [--small]

``decode``: a batch of 600 rows runs through many small operations, whose speed the host limits:

- ``eager``: without graphs;
- ``by 640``: one replay of a graph of 640 rows;
- ``split``: 512 and 88 rows in graphs of 512 and 128 rows;
- ``exact``: one replay of a graph of exactly 600 rows.

``encoder``: a service for sentences with an encoder of BERT-base's shape. A call has 1 to 200
    sentences, with the lengths of paragraphs of manual pages (tests/data/calls). Complete calls are
    measured in turns, from sentences in host memory to vectors on the device, and the times of all
    calls are summed:

- ``eager``: without graphs, padded to the longest sentence;
- ``bucket``: one replay, padded to a capture size and to the bucket of the longest sentence;
- ``split``: batches split over graphs for fewer sentences, so that few sentences are padding;
- ``packed``: tokens of several sentences in one sequence, with ``PackedRunner``;
- ``one by one``: a separate replay for each sentence in its own bucket.

All results are first compared with eager results. Without a GPU, small models run on the tape
backend, which tests the script only. ``--seconds`` limits the time of the rounds of each part.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _common import at_least_one, emit
from torch import nn
from torch.nn import functional

from dispatchkit import Axis, CaptureOptions, GraphRunner, RunnerOptions, StaticInput
from dispatchkit.execute import PackedRunner
from dispatchkit.keys import CaptureSizeWarning

from dispatchkit_packing import CheapestPacking

BENCH = "split"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
CALLS = Path(__file__).resolve().parents[1] / "tests" / "data" / "calls" / "paragraphs.csv.gz"
MOST_SENTENCES = 200


def synchronize() -> None:
    """Synchronize the device, if there is one."""
    if HAS_GPU:
        torch.cuda.synchronize()


def runner_of(step: Any, inputs: dict[str, StaticInput], **arguments: Any) -> GraphRunner:
    """Return a runner with all graphs captured."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        runner = GraphRunner(
            step, inputs, mode="FULL", backend="cuda" if HAS_GPU else "tape", **arguments
        )
    report = runner.capture()
    if report.failed:
        raise SystemExit(f"captures failed: {report.failed}")
    synchronize()
    emit(
        BENCH,
        "captures",
        (time.perf_counter() - start) * 1e3,
        "ms",
        len(runner.registry),
        sizes=list(runner.config.sizes),
    )
    return runner


def print_eager_reasons(runner: GraphRunner) -> None:
    """Print the statistics of a runner if steps ran eager, which is not expected."""
    if runner.stats().eager_by_reason:
        print("\n".join(f"# {line}" for line in str(runner).splitlines()), flush=True)


def in_turns(
    cases: dict[str, Callable[[], Any]], *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Measure the cases in turns, at least once; return milliseconds, including device work."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    for _ in range(rounds):
        for name, run in cases.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
        if time.perf_counter() > end:
            break
    return times


def show(times: dict[str, list[float]], part: str, ratio_to: str, **more: Any) -> None:
    """Print the median of each case, and of its ratios to one case within a round."""
    for name, samples in times.items():
        pairs = zip(samples, times[ratio_to], strict=True)
        emit(
            BENCH,
            f"{part}: {name}",
            statistics.median(samples),
            "ms",
            len(samples),
            ratio_to=ratio_to if name != ratio_to else None,
            ratio=statistics.median(mine / base for mine, base in pairs),
            **more,
        )


# -- decode ---------------------------------------------------------------------------------


class ManySmall(nn.Module):
    """Layers of a few small operations each, whose launches take longer than their execution."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.silu(layer(norm(x))) * 0.5
        return x


def decode(rounds: int, seconds: float, *, small: bool) -> None:
    """Measure a batch of 600 rows with a model whose speed the host limits."""
    width, layers, steps = (32, 4, 2) if small else (256, 64, 20)
    model = ManySmall(width, layers).to(DEVICE, DTYPE).eval().requires_grad_(False)
    inputs = {"x": StaticInput((None, width), DTYPE)}
    split = runner_of(
        model,
        inputs,
        sizes=(128, 512),
        max_num_tokens=1024,
        policy="threshold",
        options=RunnerOptions(rows_independent=True, policy_options={"split": True}),
    )
    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "eager": torch.no_grad()(model),
        "by 640": runner_of(model, inputs, sizes=(640,), options=RunnerOptions(strict=True)),
        "split": split,
        "exact": runner_of(model, inputs, sizes=(600,), options=RunnerOptions(strict=True)),
    }
    x = torch.randn(600, width, device=DEVICE, dtype=DTYPE)
    want = cases["eager"](x).float()
    for name, run in cases.items():
        off = float((run(x).float() - want).norm() / want.norm())
        if off > (2e-2 if HAS_GPU else 1e-4):
            raise SystemExit(f"decode: {name} differs from eager by a relative error of {off}")

    def several(run: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(steps):
                run(x)

        return repeat

    measured = {name: several(run) for name, run in cases.items()}
    in_turns(measured, rounds=2, seconds=seconds)
    times = in_turns(measured, rounds=rounds, seconds=seconds)
    per_step = {name: [one / steps for one in samples] for name, samples in times.items()}
    decision = str(split.explain(600).decision)
    print_eager_reasons(split)
    show(per_step, "decode", "eager", decision=decision, hits=split.stats().hits)


# -- encoder --------------------------------------------------------------------------------


class Encoder(nn.Module):
    """An encoder of BERT's shape with random weights. ``Padded`` and ``Packed`` run it."""

    def __init__(self, width: int, layers: int, heads: int, *, tokens: int = 30522) -> None:
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(512, width)
        self.first = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                    "last": nn.LayerNorm(width),
                }
            )
            for _ in range(layers)
        )

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the hidden states; ``attend`` gets tensors of shape (..., heads, D)."""
        x = self.first(self.token(ids) + self.position(positions))
        for layer in self.layers:
            parts = layer["qkv"](x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            x = layer["norm"](x + layer["out"](attend(*parts).flatten(-2)))
            x = layer["last"](x + layer["down"](functional.gelu(layer["up"](x))))
        return x


class Padded(nn.Module):
    """Encoder of padded sentences: ids (sentences, length), lengths (sentences,)."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return a vector for each sentence."""
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = (places < lengths[:, None])[:, None, None]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return found.transpose(1, 2)

        return self.encoder.run(ids, places.expand_as(ids), attend)[:, 0]


def varlen_attention() -> Callable[..., torch.Tensor] | None:
    """Return torch's attention for packed sequences; None if it is not available."""
    if not HAS_GPU:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn

        offsets = torch.tensor([0, 3, 8, 8], device=DEVICE, dtype=torch.int32)
        q = torch.randn(8, 2, 64, device=DEVICE, dtype=DTYPE)
        varlen_attn(q, q, q, offsets, offsets, 512, 512)
        synchronize()
    except Exception as error:  # noqa: BLE001 - a mask is used instead
        print(f"# varlen_attn is not available: {type(error).__name__}: {error}", flush=True)
        return None
    return varlen_attn


class Packed(nn.Module):
    """Encoder of packed sentences: tokens (tokens,), and the offset of each sentence."""

    def __init__(self, encoder: Encoder, varlen: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.encoder, self.varlen = encoder, varlen

    def forward(
        self,
        token: torch.Tensor,
        positions: torch.Tensor,
        item_of_token: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor:
        """Return a vector for each sentence."""
        varlen = self.varlen
        if varlen is not None:
            ends = offsets.to(torch.int32)

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return varlen(q.contiguous(), k.contiguous(), v.contiguous(), ends, ends, 512, 512)

        else:
            mask = item_of_token[:, None] == item_of_token

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
                found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                return found[0].transpose(0, 1)

        hidden = self.encoder.run(token, positions, attend)
        return hidden[offsets[:-1].clamp(max=token.shape[0] - 1)]


def calls_of(number: int) -> list[list[int]]:
    """Return the sentence lengths of up to ``number`` calls, always the same calls."""
    by_call: dict[str, list[int]] = {}
    with gzip.open(CALLS, "rt") as file:
        for row in csv.DictReader(file):
            by_call.setdefault(row["call"], []).append(int(row["length"]))
    calls = [lengths[:MOST_SENTENCES] for lengths in by_call.values()]
    return random.Random(0).sample(calls, min(number, len(calls)))


def padded(sentences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded sentences and their lengths, on the device."""
    ids = nn.utils.rnn.pad_sequence(list(sentences), batch_first=True)
    lengths = torch.tensor([len(one) for one in sentences])
    return ids.to(DEVICE), lengths.to(DEVICE)


def encoder(rounds: int, seconds: float, calls: int, *, small: bool) -> None:
    """Measure an encoder that serves calls of several sentences."""
    width, layers, heads = (32, 1, 2) if small else (768, 12, 12)
    torch.manual_seed(0)
    model = Encoder(width, layers, heads).to(DEVICE, DTYPE).eval().requires_grad_(False)
    plain = Padded(model)
    lengths = (64, 512) if small else (32, 64, 96, 128, 192, 256, 384, 512)
    inputs = {
        "ids": StaticInput((None, "length"), "int64"),
        "lengths": StaticInput((None,), "int64", fill=1),
    }
    axis = [Axis("length", lengths)]
    few = (1, 2, 4, 8, 16) if small else (1, 2, 4, 8, 16, 24, 32)
    many = (*few, 64, 256) if small else (*few, 48, 64, 96, 128, 192, 256)
    # The runner that splits proves, for the same step, that padding changes no row.
    unproven = CaptureOptions(prove_rows=False)
    bucket = runner_of(
        plain,
        inputs,
        axes=axis,
        sizes=many,
        options=RunnerOptions(strict=True, capture=unproven),
    )
    split = runner_of(
        plain,
        inputs,
        axes=axis,
        sizes=few,
        max_num_tokens=256,
        policy="threshold",
        options=RunnerOptions(rows_independent=True, policy_options={"split": True}),
    )
    varlen = varlen_attention()
    tokens = (128, 512) if small else tuple(range(256, 4096 + 1, 256))
    packing = runner_of(
        Packed(model, varlen),
        {
            "token": StaticInput((None,), "int64"),
            "positions": StaticInput((None,), "int64"),
            "item_of_token": StaticInput((None,), "int64", fill=MOST_SENTENCES),
            "offsets": StaticInput(("items + 1",), "int64", fill="last"),
        },
        axes=[Axis("items", (MOST_SENTENCES,))],
        sizes=tokens,
        # Without the proof, because attention for packed sequences leaves rows beyond the last
        # offset unwritten.
        options=RunnerOptions(strict=True, capture=unproven),
    )
    packed = PackedRunner(packing, CheapestPacking(), results="item")

    def by_bucket(runner: GraphRunner) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        def run(sentences: list[torch.Tensor]) -> torch.Tensor:
            ids, own = padded(sentences)
            return runner(ids=ids, lengths=own, length=ids.shape[1])  # type: ignore[no-any-return]

        return run

    def one_by_one(sentences: list[torch.Tensor]) -> torch.Tensor:
        run = by_bucket(bucket)
        return torch.cat([run([one]) for one in sentences])

    ways: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
        "eager": lambda sentences: plain(*padded(sentences)),
        "bucket": by_bucket(bucket),
        "split": by_bucket(split),
        "packed": lambda sentences: torch.stack(packed(token=sentences)),
        "one by one": one_by_one,
    }
    generator = torch.Generator().manual_seed(0)
    texts = [
        [torch.randint(1, 30522, (length,), generator=generator) for length in one]
        for one in calls_of(calls)
    ]
    worst = dict.fromkeys(ways, 0.0)
    with torch.no_grad():
        for sentences in texts:
            want = ways["eager"](sentences).float()
            for name, run in ways.items():
                if name == "one by one" and len(sentences) > 20:
                    continue
                got = run(sentences).float()
                worst[name] = max(worst[name], float((got - want).norm() / want.norm()))
    print("# largest relative difference from eager:", worst, flush=True)
    if max(worst.values()) > (5e-2 if HAS_GPU else 1e-3):
        raise SystemExit("encoder: a result differs too much from eager")

    def whole(run: Callable[[list[torch.Tensor]], torch.Tensor]) -> Callable[[], None]:
        def trace() -> None:
            with torch.no_grad():
                for sentences in texts:
                    run(sentences)

        return trace

    times = in_turns(
        {name: whole(run) for name, run in ways.items()}, rounds=rounds, seconds=seconds
    )
    show(
        times,
        "encoder",
        "bucket",
        calls=len(texts),
        sentences=sum(map(len, texts)),
        tokens=sum(len(one) for sentences in texts for one in sentences),
        attention="mask" if varlen is None else "varlen",
    )
    for name, runner in (("bucket", bucket), ("split", split), ("packed", packing)):
        print_eager_reasons(runner)
        stats = runner.stats()
        print(
            f"# {name}: {stats.steps} steps, padding {stats.padding:.1%}, "
            f"eager steps by reason {stats.eager_by_reason}",
            flush=True,
        )


def main() -> None:
    """Measure the selected parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=["decode", "encoder", []], default=[])
    parser.add_argument("--rounds", type=at_least_one, default=15)
    parser.add_argument("--calls", type=at_least_one, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    small = args.small or not HAS_GPU
    parts = args.parts or ["decode", "encoder"]
    if "decode" in parts:
        decode(args.rounds, args.seconds, small=small)
    if "encoder" in parts:
        encoder(args.rounds, args.seconds, args.calls, small=small)


if __name__ == "__main__":
    main()
