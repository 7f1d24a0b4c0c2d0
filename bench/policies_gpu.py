"""``adaptive`` against ``vllm`` on a GPU: total time of streams of batches, measuring included.

Two models, a wide MLP (8 layers of 4096) and a decoder; two kinds of traffic, uniform sizes up to
2048 and the sizes of a recorded trace; the same capture sizes for both policies. Each policy serves
the same batches in the same order, in blocks that take turns, so that a drift of the clock hits
all alike; the one that goes first changes from block to block. In a block nothing is waited for.
``hindsight`` is what the best single arm of every bucket would have taken: eager and graph are
timed afterwards at the sizes that came, one behind the other as in serving. What the policy asks
for at capture is not part of a total; it is printed as ``seed_s``.

    python bench/policies_gpu.py                       # all four, about five minutes
    python bench/policies_gpu.py --models mlp --traces uniform --steps 1000

One JSON object a line; the last lines say whether the goals are met. On a machine without CUDA,
``--device cpu`` runs small models on the tape, to see that the program itself works.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from dispatchkit import GraphRunner, StaticInput
from dispatchkit.backends.base import GraphBackend
from dispatchkit.observe.trace import read_trace

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"
BLOCK = 50
#: Without a GPU, sizes are so many times smaller.
SMALLER = 32
#: Most sizes that are timed for the hindsight; those between are taken as their nearest.
TIMED_SIZES = 160
# Goals: at least so many times faster than vllm on the MLP; at most so many times the best arms;
# at most so many times vllm on the decoder.
MLP_GAIN, OVER_HINDSIGHT, DECODER_LOSS = 1.15, 1.01, 1.01


class Mlp(nn.Module):
    """Layers of one width, with a residual."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many rows as there are in ``x``."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Decoder(nn.Module):
    """The decode step of a transformer without its cache: many small kernels per layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.RMSNorm(width),
                    "up": nn.Linear(width, 4 * width, bias=False),
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


@attrs.frozen
class Case:
    """A model to serve with.

    Attributes:
        make: Makes it.
        width: Of its input.
        sizes: Capture sizes.
    """

    make: Callable[[int, int], nn.Module]
    width: int
    layers: int
    sizes: tuple[int, ...]


CASES = {
    "mlp": Case(Mlp, 4096, 8, (512, 768, 1024, 2048)),
    "decoder": Case(
        Decoder, 2048, 16, (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 768, 1024, 2048)
    ),
}


def main() -> None:
    """Serve all traffic with each model and policy, and print what it took."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"bench": "policies_gpu", "skipped": "torch finds no CUDA device"}))
        sys.exit(0)
    met = []
    for model in options.models.split(","):
        case = CASES[model]
        if options.device == "cpu":
            small = tuple(sorted({max(1, size // SMALLER) for size in case.sizes}))
            case = attrs.evolve(case, width=64, layers=2, sizes=small)
        for trace in options.traces.split(","):
            met += bench(options, model, case, trace)
            gc.collect()
    for line in met:
        print(json.dumps(line))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="mlp,decoder", help="with commas")
    add(
        "--traces",
        default="uniform,azure_conv_high",
        help="`uniform`, or names of tests/data/traces",
    )
    add("--steps", type=int, default=4000, help="a trace is repeated until there are enough")
    add("--sample-every", type=int, default=16, help="one steady step in so many is measured")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def bench(options: argparse.Namespace, model: str, case: Case, trace: str) -> list[dict[str, Any]]:
    """Serve one kind of traffic with one model; return the goals and whether they are met."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    module = case.make(case.width, case.layers).to(options.device, dtype).eval()
    steps = traffic(trace, options.steps)
    if options.device == "cpu":
        steps = [max(1, size // SMALLER) for size in steps]
    rows = torch.randn(max(case.sizes), case.width, device=options.device, dtype=dtype)
    runners, seeds = {}, {}
    for policy in ("vllm", "adaptive"):
        runners[policy], seeds[policy] = make_runner(module, case, dtype, policy, options)
    totals = serve(runners, rows, steps)
    best, arms = hindsight(runners["vllm"], rows, steps, case.sizes)
    facts = {
        "bench": "policies_gpu",
        "model": model,
        "trace": trace,
        "n": len(steps),
        "sample_every": options.sample_every,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "unit": "ms",
    }
    for policy, total in totals.items():
        stats = runners[policy].stats()
        line = {
            **facts,
            "case": policy,
            "total": total,
            "vllm_over_this": totals["vllm"] / total,
            "over_hindsight": total / best,
            "seed_s": seeds[policy],
            "steps_by_mode": stats.steps_by_mode,
            "eager_by_reason": stats.eager_by_reason,
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({**facts, "case": "hindsight", "total": best, "best_arm": arms}), flush=True)
    for report in runners["adaptive"].dispatcher.policy.explain():  # type: ignore[attr-defined]
        print(report, file=sys.stderr)
    gain, over = totals["vllm"] / totals["adaptive"], totals["adaptive"] / best
    goals = [("adaptive_over_hindsight", over, OVER_HINDSIGHT, over <= OVER_HINDSIGHT)]
    if model == "mlp":
        goals.append(("vllm_over_adaptive", gain, MLP_GAIN, gain >= MLP_GAIN))
    else:
        goals.append(("adaptive_over_vllm", 1 / gain, DECODER_LOSS, 1 / gain <= DECODER_LOSS))
    return [
        {"goal": name, "model": model, "trace": trace, "found": found, "asked": asked, "met": met}
        for name, found, asked, met in goals
    ]


def traffic(trace: str, count: int) -> list[int]:
    """Return the sizes of the steps, 1 to 2048."""
    if trace == "uniform":
        chance = random.Random(1)
        return [chance.randint(1, 2048) for _ in range(count)]
    sizes = [step.num_tokens for step in read_trace(TRACES / f"step_{trace}.csv.gz")]
    sizes = [size for size in sizes if 1 <= size <= 2048]
    return [sizes[index % len(sizes)] for index in range(count)]


def make_runner(
    module: nn.Module, case: Case, dtype: torch.dtype, policy: str, options: argparse.Namespace
) -> tuple[GraphRunner, float]:
    """Return a captured runner, and the seconds that the policy's runs at capture took."""
    runner = GraphRunner(
        module,
        {"x": StaticInput((None, case.width), dtype)},
        sizes=case.sizes,
        mode="FULL",
        policy=policy,
        outputs="view",
        sample_every=options.sample_every,
        device=options.device,
        backend="tape" if options.device == "cpu" else "auto",
    )
    seconds = 0.0
    plain = runner.seed

    def timed() -> int:
        nonlocal seconds
        start = time.perf_counter()
        count = plain()
        seconds = time.perf_counter() - start
        return count

    runner.seed = timed  # type: ignore[method-assign]
    runner.capture()
    return runner, seconds


def serve(
    runners: dict[str, GraphRunner], rows: torch.Tensor, steps: Sequence[int]
) -> dict[str, float]:
    """Return the total time of each runner in milliseconds, by the host's clock.

    By that clock, since what measuring and learning cost the host is to be part of it.
    """
    totals = dict.fromkeys(runners, 0.0)
    names = list(runners)
    backend = next(iter(runners.values())).backend
    for runner in runners.values():
        runner(rows[: steps[0]])
    gc.collect()
    for index, at in enumerate(range(0, len(steps), BLOCK)):
        block = steps[at : at + BLOCK]
        for name in names if index % 2 else reversed(names):
            runner = runners[name]
            backend.synchronize()
            start = time.perf_counter()
            for size in block:
                runner(rows[:size])
            backend.synchronize()
            totals[name] += (time.perf_counter() - start) * 1e3
    return totals


def hindsight(
    runner: GraphRunner, rows: torch.Tensor, steps: Sequence[int], sizes: tuple[int, ...]
) -> tuple[float, dict[int, str]]:
    """Return the total with the best single arm of each bucket, and which arm that is."""
    counts = Counter(steps)
    timed: dict[int, list[tuple[int, float, float]]] = {}
    for size in spread(sorted(counts)):
        graph_ms = step_ms(runner.backend, lambda size=size: runner(rows[:size]))
        eager_ms = step_ms(runner.backend, lambda size=size: runner(rows[:size], ceiling=0))
        timed.setdefault(bucket_of(size, sizes), []).append((size, graph_ms, eager_ms))
    graph: Counter[int] = Counter()
    eager: Counter[int] = Counter()
    for size, count in counts.items():
        top = bucket_of(size, sizes)
        near = min(timed[top], key=lambda one: abs(one[0] - size))
        graph[top] += count * near[1]  # type: ignore[assignment]
        eager[top] += count * near[2]  # type: ignore[assignment]
    arms = {top: "eager" if eager[top] < graph[top] else "graph" for top in sorted(eager)}
    return sum(min(eager[top], graph[top]) for top in eager), arms


def spread(sizes: Sequence[int]) -> list[int]:
    """Return some of the sizes, evenly, the last with them."""
    step = max(1, len(sizes) // TIMED_SIZES)
    return sorted({*sizes[::step], sizes[-1]})


def bucket_of(size: int, sizes: Sequence[int]) -> int:
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


def step_ms(backend: GraphBackend, run: Callable[[], Any], runs: int = 10) -> float:
    """Return milliseconds of one step among others like it, by the host's clock; median of 5."""
    run()
    found = []
    for _ in range(5):
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            run()
        backend.synchronize()
        found.append((time.perf_counter() - start) * 1e3 / runs)
    return statistics.median(found)


if __name__ == "__main__":
    main()
