"""``adaptive`` against ``vllm`` on a GPU: total time of a stream of batches, measuring included.

Models: a wide MLP (8 layers of 4096) and a decoder. The same capture sizes for both policies.
Traffic: uniform sizes up to 2048, or the sizes of a recorded trace. Each policy serves the same
batches in the same order, alternating in blocks with the others so that a drift of the clock hits
all alike. ``hindsight`` is the sum over buckets of the best single arm of each, timed afterwards
at every size that came.

    python bench/adaptive_gpu.py --model mlp
    python bench/adaptive_gpu.py --model decoder --trace PATH   # of tests/data/traces

One JSON object a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
from bisect import bisect_left
from collections import Counter
from typing import Any

import torch
from torch import nn

from dispatchkit import GraphRunner, StaticInput
from dispatchkit.observe.trace import read_trace

MLP_SIZES = (512, 768, 1024, 2048)
DECODER_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 768, 1024, 2048)
BLOCK = 50


class Mlp(nn.Module):
    """Layers of one width, with a residual."""

    def __init__(self, width: int = 4096, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many rows as there are in ``x``."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Decoder(nn.Module):
    """The decode step of a transformer without its cache: many small kernels per layer."""

    def __init__(self, width: int = 2048, layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.RMSNorm(width),
                    "up": nn.Linear(width, 8 * width // 2, bias=False),
                    "down": nn.Linear(2 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many rows as there are in ``x``."""
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, dim=-1)
            weight = torch.sigmoid((q * k).sum(-1, keepdim=True))
            x = x + layer["out"](weight * v)
            gate, up = layer["up"](layer["norm2"](x)).chunk(2, dim=-1)
            x = x + layer["down"](torch.nn.functional.silu(gate) * up)
        return x


def main() -> None:
    """Serve the same traffic with each policy and print what it took."""
    options = parse()
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "adaptive_gpu", "skipped": "torch finds no CUDA device"}))
        sys.exit(0)
    torch.manual_seed(0)
    model, sizes = (Mlp(), MLP_SIZES) if options.model == "mlp" else (Decoder(), DECODER_SIZES)
    width = 4096 if options.model == "mlp" else 2048
    model = model.to("cuda", torch.bfloat16).eval()
    steps = traffic(options)
    rows = torch.randn(max(sizes), width, device="cuda", dtype=torch.bfloat16)
    runners = {name: make_runner(model, width, sizes, name) for name in ("vllm", "adaptive")}
    seeded = seed(runners["adaptive"], rows)
    totals = serve(runners, rows, steps)
    best, by_bucket = hindsight(model, runners["vllm"], rows, steps, sizes)
    facts = {
        "bench": "adaptive_gpu",
        "model": options.model,
        "trace": options.trace,
        "n": len(steps),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "unit": "ms",
    }
    for name, total in totals.items():
        stats = runners[name].stats().to_dict()
        print(
            json.dumps(
                {
                    **facts,
                    "case": name,
                    "total": total,
                    "ratio_to_vllm": totals["vllm"] / total,
                    "over_hindsight": total / best,
                    "seed_runs": seeded if name == "adaptive" else 0,
                    "steps_by_mode": stats["steps_by_mode"],
                    "eager_by_reason": stats["eager_by_reason"],
                }
            )
        )
    print(json.dumps({**facts, "case": "hindsight", "total": best, "best_arm": by_bucket}))
    for report in runners["adaptive"].dispatcher.policy.explain():
        print(report, file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=("mlp", "decoder"), default="mlp")
    add("--trace", default="uniform", help="a trace file, or `uniform`")
    add("--steps", type=int, default=4000)
    return parser.parse_args()


def traffic(options: argparse.Namespace) -> list[int]:
    """Return the sizes of the steps, 1 to 2048; a trace is repeated until there are enough."""
    if options.trace == "uniform":
        chance = random.Random(1)
        return [chance.randint(1, 2048) for _ in range(options.steps)]
    sizes = [step.num_tokens for step in read_trace(options.trace)]
    sizes = [size for size in sizes if 1 <= size <= 2048]
    return [sizes[index % len(sizes)] for index in range(options.steps)]


def make_runner(model: nn.Module, width: int, sizes: tuple[int, ...], policy: str) -> GraphRunner:
    runner = GraphRunner(
        model,
        {"x": StaticInput((None, width), torch.bfloat16)},
        sizes=sizes,
        mode="FULL",
        policy=policy,
        outputs="view",
    )
    runner.capture()
    return runner


def seed(runner: GraphRunner, rows: torch.Tensor) -> int:
    """Run what the policy asks for after a capture; return how many runs that were."""
    from dispatchkit import CellUpdate

    policy: Any = runner.dispatcher.policy
    count = 0
    while runs := policy.wants_seeding(runner.dispatcher.graphs):
        for run in runs:
            for _ in range(run.runs):
                runner.dispatcher.update(CellUpdate(run.batch, run.decision, one_shot=True))
                runner(rows[: run.batch.num_tokens])
                runner.drain(wait=True)
                count += 1
    return count


def serve(
    runners: dict[str, GraphRunner], rows: torch.Tensor, steps: list[int]
) -> dict[str, float]:
    """Return the total time of each runner in milliseconds, from its first step to its last."""
    totals = dict.fromkeys(runners, 0.0)
    names = list(runners)
    gc.collect()
    for index, at in enumerate(range(0, len(steps), BLOCK)):
        block = steps[at : at + BLOCK]
        for name in names if index % 2 else reversed(names):
            runner = runners[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for size in block:
                runner(rows[:size])
            end.record()
            torch.cuda.synchronize()
            totals[name] += start.elapsed_time(end)
            runner.drain(wait=True)
    return totals


def hindsight(
    model: nn.Module,
    runner: GraphRunner,
    rows: torch.Tensor,
    steps: list[int],
    sizes: tuple[int, ...],
) -> tuple[float, dict[int, str]]:
    """Return the total with the best single arm per bucket, and which arm that is."""
    counts = Counter(steps)
    graph_ms = {size: median_ms(lambda size=size: runner(rows[:size])) for size in sizes}
    eager: Counter[int] = Counter()
    graph: Counter[int] = Counter()
    tried: dict[int, list[tuple[int, float]]] = {}
    with torch.no_grad():
        for size in spread(sorted(counts)):
            ms = median_ms(lambda size=size: model(rows[:size]))
            tried.setdefault(bucket_of(size, sizes), []).append((size, ms))
    for size, count in counts.items():
        top = bucket_of(size, sizes)
        near = min(tried[top], key=lambda pair: abs(pair[0] - size))
        eager[top] += count * near[1]  # type: ignore[assignment]
        graph[top] += count * graph_ms[top]  # type: ignore[assignment]
    arms = {top: "eager" if eager[top] < graph[top] else "graph" for top in eager}
    return sum(min(eager[top], graph[top]) for top in eager), arms


def spread(sizes: list[int], most: int = 200) -> list[int]:
    """Return at most so many of the sizes, evenly."""
    step = max(1, len(sizes) // most)
    return [*sizes[::step], sizes[-1]]


def bucket_of(size: int, sizes: tuple[int, ...]) -> int:
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


def median_ms(run: Any, repeats: int = 15) -> float:
    """Return the median time of a run with work queued ahead of it, in milliseconds."""
    for _ in range(3):
        run()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


if __name__ == "__main__":
    main()
