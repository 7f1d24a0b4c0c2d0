"""Steps on lanes beside the same graphs on streams by hand, and beside one after another.

    python bench/lanes.py [ROUNDS] [--lanes 2 4 8] [--steps N]

On a GPU, time of a round from its first launch to the end of its device work, per step. All cases
take turns in one process:

- ``serial``: graphs of one stream, by hand; ``raw streams``: a graph for each stream, by hand;
- ``raw streams, copies``: the same with what a step needs beside its graph, by hand: the input
  copied in and the result cloned;
- ``runner, serial`` and ``runner, lanes``: the runner's calls, and ``submit`` in turn.

``small`` graphs leave most of the device idle; ``filling`` graphs leave none of it. Without a GPU
the tape is measured: what ``submit`` costs the host beside a call, on the same graph.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import emit, interleaved

from dispatchkit import GraphRunner, StaticInput

BENCH = "lanes"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
#: Name of a kind of graph: rows, width and layers of its network, how many steps of the small one
#: take as long as one of it.
KINDS = {"small": (16, 512, 100, 1), "filling": (8192, 8192, 4, 4)}


class Network:
    """Square layers, one after another."""

    def __init__(self, width: int, layers: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        kind = torch.bfloat16 if HAS_GPU else torch.float32
        self.weights = [
            (torch.randn(width, width, generator=generator, device=DEVICE) / width**0.5).to(kind)
            for _ in range(layers)
        ]
        self.dtype = kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x


def runner_of(network: Network, rows: int, width: int, lanes: int) -> GraphRunner:
    runner = GraphRunner(
        network,
        {"x": StaticInput((None, width), network.dtype)},
        sizes=(rows,),
        max_num_tokens=rows,
        mode="FULL",
        backend="cuda" if HAS_GPU else "tape",
        lanes=lanes,
        strict=True,
    )
    failed = runner.capture().failed
    if failed:
        raise SystemExit(f"A capture failed: {failed}")
    return runner


class ByHand:
    """A graph with input and output of its own, on a stream of its own."""

    def __init__(self, network: Network, rows: int, width: int) -> None:
        self.stream: Any = torch.cuda.Stream()
        self.x = torch.zeros(rows, width, dtype=network.dtype, device=DEVICE)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            network(self.x)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=self.stream):
            self.out = network(self.x)


def measure_kind(kind: str, lanes: int, rounds: int, per_lane: int) -> None:
    rows, width, layers, weight = KINDS[kind]
    network, steps = Network(width, layers), per_lane // weight * lanes
    given = torch.randn(rows, width, device=DEVICE).to(network.dtype)
    hands = [ByHand(network, rows, width) for _ in range(lanes)]
    many, one = runner_of(network, rows, width, lanes), runner_of(network, rows, width, 1)
    want = one(given)
    if not torch.equal(many.submit(given).result(), want):
        raise SystemExit("A lane gave something else than a call.")
    torch.cuda.synchronize()

    def serial() -> None:
        with torch.cuda.stream(hands[0].stream):
            for _ in range(steps):
                hands[0].graph.replay()
        torch.cuda.synchronize()

    def raw() -> None:
        for number in range(steps):
            hand = hands[number % lanes]
            with torch.cuda.stream(hand.stream):
                hand.graph.replay()
        torch.cuda.synchronize()

    def raw_copies() -> None:
        kept = []
        for number in range(steps):
            hand = hands[number % lanes]
            with torch.cuda.stream(hand.stream):
                hand.x.copy_(given)
                hand.graph.replay()
                kept.append(hand.out.clone())
        torch.cuda.synchronize()

    def calls() -> None:
        kept = [one(given) for _ in range(steps)]
        torch.cuda.synchronize()
        del kept

    def submits() -> None:
        kept = [many.submit(given) for _ in range(steps)]
        torch.cuda.synchronize()
        del kept

    report(
        f"{kind}, {lanes} lanes, {per_lane // weight} steps each",
        {
            "serial": serial,
            "raw streams": raw,
            "raw streams, copies": raw_copies,
            "runner, serial": calls,
            "runner, lanes": submits,
        },
        steps,
        rounds,
        {
            "raw streams": "serial",
            "raw streams, copies": "serial",
            "runner, serial": "serial",
            "runner, lanes": "serial" if kind == "filling" else "raw streams",
        },
    )


def report(
    what: str,
    cases: dict[str, Callable[[], None]],
    steps: int,
    rounds: int,
    beside: dict[str, str],
) -> None:
    times = interleaved(cases, rounds=rounds)
    for name, samples in times.items():
        base = beside.get(name)
        ratio = None
        if base is not None:  # of speeds: above 1 is faster than the base
            pairs = zip(times[base], samples, strict=True)
            ratio = statistics.median(other / mine for other, mine in pairs)
        median = statistics.median(samples) / steps / 1000
        emit(BENCH, f"{what}: {name}", median, "us", rounds, ratio_to=base, ratio=ratio)


def measure_host(rounds: int) -> None:
    """The host's part on the tape, where a replay of nothing costs next to nothing."""
    network, given = Network(4, 1), torch.ones(1, 4)
    one = runner_of(network, 1, 4, 1)
    many = runner_of(network, 1, 4, 4)

    def calls() -> None:
        for _ in range(20):
            one(given)

    def calls_beside_lanes() -> None:
        for _ in range(20):
            many(given)

    def submits() -> None:
        for _ in range(20):
            many.submit(given)

    cases = {"call": calls, "call, 4 lanes": calls_beside_lanes, "submit, 4 lanes": submits}
    report("tape", cases, 20, rounds, {"call, 4 lanes": "call", "submit, 4 lanes": "call"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=50)
    parser.add_argument("--lanes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=16, help="of small graphs on each lane")
    args = parser.parse_args()
    if not HAS_GPU:
        measure_host(args.rounds)
        return
    for kind in KINDS:
        for lanes in args.lanes:
            rounds = args.rounds if kind == "small" else max(5, args.rounds // 5)
            measure_kind(kind, lanes, rounds, args.steps)


if __name__ == "__main__":
    main()
